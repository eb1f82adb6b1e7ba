"""Tensors behind CUDA IPC handles as vLLM's trainers send them: those of every device, to every rank.

They are the arguments of torch's `rebuild_cuda_tensor`, by the UUID of the device: of one tensor each, or of
one buffer that holds all tensors of a request and is filled anew for the next. Source: wire_vllm section 2.4.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Final

from ebbtide.formats.allowed_globals import cuda_tensor, kind_of, resolve_global
from ebbtide.formats.announcement import IpcTensor
from ebbtide.formats.pickle_reader import read_by_slices
from ebbtide.formats.tensor_refs import TensorHeader, TensorRef, dtype_named
from ebbtide.srt.config import ParallelConfig
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.weight_sync.borrowed_memory import BorrowedMemory
from ebbtide.srt.weight_sync.cuda_memory import CudaIpc
from ebbtide.srt.weight_sync.source import PlanCache, WeightSource, borrowed_source, packed_source

IPC_HANDLES: Final = "ipc_handles"


def open_handles(
    entries: Sequence[bytes],
    lent: Sequence[IpcTensor] | None,
    *,
    place: ParallelConfig,
    cuda: CudaIpc | None,
    cache: PlanCache | None = None,
) -> Generator[int, None, WeightSource]:
    """Opens the tensors of this rank's device, by slices.

    Args:
        entries: for each rank a pickle: a list with the handles of each tensor, or the handles of a buffer.
        lent: what is behind them.
        cache: what was worked out for the payloads before it.

    Raises:
        RequestRejected: 400; every reference of this device that was read has been given back.
    """
    if lent is None:
        raise RequestRejected(f"lent: load_format {IPC_HANDLES} needs it, one entry per tensor")
    if cuda is None:
        raise RequestRejected(
            "IPC handles are of memory of CUDA devices, and this engine runs on the CPU: broadcast the "
            "weights, or send them by update_weights_from_tensor"
        )
    if len(entries) != place.num_ranks:
        raise RequestRejected(
            f"serialized_named_tensors: expected {place.num_ranks} (one per rank) entries, got {len(entries)}"
        )
    headers = [TensorHeader(one.name, one.shape, dtype_named(one.dtype, one.name[:200])) for one in lent]
    handles = yield from read_by_slices(entries[place.rank], resolve_global)
    memory = BorrowedMemory(cuda, is_kept=isinstance(handles, dict))
    try:
        if isinstance(handles, dict):
            return _open_buffer(handles, headers, lent, memory, cuda, cache)
        return _open_each(handles, headers, memory, cuda)
    except BaseException:
        memory.close()
        raise


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
                f"{header.name[:200]}: told of as {header.dtype} of {list(header.shape)}, its handle is of "
                f"{ref.dtype} of {list(ref.shape)}"
            )
    return borrowed_source([(header.name, ref) for header, ref in zip(headers, refs, strict=True)], memory)


def _open_buffer(
    handles: object,
    headers: Sequence[TensorHeader],
    lent: Sequence[IpcTensor],
    memory: BorrowedMemory,
    cuda: CudaIpc,
    cache: PlanCache | None,
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
    return packed_source(ref, (cache or PlanCache()).packed(places), memory)


def _own(by_device: object, where: str, memory: BorrowedMemory, cuda: CudaIpc) -> TensorRef:
    """What the handle of this rank's device is of."""
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
