"""The engine's own payload: tensors in memory that is shared, as a list in MessagePack.

It says what torch's pickles of shared tensors say, and is read a hundred times quicker: once per storage, and
without a step of Python for each opcode.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Annotated, Final, TypeAlias

import msgspec
from msgspec import Meta, Struct

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.weight_sync.payload.tensor_refs import (
    AnyStorageRef,
    TensorRef,
    device_storage,
    dtype_named,
    host_storage,
    tensor_within,
)

# What no pickle, no base64 and no safetensors image of less than a petabyte begins with.
MAGIC: Final = b"\xebEBT\x01\0\0\0"
# The same of memory that stays: it is not to be unmapped before the sender lets go of its file of counts.
MAGIC_STAYS: Final = b"\xebEBT\x01\x01\0\0"
MAGICS: Final = (MAGIC, MAGIC_STAYS)

_Count: TypeAlias = Annotated[int, Meta(ge=0)]


class HostStorage(Struct, frozen=True, array_like=True, tag="host", forbid_unknown_fields=True):
    """A block of shared memory by torch's names, with one reference that the sender has counted."""

    manager: bytes
    handle: bytes
    num_bytes: _Count


class DeviceStorage(Struct, frozen=True, array_like=True, tag="device", forbid_unknown_fields=True):
    """Device memory by torch's IPC handle, with one reference that the sender counts. Its work is done."""

    device: str
    handle: bytes
    num_bytes: _Count
    offset_bytes: _Count
    counter_file: bytes
    counter_index: _Count


class SharedTensor(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A tensor by name. `storage` is the number of its storage; `offset` counts elements."""

    name: str
    dtype: str
    shape: tuple[_Count, ...]
    stride: tuple[_Count, ...]
    offset: _Count
    storage: _Count


class _TensorList(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    storages: list[HostStorage | DeviceStorage]
    tensors: list[SharedTensor]


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(_TensorList)


def encode_tensors(
    storages: Sequence[HostStorage | DeviceStorage], tensors: Sequence[SharedTensor], *, stays: bool = False
) -> bytes:
    """The payload of tensors that lie in these storages.

    Args:
        stays: the memory stays where it is, and may stay mapped, see `kept_memory`.
    """
    return (MAGIC_STAYS if stays else MAGIC) + _ENCODER.encode(_TensorList(list(storages), list(tensors)))


def decode_tensors(
    data: bytes, note: Callable[[AnyStorageRef], None]
) -> Generator[int, None, list[tuple[str, TensorRef]]]:
    """The tensors of a payload that begins with one of `MAGICS`, described and not opened; in slices.

    Args:
        note: is told of every reference ahead of the first slice, so that all can be given back.

    Raises:
        RequestRejected: the payload is not of this form, or a tensor does not lie within its storage.
    """
    try:
        listed = _DECODER.decode(memoryview(data)[len(MAGIC) :])
    except msgspec.DecodeError as error:
        raise RequestRejected(f"the payload: {error}"[:500]) from error
    storages: list[AnyStorageRef | None] = []
    problems: list[RequestRejected] = []
    for number, storage in enumerate(listed.storages):
        try:
            storages.append(_reference(storage, f"the payload: storage {number}"))
        except RequestRejected as problem:
            problems.append(problem)
            continue
        if (reference := storages[-1]) is not None:
            note(reference)
    if problems:
        raise problems[0]
    yield len(data)
    tensors = []
    for tensor in listed.tensors:
        tensors.append((tensor.name, _tensor(tensor, storages)))
        yield len(tensor.name)
    return tensors


def _reference(storage: HostStorage | DeviceStorage, where: str) -> AnyStorageRef | None:
    match storage:
        case HostStorage():
            return host_storage(where, storage.manager, storage.handle, storage.num_bytes)
        case DeviceStorage():
            return device_storage(
                where,
                storage.device,
                storage.handle,
                storage.num_bytes,
                storage.offset_bytes,
                storage.counter_file,
                storage.counter_index,
                None,
                False,
            )


def _tensor(tensor: SharedTensor, storages: Sequence[AnyStorageRef | None]) -> TensorRef:
    where = tensor.name[:200]
    if tensor.storage >= len(storages):
        raise RequestRejected(f"{where}: storage {tensor.storage}: the payload has {len(storages)}")
    return tensor_within(
        where,
        storages[tensor.storage],
        dtype_named(tensor.dtype, where),
        tensor.offset,
        tensor.shape,
        tensor.stride,
    )
