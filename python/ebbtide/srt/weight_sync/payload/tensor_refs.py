"""What a payload says of tensors: checked descriptions, and references to memory that is not opened yet.

Source: wire_api sections 4.2 and 4.3.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch

from ebbtide.srt.errors import RequestRejected

MAX_DIMENSIONS: Final = 64
_MAX_INT: Final = 2**63 - 1
_HANDLE: Final = re.compile(rb"/torch_[0-9]+_[0-9]+_[0-9]+")
# torch has named these files with two numbers and with three.
_COUNTER_FILE: Final = re.compile(rb"/torch_[0-9]+_[0-9]+(?:_[0-9]+)?")
NUM_COUNTERS: Final = 10_000
_EVENT_BYTES: Final = 64
# A handle of the driver, bare or behind two bytes that say so; or a longer list of an expandable segment.
DRIVER_HANDLE_BYTES: Final = 64
_HANDLE_KINDS: Final = (b"c", b"e")
_MANAGER: Final = re.compile(rb"/(?:[^/\0]+/)*torch-shm-dir-[A-Za-z0-9]+/manager\.sock")


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """Name, shape and dtype of a tensor that is about to arrive: enough to accept or refuse it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class StorageRef:
    """A block of shared memory on this host; each instance is one reference that the sender has counted."""

    manager: bytes
    handle: bytes
    num_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class CudaStorageRef:
    """Device memory of another process on this host; each instance is one reference that the sender counts.

    Attributes:
        device: index as this process counts devices, or UUID.
        handle: what torch opens the allocation by.
        offset_bytes: where the storage begins in the allocation.
        counter_file, counter_index: where the sender counts the reference.
        event: after it the sender's writes are done; None if they are done already.
    """

    device: int | str
    handle: bytes
    num_bytes: int
    offset_bytes: int
    counter_file: bytes
    counter_index: int
    event: bytes | None


AnyStorageRef: TypeAlias = StorageRef | CudaStorageRef


@dataclass(frozen=True, slots=True, eq=False)
class TensorRef:
    """A tensor that was checked to lie within its storage. `storage` None: it has no elements."""

    storage: AnyStorageRef | None
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


# Checks of single values. Each names the place; none prints a value that the sender could make endless.


def natural(value: object, where: str) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_INT:
        raise RequestRejected(f"{where}: expected an integer from 0 to 2^63-1")
    return value


def sizes(value: object, where: str) -> tuple[int, ...]:
    if not isinstance(value, tuple | list) or len(value) > MAX_DIMENSIONS:
        raise RequestRejected(f"{where}: expected a tuple of at most {MAX_DIMENSIONS} integers")
    return tuple(natural(item, where) for item in value)


def tensor_shape(value: object, where: str) -> tuple[int, ...]:
    shape = sizes(value, where)
    # Also where a size of 0 makes the tensor empty: torch multiplies the others.
    if math.prod(max(size, 1) for size in shape) > _MAX_INT:
        raise RequestRejected(f"{where}: the sizes multiply to more than 2^63-1")
    return shape


# Those that torch can copy: not the quantized ones, nor those narrower than a byte.
_FLOATING: Final = ("float64", "float32", "float16", "bfloat16", "complex64", "complex128")
_NARROW: Final = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
_INTEGER: Final = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "bool")
DTYPES: Final[Mapping[str, torch.dtype]] = {
    name: getattr(torch, name) for name in (*_FLOATING, *_NARROW, *_INTEGER)
}


def dtype_named(name: str, where: str) -> torch.dtype:
    """The dtype of this name, if payloads may use it."""
    if name not in DTYPES:
        raise RequestRejected(f"{where}: dtype: expected one of {', '.join(DTYPES)}, got {name[:40]!r}")
    return DTYPES[name]


