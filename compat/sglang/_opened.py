"""Deserializes payloads, for `MultiprocessingSerializer.deserialize`. Source: wire_api section 4.4."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ebbtide.formats.allowed_globals import kind_of
from ebbtide.formats.pickle_reader import Record
from ebbtide.formats.stored_tensor import whole
from ebbtide.formats.tensor_refs import AnyStorageRef, CudaStorageRef, TensorRef, TensorTable
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.slices import finish
from ebbtide.srt.weight_sync.borrowed_memory import BorrowedMemory
from ebbtide.srt.weight_sync.cuda_memory import CudaIpc
from ebbtide.srt.weight_sync.tensor_source import (
    as_metadata,
    decode_by_slices,
    local_values,
    raw_payload,
)
from sglang.srt.model_executor.model_runner_components.weight_updater import LocalSerializedTensor
from sglang.srt.utils.patch_torch import device_index
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

_PLAIN = (type(None), bool, int, float, str, bytes, torch.dtype)


def deserialize(data: bytes | str) -> Any:
    """Deserialize an object. CPU tensors are copied; CUDA tensors keep the sender's memory mapped.

    Raises:
        RequestRejected: the payload is broken, or the sender's memory cannot be opened.
    """
    refs: list[AnyStorageRef] = []
    memory = BorrowedMemory()
    try:
        described = finish(decode_by_slices(raw_payload(data), refs.append))
        memory = BorrowedMemory(_ipc_of(refs))
        # A first pass, so that everything is checked before a tensor is made.
        _rebuild(described, lambda ref: memory.require(ref.storage))
        for _ in memory.open():
            pass
        return _rebuild(described, lambda ref: whole(memory.tensor(ref)))
    except RecursionError:
        raise RequestRejected("the payload is nested too deeply") from None
    finally:
        for ref in refs:
            memory.record(ref)
        # Tensors keep the memory that they need. Other references are given back.
        memory.close()


def _rebuild(value: object, tensor: Callable[[TensorRef], object]) -> Any:
    match value:
        case TensorRef():
            return tensor(value)
        case TensorTable():
            return [(name, tensor(ref)) for name, ref in value.refs()]
        case Record():
            return _record(value)
        case list():
            return [_rebuild(item, tensor) for item in value]
        case tuple():
            return tuple(_rebuild(item, tensor) for item in value)
        case dict():
            return {key: _rebuild(item, tensor) for key, item in value.items()}
        case _ if isinstance(value, _PLAIN):
            return value
    raise RequestRejected(f"the payload: {kind_of(value)} is not a value")


def _record(value: Record) -> object:
    if value.name.endswith(".LocalSerializedTensor"):
        return LocalSerializedTensor(values=list(local_values(value)))
    return FlattenedTensorMetadata(**vars(as_metadata(value)))


def _ipc_of(refs: Sequence[AnyStorageRef]) -> CudaIpc | None:
    """The opener of references to device memory, which are all on one device; None: there are none."""
    devices = {ref.device for ref in refs if isinstance(ref, CudaStorageRef)}
    if not devices:
        return None
    index = device_index(devices.pop())
    uuid = str(torch.get_device_module("cuda").get_device_properties(index).uuid)
    return CudaIpc(index, uuid, lasting=True)
