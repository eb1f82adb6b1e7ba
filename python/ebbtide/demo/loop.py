"""The demo's loop: generate, release, train, resume weights, update, resume KV cache. Measures each stage."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from ebbtide.demo.trainer import (
    EOS_ID,
    MAX_ANSWER_TOKENS,
    DemoFailed,
    Problem,
    ProblemSet,
    Ratios,
    Sample,
    Trainer,
    encode,
)
from ebbtide.formats.bucket import pack_buckets
from ebbtide.srt.device import CpuDevice
from ebbtide.trainer.payload_encoding import serialize_bucket

if TYPE_CHECKING:
    from ebbtide import Engine

T = TypeVar("T")


@dataclass(frozen=True)
class MemorySample:
    """Memory at one moment.

    Attributes:
        time_s: seconds since the probe was made.
        tag_bytes: resident bytes by memory tag, from `memory_occupation()`.
        process_bytes: sum over the engine's processes of the proportional set size (Pss), without files.
        parked_bytes: KV in host memory of requests that wait for room in the cache.
    """

    time_s: float
    tag_bytes: dict[str, int]
    process_bytes: int
    parked_bytes: int = 0


class MemoryProbe:
    """Measures an engine's memory. Assumes that all child processes of this process are the engine's."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._device = CpuDevice()
        self._pids = [process.pid for process in psutil.Process().children(recursive=True)]
        self._start = time.perf_counter()

    def sample(self) -> MemorySample:
        tags = self._engine.memory_occupation()["tags"]
        return MemorySample(
            time_s=time.perf_counter() - self._start,
            tag_bytes={tag: state["resident_bytes"] for tag, state in tags.items()},
            parked_bytes=tags["kv_cache"]["backup_bytes"],
            process_bytes=sum(self._device.memory_info(pid).process_bytes for pid in self._pids),
        )


# The longest answer for which the model's context has room.
_NUM_TOKENS = 54
_SAMPLE_EVERY_S = 0.04


@dataclass(frozen=True)
class LentTime:
    """An interval in which some memory was lent to somebody else, in seconds of the probe."""

    start_s: float
    end_s: float
    label: str


@dataclass
class ElasticRecord:
    """Requests that ran while their memory was taken away and given back.

    Attributes:
        samples: memory from before the first request to after the last.
        spans: when some memory was lent.
        is_equal: whether the answers are those of an undisturbed engine.
    """

    num_requests: int
    samples: list[MemorySample] = field(default_factory=list)
    spans: list[LentTime] = field(default_factory=list)
    is_equal: bool = False


