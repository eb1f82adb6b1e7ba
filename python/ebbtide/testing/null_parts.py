"""A runner, memory and weights without a model: what they hold is visible, misuse is an AssertionError."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ebbtide.srt.errors import EngineError, OutOfDeviceMemory, RequestRejected
from ebbtide.srt.managers.control.ports import Slices
from ebbtide.srt.managers.control.weight_ports import Conversation, GroupJoining, IncomingWeights, Staging
from ebbtide.srt.managers.io_struct import (
    InitWeightsUpdateGroupReqInput,
    UpdateWeightFromDiskReqInput,
    WeightUpdateRequest,
)
from ebbtide.srt.memory_saver.tags import MemoryTag
from ebbtide.srt.model_executor.batch_plan import (
    SAMPLED_BEFORE,
    BatchPlan,
    BeforeMasks,
    LogprobArrays,
    SampleSpec,
    StepResult,
)
from ebbtide.testing.null_kv import NullKV
from ebbtide.testing.null_parameters import NullParameters

# What stands for a logprob that is not finite.
LOWEST_LOGPROB = -3.4028234663852886e38


class NullRunner:
    """Samples without a model: the next token is a function of the weights' value, the seed and the position.

    So an output tells which weights sampled which of its tokens, and does not depend on how it was batched.

    A forward pass over memory that is not there, over weights that are not whole, or over other tokens than
    the requests', is an AssertionError.

    Attributes:
        value: stands for the weights' contents, see `NullWeights`; None while they are not whole.
        needed: the memory that a forward pass reads.
        kv: what its pages hold is checked; None: it is not.
        num_steps: forward passes so far.
        num_under_way: of those, the ones that nobody has waited for.
    """

    VOCAB_SIZE = 1000

    def __init__(self) -> None:
        self.value: int | None = 0
        self.needed: list[NullMemory] = []
        self.kv: NullKV | None = None
        self.num_steps = 0
        self.num_under_way = 0
        self._sampled_by_row: dict[int, int] = {}

    def token(self, seed: int, position: int, value: int) -> int:
        """The token that weights of this value sample at this output position."""
        return (seed * 7919 + position * 104729 + value * 31) % (self.VOCAB_SIZE - 1) + 1

    def launch(self, plan: BatchPlan, before_masks: BeforeMasks = None) -> NullStep:
        value = self.value
        assert value is not None, "a forward pass ran on weights that are not whole"
        assert all(memory.resident_bytes for memory in self.needed), "a forward pass ran on released memory"
        self._check_tokens(plan, value)
        self.num_steps += 1
        self.num_under_way += 1
        if before_masks is not None and any(spec.mask is not None for spec in plan.specs):
            before_masks()
        tokens = [
            self._choose(spec, num_outputs, value) if samples else -1
            for spec, num_outputs, samples in zip(
                plan.specs, plan.num_outputs_R.tolist(), plan.samples_R.tolist(), strict=True
            )
        ]
        self._sampled_by_row.update(zip(plan.page_rows_R.tolist(), tokens, strict=True))
        # Of a prompt in one piece: as the value says.
        input_logprobs = {
            index: LogprobArrays(np.full(len(spec.prompt_ids) - 1, self.logprob(value), dtype=np.float32))
            for index, spec in enumerate(plan.specs)
            if spec.logprobs is not None and spec.logprobs.start is not None
        }
        return NullStep(self, value, StepResult(tokens, input_logprobs=input_logprobs))

    def _choose(self, spec: SampleSpec, num_outputs: int, value: int) -> int:
        """The first token that a mask allows, where there is one."""
        if spec.mask is None:
            return self.token(spec.seed, num_outputs, value)
        words_W = np.empty(-(-self.VOCAB_SIZE // 32), dtype=np.int32)
        spec.mask.fill(words_W)
        return int(np.flatnonzero(np.unpackbits(words_W.view(np.uint8), bitorder="little"))[0])

    def logprob(self, value: int) -> float:
        """What weights of this value make of any token of a prompt; of odd hundreds, nothing finite."""
        return LOWEST_LOGPROB if value // 100 % 2 else -value / 1024

    def _check_tokens(self, plan: BatchPlan, value: int) -> None:
        """Every request must be fed its own next tokens, and sampled behind its last."""
        input_ids = plan.input_ids_T.tolist()
        first = 0
        rows = zip(
            plan.specs,
            plan.page_rows_R.tolist(),
            plan.starts_R.tolist(),
            plan.num_new_R.tolist(),
            plan.samples_R.tolist(),
            plan.num_outputs_R.tolist(),
            strict=True,
        )
        for spec, row, start, num_new, samples, num_outputs in rows:
            tokens = [*spec.prompt_ids, *spec.output_ids]
            given = input_ids[first : first + num_new]
            if num_outputs > len(spec.output_ids):
                # One token is in flight: it is known here, and to the scheduler by number only.
                assert num_outputs == len(spec.output_ids) + 1
                assert given == [SAMPLED_BEFORE]
                assert not spec.needs_output_ids, "a penalty was computed without the last token"
                given = [self._sampled_by_row[row]]
                tokens.append(self.token(spec.seed, num_outputs - 1, value))
            end = start + num_new
            assert given == tokens[start:end]
            assert samples == (end == len(tokens) and spec.params.max_new_tokens != 0)
            if self.kv is not None:
                self.kv.compute(row, tokens, start, end)
            first += num_new
        assert first == len(input_ids)


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step that has run."""

    result: StepResult

    def wait(self) -> StepResult:
        return self.result


