"""Parts without a model, to test the scheduler and what drives it: the state machines are the real ones.

Plain Python and numpy: a controller can be tried against the whole control plane in milliseconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from ebbtide.srt.config import ScheduleConfig
from ebbtide.srt.errors import EngineError, OutOfDeviceMemory, RequestRejected
from ebbtide.srt.managers.assembly import RankParts, SchedulerConfig, assemble_scheduler
from ebbtide.srt.managers.control.ports import IncomingWeights, Staging
from ebbtide.srt.managers.io_struct import (
    AbortGeneration,
    AnyControlRequest,
    AnyReply,
    ControlCall,
    ControlReply,
    FinishReason,
    ManagerInput,
    Refusal,
    RequestOutput,
    SchedulerInput,
    StateReport,
    TextOutput,
    TokenizedGenerateReqInput,
    TokenOutput,
    UpdateWeightFromDiskReqInput,
    WeightUpdateRequest,
)
from ebbtide.srt.managers.replication import Inbox
from ebbtide.srt.mem_cache.page_table import PageTable
from ebbtide.srt.memory_saver.tags import MemoryTag
from ebbtide.srt.model_executor.batch_plan import BatchPlan, StepResult
from ebbtide.srt.sampling_params import SamplingParams

Body = TypeVar("Body")


class NullRunner:
    """Samples without a model: the next token is a function of the weights' value, the seed and the position.

    So an output tells which weights sampled which of its tokens, and does not depend on how it was batched.

    A forward pass over memory that is not there, or over weights that are not whole, is an AssertionError.

    Attributes:
        value: stands for the weights' contents, see `NullWeights`; None while they are not whole.
        needed: the memory that a forward pass reads.
        num_steps: forward passes so far.
    """

    VOCAB_SIZE = 1000

    def __init__(self) -> None:
        self.value: int | None = 0
        self.needed: list[NullMemory] = []
        self.num_steps = 0

    def token(self, seed: int, position: int, value: int) -> int:
        """The token that weights of this value sample at this output position."""
        return (seed * 7919 + position * 104729 + value * 31) % (self.VOCAB_SIZE - 1) + 1

    def launch(self, plan: BatchPlan) -> FinishedStep:
        value = self.value
        assert value is not None, "a forward pass ran on weights that are not whole"
        assert all(memory.resident_bytes for memory in self.needed), "a forward pass ran on released memory"
        self.num_steps += 1
        tokens = [
            self.token(spec.seed, len(spec.output_ids), value) if samples else -1
            for spec, samples in zip(plan.specs, plan.samples_R.tolist(), strict=True)
        ]
        return FinishedStep(StepResult(tokens))


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step that has run."""

    result: StepResult

    def wait(self) -> StepResult:
        return self.result


