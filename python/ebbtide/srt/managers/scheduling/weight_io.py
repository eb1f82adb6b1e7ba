"""The control plane's view of the weights, over the weight store and the weight sources."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from typing import Any, Final, TypeVar

import torch

from ebbtide.srt.config import EngineConfig
from ebbtide.srt.device.base import Device
from ebbtide.srt.errors import EngineError, OutOfDeviceMemory, RequestRejected
from ebbtide.srt.managers.control.ports import IncomingWeights, OutOfStep, Slices, Staging
from ebbtide.srt.managers.control.weights.session import SLICE_BYTES
from ebbtide.srt.managers.io_struct import (
    InitWeightsUpdateGroupReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromTensorReqInput,
    WeightUpdateRequest,
)
from ebbtide.srt.managers.scheduling.parameter_checker import ParameterChecker
from ebbtide.srt.memory_saver.arena import Shadow
from ebbtide.srt.model_executor.weight_store import Destination, WeightStore
from ebbtide.srt.stored_tensor import whole
from ebbtide.srt.weight_sync.broadcast.memberships import Joining, WeightGroups
from ebbtide.srt.weight_sync.broadcast.weight_group import GroupAddress
from ebbtide.srt.weight_sync.custom_loader import CustomLoader, StagedModel, import_loaders
from ebbtide.srt.weight_sync.disk_source import open_checkpoint
from ebbtide.srt.weight_sync.distributed_source import Announcement, BroadcastSource, open_broadcast
from ebbtide.srt.weight_sync.ipc_source import IpcConversation, open_conversation
from ebbtide.srt.weight_sync.payload.cuda_memory import CudaIpc, TorchCudaIpc
from ebbtide.srt.weight_sync.payload.pickle_reader import finish
from ebbtide.srt.weight_sync.source import WeightSource
from ebbtide.srt.weight_sync.tensor_source import open_by_slices

# What one turn of the loop may launch on a CUDA device: copies that delay the next forward pass by about a
# millisecond, or what takes the host that long, whichever comes first.
TURN_BYTES: Final = 2 << 30
TURN_S: Final = 1.5e-3

T = TypeVar("T")


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
        self._loaders = import_loaders(config.update.custom_weight_loaders)
        self._store = store
        self._config = config
        self._device = device
        self._groups = WeightGroups(torch.device(device.name), config.parallel)
        self._cuda: CudaIpc | None = None
        if device.uuid is not None:
            _, _, index = device.name.partition(":")
            self._cuda = TorchCudaIpc(int(index), device.uuid)

    def open(self, request: WeightUpdateRequest) -> Generator[int, None, IncomingWeights]:
        loader = self._loader(request)
        source = yield from self._source(request, loader)
        return _Incoming(source, self._store, self._device, loader)

    def converse(self, zmq_handles: Mapping[str, str]) -> _Conversation:
        conversation = open_conversation(zmq_handles, self._cuda)
        return _Conversation(conversation, self._store, self._device)

    def stage(self, *, in_place: bool) -> Generator[int, None, Staging]:
        if not in_place:
            with suppress(OutOfDeviceMemory):
                shadow = yield from _paced(self._store.arena.stage_by_chunks(), self._device)
                return _Staged(self._store, shadow, self._device)
        return _InPlace(self._device)

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
        )
        return self._groups.join(address, request.timeout_s)

    def leave_group(self, name: str) -> Callable[[], bool] | None:
        leaving = self._groups.leave(name, "destroy_weights_update_group")
        return None if leaving is None else lambda: leaving.is_done

    def read(self, name: str, max_rows: int) -> list[Any]:
        rows: list[Any] = self._store.read(name, max_rows).tolist()
        return rows

    def _loader(self, request: WeightUpdateRequest) -> CustomLoader | None:
        if isinstance(request, UpdateWeightsFromTensorReqInput) and request.load_format is not None:
            return self._loaders.get(request.load_format)
        return None

    def _source(
        self, request: WeightUpdateRequest, loader: CustomLoader | None
    ) -> Generator[int, None, WeightSource]:
        match request:
            case UpdateWeightFromDiskReqInput():
                architecture = self._config.model.architecture
                return open_checkpoint(request.model_path, request.load_format, architecture=architecture)
            case UpdateWeightsFromTensorReqInput():
                opening = open_by_slices(
                    request.serialized_named_tensors,
                    request.load_format if loader is None else None,
                    place=self._config.parallel,
                    cuda=self._cuda,
                )
                if self._device.uuid is None:
                    # A forward pass there takes longer than all of this.
                    return finish(opening)
                return (yield from _paced(_counted(opening), self._device))
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

    def complete(self, written: frozenset[str]) -> Slices:
        """There is no copy to complete."""
        yield from ()

    def give_back(self) -> Slices:
        """There is no copy."""
        yield from ()

    def commit(self) -> None:
        """Everything is where it belongs, once the copies have run."""
        self._device.synchronize()

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

    def complete(self, written: frozenset[str]) -> Slices:
        copies = self._store.complete(self.shadow, written)
        yield from _paced(copies, self._device, self._device.copying)
        yield from _until_copied(self._device)
        self.is_complete = True

    def commit(self) -> None:
        self._device.synchronize()
        self._store.commit(self.shadow)

    def close(self) -> None:
        self.shadow.close()

    def give_back(self) -> Slices:
        return _paced(self.shadow.close_by_chunks(), self._device)


class _Incoming:
    """One update's tensors, checked against the model by their headers.

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
        self.is_sent = isinstance(source, BroadcastSource)
        self.needs_copy = loader is not None
        self.num_ignored = 0
        self.num_tensors = len(source.entries)
        self.names = store.names if source.entries else frozenset[str]()
        self._source = source
        self._store = store
        self._device = device
        self._loader = loader
        self._is_read = False
        self._lands_in_place = False
        self._landed_bytes: int | None = None
        self._problems: list[dict[str, str]] = []
        if loader is None:
            self._check()

    def _check(self) -> None:
        source, store = self._source, self._store
        ignored = [entry for entry in source.entries if not source.direct and store.ignored(entry.name)]
        self.num_ignored = len(ignored)
        self.num_tensors = len(source.entries) - len(ignored)
        self._problems = [
            {"name": problem.name, "reason": problem.reason}
            for entry in source.entries
            if (problem := store.check(entry.name, entry.shape, entry.dtype, source.direct)) is not None
        ]
        covered = [store.covered(entry.name, source.direct) for entry in source.entries if not self._problems]
        self.names = frozenset[str]().union(*covered)

    def problems(self) -> list[dict[str, str]]:
        return self._problems

    def receive_into(self, staging: Staging) -> bool:
        assert isinstance(staging, _InPlace | _Staged)
        source, store = self._source, self._store
        if not isinstance(source, BroadcastSource) or not source.can_land(store.device):
            return False

        def destinations() -> list[Destination | None]:
            made = [store.destination(entry.name, staging.shadow) for entry in source.entries]
            self._landed_bytes = sum(place.region.nbytes for place in made if place is not None)
            return made

        self._lands_in_place = staging.shadow is None
        self._note_landing()
        source.land(destinations)
        return True

    def arrived(self) -> bool:
        return not isinstance(self._source, BroadcastSource) or self._source.arrived()

    def abandon(self) -> None:
        if isinstance(self._source, BroadcastSource) and not self._source.abandon():
            raise OutOfStep(
                "the group of a weight update was left, and its broadcasts do not end: memory that they may "
                "still write to cannot be given back"
            )
        self._note_landing()

    def _note_landing(self) -> None:
        if self._lands_in_place:
            self._store.note_write()

    def open(self) -> Slices:
        return _paced(_steps(self._source.open()), self._device)

    def write(self, staging: Staging) -> Slices:
        """Copy the tensors and wait for the copies, in slices; what was received there is there."""
        assert isinstance(staging, _InPlace | _Staged)
        if self._landed_bytes is not None:
            self._note_landing()
            yield self._landed_bytes
            return
        self._is_read = True
        work = self._copies(staging) if self._loader is None else self._load(self._loader, staging)
        yield from _paced(work, self._device, self._device.copying)
        yield from _until_copied(self._device)
        self._is_read = False

    def let_go(self) -> Slices:
        """Before the commit, so that closing many mappings holds no forward pass up."""
        return _paced(_steps(self._source.drop()), self._device)

    def close(self) -> None:
        try:
            if self._is_read:
                # It ends early: copies from the sender's memory may still be under way.
                self._device.synchronize()
        finally:
            self._source.close()

    def _copies(self, staging: _InPlace | _Staged) -> Slices:
        try:
            for name, tensor in self._source:
                yield from self._store.write_by_slices(name, tensor, staging.shadow, self._source.direct)
        except RequestRejected as error:
            if staging.is_staged:
                raise
            # A refusal would say that nothing was written.
            raise EngineError(f"the update broke off half-way: {error.message}") from error

    def _load(self, loader: CustomLoader, staging: _InPlace | _Staged) -> Slices:
        """All of it in one slice: the function cannot be left half-way. It is not called for nothing."""
        if not self._source.entries:
            return
        assert isinstance(staging, _Staged), "a loader is given a copy"
        assert staging.is_complete, "a loader is given a whole copy"
        named = [(name, whole(tensor)) for name, tensor in self._source]
        loader.load(StagedModel(self._store, staging.shadow), named)
        yield sum(entry.num_bytes for entry in self._source.entries)