@dataclass(frozen=True, slots=True)
class NullStep:
    """A step that counts as under way until its result is asked for: nothing of it may change meanwhile."""

    runner: NullRunner
    value: int
    result: StepResult

    def wait(self) -> StepResult:
        self.runner.num_under_way -= 1
        assert self.runner.value == self.value, "the weights changed under a forward pass"
        assert all(memory.resident_bytes for memory in self.runner.needed), "memory went under a forward pass"
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
        is_needed: bool = True,
        lose_contents: Callable[[], None] = lambda: None,
    ) -> None:
        device.take(num_bytes)
        self.keeps_contents = keeps_contents
        self.is_needed = is_needed
        self.virtual_bytes = num_bytes
        self.resident_bytes = num_bytes
        self.backup_bytes = 0
        # What a resume takes.
        self.wanted_bytes = num_bytes
        self._is_saved = False
        self._device = device
        self._lose_contents = lose_contents

    def prepare_release(self, keep: bool) -> None:
        if keep:
            self.backup_bytes = self.virtual_bytes
        self._is_saved = keep

    def release(self) -> int:
        freed_bytes, self.resident_bytes = self.resident_bytes, 0
        self._device.used_bytes -= freed_bytes
        if not self._is_saved:
            self._lose_contents()
        return freed_bytes

    def resume(self) -> int:
        mapped_bytes = self.wanted_bytes - self.resident_bytes
        self._device.take(mapped_bytes)
        self.resident_bytes = self.wanted_bytes
        return mapped_bytes

    def give(self, num_bytes: int) -> int:
        """So much of it goes to the device, and does not come with a resume."""
        self._device.used_bytes -= num_bytes
        self.resident_bytes -= num_bytes
        self.wanted_bytes -= num_bytes
        return num_bytes

    def take(self, num_bytes: int) -> int:
        """So much more of it."""
        self._device.take(num_bytes)
        self.resident_bytes += num_bytes
        self.wanted_bytes += num_bytes
        return num_bytes


class NullCopies:
    """To launch a copy is to have it run."""

    def copying(self) -> AbstractContextManager[None]:
        return nullcontext()

    def copies_done(self) -> bool:
        return True


