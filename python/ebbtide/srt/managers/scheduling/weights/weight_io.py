"""The control plane's view of the weights, over the weight store and the weight sources."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ebbtide.formats.announcement import Announcement
from ebbtide.formats.rendezvous import GroupAddress, decode_id
from ebbtide.srt.config import EngineConfig
from ebbtide.srt.device.base import Device
from ebbtide.srt.errors import OutOfDeviceMemory, RequestRejected
from ebbtide.srt.managers.control.ports import CopyStream, Slices
from ebbtide.srt.managers.control.weight_ports import Conversation, Staging
from ebbtide.srt.managers.io_struct import (
    InitWeightsUpdateGroupReqInput,
    PiecewiseRequest,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
    WeightUpdateRequest,
)
from ebbtide.srt.managers.scheduling.weights.checks import ParameterChecker
from ebbtide.srt.managers.scheduling.weights.write_plan import (
    TensorPlan,
    WeightStaging,
    make_plan,
    paced_by_time,
)
from ebbtide.srt.model_executor.weight_store import WeightStore
from ebbtide.srt.weight_sync.borrowed_memory import KeptMemory
from ebbtide.srt.weight_sync.conversations import StateDictConversation, open_conversation
from ebbtide.srt.weight_sync.cuda_memory import CudaIpc
from ebbtide.srt.weight_sync.custom_loader import CustomLoader, import_loaders
from ebbtide.srt.weight_sync.disk_source import open_folder
from ebbtide.srt.weight_sync.distributed_source import Joining, Memberships, open_broadcast
from ebbtide.srt.weight_sync.source import PlanCache, WeightSource
from ebbtide.srt.weight_sync.sparse_source import open_sparse
from ebbtide.srt.weight_sync.tensor_source import PayloadReader

T = TypeVar("T")


class EngineWeights:
    """Opens updates, and finds room for them. Implements `weight_ports.Weights`."""

    def __init__(self, store: WeightStore, config: EngineConfig, device: Device) -> None:
        self.names, self.stored_as, self.precision_of = store.names, store.stored_as, store.precision_of
        self.parameters = ParameterChecker(store, device, config.parallel)
        self.requires_copy = config.update.staging == "always"
        self.refuses_nonfinite = config.update.refuse_nonfinite
        self._loaders = import_loaders(config.update.custom_weight_loaders)
        self._store = store
        self._config = config
        self._device = device
        self._groups = Memberships(torch.device(device.name), config.parallel)
        self._cuda: CudaIpc | None = None
        if device.uuid is not None:
            from ebbtide.srt.weight_sync.patch_kernels import compile_deltas  # Triton is where GPUs are

            for dtype in {tensor.dtype for _, tensor in store.parameters()}:
                compile_deltas(store.device, dtype)
            _, _, index = device.name.partition(":")
            self._cuda = CudaIpc(int(index), device.uuid)
        self._cache = PlanCache()
        keeper = None if self._cuda is None else KeptMemory(self._cuda)
        self.reader = PayloadReader(config.parallel, self._cuda, self._cache, keeper)

    @property
    def copies(self) -> CopyStream:
        return self._device

    def open(self, request: WeightUpdateRequest) -> Slices[TensorPlan]:
        loader = self._loader(request)
        source = yield from self._source(request, loader)
        return (yield from self._plan(source, loader))

    def converse(self, request: PiecewiseRequest) -> Conversation:
        if isinstance(request, UpdateWeightsFromIPCReqInput):
            return open_conversation(self._plan, request.zmq_handles, self._cuda)
        group = self._groups.get(request.group_name)
        return StateDictConversation(self._plan, group, self._limit_s(request))

    def _plan(self, source: WeightSource, loader: CustomLoader | None = None) -> Slices[TensorPlan]:
        return make_plan(source, self._store, self._device, self._cache, loader)

    def stage(self, *, in_place: bool, is_last: bool = True) -> Slices[Staging]:
        if in_place or self._config.update.staging == "never":
            return WeightStaging(self._store, self._device)
        try:
            shadow = yield from paced_by_time(self._store.arena.stage_by_chunks())
        except OutOfDeviceMemory as error:
            if self.requires_copy and is_last:
                raise RequestRejected(
                    "nothing was written: update_staging is 'always', and there is no room for a second copy "
                    f"of the weights: {error}",
                    409,
                    needed_bytes=error.needed_bytes,
                    free_bytes=error.free_bytes,
                ) from error
            return WeightStaging(self._store, self._device)
        return WeightStaging(self._store, self._device, shadow)

    def group_names(self) -> list[str]:
        return self._groups.names if self._groups.groups else []

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

    def read(self, name: str, max_rows: int) -> list[Any]:
        rows: list[Any] = self._store.read(name, max_rows).tolist()
        return rows

    def _limit_s(self, request: WeightUpdateRequest) -> float:
        return self._config.update.timeout_s if request.timeout_s is None else request.timeout_s

    def _loader(self, request: WeightUpdateRequest) -> CustomLoader | None:
        if isinstance(request, UpdateWeightsFromTensorReqInput) and request.load_format is not None:
            return self._loaders.get(request.load_format)
        return None

    def _source(self, request: WeightUpdateRequest, loader: CustomLoader | None) -> Slices[WeightSource]:
        match request:
            case UpdateWeightFromDiskReqInput():
                return open_folder(
                    request.model_path,
                    request.load_format,
                    architecture=self._config.model.architecture,
                    describe=self._store.described,
                    device=self._store.device,
                )
            case UpdateWeightsFromTensorReqInput(load_format="sparse"):
                base_version = None if request.base_version is None else str(request.base_version)
                entries, device = request.serialized_named_tensors, self._store.device
                return (yield from open_sparse(entries, request.changed, device, self.reader, base_version))
            case UpdateWeightsFromTensorReqInput(load_format="ipc_handles"):
                entries = request.serialized_named_tensors
                return (yield from self.reader.open_handles(entries, request.lent))
            case UpdateWeightsFromTensorReqInput():
                load_format = request.load_format if loader is None else None
                return (yield from self.reader.open(request.serialized_named_tensors, load_format))
            case UpdateWeightsFromDistributedReqInput():
                group = self._groups.get(request.group_name)
                return open_broadcast(_announced(request), group, self._limit_s(request))
            case _:
                raise RequestRejected(f"{type(request).__name__} is not a weight source of this engine", 501)


def _announced(request: UpdateWeightsFromDistributedReqInput) -> Announcement:
    """What the request announces, in its lists or in its older fields for a single tensor."""
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