class _Conversation:
    """A sender's pieces, checked against the model."""

    def __init__(self, conversation: IpcConversation, store: WeightStore, device: Device) -> None:
        self.poll = conversation.poll
        self.answer = conversation.answer
        self.close = conversation.close
        self._conversation = conversation
        self._store = store
        self._device = device

    def piece(self) -> _Incoming | None:
        bucket = self._conversation.bucket
        return None if bucket is None else _Incoming(bucket, self._store, self._device)


def _announced(request: UpdateWeightsFromDistributedReqInput) -> Announcement:
    """With the older fields for a single tensor; what is missing is refused."""
    names = request.names if request.name is None else [request.name]
    dtypes = request.dtypes if request.dtype is None else [request.dtype]
    shapes = request.shapes if request.shape is None else [request.shape]
    if names is None or dtypes is None or shapes is None:
        given = {"names": names, "dtypes": dtypes, "shapes": shapes}
        missing = ", ".join(field for field, value in given.items() if value is None)
        raise RequestRejected(f"{missing}: required, one entry per tensor")
    return Announcement(names, dtypes, shapes, request.load_format)


def _port(given: int | str) -> int:
    if isinstance(given, str) and not (given.isascii() and given.isdecimal()):
        raise RequestRejected(f"master_port: expected a number, got {given[:200]!r}")
    return int(given)