class NullWeights:
    """Weights that are one integer per parameter; None where it was lost or is being overwritten.

    An update is an `UpdateWeightFromDiskReqInput` whose `model_path` is the integer to write. Its `manifest`
    may hold `names` (parameters to write, all by default), `fail_after` (raise after so many of them),
    `is_sent` (it arrives through a group), `near_bytes` (it may be written in a burst), `needs_copy` (the
    integer is added to all parameters), and `nonfinite` (of the names, those that hold NaN).

    An `UpdateWeightsFromIPCReqInput` may have any handles. What its sender says is put into `sender.says`.

    Args:
        num_staged: copies that there is room for; with 0 every update is in place.

    Attributes:
        faults: what this rank fails with, once, at which steps of updates (`STEPS`).
        slowness: slices without bytes ahead of each one with some, and looks before something arrives.
        lateness: further looks before tensors arrive, or a group has been joined.
        nonfinite: what an update holds NaN in on this rank, where its manifest does not say.
        groups: that were joined.
        sender: of the updates that come piece by piece.
        take_chunks, return_chunks: a copy takes what was lent for it, and returns that.
    """

    STEPS = (
        "open",
        "stage",
        "arrive",
        "map",
        "write",
        "complete",
        "release",
        "give_back",
        "join",
        "commit",
        "check",
    )

    # More than a turn may launch beside any forward pass.
    BYTES_PER_PARAMETER = 1 << 40

    requires_copy = False

    def __init__(self, runner: NullRunner, num_parameters: int = 4, num_staged: int = 1) -> None:
        self.names = frozenset(f"layer.{index}" for index in range(num_parameters))
        self.num_staged = num_staged
        self.live: dict[str, int | None] = dict.fromkeys(sorted(self.names), 0)
        self.runner = runner
        self.faults: dict[str, Exception] = {}
        self.slowness = 0
        self.lateness = 0
        self.nonfinite: list[str] = []
        self.groups: set[str] = set()
        self.sender = NullSender()
        self.take_chunks: Callable[[], int] = lambda: 0
        self.return_chunks: Callable[[int], None] = lambda num_chunks: None
        self.parameters = NullParameters(self)

    def fail_at(self, step: str) -> None:
        """Raise what this rank is to fail with at this step, if anything."""
        assert step in self.STEPS
        error = self.faults.pop(step, None)
        if error is not None:
            raise error

    def slice(self) -> Slices[None]:
        """The bytes of one parameter, when this rank gets to it."""
        for _ in range(self.slowness):
            yield 0
        yield self.BYTES_PER_PARAMETER

    @property
    def copies(self) -> NullCopies:
        return NullCopies()

    def open(self, request: WeightUpdateRequest) -> Slices[IncomingWeights]:
        yield from ()
        if not isinstance(request, UpdateWeightFromDiskReqInput):
            raise RequestRejected("the null weights are updated from disk, with model_path an integer")
        if not request.model_path.isdigit():
            raise RequestRejected(f"model_path: expected an integer, got {request.model_path!r}")
        self.fail_at("open")
        return _NullIncoming(self, int(request.model_path), request.manifest or {})

    def converse(self, zmq_handles: Mapping[str, str]) -> Conversation:
        if not zmq_handles:
            raise RequestRejected("zmq_handles: there is no address for this device")
        self.fail_at("open")
        return _NullConversation(self, self.sender)

    def stage(self, *, in_place: bool, is_last: bool = True) -> Slices[Staging]:
        num_staged = 0 if in_place else self.num_staged
        for _ in range(num_staged):
            yield from self.slice()
            self.fail_at("stage")
        is_staged = num_staged > 0
        return _NullStaging(self, is_staged=is_staged, num_chunks=self.take_chunks() if is_staged else 0)

    @property
    def group_names(self) -> list[str]:
        return sorted(self.groups)

    def join_group(self, request: InitWeightsUpdateGroupReqInput) -> GroupJoining:
        return _NullJoining(self, request.group_name)

    def leave_group(self, name: str) -> Callable[[], bool] | None:
        if name not in self.groups:
            return None
        self.groups.discard(name)
        return lambda: True

    def stored_as(self, name: str) -> str:
        return name

    def read(self, name: str, max_rows: int) -> list[Any]:
        if name not in self.names:
            raise RequestRejected(f"the model has no parameter {name!r}")
        value = self.live[name]
        assert value is not None, "a weight was read that is not whole"
        return [float(value)][:max_rows]

    def write(self, values: Mapping[str, int | None]) -> None:
        """Change live weights, for the runner too."""
        self.parameters.generation += 1
        self.live.update(values)
        live = [value for value in self.live.values() if value is not None]
        is_whole = len(live) == len(self.live)
        self.runner.value = sum(value * (i + 1) for i, value in enumerate(live)) if is_whole else None

    def lose(self) -> None:
        """The memory behind them was released."""
        self.write(dict.fromkeys(self.names, None))