def tensor_within(
    where: str,
    storage: AnyStorageRef | None,
    dtype: torch.dtype,
    offset: object,
    shape: object,
    stride: object,
) -> TensorRef:
    """A reference to a tensor, checked to lie within its storage."""
    ref = TensorRef(
        storage,
        dtype,
        natural(offset, f"{where}: offset"),
        tensor_shape(shape, f"{where}: shape"),
        sizes(stride, f"{where}: stride"),
    )
    _check_bounds(ref, where)
    return ref


def _check_bounds(ref: TensorRef, where: str) -> None:
    if len(ref.shape) != len(ref.stride):
        raise RequestRejected(f"{where}: {len(ref.shape)} sizes but {len(ref.stride)} strides")
    available = ref.storage.num_bytes if ref.storage is not None else 0
    itemsize = ref.dtype.itemsize
    num_elements = math.prod(ref.shape)
    last = ref.offset + sum((size - 1) * step for size, step in zip(ref.shape, ref.stride, strict=True))
    end = last + 1 if num_elements else ref.offset
    if end * itemsize > available:
        raise RequestRejected(f"{where}: the tensor reaches beyond its storage of {available} bytes")
    # A copy of an expanded view can be larger than any memory; what is sent must exist.
    if num_elements * itemsize > available:
        raise RequestRejected(f"{where}: the tensor repeats elements: send tensor.contiguous()")


def host_storage(where: str, manager: object, handle: object, num_bytes: object) -> StorageRef:
    """A checked reference to shared memory."""
    if not isinstance(manager, bytes) or not _MANAGER.fullmatch(manager) or b"/../" in manager:
        raise RequestRejected(f"{where}: manager: expected the path of a torch-shm-dir-*/manager.sock")
    if not isinstance(handle, bytes) or not _HANDLE.fullmatch(handle):
        raise RequestRejected(f"{where}: handle: expected the form /torch_<pid>_<n>_<n>")
    return StorageRef(manager, handle, natural(num_bytes, f"{where}: size"))


def device_storage(
    name: str,
    device: object,
    handle: object,
    num_bytes: object,
    offset_bytes: object,
    counter_file: object,
    counter_index: object,
    event: object,
    must_wait: object,
) -> CudaStorageRef | None:
    """A checked reference to device memory; None where there is no memory."""
    size = natural(num_bytes, f"{name}: storage size")
    if handle is None or size == 0:
        return None
    if not _is_memory_handle(handle):
        raise RequestRejected(f"{name}: memory handle: not one that torch makes")
    if not isinstance(counter_file, bytes) or not _COUNTER_FILE.fullmatch(counter_file):
        raise RequestRejected(f"{name}: reference counter file: expected the form /torch_<pid>_<n>")
    if type(counter_index) is not int or counter_index >= NUM_COUNTERS:
        raise RequestRejected(f"{name}: reference counter index: expected 0 to {NUM_COUNTERS - 1}")
    if must_wait and (not isinstance(event, bytes) or len(event) != _EVENT_BYTES):
        raise RequestRejected(f"{name}: event handle: expected {_EVENT_BYTES} bytes")
    if not isinstance(device, int | str) or not is_device(device):
        raise RequestRejected(f"{name}: device: expected an index or a UUID")
    assert isinstance(handle, bytes)
    return CudaStorageRef(
        device,
        handle,
        size,
        natural(offset_bytes, f"{name}: storage offset"),
        counter_file,
        counter_index,
        event if must_wait and isinstance(event, bytes) else None,
    )


def _is_memory_handle(handle: object) -> bool:
    if not isinstance(handle, bytes):
        return False
    if len(handle) == DRIVER_HANDLE_BYTES:
        return True
    kind = handle[1:2]
    return kind in _HANDLE_KINDS and (kind == b"e" or len(handle) == 2 + DRIVER_HANDLE_BYTES)


def is_device(value: object) -> bool:
    is_uuid = type(value) is str and re.fullmatch(r"[0-9a-fA-F-]{36}", value) is not None
    return is_count(value) or is_uuid


def is_count(value: object) -> bool:
    return type(value) is int and value >= 0