class NullDevice:
    """Device memory that is only counted; shared by all tags of one engine, or of several."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.used_bytes = 0

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.used_bytes

    def take(self, num_bytes: int) -> None:
        if num_bytes > self.free_bytes:
            raise OutOfDeviceMemory(num_bytes, self.free_bytes)
        self.used_bytes += num_bytes


class NullMemory:
    """The memory of one tag on a `NullDevice`; resident from the start."""

    def __init__(
        self,
        device: NullDevice,
        num_bytes: int,
        *,
        keeps_contents: bool = False,
        lose_contents: Callable[[], None] = lambda: None,
    ) -> None:
        device.take(num_bytes)
        self.keeps_contents = keeps_contents
        self.virtual_bytes = num_bytes
        self.resident_bytes = num_bytes
        self.backup_bytes = 0
        self._device = device
        self._lose_contents = lose_contents

    def prepare_release(self) -> None:
        if self.keeps_contents:
            self.backup_bytes = self.virtual_bytes

    def release(self) -> int:
        freed_bytes, self.resident_bytes = self.resident_bytes, 0
        self._device.used_bytes -= freed_bytes
        if not self.keeps_contents:
            self._lose_contents()
        return freed_bytes

    def resume(self) -> int:
        mapped_bytes = self.virtual_bytes - self.resident_bytes
        self._device.take(mapped_bytes)
        self.resident_bytes = self.virtual_bytes
        return mapped_bytes


class NullWeights:
    """Weights that are one integer per parameter; None where it was lost or is being overwritten.

    An update is an `UpdateWeightFromDiskReqInput` whose `model_path` is the integer to write. Its `manifest`
    may hold `names` (parameters to write, all by default), and `fail_after` (raise after so many of them).

    Args:
        num_staged: copies that there is room for; with 0 every update is in place.
    """

    BYTES_PER_PARAMETER = 48 << 20

    def __init__(self, runner: NullRunner, num_parameters: int = 4, num_staged: int = 1) -> None:
        self.names = frozenset(f"layer.{index}" for index in range(num_parameters))
        self.num_staged = num_staged
        self.live: dict[str, int | None] = dict.fromkeys(sorted(self.names), 0)
        self.runner = runner

    def open(self, request: WeightUpdateRequest) -> IncomingWeights:
        if not isinstance(request, UpdateWeightFromDiskReqInput):
            raise RequestRejected("the null weights are updated from disk, with model_path an integer")
        if not request.model_path.isdigit():
            raise RequestRejected(f"model_path: expected an integer, got {request.model_path!r}")
        manifest = request.manifest or {}
        names = manifest.get("names", sorted(self.names))
        return _NullIncoming(self, names, int(request.model_path), manifest.get("fail_after"))

    def stage(self, *, in_place: bool) -> Staging:
        return _NullStaging(self, is_staged=not in_place and self.num_staged > 0)

    def read(self, name: str, max_rows: int) -> list[Any]:
        if name not in self.names:
            raise RequestRejected(f"the model has no parameter {name!r}")
        value = self.live[name]
        assert value is not None, "a weight was read that is not whole"
        return [float(value)][:max_rows]

    def write(self, values: Mapping[str, int | None]) -> None:
        """Change live weights, for the runner too."""
        self.live.update(values)
        live = [value for value in self.live.values() if value is not None]
        is_whole = len(live) == len(self.live)
        self.runner.value = sum(value * (i + 1) for i, value in enumerate(live)) if is_whole else None

    def lose(self) -> None:
        """The memory behind them was released."""
        self.write(dict.fromkeys(self.names, None))


class _NullStaging:
    def __init__(self, weights: NullWeights, *, is_staged: bool) -> None:
        self.is_staged = is_staged
        self.values: dict[str, int | None] = {}
        self._weights = weights

    def write(self, name: str, value: int) -> None:
        self.values[name] = value
        if not self.is_staged:
            self._weights.write({name: None})

    def complete(self, written: frozenset[str]) -> Iterator[int]:
        for name in sorted(self._weights.names - written):
            self.values[name] = self._weights.live[name]
            yield NullWeights.BYTES_PER_PARAMETER

    def commit(self) -> None:
        self._weights.write(self.values)

    def close(self) -> None:
        """Nothing is held."""


class _NullIncoming:
    def __init__(
        self, weights: NullWeights, names: Sequence[str], value: int, fail_after: int | None
    ) -> None:
        self.names = frozenset(names) & weights.names
        self.num_tensors = len(names)
        self.num_ignored = 0
        self._unknown = sorted(set(names) - weights.names)
        self._value = value
        self._fail_after = fail_after

    def problems(self) -> list[dict[str, str]]:
        return [{"name": name, "reason": "the model has no parameter of this name"} for name in self._unknown]

    def write(self, staging: Staging) -> Iterator[int]:
        assert isinstance(staging, _NullStaging)
        for index, name in enumerate(sorted(self.names)):
            if index == self._fail_after:
                raise EngineError("this update was told to fail")
            staging.write(name, self._value)
            yield NullWeights.BYTES_PER_PARAMETER

    def close(self) -> None:
        """Nothing is held."""


@dataclass
class Output:
    """What has come back for one request so far."""

    token_ids: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    version_starts: list[tuple[str, int]] = field(default_factory=list)
    kv_versions: list[str] = field(default_factory=list)
    num_retractions: int = 0
    cached_tokens: int = 0


class SchedulerHarness:
    """A scheduler on null parts, turned by hand: send messages, turn the loop, look at what came back.

    Attributes:
        replies: by call id.
        outputs: by rid.
        state: the state report that came last.
    """

    def __init__(
        self,
        *,
        num_pages: int = 64,
        page_size: int = 4,
        context_len: int = 128,
        schedule: ScheduleConfig | None = None,
        cache_by_version: bool = False,
        enable_prefix_cache: bool = True,
        has_memory_saver: bool = True,
        keeps_weights: bool = False,
        eos_token_ids: frozenset[int] = frozenset(),
        device: NullDevice | None = None,
    ) -> None:
        self.runner = NullRunner()
        self.weights = NullWeights(self.runner)
        self.num_pages = num_pages
        self.device = device if device is not None else NullDevice(10_000)
        self.schedule = schedule if schedule is not None else default_schedule()
        self.replies: dict[str, AnyReply] = {}
        self.outputs: dict[str, Output] = {}
        self.state: StateReport | None = None
        self._incoming: list[SchedulerInput] = []
        self._ids = itertools.count()
        config = SchedulerConfig(
            schedule=self.schedule,
            page_size=page_size,
            enable_prefix_cache=enable_prefix_cache,
            cache_by_version=cache_by_version,
            has_memory_saver=has_memory_saver,
            weight_version="default",
            model_path="null",
            load_format="dummy",
            update_timeout_s=600.0,
            eos_token_ids=eos_token_ids,
        )
        parts = RankParts(
            runner=self.runner,
            num_pages=num_pages,
            table=PageTable(self.schedule.max_running_requests, -(-context_len // page_size)),
            memories=self._memories(keeps_weights),
            weights=self.weights,
            free_bytes=lambda: self.device.free_bytes,
            device="null",
            tokenizer=None,
        )
        self.table = parts.table
        self.scheduler = assemble_scheduler(config, parts, Inbox(self, self), self)
        self.scheduler.answer()

    def _memories(self, keeps_weights: bool) -> dict[MemoryTag, NullMemory]:
        weights = NullMemory(self.device, 2000, keeps_contents=keeps_weights, lose_contents=self.weights.lose)
        kv_cache = NullMemory(self.device, 5000)
        self.runner.needed = [weights, kv_cache]
        cuda_graph = NullMemory(self.device, 100)
        return {MemoryTag.WEIGHTS: weights, MemoryTag.KV_CACHE: kv_cache, MemoryTag.CUDA_GRAPH: cuda_graph}

    def generate(
        self,
        prompt: Sequence[int],
        *,
        rid: str | None = None,
        stream: bool = True,
        seed: int = 0,
        max_new_tokens: int = 16,
        namespace: tuple[str, ...] = (),
        **params: Any,
    ) -> str:
        """Queue a request; returns its rid."""
        rid = rid if rid is not None else f"req-{next(self._ids)}"
        self.outputs[rid] = Output()
        self._incoming.append(
            TokenizedGenerateReqInput(
                rid=rid,
                input_ids=list(prompt),
                sampling_params=SamplingParams(max_new_tokens=max_new_tokens, **params),
                max_new_tokens=max_new_tokens,
                seed=seed,
                stream=stream,
                cache_namespace=namespace,
            )
        )
        return rid

    def abort(self, rid: str) -> None:
        """End a request as the API process does when its client is gone."""
        self._incoming.append(AbortGeneration(rid=rid, message="Aborted: the client went away"))

    def deliver(self, message: SchedulerInput) -> None:
        """Queue any message."""
        self._incoming.append(message)

    def call(self, request: AnyControlRequest) -> str:
        """Queue a control request; returns its call id."""
        call_id = f"call-{next(self._ids)}"
        self._incoming.append(ControlCall(id=call_id, request=request))
        return call_id

    def apply(self, request: AnyControlRequest, kind: type[Body]) -> Body:
        """Carry a control request out; the reply, which must be of this kind."""
        call_id = self.call(request)
        self.turn_until(lambda: call_id in self.replies)
        reply = self.replies[call_id]
        assert isinstance(reply, kind), reply
        return reply

    def refuse(self, request: AnyControlRequest) -> Refusal:
        """Carry out a control request that must be refused."""
        return self.apply(request, Refusal)

    @property
    def num_waiting(self) -> int:
        """Messages that the next turn will take."""
        return len(self._incoming)

    def turn(self, count: int = 1) -> None:
        """Turn the loop; a turn with nothing to do is one too."""
        for _ in range(count):
            self.scheduler.turn()

    def turn_until(self, condition: Callable[[], bool], limit: int = 10_000) -> None:
        """Turn until the condition holds; it must before the scheduler has nothing left to do."""
        for _ in range(limit):
            self.turn()
            if condition():
                return
            assert self._incoming or self.scheduler.is_runnable, "the scheduler sleeps and would not wake up"
        raise AssertionError(f"still running after {limit} turns")

    def run_until_idle(self) -> None:
        """Turn until every request has ended or nothing can run."""
        self.turn_until(lambda: not self._incoming and not self.scheduler.is_runnable)

    def receive(self, timeout_s: float | None) -> list[SchedulerInput]:
        """The scheduler's end: what was queued since the last turn. Never sleeps."""
        messages, self._incoming = self._incoming, []
        return messages

    def send(self, message: ManagerInput) -> None:
        """The scheduler's end: a message for the API process."""
        # Through the wire format, so that what cannot travel fails here too.
        message = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=ManagerInput)
        match message:
            case ControlReply():
                assert message.id not in self.replies
                self.replies[message.id] = message.reply
            case StateReport():
                self.state = message
            case TokenOutput() | TextOutput():
                for output in message.outputs:
                    self._collect(output)

    def _collect(self, output: RequestOutput) -> None:
        known = self.outputs[output.rid]
        assert known.finish is None, f"{output.rid} goes on after its end"
        known.token_ids += output.token_ids
        known.finish = output.finish
        known.num_retractions = output.num_retractions
        if output.start is not None:
            known.cached_tokens = output.start.cached_tokens
        if output.version_starts is not None:
            known.version_starts = output.version_starts
        if output.kv_versions is not None:
            known.kv_versions = output.kv_versions


def default_schedule(**changes: Any) -> ScheduleConfig:
    """Limits that are small enough to be reached."""
    limits: dict[str, Any] = {
        "max_running_requests": 8,
        "max_queued_requests": None,
        "chunked_prefill_size": 16,
        "max_prefill_tokens": 64,
        "policy": "fcfs",
        "stream_interval": 1,
        "incremental_streaming_output": False,
    }
    return ScheduleConfig(**{**limits, **changes})