@dataclass
class NullSender:
    """Who brings the pieces of an update. The engine hears the next one when it has answered the last.

    Attributes:
        says: what the engine is still to hear: a piece, as the integer to write and the names to write it
            to; None, everything has come; a string, why the sender gives up.
        answers: what the engine has answered, oldest first.
        is_left: whether the engine has let go.
    """

    says: deque[tuple[int, Sequence[str]] | str | None] = field(default_factory=deque)
    answers: list[str] = field(default_factory=list)
    is_left: bool = False


class _NullConversation:
    def __init__(self, weights: NullWeights, sender: NullSender) -> None:
        sender.is_left = False
        self._weights = weights
        self._sender = sender
        self._piece: _NullIncoming | None = None
        self._owes_answer = False
        self._refused = ""

    def poll(self) -> bool:
        if self._owes_answer or not self._sender.says:
            return self._owes_answer
        said = self._sender.says.popleft()
        self._owes_answer = True
        if isinstance(said, str) or (said is None and self._refused):
            self.answer(self._refused or f"the sender gave up: {said}")
            raise RequestRejected(f"nothing of the update is served: {self._refused}")
        if said is not None:
            value, names = said
            self._piece = _NullIncoming(self._weights, value, {"names": names})
        return True

    def piece(self) -> Slices[IncomingWeights | None]:
        yield from ()
        assert self._owes_answer
        return self._piece

    def answer(self, problem: str = "") -> None:
        assert self._owes_answer, "the sender is answered once"
        self._refused = self._refused or problem
        self._owes_answer = False
        self._piece = None
        self._sender.answers.append(problem)

    def close(self) -> None:
        if self._owes_answer:
            self.answer("the update was given up")
        self._sender.is_left = True


class _NullStaging:
    def __init__(self, weights: NullWeights, *, is_staged: bool, num_chunks: int) -> None:
        self.is_staged = is_staged
        self._num_chunks = num_chunks
        self._before: dict[str, int | None] = {}
        self.values: dict[str, int | None] = {}
        self._weights = weights

    def write(self, name: str, value: int, *, adds: bool = False) -> None:
        found = self.values[name] if adds else 0
        assert found is not None, "what is added to was lost"
        self.values[name] = found + value
        if not self.is_staged:
            self._weights.write({name: None})

    def spoil(self, names: Iterable[str]) -> None:
        """They are being received."""
        if self.is_staged:
            self.values |= dict.fromkeys(names, None)
        else:
            self._weights.write(dict.fromkeys(names, None))

    def complete(self, written: frozenset[str]) -> Slices[None]:
        self._weights.fail_at("complete")
        for name in sorted(self._weights.names - written):
            self.values[name] = self._weights.live[name]
            yield from self._weights.slice()

    def commit(self) -> None:
        assert not self.is_staged or self.values.keys() == self._weights.names, "a copy is committed whole"
        self._weights.fail_at("commit")
        before = {name: self._weights.live[name] for name in self.values}
        self._weights.write(self.values)
        self._before = before

    def roll_back(self) -> None:
        assert self.is_staged, "what was written in place cannot come back"
        self._weights.write(self._before)

    def repay(self) -> None:
        self._weights.return_chunks(self._num_chunks)
        self._num_chunks = 0

    def release(self) -> Slices[None]:
        yield from self._weights.slice()
        self._weights.fail_at("give_back")

    def close(self) -> None:
        self.repay()


