"""Weight sources for `update_weights_from_tensor`. Source: wire_api sections 3.3 and 4."""

import base64
import binascii
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, TypeGuard

import safetensors.torch
import torch
from safetensors import SafetensorError

from ebbtide.formats import IpcTensor
from ebbtide.formats.allowed_globals import (
    cuda_tensor,
    kind_of,
    record_fields,
    recording,
    resolve_global,
    tensor_dtype,
    text,
)
from ebbtide.formats.bucket import (
    FlattenedTensorMetadata,
    check_bucket,
    check_bytes,
)
from ebbtide.formats.pickle_reader import Budget, Record, read_by_slices
from ebbtide.formats.tensor_list import MAGIC_STAYS, MAGICS, decode_tensors
from ebbtide.formats.tensor_refs import (
    AnyStorageRef,
    TensorHeader,
    TensorRef,
    TensorTable,
    dtype_named,
    natural,
    tensor_shape,
)
from ebbtide.srt.config import ONE_RANK, Place
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.slices import Slices, finish
from ebbtide.srt.weight_sync.borrowed_memory import BorrowedMemory, KeptMemory
from ebbtide.srt.weight_sync.cuda_memory import CudaIpc
from ebbtide.srt.weight_sync.source import (
    KnownList,
    PackedTensors,
    PlanCache,
    TableSource,
    WeightSource,
    packed_source,
)

SAFETENSORS: Final = "safetensors"
# About 80 bytes describe a tensor, so this leaves room for 100,000: reading them takes seconds, in one piece.
MAX_HEADER_BYTES: Final = 8 << 20
_FORMATS: Final = ("flattened_bucket", "direct", SAFETENSORS)
_STARTS: Final = (b"\x80", *MAGICS)
_METADATA_FIELDS: Final = ("name", "shape", "dtype", "start_idx", "end_idx", "numel")
IPC_HANDLES: Final = "ipc_handles"


def raw_payload(entry: bytes | str) -> bytes:
    """The payload inside an entry, which is base64 or the payload itself: a pickle (its first byte is 0x80),
    or a tensor list (it begins with one of `tensor_list.MAGICS`).
    """
    if isinstance(entry, bytes) and entry.startswith(_STARTS):
        return entry
    try:
        data = raw_base64(entry)
    except RequestRejected as error:
        if isinstance(entry, str):
            raise
        raise RequestRejected(
            "the payload is neither a pickle of protocol 2 or later (its first byte is not 0x80) nor base64"
        ) from error
    if not data.startswith(_STARTS):
        raise RequestRejected(
            "the payload is not a pickle of protocol 2 or later: its first byte is not 0x80"
        )
    return data


