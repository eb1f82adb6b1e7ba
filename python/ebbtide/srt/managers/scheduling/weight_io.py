"""The control plane's view of the weights, over the weight store and the weight sources."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from ebbtide.srt.config import EngineConfig
from ebbtide.srt.device.base import Device
from ebbtide.srt.errors import EngineError, OutOfDeviceMemory, RequestRejected
from ebbtide.srt.managers.control.ports import CopyStream, OutOfStep, Slices
from ebbtide.srt.managers.control.weight_ports import Staging
from ebbtide.srt.managers.io_struct import (
    InitWeightsUpdateGroupReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromTensorReqInput,
    WeightUpdateRequest,
)
from ebbtide.srt.managers.scheduling.parameter_checker import ParameterChecker
from ebbtide.srt.memory_saver.arena import Shadow
from ebbtide.srt.model_executor.weight_store import Destination, NonFinite, WeightStore
from ebbtide.srt.stored_tensor import whole
from ebbtide.srt.weight_sync.broadcast.announcement import Announcement
from ebbtide.srt.weight_sync.broadcast.memberships import Joining, Memberships
from ebbtide.srt.weight_sync.broadcast.rendezvous import GroupAddress
from ebbtide.srt.weight_sync.broadcast.stateless import decode_id
from ebbtide.srt.weight_sync.custom_loader import CustomLoader, StagedModel, import_loaders
from ebbtide.srt.weight_sync.delta.folder import read_state
from ebbtide.srt.weight_sync.delta.state_sum import as_hex
from ebbtide.srt.weight_sync.delta.target import StoreTarget
from ebbtide.srt.weight_sync.disk_source import open_checkpoint
from ebbtide.srt.weight_sync.distributed_source import BroadcastSource, open_broadcast
from ebbtide.srt.weight_sync.ipc_source import IpcConversation, open_conversation
from ebbtide.srt.weight_sync.payload.cuda_memory import CudaIpc, TorchCudaIpc
from ebbtide.srt.weight_sync.published_source import PublishedSource
from ebbtide.srt.weight_sync.source import WeightSource
from ebbtide.srt.weight_sync.sparse_source import DeltaSource, PlacedChanges, open_sparse
from ebbtide.srt.weight_sync.tensor_source import open_by_slices

T = TypeVar("T")

# So many names are listed in a message.
MAX_TOLD: Final = 10


class EngineWeights:
    """Opens updates, and finds room for them.

    Args:
        store: the live weights.
        device: where they are. On a CUDA device copies run beside forward passes.

    Raises ConfigurationError for a custom weight loader that cannot be imported.
    """

    def __init__(self, store: WeightStore, config: EngineConfig, device: Device) -> None:
        self.names = store.names
        self.parameters = ParameterChecker(store, device, config.parallel)
        self.requires_copy = config.update.staging == "always"
        self._loaders = import_loaders(config.update.custom_weight_loaders)
        self._store = store
        self._config = config
        self._device = device
        self._groups = Memberships(torch.device(device.name), config.parallel)
        self._cuda: CudaIpc | None = None
        if device.uuid is not None:
            _, _, index = device.name.partition(":")
            self._cuda = TorchCudaIpc(int(index), device.uuid)

    @property
    def copies(self) -> CopyStream:
        return self._device

    def open(self, request: WeightUpdateRequest) -> Slices[_Incoming]:
        loader = self._loader(request)
        source = yield from self._source(request, loader)
        return (yield from _checked(_Incoming(source, self._store, self._device, loader)))

    def converse(self, zmq_handles: Mapping[str, str]) -> _Conversation:
        conversation = open_conversation(zmq_handles, self._cuda)
        return _Conversation(conversation, self._store, self._device)

    def stage(self, *, in_place: bool, may_burst: bool = False, is_last: bool = True) -> Slices[Staging]:
        if in_place or may_burst or self._config.update.staging == "never":
            return _InPlace(self._device)
        try:
            shadow = yield from _timed(self._store.arena.stage_by_chunks())
        except OutOfDeviceMemory as error:
            if self.requires_copy and is_last:
                raise RequestRejected(
                    "nothing was written: update_staging is 'always', and there is no room for a second copy "
                    f"of the weights: {error}",
                    409,
                    needed_bytes=error.needed_bytes,
                    free_bytes=error.free_bytes,
                ) from error
            return _InPlace(self._device)
        return _Staged(self._store, shadow, self._device)

    @property
    def group_names(self) -> list[str]:
        return self._groups.names

    def join_group(self, request: InitWeightsUpdateGroupReqInput) -> Joining:
        address = GroupAddress(
            name=request.group_name,
            host=request.master_address,
            port=_port(request.master_port),
            rank=request.rank_offset + self._config.parallel.rank,
            world_size=request.world_size,
            backend=request.backend,
            unique_id=None if request.nccl_unique_id is None else decode_id(request.nccl_unique_id),
        )
        return self._groups.join(address, request.timeout_s)

    def leave_group(self, name: str) -> Callable[[], bool] | None:
        leaving = self._groups.leave(name, "destroy_weights_update_group")
        return None if leaving is None else lambda: leaving.is_done

    def stored_as(self, name: str) -> str:
        return self._store.stored_as(name)

    def read(self, name: str, max_rows: int) -> list[Any]:
        rows: list[Any] = self._store.read(name, max_rows).tolist()
        return rows

    def _loader(self, request: WeightUpdateRequest) -> CustomLoader | None:
        if isinstance(request, UpdateWeightsFromTensorReqInput) and request.load_format is not None:
            return self._loaders.get(request.load_format)
        return None

    def _source(self, request: WeightUpdateRequest, loader: CustomLoader | None) -> Slices[WeightSource]:
        match request:
            case UpdateWeightFromDiskReqInput():
                pulled = read_state(Path(request.model_path))
                if pulled is not None:
                    return PublishedSource(pulled, self._store.described, self._store.device)
                architecture = self._config.model.architecture
                return open_checkpoint(request.model_path, request.load_format, architecture=architecture)
            case UpdateWeightsFromTensorReqInput(load_format="sparse"):
                return (
                    yield from open_sparse(
                        request.serialized_named_tensors,
                        request.changed,
                        self._store.device,
                        base_version=None if request.base_version is None else str(request.base_version),
                        place=self._config.parallel,
                        cuda=self._cuda,
                    )
                )
            case UpdateWeightsFromTensorReqInput():
                return (
                    yield from open_by_slices(
                        request.serialized_named_tensors,
                        request.load_format if loader is None else None,
                        place=self._config.parallel,
                        cuda=self._cuda,
                    )
                )
            case UpdateWeightsFromDistributedReqInput():
                limit_s = self._config.update.timeout_s if request.timeout_s is None else request.timeout_s
                return open_broadcast(_announced(request), self._groups.get(request.group_name), limit_s)
            case _:
                raise RequestRejected(f"{type(request).__name__} is not a weight source of this engine", 501)


class _InPlace:
    """Writes go straight into the live weights."""

    is_staged = False
    shadow = None

    def __init__(self, device: Device) -> None:
        self._device = device

    def complete(self, written: frozenset[str]) -> Slices[None]:
        """There is no copy to complete."""
        yield from ()

    def repay(self) -> None:
        """There is no copy."""

    def release(self) -> Slices[None]:
        """There is no copy."""
        yield from ()

    def commit(self) -> None:
        """Everything is where it belongs, once the copies have run."""
        self._device.synchronize()

    def roll_back(self) -> None:
        raise AssertionError("there is no way back from what was written in place")

    def close(self) -> None:
        """Nothing is held."""


class _Staged:
    """Writes go into a second copy of the weights."""

    is_staged = True

    def __init__(self, store: WeightStore, shadow: Shadow, device: Device) -> None:
        self.shadow = shadow
        self.is_complete = False
        self._store = store
        self._device = device

    def complete(self, written: frozenset[str]) -> Slices[None]:
        yield from self._store.complete(self.shadow, written)
        self.is_complete = True

    def commit(self) -> None:
        self._device.synchronize()
        self._store.commit(self.shadow)

    def roll_back(self) -> None:
        # What the shadow holds after a commit are the weights before it.
        self.commit()

    def repay(self) -> None:
        self.shadow.repay()

    def release(self) -> Slices[None]:
        return _timed(self.shadow.close_by_chunks())

    def close(self) -> None:
        self.shadow.close()


class _Incoming:
    """One update's tensors; `check` holds their headers against the model.

    Args:
        loader: writes them, to any parameters that it likes: nothing is checked then.
    """

    def __init__(
        self,
        source: WeightSource,
        store: WeightStore,
        device: Device,
        loader: CustomLoader | None = None,
    ) -> None:
        self.is_sent, self.is_near = source.is_sent, source.is_near
        self.needs_copy = loader is not None
        self.is_delta = isinstance(source, DeltaSource)
        self.base_version = source.base_version
        self.num_ignored = 0
        self.num_tensors = len(source.entries)
        self.sent = frozenset(entry.name for entry in source.entries)
        self.names = store.names if source.entries else frozenset[str]()
        self._source = source
        self._store = store
        self._device = device
        self._loader = loader
        self._is_received_in_place = False
        self._received: list[tuple[str, Tensor]] | None = None
        self._nonfinite = NonFinite()
        self._changes: PlacedChanges | None = None
        self._sums: Tensor | None = None
        self.problems: list[dict[str, str]] = []

    def check(self) -> Slices[None]:
        """Find what stands against writing them, and what they cover."""
        if self._loader is not None:
            return
        source, store = self._source, self._store
        covered: set[str] = set()
        others: set[str] = set()
        for entry in source.entries:
            problem = store.check(entry.name, entry.shape, entry.dtype, source.direct)
            if problem is None and isinstance(source, DeltaSource) and source.needs_own_dtype:
                problem = store.check_bits(entry.name, entry.dtype)
            if problem is not None:
                self.problems.append({"name": problem.name, "reason": problem.reason})
            is_ignored = not source.direct and store.ignored(entry.name)
            self.num_ignored += is_ignored
            if is_ignored or not store.knows(entry.name, source.direct):
                others.add(entry.name)
            else:
                covered |= store.covered(entry.name, source.direct)
            yield len(entry.name)
        self.num_tensors -= self.num_ignored
        self.names = frozenset(covered)
        self.sent = frozenset(covered | others)

    def receive_into(self, staging: Staging) -> bool:
        assert isinstance(staging, _InPlace | _Staged)
        source, store = self._source, self._store
        if not isinstance(source, BroadcastSource) or not source.can_receive_in_place(store.device):
            return False

        def destinations() -> list[Destination | None]:
            made = [store.destination(entry.name, staging.shadow) for entry in source.entries]
            named = zip(source.entries, made, strict=True)
            self._received = [(entry.name, place.region) for entry, place in named if place is not None]
            return made

        self._is_received_in_place = staging.shadow is None
        self._note_write_in_place()
        source.receive_in_place(destinations)
        return True

    def arrived(self) -> bool:
        return self._source.arrived()

    def abandon(self) -> None:
        if not self._source.abandon():
            raise OutOfStep(
                "the group of a weight update was left, and its broadcasts do not end: memory that they may "
                "still write to cannot be given back"
            )
        self._note_write_in_place()

    def _note_write_in_place(self) -> None:
        if self._is_received_in_place:
            self._store.note_write()

    def open(self) -> Slices[None]:
        yield from self._source.open()

    def write(self, staging: Staging) -> Slices[None]:
        """Launch the copies; what was received in its place is there."""
        assert isinstance(staging, _InPlace | _Staged)
        if self._received is not None:
            self._note_write_in_place()
            yield from self._look_at(self._received)
        elif self._changes is not None:
            yield from self._patch(self._changes, staging)
        elif self._loader is None:
            yield from self._copies(staging)
        else:
            yield from self._load(self._loader, staging)
        self._nonfinite.finish()

    def nonfinite(self) -> list[str]:
        if self._changes is not None:
            return [self._source.entries[index].name for index in self._changes.nonfinite()]
        return self._nonfinite.names()

    def sum_up(self, staging: Staging) -> Slices[None]:
        assert isinstance(staging, _InPlace | _Staged)
        assert isinstance(self._source, DeltaSource), "only a delta has sums"
        target = StoreTarget(self._store, staging.shadow, self._store.places)
        yield from self._source.verify(target)
        self._changes = self._source.place(target)
        if self._source.checksums:
            self._sums = self._changes.sums_after()
            yield sum(entry.num_bytes for entry in self._source.entries)

    def sums(self) -> Mapping[str, int]:
        if self._sums is None:
            return {}
        names = [entry.name for entry in self._source.entries]
        return dict(zip(names, self._sums.tolist(), strict=True))

    def check_sums(self, shares: Sequence[Mapping[str, int]]) -> None:
        assert isinstance(self._source, DeltaSource), "only a delta has sums"
        wrong = [
            name
            for name, expected in self._source.checksums.items()
            if not self._store.ignored(name) and as_hex(sum(share[name] for share in shares)) != expected
        ]
        if wrong:
            raise RequestRejected(
                f"nothing was written: the checksums of {len(wrong)} tensors would not be the sender's "
                f"({', '.join(sorted(wrong)[:MAX_TOLD])}). What serves is not what the delta is of, or it "
                "was damaged on its way: send the weights whole"
            )

    def _patch(self, changes: PlacedChanges, staging: _InPlace | _Staged) -> Slices[None]:
        if not staging.is_staged:
            self._store.note_write()
        yield changes.apply()

    def _look_at(self, named: Iterable[tuple[str, Tensor]]) -> Slices[None]:
        for name, region in named:
            self._nonfinite.add(name, region)
            yield region.nbytes

    def release(self) -> Slices[None]:
        """Before the commit, so that closing many mappings holds no forward pass up."""
        yield from self._source.release()

    def close(self) -> None:
        try:
            if not self._device.copies_done():
                # It ends early: copies from the sender's memory are still under way.
                self._device.synchronize()
        finally:
            self._source.close()

    def _copies(self, staging: _InPlace | _Staged) -> Slices[None]:
        try:
            for name, tensor in self._source:
                yield from self._store.write_by_slices(
                    name, tensor, staging.shadow, self._source.direct, self._nonfinite
                )
        except RequestRejected as error:
            if staging.is_staged:
                raise
            # A refusal would say that nothing was written.
            raise EngineError(f"the update broke off half-way: {error.message}") from error

    def _load(self, loader: CustomLoader, staging: _InPlace | _Staged) -> Slices[None]:
        """All of it in one slice: the function cannot be left half-way. It is not called for nothing."""
        if not self._source.entries:
            return
        assert isinstance(staging, _Staged), "a loader is given a copy"
        assert staging.is_complete, "a loader is given a whole copy"
        named = [(name, whole(tensor)) for name, tensor in self._source]
        loader.load(StagedModel(self._store, staging.shadow), named)
        yield sum(entry.num_bytes for entry in self._source.entries)
        for name, region in self._store.parameters(staging.shadow):
            self._nonfinite.add(name, region)


class _Conversation:
    """A sender's pieces, checked against the model."""

    def __init__(self, conversation: IpcConversation, store: WeightStore, device: Device) -> None:
        self.poll = conversation.poll
        self.answer = conversation.answer
        self.close = conversation.close
        self._conversation = conversation
        self._store = store
        self._device = device

    def piece(self) -> Slices[_Incoming | None]:
        bucket = self._conversation.bucket
        if bucket is None:
            return None
        return (yield from _checked(_Incoming(bucket, self._store, self._device)))


