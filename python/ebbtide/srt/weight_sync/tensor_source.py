"""Weight sources for `update_weights_from_tensor`. Source: wire_api sections 3.3 and 4."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

import safetensors.torch
import torch
from safetensors import SafetensorError

from ebbtide.srt.errors import EngineError, RequestRejected
from ebbtide.srt.weight_sync.bucket import FlattenedTensorBucket, check_bucket
from ebbtide.srt.weight_sync.cuda_memory import CudaIpc
from ebbtide.srt.weight_sync.payload import (
    as_local_serialized,
    as_metadata,
    decode_payload,
    raw_base64,
    raw_pickle,
)
from ebbtide.srt.weight_sync.pickle_reader import Record
from ebbtide.srt.weight_sync.references import TensorRef, kind_of
from ebbtide.srt.weight_sync.sender_memory import SenderMemory
from ebbtide.srt.weight_sync.source import TensorHeader, WeightSource

NamedTensor = tuple[str, torch.Tensor]


class TensorSource:
    """A `WeightSource` over tensors that are at hand: in this process, or in the sender's memory."""

    def __init__(
        self,
        entries: Sequence[TensorHeader],
        read: Callable[[], Iterable[NamedTensor]],
        *,
        direct: bool = False,
        memory: SenderMemory | None = None,
    ) -> None:
        self.entries = entries
        self.direct = direct
        self._read: Callable[[], Iterable[NamedTensor]] | None = read
        self._memory = memory

    def open(self) -> Iterator[None]:
        return self._memory.open() if self._memory is not None else iter(())

    def __iter__(self) -> Iterator[NamedTensor]:
        if self._read is None:
            raise EngineError("the weight source is closed")
        return iter(self._read())

    def drop(self) -> Iterator[None]:
        self._read = None
        return self._memory.drop() if self._memory is not None else iter(())

    def close(self) -> None:
        self._read = None
        if self._memory is not None:
            self._memory.close()


def open_tensor_payload(
    entries: Sequence[bytes | str],
    load_format: str | None,
    *,
    tp_rank: int = 0,
    tp_size: int = 1,
    dp_rank: int = 0,
    dp_size: int = 1,
    custom_weight_loaders: Sequence[str] = (),
    cuda: CudaIpc | None = None,
) -> WeightSource:
    """Opens this rank's part of `serialized_named_tensors`.

    Args:
        entries: base64 text, or raw bytes (a pickle, or a safetensors image). Empty: nothing to write.
        load_format: None, `flattened_bucket`, `direct` or `safetensors`.
        custom_weight_loaders: the import paths that the operator allows as `load_format`.
        cuda: opens tensors on the device that the engine runs on; None where that is the CPU.

    Raises `RequestRejected` (400) for anything that is wrong with the payload; nothing has been written then,
    and every reference that was decoded has been given back, whether it was opened or not.
    """
    opener = _OPENERS.get(load_format)
    if opener is None:
        raise _refuse_format(load_format, custom_weight_loaders)
    num_ranks = tp_size * dp_size
    if not entries:
        return TensorSource((), tuple)
    if len(entries) == num_ranks:
        return _open(opener, entries[dp_rank * tp_size + tp_rank], tp_rank, SenderMemory(True, cuda))
    if len(entries) == tp_size:
        # All replicas open the same references: the first one drops them.
        return _open(opener, entries[tp_rank], tp_rank, SenderMemory(dp_rank == 0, cuda))
    if len(entries) == 1 and load_format == "safetensors":
        return _open(opener, entries[0], tp_rank, SenderMemory(True, cuda))
    expected = f"{num_ranks} (one per rank)"
    if dp_size > 1:
        expected += f" or {tp_size} (for every replica)"
    raise RequestRejected(f"serialized_named_tensors: expected {expected} entries, got {len(entries)}")


_Opener = Callable[[bytes | str, int, SenderMemory], WeightSource]


def _open(opener: _Opener, entry: bytes | str, tp_rank: int, memory: SenderMemory) -> WeightSource:
    try:
        return opener(entry, tp_rank, memory)
    except BaseException:
        memory.close()
        raise


