"""Implements the control plane's interfaces to the weights, over the weight store and the weight sources."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import psutil
import torch
from torch import Tensor

from ebbtide.formats import Announcement
from ebbtide.formats.rendezvous import GroupAddress, decode_id
from ebbtide.srt.config import EngineConfig, Place
from ebbtide.srt.device import Device
from ebbtide.srt.errors import OutOfDeviceMemory, RequestRejected
from ebbtide.srt.managers.control import CopyStream
from ebbtide.srt.managers.control.weights import Conversation, Snapshot, Staging
from ebbtide.srt.managers.io_struct import (
    ChecksumAlgorithm,
    InitWeightsUpdateGroupReqInput,
    PiecewiseRequest,
    RankChecksums,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
    WeightPiece,
    WeightUpdateRequest,
)
from ebbtide.srt.managers.scheduling.write_plan import (
    TensorPlan,
    WeightStaging,
    make_plan,
    paced_by_time,
)
from ebbtide.srt.managers.wire.message import Parallelism
from ebbtide.srt.model_executor.weight_store import WeightStore
from ebbtide.srt.slices import Slices
from ebbtide.srt.weight_sync.borrowed_memory import KeptMemory
from ebbtide.srt.weight_sync.conversations import StateDictConversation, open_conversation
from ebbtide.srt.weight_sync.cuda_memory import CudaIpc
from ebbtide.srt.weight_sync.custom_loader import CustomLoader, import_loaders
from ebbtide.srt.weight_sync.disk_source import open_folder
from ebbtide.srt.weight_sync.distributed_source import Memberships, open_broadcast
from ebbtide.srt.weight_sync.source import PlanCache, WeightSource
from ebbtide.srt.weight_sync.sparse_source import open_sparse
from ebbtide.srt.weight_sync.tensor_source import PayloadReader

# Bytes of a parameter that are handled at once. Intermediate results take twice as much in addition.
PIECE_BYTES: Final = 16 << 20

WORD_BYTES: Final = 8
# SplitMix64's constants without their highest bits. They may never change: clients may have stored checksums.
PLACE_FACTOR: Final = 0x1E3779B97F4A7C15
MIXING_FACTORS: Final = (0x3F58476D1CE4E5B9, 0x14D049BB133111EB)
LOW_32_BITS: Final = (1 << 32) - 1


@dataclass(eq=False)
class EngineWeights:
    """Implements `control.weights.Weights`: opens updates, and makes their stagings."""

    _store: WeightStore
    _config: EngineConfig
    _device: Device

    def __post_init__(self) -> None:
        store, config, device = self._store, self._config, self._device
        self.names, self.stored_as, self.precision_of = store.names, store.stored_as, store.precision_of
        self.parameters = ParameterChecker(store, device, config.parallel)
        self.requires_copy = config.server_args.update_staging == "always"
        self.refuses_nonfinite = config.server_args.refuse_nonfinite
        self._loaders = import_loaders(config.server_args.custom_weight_loader or ())
        self.copies: CopyStream = device
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
        if in_place or self._config.server_args.update_staging == "never":
            return WeightStaging(self._store, self._device)
        try:
            shadow = yield from paced_by_time(self._store.arena.stage())
        except OutOfDeviceMemory as error:
            if self.requires_copy and is_last:
                raise error.refusal(
                    "nothing was written: update_staging is 'always', and there is no room for a second copy "
                    f"of the weights: {error}"
                ) from error
            return WeightStaging(self._store, self._device)
        return WeightStaging(self._store, self._device, shadow)

    def group_names(self) -> list[str]:
        return self._groups.names if self._groups.groups else []

    def join_group(self, request: InitWeightsUpdateGroupReqInput) -> Slices[None]:
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

    def read(self, name: str, max_rows: int) -> Callable[[], list[Any]]:
        joined = self._store.read(name, max_rows)
        return lambda: joined().tolist()

    def _limit_s(self, request: WeightUpdateRequest) -> float:
        limit_s = self._config.server_args.weight_update_timeout_s
        return limit_s if request.timeout_s is None else request.timeout_s

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
    """The tensors that a request announces, in its lists or in the older fields for a single tensor."""
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


@dataclass
class ParameterChecker:
    """Implements `control.weights.Parameters`; parameters are read in pieces on their device."""

    _store: WeightStore
    _device: Device
    _place: Place

    @property
    def generation(self) -> int:
        return self._store.generation

    def checksums(
        self, skipped: Sequence[str], algorithm: ChecksumAlgorithm = "sum64"
    ) -> Slices[RankChecksums]:
        """Checksums of the bytes of each parameter and their order; the same on every kind of device."""
        checksums: dict[str, str] = {}
        summed = _sha256 if algorithm == "sha256" else _sum64
        for name, parameter in _without(skipped, self._store):
            checksums[name] = yield from summed(parameter)
        place = self._place
        listed = "".join(f"{name}={checksums[name]};" for name in sorted(checksums))
        return RankChecksums(
            checksums=checksums,
            per_gpu_checksum=hashlib.sha256(listed.encode()).hexdigest(),
            parallelism_info=[
                Parallelism(
                    tp_rank=place.tp_rank,
                    tp_size=place.tp_size,
                    dp_rank=place.dp_rank,
                    dp_size=place.dp_size,
                    rank=place.rank,
                    size=place.num_ranks,
                )
            ],
        )

    def snapshot(self) -> Slices[Snapshot]:
        needed_bytes = sum(parameter.nbytes for _, parameter in self._store.parameters())
        free_bytes = psutil.virtual_memory().available
        if needed_bytes > free_bytes:
            raise _no_room(needed_bytes, free_bytes)
        taken_bytes = 0
        copies: dict[str, list[Tensor]] = {}
        for name, parameter in self._store.parameters():
            copies[name] = []
            for piece in _pieces(parameter):
                try:
                    copy = torch.empty_like(piece, device="cpu")
                except RuntimeError as error:
                    # Other processes take memory too, and this one may have a limit of its own.
                    raise _no_room(needed_bytes, taken_bytes) from error
                taken_bytes += len(piece)
                copies[name].append(copy.copy_(piece))
                yield len(piece)
        return partial(self._differences, copies)

    def _differences(
        self, copies: Mapping[str, list[Tensor]], skipped: Sequence[str]
    ) -> Slices[list[dict[str, str]]]:
        """Each reason has the largest difference of two elements, `max_abs_err`; NaN if either is NaN."""
        found: list[dict[str, str]] = []
        for name, parameter in _without(skipped, self._store):
            num_different, max_abs_err = 0, 0.0
            for piece, copy in zip(_pieces(parameter), copies[name], strict=True):
                before = copy.to(piece.device)
                num_here = int((piece != before).sum())
                if num_here:
                    error = (piece.view(parameter.dtype).float() - before.view(parameter.dtype).float()).abs()
                    max_abs_err = float(torch.maximum(error.max().cpu(), torch.tensor(max_abs_err)))
                num_different += num_here
                yield len(piece)
            if num_different:
                reason = (
                    f"{num_different} of {parameter.nbytes} bytes are not those of the snapshot: "
                    f"max_abs_err={max_abs_err:g}"
                )
                found.append({"name": name, "reason": reason})
        return found

    def sources(self, skipped: Sequence[str]) -> frozenset[str]:
        covered = [self._store.covered(name, direct=True) for name, _ in _without(skipped, self._store)]
        return frozenset[str]().union(*covered)

    def pieces(self, index: int, first_byte: int, num_bytes: int) -> list[WeightPiece]:
        parameters = list(self._store.parameters())
        if index >= len(parameters):
            raise RequestRejected(f"index: expected 0 to {len(parameters) - 1}, got {index}")
        pieces: list[WeightPiece] = []
        left_bytes = num_bytes
        for name, parameter in parameters[index:]:
            if pieces and (first_byte > 0 or parameter.nbytes > left_bytes):
                break
            flat = parameter.view(-1).view(torch.uint8)[first_byte : first_byte + num_bytes]
            left_bytes -= len(flat)
            pieces.append(
                WeightPiece(
                    num_parameters=len(parameters),
                    generation=self.generation,
                    name=name,
                    dtype=str(parameter.dtype).removeprefix("torch."),
                    shape=tuple(parameter.shape),
                    data=flat.cpu().numpy().tobytes(),
                )
            )
        return pieces

    def fill(self, skipped: Sequence[str]) -> None:
        self._store.note_write()
        for _, parameter in _without(skipped, self._store):
            for piece in _pieces(parameter):
                piece.random_(0, 256)
        self._device.synchronize()


def _no_room(needed_bytes: int, free_bytes: int) -> RequestRejected:
    message = f"a snapshot takes {needed_bytes} bytes of host memory, {free_bytes} are free"
    return RequestRejected(message, 409, needed_bytes=needed_bytes, free_bytes=free_bytes)


def _without(skipped: Sequence[str], store: WeightStore) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in store.parameters():
        if not any(part in name for part in skipped):
            yield name, parameter


def _pieces(parameter: Tensor) -> Iterator[Tensor]:
    """Views of a parameter's bytes, in order."""
    return iter(torch.split(parameter.detach().reshape(-1).view(torch.uint8), PIECE_BYTES))