class Elastic:
    """Gets long answers to many questions: undisturbed, then while the KV cache is resized and released."""

    def __init__(self, engine: Engine, probe: MemoryProbe, problems: Sequence[Problem]) -> None:
        self._engine = engine
        self._probe = probe
        self._questions = [problem.question for problem in problems]
        self._record = ElasticRecord(len(problems))

    def run(self) -> ElasticRecord:
        """Get all answers twice; the second time, resize and release the KV cache meanwhile."""
        engine, started = self._engine, time.perf_counter()
        expected = self._answers()
        whole_s = time.perf_counter() - started
        engine.flush_cache()
        with ThreadPoolExecutor(1) as thread:
            answers = thread.submit(self._answers)
            self._watch(answers, 0.2 * whole_s)
            whole_bytes = self._record.samples[-1].tag_bytes["kv_cache"]
            reply = engine.resize_memory_occupation(num_bytes=whole_bytes // 8, preserve="live")
            self._note_lent("7/8 of the KV cache", reply, answers, 0.4 * whole_s)
            engine.resize_memory_occupation(num_bytes=whole_bytes)
            self._watch(answers, 0.1 * whole_s)
            reply = engine.release_memory_occupation(["kv_cache"], preserve="live")
            self._note_lent("all of it", reply, answers, 0.3 * whole_s)
            engine.resume_memory_occupation(["kv_cache"])
            self._watch(answers, 600.0)
            self._record.is_equal = answers.result() == expected
        self._watch(answers, 0.0)
        return self._record

    def _answers(self) -> list[list[int]]:
        params = {"temperature": 0.0, "max_new_tokens": _NUM_TOKENS, "ignore_eos": True}
        outputs: list[dict[str, Any]] = self._engine.generate(self._questions, params)
        return [output["output_ids"] for output in outputs]

    def _watch(self, answers: Future[list[list[int]]], seconds: float) -> None:
        """Measure memory for this many seconds, or until the answers are there; at least once."""
        until_s = time.perf_counter() + seconds
        while True:
            self._record.samples.append(self._probe.sample())
            if answers.done() or time.perf_counter() >= until_s:
                return
            time.sleep(_SAMPLE_EVERY_S)

    def _note_lent(
        self, what: str, reply: Mapping[str, Any], answers: Future[list[list[int]]], seconds: float
    ) -> None:
        """Measure while a part of the cache is lent, and note the interval."""
        start_s = self._record.samples[-1].time_s
        self._watch(answers, seconds)
        parked = f"{reply['num_parked']} of {self._record.num_requests} requests parked"
        label = f"{what} lent to a trainer\n{parked}"
        self._record.spans.append(LentTime(start_s, self._record.samples[-1].time_s, label))


MAX_LOGPROB_DIFFERENCE = 1e-4
# Small, so that the weights of this small model take several buckets.
_BUCKET_BYTES = 1_000_000


class Stage(StrEnum):
    """The stages of a step, in order."""

    GENERATE = "generate"
    RELEASE = "release"
    TRAIN = "train"
    RESUME_WEIGHTS = "resume weights"
    UPDATE = "update"
    RESUME_KV = "resume kv"


@dataclass(frozen=True)
class StageRecord:
    """A stage's duration, and the memory at its end."""

    seconds: float
    memory: MemorySample


@dataclass(frozen=True)
class StepRecord:
    """One step.

    Attributes:
        reward: mean reward of all answers, which the weights before the step gave.
        num_tokens: output tokens.
        logprob_difference: greatest |trainer - engine| of the output tokens' logprobs.
        ratios: importance ratios of the output tokens.
    """

    step: int
    reward: float
    num_tokens: int
    logprob_difference: float
    stages: dict[Stage, StageRecord]
    ratios: Ratios

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.stages[Stage.GENERATE].seconds


@dataclass(eq=False)
class Loop:
    """Trains a model with rollouts of an engine.

    Args:
        num_prompts: questions per step.
        group_size: answers per question.
        on_stage: called with the step and the stage that begins.
        is_rounded: the engine computes in lower precision than the trainer. Then their logprobs may differ,
            and the trainer weights tokens by importance ratios.
    """

    _engine: Engine
    _trainer: Trainer
    _problems: ProblemSet
    _: KW_ONLY
    num_prompts: int
    group_size: int
    on_stage: Callable[[int, Stage], None]
    is_rounded: bool = False

    def __post_init__(self) -> None:
        self._probe = MemoryProbe(self._engine)
        self.start = self._probe.sample()

    def disturb(self, num_requests: int) -> ElasticRecord:
        """Run this many requests while their memory is taken away and given back."""
        return Elastic(self._engine, self._probe, self._problems.draw(num_requests)).run()

    def examine(self) -> float:
        """Share of the held-out problems that the engine answers right with greedy sampling."""
        problems = self._problems.held_out
        params = {"temperature": 0.0, "max_new_tokens": MAX_ANSWER_TOKENS}
        outputs = self._engine.generate([problem.question for problem in problems], params)
        return fmean(_reward(problem, output) for problem, output in zip(problems, outputs, strict=True))

    def run(self, num_steps: int) -> Iterator[StepRecord]:
        """Run steps; yields each one when it is done.

        Raises:
            DemoFailed: a logprob differs too much between trainer and engine, or the engine has the wrong
                weights.
        """
        for step in range(num_steps):
            yield self._step(step)

    def _step(self, step: int) -> StepRecord:
        stages: dict[Stage, StageRecord] = {}

        def timed(stage: Stage, work: Callable[[], T]) -> T:
            self.on_stage(step, stage)
            start = time.perf_counter()
            result = work()
            stages[stage] = StageRecord(time.perf_counter() - start, self._probe.sample())
            return result

        engine = self._engine
        samples = timed(Stage.GENERATE, lambda: self._roll_out(version=str(step)))
        timed(Stage.RELEASE, engine.release_memory_occupation)
        difference, ratios = timed(Stage.TRAIN, lambda: self._train(step, samples))
        timed(Stage.RESUME_WEIGHTS, lambda: engine.resume_memory_occupation(["weights"]))
        timed(Stage.UPDATE, lambda: self._send_weights(version=str(step + 1)))
        timed(Stage.RESUME_KV, lambda: engine.resume_memory_occupation(["kv_cache"]))
        return StepRecord(
            step=step,
            reward=fmean(sample.reward for sample in samples),
            num_tokens=sum(len(sample.output_ids) for sample in samples),
            logprob_difference=difference,
            stages=stages,
            ratios=ratios,
        )

    def _roll_out(self, version: str) -> list[Sample]:
        problems = self._problems.draw(self.num_prompts)
        params = {"n": self.group_size, "max_new_tokens": MAX_ANSWER_TOKENS}
        questions = [problem.question for problem in problems]
        outputs = self._engine.generate(questions, params, return_logprob=True)
        served = {span["version"] for output in outputs for span in output["meta_info"]["weight_versions"]}
        if served != {version}:
            raise DemoFailed(f"answers by weights of version {sorted(served)}, not {version}")
        starts = range(0, len(outputs), self.group_size)
        groups = [outputs[start : start + self.group_size] for start in starts]
        return [
            sample
            for problem, group in zip(problems, groups, strict=True)
            for sample in _score(problem, group)
        ]

    def _train(self, step: int, samples: Sequence[Sample]) -> tuple[float, Ratios]:
        """Train on the samples; returns the greatest logprob difference before that, and the ratios."""
        anchors = self._trainer.logprobs(samples)
        difference = max(
            abs(ours - theirs)
            for logprobs, sample in zip(anchors, samples, strict=True)
            for ours, theirs in zip(logprobs, sample.logprobs, strict=True)
        )
        if not (self.is_rounded or difference < MAX_LOGPROB_DIFFERENCE):
            raise DemoFailed(
                f"step {step}: logprobs of trainer and engine differ by {difference:.2e}, "
                f"the limit is {MAX_LOGPROB_DIFFERENCE:.0e}"
            )
        self._trainer.learn(samples, anchors if self.is_rounded else None)
        return difference, Ratios.of(anchors, [sample.logprobs for sample in samples])

    def _send_weights(self, version: str) -> None:
        for bucket in pack_buckets(self._trainer.model.named_parameters(), _BUCKET_BYTES):
            self._engine.update_weights_from_tensor(
                [serialize_bucket(bucket)], load_format="flattened_bucket", weight_version=version
            )


def _score(problem: Problem, outputs: Sequence[dict[str, Any]]) -> list[Sample]:
    rewards = [_reward(problem, output) for output in outputs]
    return [
        Sample(
            problem=problem,
            output_ids=output["output_ids"],
            logprobs=[logprob for logprob, _, _ in output["meta_info"]["output_token_logprobs"]],
            reward=reward,
            advantage=reward - fmean(rewards),
        )
        for output, reward in zip(outputs, rewards, strict=True)
    ]


def _reward(problem: Problem, output: dict[str, Any]) -> float:
    """1 if the output is exactly the answer's digits and the end of the text, else 0."""
    return float(output["output_ids"] == [*encode(problem.answer), EOS_ID])


FIRST_REWARD_BELOW = 0.3
LAST_REWARD_ABOVE = 0.9
RETURNED_SHARE = 0.95
# The last steps' rewards are averaged, since each is the mean of some hundred sampled answers only.
_NUM_LAST_STEPS = 3
MB = 1e6


@dataclass
class Results:
    """The results, which are filled in while the demo runs.

    Attributes:
        warm_up_s, total_s: duration of the warm-up, and of all.
        start: memory before the first step.
        before, after: share of held-out problems answered right, see `Loop.examine`; None: not measured yet.
        elastic: requests that ran while their memory was taken away; None: not run yet.
        failure: why the demo failed; None: it did not.
        is_fp8: whether the engine has weights and KV cache in FP8.
    """

    seed: int
    warm_up_s: float
    start: MemorySample
    before: float
    after: float | None = None
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
        """Bytes that a step's release freed: of the memory tags, and of the processes (Pss)."""
        before = step.stages[Stage.GENERATE].memory
        after = step.stages[Stage.RELEASE].memory
        tag_bytes = sum(before.tag_bytes.values()) - sum(after.tag_bytes.values())
        return tag_bytes, before.process_bytes - after.process_bytes

    def check(self) -> None:
        """Check the results.

        Raises:
            DemoFailed: the reward did not rise enough, a release did not free the processes' memory, or lent
                memory changed an answer.
        """
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


def _megabytes(step: StepRecord, num_bytes: Callable[[MemorySample], int], digits: int = 1) -> str:
    """Megabytes while the engine generates, and while the trainer trains, as text."""
    awake, asleep = (num_bytes(step.stages[stage].memory) / MB for stage in (Stage.GENERATE, Stage.TRAIN))
    return f"{awake:.{digits}f}→{asleep:.{digits}f}"


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
    ("weights MB", 7, lambda step: _megabytes(step, lambda held: held.tag_bytes["weights"])),
    ("kv_cache MB", 9, lambda step: _megabytes(step, lambda held: held.tag_bytes["kv_cache"])),
    ("processes MB", 9, lambda step: _megabytes(step, lambda held: held.process_bytes, 0)),
    ("Δlogprob", 8, lambda step: f"{step.logprob_difference:.1e}"),
)


def heading() -> str:
    """The column headings, on two lines."""
    names = [(_on_two_lines(name), width) for name, width, _ in COLUMNS]
    return "\n".join("  ".join(f"{name[line]:>{width}}" for name, width in names) for line in (0, 1))


def row(step: StepRecord) -> str:
    """One step, aligned under `heading`."""
    return "  ".join(f"{cell(step):>{width}}" for _, width, cell in COLUMNS)
