"""What a run of the demo brought, also as rows of a table, and whether it is what was promised."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean

from ebbtide.demo.elastic import ElasticRecord
from ebbtide.demo.loop import Exam, Stage, StepRecord
from ebbtide.demo.memory import MemorySample
from ebbtide.demo.trainer import DemoFailed

FIRST_REWARD_BELOW = 0.3
LAST_REWARD_ABOVE = 0.9
RETURNED_SHARE = 0.95
# One step's reward is a sample of some hundred answers: the last ones are averaged.
_NUM_LAST_STEPS = 3
MB = 1e6


@dataclass
class Results:
    """Grows while the demo runs.

    Attributes:
        start: memory before the first step.
        elastic: requests that ran while memory was taken from under them; None: not reached.
        before, after: the held-out problems before the first and after the last step; None: not reached.
        warm_up_s, total_s: how long the warm-up and everything took.
        failure: what does not hold; None: nothing.
        is_fp8: whether the engine computed in FP8.
    """

    seed: int
    warm_up_s: float
    start: MemorySample
    before: Exam
    after: Exam | None = None
    steps: list[StepRecord] = field(default_factory=list)
    elastic: ElasticRecord | None = None
    total_s: float = 0.0
    failure: str | None = "it did not finish"
    is_fp8: bool = False

    @property
    def first_reward(self) -> float:
        return self.steps[0].reward

    @property
    def last_reward(self) -> float:
        return fmean(step.reward for step in self.steps[-_NUM_LAST_STEPS:])

    @property
    def greatest_logprob_difference(self) -> float:
        return max(step.logprob_difference for step in self.steps)

    @staticmethod
    def released(step: StepRecord) -> tuple[int, int]:
        """Bytes that the release of a step took from the tags, and from the processes (Pss)."""
        before = step.stages[Stage.GENERATE].memory
        after = step.stages[Stage.RELEASE].memory
        tag_bytes = sum(before.tag_bytes.values()) - sum(after.tag_bytes.values())
        return tag_bytes, before.process_bytes - after.process_bytes

    def check(self) -> None:
        """Raises `DemoFailed` unless the reward rose and memory was really given back at every release."""
        for step in self.steps:
            tag_bytes, process_bytes = self.released(step)
            if process_bytes < RETURNED_SHARE * tag_bytes:
                raise DemoFailed(
                    f"step {step.step}: {tag_bytes} bytes were released, but the processes of the engine "
                    f"hold only {process_bytes} fewer"
                )
        if self.elastic is not None and not self.elastic.is_equal:
            raise DemoFailed("requests were answered otherwise because memory was taken from under them")
        if not self.first_reward < FIRST_REWARD_BELOW or not self.last_reward > LAST_REWARD_ABOVE:
            raise DemoFailed(
                f"the reward went from {self.first_reward:.3f} to {self.last_reward:.3f}; "
                f"it was to rise from below {FIRST_REWARD_BELOW} to above {LAST_REWARD_ABOVE}"
            )


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