def _sum64(parameter: Tensor) -> Slices[str]:
    total = first_word = 0
    for piece in _pieces(parameter):
        words = _words(piece)
        total += _sum_of_mixed(words, first_word)
        first_word += len(words)
        yield len(piece)
    return f"{total % 2**64:016x}"


def _sha256(parameter: Tensor) -> Slices[str]:
    digest = hashlib.sha256()
    for piece in _pieces(parameter):
        digest.update(piece.cpu().numpy().data)
        yield len(piece)
    return digest.hexdigest()


def _words(piece: Tensor) -> Tensor:
    """The bytes as words of 8 bytes; the last one is padded with zeros."""
    num_odd = len(piece) % WORD_BYTES
    if num_odd:
        piece = torch.nn.functional.pad(piece, (0, WORD_BYTES - num_odd))
    return piece.view(torch.int64)


def _sum_of_mixed(words: Tensor, first: int) -> int:
    """The sum, modulo 2^64, of a hash of each word and its place.

    Integers wrap around the same way on every device, in any order of addition. Source: the multiply and
    shift steps of SplitMix64 (Steele, Lea, Flood, 2014).
    """
    mixed = torch.arange(first, first + len(words), device=words.device)
    mixed *= PLACE_FACTOR
    mixed ^= words
    for factor in MIXING_FACTORS:
        mixed *= factor
        # Shifting a negative word fills it with ones: clear them.
        high = mixed >> 32
        high &= LOW_32_BITS
        mixed ^= high
    return int(mixed.sum())
