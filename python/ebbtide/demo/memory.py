"""What the engine holds, by its report and by the system's; and memory that comes and goes under requests."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psutil

from ebbtide.demo.trainer import Problem
from ebbtide.srt.device.cpu import CpuDevice

if TYPE_CHECKING:
    from ebbtide import Engine


@dataclass(frozen=True)
class MemorySample:
    """Memory at one moment.

    Attributes:
        time_s: since the probe was made.
        tag_bytes: resident bytes per memory tag, as `memory_occupation()` reports them.
        parked_bytes: KV in host memory, of requests that wait for room in the cache.
        process_bytes: proportional set size (Pss) of all processes of the engine together.
    """

    time_s: float
    tag_bytes: dict[str, int]
    process_bytes: int
    parked_bytes: int = 0


class MemoryProbe:
    """Measures an engine. Its processes are taken to be all that this one has started so far."""

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


# The most that the model's context has room for.
_NUM_TOKENS = 54
_SAMPLE_EVERY_S = 0.04


@dataclass(frozen=True)
class LentTime:
    """A time in which some of the memory was somebody else's, in the probe's seconds."""

    start_s: float
    end_s: float
    label: str


@dataclass
class ElasticRecord:
    """Requests that ran while memory was taken from under them.

    Attributes:
        samples: memory from before the first of them to behind the last.
        is_equal: whether they were answered as by an engine that nobody disturbs.
    """

    num_requests: int
    samples: list[MemorySample] = field(default_factory=list)
    spans: list[LentTime] = field(default_factory=list)
    is_equal: bool = False


class Elastic:
    """Long answers to many questions: undisturbed, and while the KV cache shrinks, grows and is gone."""

    def __init__(self, engine: Engine, probe: MemoryProbe, problems: Sequence[Problem]) -> None:
        self._engine = engine
        self._probe = probe
        self._questions = [problem.question for problem in problems]
        self._record = ElasticRecord(len(problems))

    def run(self) -> ElasticRecord:
        """Takes twice the time of the answers, and that in which nothing can run."""
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
        """Measure for so long, or until the answers are there; once in any case."""
        until_s = time.perf_counter() + seconds
        while True:
            self._record.samples.append(self._probe.sample())
            if answers.done() or time.perf_counter() >= until_s:
                return
            time.sleep(_SAMPLE_EVERY_S)

    def _note_lent(
        self, what: str, reply: Mapping[str, Any], answers: Future[list[list[int]]], seconds: float
    ) -> None:
        """Watch while a part of the cache is somebody else's."""
        start_s = self._record.samples[-1].time_s
        self._watch(answers, seconds)
        parked = f"{reply['num_parked']} of {self._record.num_requests} requests parked"
        label = f"{what} lent to a trainer\n{parked}"
        self._record.spans.append(LentTime(start_s, self._record.samples[-1].time_s, label))