def raw_base64(entry: bytes | str) -> bytes:
    try:
        return base64.b64decode(entry, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestRejected(f"the payload is not base64: {error}") from error


def decode_by_slices(
    data: bytes,
    record: Callable[[AnyStorageRef], None],
    budget: Budget | None = None,
    cache: PlanCache | None = None,
) -> Slices[object]:
    """Decode a payload into plain values, `TensorRef`s and records by class name, or into a `TensorTable`.

    Args:
        record: called with each reference to the sender's memory when it is read, so that references are
            given back even if the payload is refused half-way.

    RequestRejected (400): the payload has anything outside of wire_api section 4.4. It names the global.
    """
    if data.startswith(MAGICS):
        return (yield from decode_tensors(data, record, None if cache is None else cache.form))
    return (yield from read_by_slices(data, recording(record), budget, cache))


def as_metadata(value: object) -> FlattenedTensorMetadata:
    """Check one entry of a bucket's metadata: a record or a dict with exactly its six fields."""
    fields = record_fields(value, "FlattenedTensorMetadata", _METADATA_FIELDS)
    where = "FlattenedTensorMetadata"
    return FlattenedTensorMetadata(
        name=text(fields["name"], f"{where}.name"),
        shape=torch.Size(tensor_shape(fields["shape"], f"{where}.shape")),
        dtype=tensor_dtype(fields["dtype"], f"{where}.dtype"),
        start_idx=natural(fields["start_idx"], f"{where}.start_idx"),
        end_idx=natural(fields["end_idx"], f"{where}.end_idx"),
        numel=natural(fields["numel"], f"{where}.numel"),
    )


def local_values(value: Record) -> Sequence[bytes]:
    """The pickles of a `LocalSerializedTensor`: one tensor for each tensor-parallel rank."""
    values = record_fields(value, "LocalSerializedTensor", ("values",))["values"]
    if not isinstance(values, list | tuple) or not all(isinstance(item, bytes) for item in values):
        raise RequestRejected("LocalSerializedTensor.values: expected a list of bytes, one per rank")
    return values


class PayloadReader:
    """Opens the payloads of `update_weights_from_tensor` for this rank.

    If a payload is refused (400), or opening is ended early, all decoded references are given back.

    Args:
        place: which of the engine's ranks this is.
        cuda: opens tensors on this rank's device; None: it is the CPU.
        cache: results for earlier payloads.
        keeper: keeps payloads whose memory stays mapped; None: all memory is unmapped after use.
    """

    def __init__(
        self,
        place: Place = ONE_RANK,
        cuda: CudaIpc | None = None,
        cache: PlanCache | None = None,
        keeper: KeptMemory | None = None,
    ) -> None:
        self._place = place
        self._rank, self._num_ranks = place.rank, place.num_ranks
        self._cuda = cuda
        self._cache = PlanCache() if cache is None else cache
        self._keeper = keeper

    def open(self, entries: Sequence[bytes | str], load_format: str | None) -> Slices[WeightSource]:
        """Open this rank's entry, base64 text or raw bytes. Without entries the source is empty."""
        if load_format is not None and load_format not in _FORMATS:
            raise _unknown_format(load_format)
        if not entries:
            return WeightSource((), tuple)
        entry, memory = self._entry_of(entries, load_format)
        if load_format == SAFETENSORS:
            return _open_safetensors(entry)
        try:
            data = raw_payload(entry)
            if self._keeper is not None and data.startswith(MAGIC_STAYS):
                decoded = yield from self._decode_kept(data, memory, self._keeper)
            else:
                decoded = yield from self._decode(data, memory)
            if load_format == "flattened_bucket":
                return _open_bucket(decoded, memory, self._cache)
            return _open_named(decoded, memory, direct=load_format == "direct")
        except BaseException:
            memory.close()
            raise

    def _decode_kept(self, data: bytes, memory: BorrowedMemory, keeper: KeptMemory) -> Slices[object]:
        """Decode a payload whose memory stays mapped, unless one with the same bytes is kept."""
        kept = keeper.take(data)
        if kept is None:
            decoded = yield from self._decode(data, memory)
            kept = keeper.add(data, memory.device_refs, decoded)
            if kept is None:
                return decoded
        else:
            for ref in kept.refs:
                memory.record(ref)
        memory.stay_in(keeper, kept)
        return kept.decoded

    def _decode(self, pickled: bytes, memory: BorrowedMemory) -> Slices[object]:
        decoding = self._decode_all(pickled, memory)
        try:
            while True:
                try:
                    yield next(decoding)
                except StopIteration as end:
                    return end.value
        except GeneratorExit:
            # Read the rest: only references that were read can be given back.
            with suppress(RequestRejected):
                finish(decoding)
            raise

    def _decode_all(self, pickled: bytes, memory: BorrowedMemory) -> Slices[object]:
        """Decode a payload, and replace each `LocalSerializedTensor` by this rank's tensor."""
        budget, tp_rank = Budget(), self._place.tp_rank
        decoded = yield from decode_by_slices(pickled, memory.record, budget, self._cache)
        if not isinstance(decoded, list):
            return decoded
        for index, item in enumerate(decoded):
            if _is_pair(item) and isinstance(item[1], Record):
                values = local_values(item[1])
                if tp_rank >= len(values):
                    raise RequestRejected(
                        f"{item[0][:200]}: {len(values)} ranks' tensors were sent, this is rank {tp_rank}"
                    )
                # They share one budget, since a short payload can refer to a long pickle many times.
                value = yield from decode_by_slices(raw_payload(values[tp_rank]), memory.record, budget)
                decoded[index] = (item[0], value)
        return decoded

    def _entry_of(
        self, entries: Sequence[bytes | str], load_format: str | None
    ) -> tuple[bytes | str, BorrowedMemory]:
        """This rank's entry, and the `BorrowedMemory` for its references."""
        place, cuda = self._place, self._cuda
        if len(entries) == self._num_ranks:
            return entries[self._rank], BorrowedMemory(cuda)
        if len(entries) == place.tp_size:
            return entries[place.tp_rank], BorrowedMemory(cuda, place.dp_rank, place.dp_size)
        if len(entries) == 1 and load_format == SAFETENSORS:
            return entries[0], BorrowedMemory(cuda)
        expected = f"{self._num_ranks} (one per rank)"
        if place.dp_size > 1:
            expected += f" or {place.tp_size} (for every replica)"
        raise RequestRejected(f"serialized_named_tensors: expected {expected} entries, got {len(entries)}")

    def open_handles(
        self, entries: Sequence[bytes], lent: Sequence[IpcTensor] | None
    ) -> Slices[WeightSource]:
        """Open tensors on this rank's device from CUDA IPC handles, as vLLM's trainers send them.

        A handle has the arguments of torch's `rebuild_cuda_tensor`, by UUID of the device. It is of one
        tensor, or of one buffer with all tensors of the request. Source: wire_vllm section 2.4.

        Args:
            entries: one pickle per rank: a list with the handles of each tensor, or those of the buffer.
            lent: names, shapes and dtypes of the tensors.
        """
        cuda = self._cuda
        if lent is None:
            raise RequestRejected(f"lent: load_format {IPC_HANDLES} needs it, one entry per tensor")
        if cuda is None:
            raise RequestRejected(
                "IPC handles are of memory of CUDA devices, and this engine runs on the CPU: broadcast the "
                "weights, or send them by update_weights_from_tensor"
            )
        if len(entries) != self._num_ranks:
            raise RequestRejected(
                f"serialized_named_tensors: expected {self._num_ranks} (one per rank) entries, got "
                f"{len(entries)}"
            )
        headers = [TensorHeader(one.name, one.shape, dtype_named(one.dtype, one.name[:200])) for one in lent]
        handles = yield from read_by_slices(entries[self._rank], resolve_global)
        memory = BorrowedMemory(cuda, is_kept=isinstance(handles, dict))
        try:
            if isinstance(handles, dict):
                return _open_buffer(handles, headers, lent, memory, cuda, self._cache)
            return _open_each(handles, headers, memory, cuda)
        except BaseException:
            memory.close()
            raise


def _is_pair(item: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(item, tuple | list) and len(item) == 2 and type(item[0]) is str


def _open_named(decoded: object, memory: BorrowedMemory, *, direct: bool) -> WeightSource:
    if isinstance(decoded, dict):
        # SGLang's clients send an adapter like this.
        decoded = list(decoded.items())
    if isinstance(decoded, list):
        decoded = TensorTable.of([_named_ref(item) for item in decoded])
    if not isinstance(decoded, TensorTable):
        raise RequestRejected(f"the payload: expected a list of (name, tensor), got {kind_of(decoded)}")
    return TableSource(decoded, memory, direct=direct)


def _named_ref(item: object) -> tuple[str, TensorRef]:
    if not _is_pair(item):
        raise RequestRejected(f"the payload: expected pairs of (name, tensor), got {kind_of(item)}")
    name, value = item
    if not isinstance(value, TensorRef):
        raise RequestRejected(f"{name[:200]}: expected a tensor, got {kind_of(value)}")
    return name, value


def _open_bucket(decoded: object, memory: BorrowedMemory, cache: PlanCache) -> WeightSource:
    if not isinstance(decoded, dict) or decoded.keys() != {"flattened_tensor", "metadata"}:
        raise RequestRejected('the payload: expected a dictionary of "flattened_tensor" and "metadata"')
    flat_ref, listed = decoded["flattened_tensor"], decoded["metadata"]
    if not isinstance(flat_ref, TensorRef):
        raise RequestRejected(f"flattened_tensor: expected a tensor, got {kind_of(flat_ref)}")
    if not isinstance(listed, KnownList | list | tuple):
        raise RequestRejected(f"metadata: expected a list, got {kind_of(listed)}")
    return packed_source(flat_ref, _packed(flat_ref, listed, cache), memory)


def _packed(flat: TensorRef, listed: KnownList | Sequence[object], cache: PlanCache) -> PackedTensors:
    """A bucket's tensors, checked against its size. For metadata that came before, they are known."""
    if not isinstance(listed, KnownList):
        return _checked(flat, listed, cache)
    if listed.packed is not None:
        check_bytes(flat.dtype, flat.shape, flat.stride)
        if listed.packed.num_bytes <= flat.shape[0]:
            return listed.packed
    listed.packed = _checked(flat, listed.items, cache)
    return listed.packed


def _checked(flat: TensorRef, items: Sequence[object], cache: PlanCache) -> PackedTensors:
    metadata = [as_metadata(item) for item in items]
    check_bucket(flat.dtype, flat.shape, flat.stride, metadata)
    return cache.packed([item.place for item in metadata])


def is_safetensors(entry: bytes | str) -> bool:
    """Whether an entry begins like a safetensors image, as no other kind of payload does."""
    start = entry[:8] if isinstance(entry, bytes) else raw_base64(entry[:12])[:8]
    return int.from_bytes(start, "little") <= MAX_HEADER_BYTES


def _open_safetensors(entry: bytes | str) -> WeightSource:
    image = entry if isinstance(entry, bytes) else raw_base64(entry)
    if int.from_bytes(image[:8], "little") > MAX_HEADER_BYTES:
        raise RequestRejected(
            f"the payload is not a safetensors image with a header of at most {MAX_HEADER_BYTES} bytes"
        )
    try:
        tensors = sorted(safetensors.torch.load(image).items())
    except KeyError as error:
        raise RequestRejected(
            f"the payload has tensors of the type {error}, which is not supported"
        ) from error
    except (SafetensorError, ValueError, RuntimeError) as error:
        raise RequestRejected(f"the payload is not a safetensors image: {error!r}"[:500]) from error
    headers = [TensorHeader(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors]
    return WeightSource(headers, lambda: tensors)


def _unknown_format(load_format: str) -> RequestRejected:
    valid = "null, " + ", ".join(_FORMATS)
    if "." in load_format:
        return RequestRejected(
            f"load_format: the import path {load_format[:200]!r} is not listed in --custom-weight-loader; "
            f"valid: {valid}"
        )
    return RequestRejected(f"load_format: unknown value {load_format[:200]!r}; valid: {valid}")


def _open_each(
    handles: object, headers: Sequence[TensorHeader], memory: BorrowedMemory, cuda: CudaIpc
) -> WeightSource:
    if not isinstance(handles, list) or len(handles) != len(headers):
        given = f"{len(handles)} of them" if isinstance(handles, list) else kind_of(handles)
        raise RequestRejected(
            f"ipc_handles: expected a list with the handles of each of {len(headers)} tensors, got {given}"
        )
    pairs = zip(headers, handles, strict=True)
    refs = [_own(by_device, header.name[:200], memory, cuda) for header, by_device in pairs]
    for header, ref in zip(headers, refs, strict=True):
        if (ref.shape, ref.dtype) != (header.shape, header.dtype):
            raise RequestRejected(
                f"{header.name[:200]}: announced as {header.dtype} of {list(header.shape)}, its handle is of "
                f"{ref.dtype} of {list(ref.shape)}"
            )
    named = [(header.name, ref) for header, ref in zip(headers, refs, strict=True)]
    return TableSource(TensorTable.of(named), memory)


def _open_buffer(
    handles: object,
    headers: Sequence[TensorHeader],
    lent: Sequence[IpcTensor],
    memory: BorrowedMemory,
    cuda: CudaIpc,
    cache: PlanCache,
) -> WeightSource:
    ref = _own(handles, "the buffer", memory, cuda)
    if len(ref.shape) != 1 or ref.stride != (1,):
        raise RequestRejected(f"the buffer: expected one dimension, got {list(ref.shape)}")
    places, start = [], 0
    for header, one in zip(headers, lent, strict=True):
        room = header.num_bytes if one.num_bytes is None else one.num_bytes
        if room < header.num_bytes:
            raise RequestRejected(
                f"tensor_sizes: {header.name[:200]}: expected {header.num_bytes} bytes, got {room}"
            )
        places.append((header, start))
        start += room
    num_bytes = ref.shape[0] * ref.dtype.itemsize
    if start > num_bytes:
        raise RequestRejected(f"tensor_sizes: {start} bytes are not within the buffer of {num_bytes}")
    return packed_source(ref, cache.packed(places), memory)


def _own(by_device: object, where: str, memory: BorrowedMemory, cuda: CudaIpc) -> TensorRef:
    if not isinstance(by_device, dict):
        raise RequestRejected(f"{where}: expected handles by the UUID of a device, got {kind_of(by_device)}")
    by_uuid = {str(uuid).lower().removeprefix("gpu-"): handle for uuid, handle in by_device.items()}
    handle = by_uuid.get(cuda.uuid.lower())
    if handle is None:
        known = ", ".join(sorted(by_uuid))[:1000] or "none"
        raise RequestRejected(f"{where}: there is no handle for device {cuda.uuid}; given: {known}")
    ref = cuda_tensor(handle, cuda.index)
    if ref.storage is not None:
        memory.record(ref.storage)
    return ref
