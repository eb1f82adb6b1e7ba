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


def _on_two_lines(name: str) -> tuple[str, str]:
    first, _, rest = name.partition(" ")
    return (first, rest) if rest else ("", first)


# Heading, width on a terminal, and the cell.
COLUMNS: tuple[tuple[str, int, Callable[[StepRecord], str]], ...] = (
    ("step", 4, lambda step: str(step.step)),
    ("reward", 6, lambda step: f"{step.reward:.3f}"),
    ("tokens/s", 8, lambda step: f"{step.tokens_per_s:.0f}"),
    *((f"{stage} ms", max(map(len, _on_two_lines(f"{stage} ms"))), _stage_ms(stage)) for stage in Stage),
    ("weights MB", 7, lambda step: _resident(step, "weights")),
    ("kv_cache MB", 9, lambda step: _resident(step, "kv_cache")),
    ("processes MB", 9, _process),
    ("Δlogprob", 8, lambda step: f"{step.logprob_difference:.1e}"),
)


def heading() -> str:
    """The headings above their columns, on two lines."""
    names = [(_on_two_lines(name), width) for name, width, _ in COLUMNS]
    return "\n".join("  ".join(f"{name[line]:>{width}}" for name, width in names) for line in (0, 1))


def row(step: StepRecord) -> str:
    """One step, aligned under `heading`."""
    return "  ".join(f"{cell(step):>{width}}" for _, width, cell in COLUMNS)