def _open_named(
    entry: bytes | str, tp_rank: int, memory: SenderMemory, *, direct: bool = False
) -> WeightSource:
    decoded = decode_payload(raw_pickle(entry), memory.note)
    if not isinstance(decoded, list):
        raise RequestRejected(f"the payload: expected a list of (name, tensor), got {kind_of(decoded)}")
    refs = [_named_ref(item, tp_rank, memory) for item in decoded]
    for _, ref in refs:
        memory.map(ref)
    headers = [TensorHeader(name, ref.shape, ref.dtype) for name, ref in refs]
    # One by one, so that no tensor outlives the memory that it views.
    return TensorSource(
        headers, lambda: ((name, memory.tensor(ref)) for name, ref in refs), direct=direct, memory=memory
    )


def _open_direct(entry: bytes | str, tp_rank: int, memory: SenderMemory) -> WeightSource:
    return _open_named(entry, tp_rank, memory, direct=True)


def _named_ref(item: object, tp_rank: int, memory: SenderMemory) -> tuple[str, TensorRef]:
    if not isinstance(item, tuple | list) or len(item) != 2 or type(item[0]) is not str:
        raise RequestRejected(f"the payload: expected pairs of (name, tensor), got {kind_of(item)}")
    name, value = item
    if isinstance(value, Record):
        values = as_local_serialized(value).values
        if tp_rank >= len(values):
            raise RequestRejected(
                f"{name[:200]}: {len(values)} ranks' tensors were sent, this is rank {tp_rank}"
            )
        value = decode_payload(raw_pickle(values[tp_rank]), memory.note)
    if not isinstance(value, TensorRef):
        raise RequestRejected(f"{name[:200]}: expected a tensor, got {kind_of(value)}")
    return name, value


def _open_bucket(entry: bytes | str, tp_rank: int, memory: SenderMemory) -> WeightSource:
    decoded = decode_payload(raw_pickle(entry), memory.note)
    if not isinstance(decoded, dict) or decoded.keys() != {"flattened_tensor", "metadata"}:
        raise RequestRejected('the payload: expected a dictionary of "flattened_tensor" and "metadata"')
    flat_ref, listed = decoded["flattened_tensor"], decoded["metadata"]
    if not isinstance(flat_ref, TensorRef):
        raise RequestRejected(f"flattened_tensor: expected a tensor, got {kind_of(flat_ref)}")
    if not isinstance(listed, list | tuple):
        raise RequestRejected(f"metadata: expected a list, got {kind_of(listed)}")
    metadata = [as_metadata(item) for item in listed]
    check_bucket(flat_ref.dtype, flat_ref.shape, flat_ref.stride, metadata)
    memory.map(flat_ref)
    headers = [TensorHeader(item.name, tuple(item.shape), item.dtype) for item in metadata]

    def read() -> Iterable[NamedTensor]:
        flat = memory.tensor(flat_ref)
        return FlattenedTensorBucket(flattened_tensor=flat, metadata=metadata).iterate()

    return TensorSource(headers, read, memory=memory)


def _open_safetensors(entry: bytes | str, tp_rank: int, memory: SenderMemory) -> WeightSource:
    image = entry if isinstance(entry, bytes) else raw_base64(entry)
    try:
        tensors = sorted(safetensors.torch.load(image).items())
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise RequestRejected(f"the payload is not a safetensors image: {error!r}"[:500]) from error
    headers = [TensorHeader(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors]
    return TensorSource(headers, lambda: tensors)


_OPENERS: Final[Mapping[str | None, _Opener]] = {
    None: _open_named,
    "flattened_bucket": _open_bucket,
    "direct": _open_direct,
    "safetensors": _open_safetensors,
}


def _refuse_format(load_format: str | None, custom_weight_loaders: Sequence[str]) -> RequestRejected:
    if load_format in custom_weight_loaders:
        return RequestRejected(
            f"load_format {load_format!r}: custom weight loaders are not supported yet", status=501
        )
    valid = "null, " + ", ".join(name for name in _OPENERS if name is not None)
    if load_format is not None and "." in load_format:
        return RequestRejected(
            f"load_format: the import path {load_format[:200]!r} is not listed in --custom-weight-loader; "
            f"valid: {valid}"
        )
    return RequestRejected(f"load_format: unknown value {str(load_format)[:200]!r}; valid: {valid}")
