"""Weights that are integers, so that their contents are visible. Asserts that they are used correctly."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ebbtide.srt.errors import EngineError, RequestRejected
from ebbtide.srt.managers.control.weights import (
    Conversation,
    How,
    PatchSums,
    Snapshot,
    Staging,
    WritePlan,
)
from ebbtide.srt.managers.io_struct import (
    ChecksumAlgorithm,
    InitWeightsUpdateGroupReqInput,
    PiecewiseRequest,
    RankChecksums,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromIPCReqInput,
    WeightPiece,
    WeightUpdateRequest,
)
from ebbtide.srt.memory_saver import MemoryTag
from ebbtide.srt.slices import Slices
from ebbtide.testing.null_kv import NullDevice, NullKV, NullMemory
from ebbtide.testing.null_runner import NullRunner


class NullCopies:
    """Copies that are done when they are launched. Without `beside`, they run after the passes under way."""

    def __init__(self, runner: NullRunner) -> None:
        self._runner = runner

    @contextmanager
    def copying(self, *, beside: bool = False) -> Iterator[None]:
        self._runner.follows_passes = not beside
        try:
            yield
        finally:
            self._runner.follows_passes = False

    def copies_done(self) -> bool:
        return True


class NullWeights:
    """Weights with one integer per parameter; None: it was lost, or is being overwritten.

    An update is an `UpdateWeightFromDiskReqInput` whose `model_path` is the integer to write. Its `manifest`
    may have `names` (parameters to write; by default all), `fail_after` (raise after this many of them),
    `is_sent` (it arrives through a group), `near_bytes` (it may be written in a burst), `needs_copy` (the
    integer is added to all parameters), and `nonfinite` (names of parameters with NaN).

    An `UpdateWeightsFromIPCReqInput` may have any handles. Put its pieces into `sender.says`.

    Args:
        num_staged: number of second copies that there is memory for; 0: every update is in place.

    Attributes:
        faults: exceptions to raise, once each, by step of an update (`STEPS`).
        slowness: number of empty slices before each slice with bytes, and of polls before something arrives.
        lateness: number of further polls before tensors arrive, or a group has been joined.
        nonfinite: names of parameters with NaN, in updates whose manifest does not say.
        groups: names of joined groups.
        sender: of updates that come piece by piece.
        take_chunks, return_chunks: called when a second copy takes lent chunks, and gives them back.
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

    # More bytes than a turn may copy beside a forward pass.
    BYTES_PER_PARAMETER = 1 << 40

    requires_copy = refuses_nonfinite = False

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
        """Raise the fault for this step, if there is one."""
        assert step in self.STEPS
        error = self.faults.pop(step, None)
        if error is not None:
            raise error

    def slice(self) -> Slices[None]:
        """Yield the bytes of one parameter, after `slowness` empty slices."""
        for _ in range(self.slowness):
            yield 0
        yield self.BYTES_PER_PARAMETER

    @property
    def copies(self) -> NullCopies:
        return NullCopies(self.runner)

    def open(self, request: WeightUpdateRequest) -> Slices[WritePlan]:
        yield from ()
        if not isinstance(request, UpdateWeightFromDiskReqInput):
            raise RequestRejected("the null weights are updated from disk, with model_path an integer")
        if not request.model_path.isdigit():
            raise RequestRejected(f"model_path: expected an integer, got {request.model_path!r}")
        self.fail_at("open")
        return _NullPlan(self, int(request.model_path), request.manifest or {})

    def converse(self, request: PiecewiseRequest) -> Conversation:
        if isinstance(request, UpdateWeightsFromIPCReqInput) and not request.zmq_handles:
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

    def group_names(self) -> list[str]:
        return sorted(self.groups)

    def join_group(self, request: InitWeightsUpdateGroupReqInput) -> Slices[None]:
        for _ in range(self.slowness + self.lateness):
            self.fail_at("join")
            yield 0
        self.fail_at("join")
        self.groups.add(request.group_name)

    def leave_group(self, name: str) -> Callable[[], bool] | None:
        if name not in self.groups:
            return None
        self.groups.discard(name)
        return lambda: True

    def stored_as(self, name: str) -> str:
        return name

    def precision_of(self, name: str) -> str:
        return ""

    def read(self, name: str, max_rows: int) -> Callable[[], list[Any]]:
        if name not in self.names:
            raise RequestRejected(f"the model has no parameter {name!r}")
        value = self.live[name]
        assert value is not None, "a weight was read that is not whole"
        return lambda: [float(value)][:max_rows]

    def write(self, values: Mapping[str, int | None]) -> None:
        """Change live weights, and the runner's value."""
        self.parameters.generation += 1
        self.live.update(values)
        live = [value for value in self.live.values() if value is not None]
        is_whole = len(live) == len(self.live)
        self.runner.change(sum(value * (i + 1) for i, value in enumerate(live)) if is_whole else None)

    def lose(self) -> None:
        """Lose all contents, as a release does."""
        self.write(dict.fromkeys(self.names, None))


@dataclass
class NullSender:
    """The sender of an update in pieces. The engine gets a piece when it has answered the one before.

    Attributes:
        says: messages that the engine has not got yet: a piece (the integer, and the names of parameters to
            write it to); None: that was all; a string: why the sender gives up.
        answers: the engine's answers, oldest first; "" is success.
        is_left: whether the engine has ended the conversation.
    """

    says: deque[tuple[int, Sequence[str]] | str | None] = field(default_factory=deque)
    answers: list[str] = field(default_factory=list)
    is_left: bool = False