def _checked(incoming: _Incoming) -> Slices[_Incoming]:
    """Ended early, it is closed."""
    try:
        yield from incoming.check()
    except BaseException:
        incoming.close()
        raise
    return incoming


def _timed(slices: Slices[T]) -> Slices[T]:
    """Work that takes the time that it takes: its bytes are none that a device has to copy afterwards."""
    with closing(slices):
        while True:
            try:
                next(slices)
            except StopIteration as end:
                result: T = end.value
                return result
            yield 1


def _announced(request: UpdateWeightsFromDistributedReqInput) -> Announcement:
    """With the older fields for a single tensor; what is missing is refused."""
    names = request.names if request.name is None else [request.name]
    dtypes = request.dtypes if request.dtype is None else [request.dtype]
    shapes = request.shapes if request.shape is None else [request.shape]
    if names is None or dtypes is None or shapes is None:
        given = {"names": names, "dtypes": dtypes, "shapes": shapes}
        missing = ", ".join(field for field, value in given.items() if value is None)
        raise RequestRejected(f"{missing}: required, one entry per tensor")
    num_bytes = request.packed_buffer_bytes
    return Announcement(names, dtypes, shapes, request.load_format, num_bytes, request.num_updates or ())


def _port(given: int | str) -> int:
    if isinstance(given, str) and not (given.isascii() and given.isdecimal()):
        raise RequestRejected(f"master_port: expected a number, got {given[:200]!r}")
    return int(given)