def _until_copied(device: Device) -> Slices:
    """Forward passes go on until the copies have run."""
    while not device.copies_done():
        yield 0


def _steps(steps: Iterator[None]) -> Slices:
    """Work that takes time and writes no bytes."""
    for _ in steps:
        yield 0


def _counted(work: Generator[None, None, T]) -> Generator[int, None, T]:
    """The same with a result."""
    with closing(work):
        while True:
            try:
                next(work)
            except StopIteration as end:
                result: T = end.value
                return result
            yield 0


def _paced(
    work: Generator[int, None, T],
    device: Device,
    scope: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Generator[int, None, T]:
    """The work in slices of one turn of the loop each, cut where it has taken its share of a CUDA device.

    On a CPU, where to launch is to run, the work's own slices are kept.

    Args:
        scope: entered for the work of each turn: a turn's forward pass is launched outside.
    """
    if device.uuid is None:
        return (yield from work)
    ended: list[T] = []
    with closing(work):
        while not ended:
            num_bytes, started_s = 0, time.perf_counter()
            with scope():
                while not ended and num_bytes < TURN_BYTES and time.perf_counter() - started_s < TURN_S:
                    try:
                        num_bytes += next(work)
                    except StopIteration as end:
                        ended.append(end.value)
            if num_bytes > 0:
                yield num_bytes
            if not ended and num_bytes < SLICE_BYTES:
                yield 0
    return ended[0]
