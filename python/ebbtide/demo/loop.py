"""The loop: generate, release, train, resume weights, update, resume KV cache; every stage is measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeVar

from ebbtide.demo.elastic import Elastic, ElasticRecord
from ebbtide.demo.memory import MemoryProbe, MemorySample
from ebbtide.demo.task import EOS_ID, MAX_ANSWER_TOKENS, Problem, ProblemSet, encode
from ebbtide.demo.trainer import DemoFailed, Ratios, Sample, Trainer
from ebbtide.formats.bucket import pack_buckets
from ebbtide.trainer.payload_encoding import serialize_bucket

if TYPE_CHECKING:
    from ebbtide import Engine

T = TypeVar("T")

MAX_LOGPROB_DIFFERENCE = 1e-4
# Small, so that the weights of this small model travel in several.
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
    """One stage: how long it took, and the memory at its end."""

    seconds: float
    memory: MemorySample


@dataclass(frozen=True)
class StepRecord:
    """One step.

    Attributes:
        reward: mean over all answers, by the weights that the step began with.
        logprob_difference: greatest |trainer - engine| over all output tokens of the step.
        ratios: of these tokens.
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


@dataclass(frozen=True)
class Exam:
    """Greedy answers to the held-out problems, and the share that is right."""

    accuracy: float
    answers: list[tuple[Problem, str]]


class Loop:
    """Trains a model with the engine that serves it.

    Args:
        num_prompts: questions per step.
        group_size: answers to each.
        on_stage: called with the stage and the step that begin.
        is_rounded: the engine rounds more than the trainer: they are not held to the same logprobs, and the
            trainer weighs tokens by their importance ratios.
    """

    def __init__(
        self,
        engine: Engine,
        trainer: Trainer,
        problems: ProblemSet,
        *,
        num_prompts: int,
        group_size: int,
        on_stage: Callable[[int, Stage], None],
        is_rounded: bool = False,
    ) -> None:
        self._is_rounded = is_rounded
        self._engine = engine
        self._trainer = trainer
        self._problems = problems
        self._num_prompts = num_prompts
        self._group_size = group_size
        self._on_stage = on_stage
        self._probe = MemoryProbe(engine)
        self.start = self._probe.sample()

    def disturb(self, num_requests: int) -> ElasticRecord:
        """Have this many requests answered while memory is taken from under them."""
        return Elastic(self._engine, self._probe, self._problems.draw(num_requests)).run()

    def examine(self) -> Exam:
        """What the engine answers to the held-out problems, greedily."""
        problems = self._problems.held_out
        params = {"temperature": 0.0, "max_new_tokens": MAX_ANSWER_TOKENS}
        outputs = self._engine.generate([problem.question for problem in problems], params)
        rewards = [_reward(problem, output) for problem, output in zip(problems, outputs, strict=True)]
        texts = [output["text"] for output in outputs]
        return Exam(fmean(rewards), list(zip(problems, texts, strict=True)))

    def run(self, num_steps: int) -> Iterator[StepRecord]:
        """Yields each step when it is done.

        Raises:
            DemoFailed: trainer and engine disagree on a log-probability, or the engine has other weights than
                it should.
        """
        for step in range(num_steps):
            yield self._step(step)

    def _step(self, step: int) -> StepRecord:
        stages: dict[Stage, StageRecord] = {}

        def timed(stage: Stage, work: Callable[[], T]) -> T:
            self._on_stage(step, stage)
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
        problems = self._problems.draw(self._num_prompts)
        params = {"n": self._group_size, "max_new_tokens": MAX_ANSWER_TOKENS}
        questions = [problem.question for problem in problems]
        outputs = self._engine.generate(questions, params, return_logprob=True)
        served = {span["version"] for output in outputs for span in output["meta_info"]["weight_versions"]}
        if served != {version}:
            raise DemoFailed(f"answers by weights of version {sorted(served)}, not {version}")
        starts = range(0, len(outputs), self._group_size)
        groups = [outputs[start : start + self._group_size] for start in starts]
        return [
            sample
            for problem, group in zip(problems, groups, strict=True)
            for sample in _score(problem, group)
        ]

    def _train(self, step: int, samples: Sequence[Sample]) -> tuple[float, Ratios]:
        """Learn; returns how far trainer and engine were apart before that."""
        anchors = self._trainer.logprobs(samples)
        difference = max(
            abs(ours - theirs)
            for logprobs, sample in zip(anchors, samples, strict=True)
            for ours, theirs in zip(logprobs, sample.logprobs, strict=True)
        )
        if not (self._is_rounded or difference < MAX_LOGPROB_DIFFERENCE):
            raise DemoFailed(
                f"step {step}: logprobs of trainer and engine differ by {difference:.2e}, "
                f"the limit is {MAX_LOGPROB_DIFFERENCE:.0e}"
            )
        self._trainer.learn(samples, anchors if self._is_rounded else None)
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
    """1 for exactly the digits of the answer and the end of the text, else 0."""
    return float(output["output_ids"] == [*encode(problem.answer), EOS_ID])