class _NullIncoming:
    is_delta = False
    base_version: str | None = None

    def __init__(self, weights: NullWeights, value: int, manifest: Mapping[str, Any]) -> None:
        names: Sequence[str] = manifest.get("names", sorted(weights.names))
        self.is_sent: bool = manifest.get("is_sent", False)
        self.near_bytes: int | None = manifest.get("near_bytes")
        self.needs_copy: bool = manifest.get("needs_copy", False)
        self.names = weights.names if self.needs_copy and names else frozenset(names) & weights.names
        self.sent = frozenset(names)
        self.num_tensors = len(names)
        self.num_ignored = 0
        self.problems = [
            {"name": name, "reason": "the model has no parameter of this name"}
            for name in sorted(set(names) - weights.names)
        ]
        self._weights = weights
        self._nonfinite: list[str] = manifest.get("nonfinite", weights.nonfinite)
        self._value = value
        self._fail_after: int | None = manifest.get("fail_after")
        self._num_looks = weights.slowness + weights.lateness

    def receive_into(self, staging: Staging) -> bool:
        assert isinstance(staging, _NullStaging)
        staging.spoil(self.names)
        return True

    def arrived(self) -> bool:
        self._weights.fail_at("arrive")
        self._num_looks -= 1
        return self._num_looks < 0

    def abandon(self) -> None:
        """There is no group to leave."""

    def open(self, staging: Staging) -> Slices[None]:
        yield 0
        self._weights.fail_at("map")

    def release(self) -> Slices[None]:
        yield 0
        self._weights.fail_at("release")

    def detach(self) -> Callable[[], None]:
        self._weights.fail_at("release")
        return lambda: None

    def write(self, staging: Staging) -> Slices[None]:
        assert isinstance(staging, _NullStaging)
        for index, name in enumerate(sorted(self.names)):
            if index == self._fail_after:
                raise EngineError("this update was told to fail")
            staging.write(name, self._value, adds=self.needs_copy)
            yield from self._weights.slice()
        self._weights.fail_at("write")

    def sum_up(self, staging: Staging) -> Slices[None]:
        raise NotImplementedError("these are whole weights")

    def sums(self) -> Mapping[str, int]:
        raise NotImplementedError("these are whole weights")

    def check_sums(self, shares: Sequence[Mapping[str, int]]) -> None:
        raise NotImplementedError("these are whole weights")

    def nonfinite(self) -> list[str]:
        return self._nonfinite

    def close(self) -> None:
        """Nothing is held."""


class _NullJoining:
    replaced = False

    def __init__(self, weights: NullWeights, name: str) -> None:
        self._weights = weights
        self._name = name
        self._num_looks = weights.slowness + weights.lateness

    def poll(self) -> bool:
        self._weights.fail_at("join")
        self._num_looks -= 1
        if self._num_looks >= 0:
            return False
        self._weights.groups.add(self._name)
        return True

    def close(self) -> None:
        """Nothing is held."""


def null_memories(
    device: NullDevice, weights: NullWeights, *, keeps_weights: bool = False, kv: NullKV | None = None
) -> dict[MemoryTag, NullMemory]:
    """Memory for every tag; the runner of these weights checks what it reads."""
    lose_kv = kv.lose if kv is not None else lambda: None
    memories = {
        MemoryTag.WEIGHTS: NullMemory(device, 2000, keeps_contents=keeps_weights, lose_contents=weights.lose),
        MemoryTag.KV_CACHE: NullMemory(device, 5000, lose_contents=lose_kv),
        MemoryTag.CUDA_GRAPH: NullMemory(device, 100, is_needed=False),
    }
    weights.runner.needed = [memory for memory in memories.values() if memory.is_needed]
    return memories