class _NullConversation:
    def __init__(self, weights: NullWeights, sender: NullSender) -> None:
        sender.is_left = False
        self._weights = weights
        self._sender = sender
        self._piece: _NullPlan | None = None
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
            self._piece = _NullPlan(self._weights, value, {"names": names})
        return True

    def piece(self) -> Slices[WritePlan | None]:
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
        """Note that these parameters are being received, so that their old contents are lost."""
        if self.is_staged:
            self.values |= dict.fromkeys(names, None)
        else:
            self._weights.write(dict.fromkeys(names, None))

    def require_complete(self) -> None:
        """Does nothing: a tensor is always complete."""

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


class _NullPlan:
    patch: PatchSums | None = None
    base_version: str | None = None
    incomplete = ""

    def __init__(self, weights: NullWeights, value: int, manifest: Mapping[str, Any]) -> None:
        names: Sequence[str] = manifest.get("names", sorted(weights.names))
        self.is_sent: bool = manifest.get("is_sent", False)
        self.near_bytes: int | None = manifest.get("near_bytes")
        self.cost = 1
        self.opens = not self.is_sent
        adds: bool = manifest.get("needs_copy", False)
        self.how = How.LOAD if adds else How.COPY
        self.names = weights.names if adds and names else frozenset(names) & weights.names
        self.touched = self.names
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
        """Does nothing: there is no group to leave."""

    def open(self, staging: Staging) -> Slices[None]:
        yield 0
        self._weights.fail_at("map")

    def detach(self) -> Slices[None]:
        self._weights.fail_at("release")
        return self._unmap()

    def _unmap(self) -> Slices[None]:
        yield 1

    def begin(self, staging: Staging) -> None:
        """Does nothing: old values need not be kept."""

    def end(self, staging: Staging) -> frozenset[str]:
        return frozenset()

    def write(self, staging: Staging) -> Slices[None]:
        assert isinstance(staging, _NullStaging)
        for index, name in enumerate(sorted(self.names)):
            if index == self._fail_after:
                raise EngineError("this update was told to fail")
            staging.write(name, self._value, adds=self.how is How.LOAD)
            yield from self._weights.slice()
        self._weights.fail_at("write")

    def finish(self) -> None:
        """Does nothing: copies are done when they are launched."""

    def nonfinite(self) -> list[str]:
        return self._nonfinite

    def close(self) -> None:
        """Does nothing: the plan holds no memory."""


def null_memories(
    device: NullDevice, weights: NullWeights, *, keeps_weights: bool = False, kv: NullKV | None = None
) -> dict[MemoryTag, NullMemory]:
    """Make the memory of all tags, and let the weights' runner check it in forward passes."""
    lose_kv = kv.lose if kv is not None else lambda: None
    memories = {
        MemoryTag.WEIGHTS: NullMemory(device, 2000, keeps_contents=keeps_weights, lose_contents=weights.lose),
        MemoryTag.KV_CACHE: NullMemory(device, 5000, lose_contents=lose_kv),
        MemoryTag.CUDA_GRAPH: NullMemory(device, 100, is_needed=False),
    }
    weights.runner.needed = [memory for memory in memories.values() if memory.is_needed]
    return memories


class NullParameters:
    """The parameters of null weights. A checksum is the integer itself."""

    def __init__(self, weights: NullWeights) -> None:
        self.generation = 0
        self._weights = weights

    def live(self, skipped: Sequence[str]) -> dict[str, int | None]:
        return {
            name: value
            for name, value in self._weights.live.items()
            if not any(part in name for part in skipped)
        }

    def read(self, skipped: Sequence[str]) -> Slices[dict[str, int | None]]:
        """Read the integers, each in a slice of its own; None: it is incomplete."""
        values: dict[str, int | None] = {}
        for name in self.live(skipped):
            yield from self._weights.slice()
            values[name] = self._weights.live[name]
        return values

    def checksums(self, skipped: Sequence[str], algorithm: ChecksumAlgorithm) -> Slices[RankChecksums]:
        self._weights.fail_at("check")
        values = yield from self.read(skipped)
        checksums = {name: str(value) for name, value in values.items()}
        return RankChecksums(checksums=checksums, per_gpu_checksum=str(values), parallelism_info=[])

    def snapshot(self) -> Slices[Snapshot]:
        self._weights.fail_at("check")
        values = yield from self.read(())
        assert None not in values.values(), "weights were copied that are not whole"

        def differences(skipped: Sequence[str]) -> Slices[list[dict[str, str]]]:
            now = (yield from self.read(skipped)).items()
            changed = [(name, value) for name, value in now if value != values[name]]
            return [{"name": name, "reason": f"{value} was {values[name]}"} for name, value in changed]

        return differences

    def sources(self, skipped: Sequence[str]) -> frozenset[str]:
        return frozenset(self.live(skipped))

    def pieces(self, index: int, first_byte: int, num_bytes: int) -> list[WeightPiece]:
        self._weights.fail_at("check")
        live = self.live(())
        if index >= len(live):
            raise RequestRejected(f"index: expected 0 to {len(live) - 1}, got {index}")
        name, value = list(live.items())[index]
        assert value is not None, "a weight was read that is not whole"
        data = value.to_bytes(8, "little", signed=True)[first_byte : first_byte + num_bytes]
        piece = WeightPiece(
            num_parameters=len(live),
            generation=self.generation,
            name=name,
            dtype="int64",
            shape=(),
            data=data,
        )
        return [piece]

    def fill(self, skipped: Sequence[str]) -> None:
        self.generation += 1
        self._weights.write(dict.fromkeys(self.live(skipped), None))
