"""The table of steps, as text."""

from __future__ import annotations

from collections.abc import Callable

from ebbtide.demo.loop import Stage, StepRecord

MB = 1e6


def _resident(step: StepRecord, tag: str) -> str:
    """MB of a tag while the engine generates, and while the trainer trains."""
    awake, asleep = (step.stages[stage].memory.tag_bytes[tag] / MB for stage in (Stage.GENERATE, Stage.TRAIN))
    return f"{awake:.1f}→{asleep:.1f}"


def _process(step: StepRecord) -> str:
    awake, asleep = (step.stages[stage].memory.process_bytes / MB for stage in (Stage.GENERATE, Stage.TRAIN))
    return f"{awake:.0f}→{asleep:.0f}"


def _stage_ms(stage: Stage) -> Callable[[StepRecord], str]:
    return lambda step: f"{step.stages[stage].seconds * 1e3:.0f}"


# Heading, width, and the cell.
COLUMNS: tuple[tuple[str, int, Callable[[StepRecord], str]], ...] = (
    ("step", 4, lambda step: str(step.step)),
    ("reward", 6, lambda step: f"{step.reward:.3f}"),
    ("tokens/s", 8, lambda step: f"{step.tokens_per_s:.0f}"),
    *((f"{stage} ms", len(stage) + 3, _stage_ms(stage)) for stage in Stage),
    ("weights MB", 10, lambda step: _resident(step, "weights")),
    ("kv_cache MB", 11, lambda step: _resident(step, "kv_cache")),
    ("processes MB", 12, _process),
    ("Δlogprob", 8, lambda step: f"{step.logprob_difference:.1e}"),
)


def heading() -> str:
    """The headings, each above its column."""
    return "  ".join(f"{name:>{width}}" for name, width, _ in COLUMNS)


def row(step: StepRecord) -> str:
    """One step, aligned under `heading`."""
    return "  ".join(f"{cell(step):>{width}}" for _, width, cell in COLUMNS)
