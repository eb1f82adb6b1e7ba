"""Checked descriptions of a payload's tensors, and references to their memory, which is not opened yet.

Tensors are described one by one, or thousands in columns. Shapes: T tensors, L layouts, S storages.

Source: wire_api sections 4.2 and 4.3.
"""

from __future__ import annotations

import itertools
import math
import operator
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Final, Self, TypeAlias, TypeGuard

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray

from ebbtide.srt.errors import RequestRejected

MAX_DIMENSIONS: Final = 64
_MAX_INT: Final = 2**63 - 1
_HANDLE: Final = re.compile(rb"/torch_[0-9]+_[0-9]+_[0-9]+")
# Depending on its version, torch has two or three numbers in these names.
_COUNTER_FILE: Final = re.compile(rb"/torch_[0-9]+_[0-9]+(?:_[0-9]+)?")
_UUID: Final = re.compile(r"[0-9a-fA-F-]{36}")
NUM_COUNTERS: Final = 10_000
_EVENT_BYTES: Final = 64
# The size of the largest element. torch's storages begin at multiples of 512 bytes on a device.
STORAGE_ALIGNMENT_BYTES: Final = 16
# Size of a CUDA IPC handle. torch sends it bare or after two bytes with its kind, "c"; the kind "e" is an
# expandable segment's, with more data.
DRIVER_HANDLE_BYTES: Final = 64
_HANDLE_KINDS: Final = (b"c", b"e")
_MANAGER: Final = re.compile(rb"/(?:[^/\0]+/)*torch-shm-dir-[A-Za-z0-9]+/manager\.sock")


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """Name, shape and dtype of a tensor that will be sent: enough to accept or refuse it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class StorageRef(Struct, frozen=True, eq=False, array_like=True, tag="host", forbid_unknown_fields=True):
    """A block of shared memory on this host. Each instance is a reference that the sender has counted.

    Attributes:
        manager, handle: of torch: path of its manager's socket, and name of the block.
    """

    manager: bytes
    handle: bytes
    num_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class CudaStorageRef:
    """Device memory of another process on this host. Each instance is a reference that the sender counts.

    Attributes:
        device: index in this process, or UUID.
        handle: torch's handle of the allocation.
        num_bytes: size of the storage.
        offset_bytes: offset of the storage in the allocation.
        counter_file, counter_index: where the sender counts the reference.
        event: handle of an event after the sender's writes; None: they are done already.
    """

    device: int | str
    handle: bytes
    num_bytes: int
    offset_bytes: int
    counter_file: bytes
    counter_index: int
    event: bytes | None

    def __str__(self) -> str:
        return f"CUDA memory counted in {os.fsdecode(self.counter_file)}[{self.counter_index}]"


AnyStorageRef: TypeAlias = StorageRef | CudaStorageRef


@dataclass(frozen=True, slots=True, eq=False)
class TensorRef:
    """A tensor that was checked to lie within its storage.

    Attributes:
        storage: None: the tensor has no elements.
        offset, stride: in elements.
    """

    storage: AnyStorageRef | None
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


# Checks of single values. Messages say where the value is, and never contain it, since it may be very long.


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
    # Sizes of 0 count as 1, since torch multiplies the others even if the tensor is empty.
    if math.prod(max(size, 1) for size in shape) > _MAX_INT:
        raise RequestRejected(f"{where}: the sizes multiply to more than 2^63-1")
    return shape


# Dtypes that torch can copy: not quantized ones, nor those of less than a byte.
_FLOATING: Final = ("float64", "float32", "float16", "bfloat16", "complex64", "complex128")
_NARROW: Final = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
_INTEGER: Final = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "bool")
DTYPES: Final[Mapping[str, torch.dtype]] = {
    name: getattr(torch, name) for name in (*_FLOATING, *_NARROW, *_INTEGER)
}


def dtype_named(name: str, where: str) -> torch.dtype:
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
    """Make a reference to a tensor, checked to lie within its storage.

    Args:
        where: names the tensor in messages.
        storage: None: there is no memory, so the tensor must be empty.

    Raises:
        RequestRejected: a value is wrong, or the tensor does not lie within its storage.
    """
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
    num_spanned = _num_spanned(where, ref.shape, ref.stride)
    available = ref.storage.num_bytes if ref.storage is not None else 0
    itemsize = ref.dtype.itemsize
    if (ref.offset + num_spanned) * itemsize > available:
        raise RequestRejected(f"{where}: the tensor reaches beyond its storage of {available} bytes")
    # Otherwise a copy of an expanded view could be larger than any memory.
    if math.prod(ref.shape) * itemsize > available:
        raise RequestRejected(f"{where}: the tensor repeats elements: send tensor.contiguous()")


def _num_spanned(where: str, shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Number of elements in memory from the first to the last, both included; 0 for an empty tensor."""
    if len(shape) != len(stride):
        raise RequestRejected(f"{where}: {len(shape)} sizes but {len(stride)} strides")
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def host_storage(where: str, manager: object, handle: object, num_bytes: object) -> StorageRef:
    """Check and make a reference to shared memory. Raises RequestRejected."""
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
) -> CudaStorageRef | None:
    """Check and make a reference to device memory; returns None for an empty storage.

    Args:
        event: handle of the event to wait for; None: none.

    Raises:
        RequestRejected: a value is wrong. Its message begins with `name`.
    """
    size = natural(num_bytes, f"{name}: storage size")
    begin = natural(offset_bytes, f"{name}: storage offset")
    if handle is None or size == 0:
        return None
    if not _is_device(device):
        raise RequestRejected(f"{name}: device: expected an index or a UUID")
    if not isinstance(handle, bytes) or not _is_memory_handle(handle):
        raise RequestRejected(f"{name}: memory handle: not one that torch makes")
    if not isinstance(counter_file, bytes) or not _COUNTER_FILE.fullmatch(counter_file):
        raise RequestRejected(f"{name}: reference counter file: expected the form /torch_<pid>_<n>")
    if type(counter_index) is not int or not 0 <= counter_index < NUM_COUNTERS:
        raise RequestRejected(f"{name}: reference counter index: expected 0 to {NUM_COUNTERS - 1}")
    if event is not None and (not isinstance(event, bytes) or len(event) != _EVENT_BYTES):
        raise RequestRejected(f"{name}: event handle: expected {_EVENT_BYTES} bytes")
    if begin % STORAGE_ALIGNMENT_BYTES:
        # A misaligned access by a kernel would end the engine's CUDA context.
        raise RequestRejected(f"{name}: storage offset: expected a multiple of {STORAGE_ALIGNMENT_BYTES}")
    return CudaStorageRef(device, handle, size, begin, counter_file, counter_index, event)


def _is_memory_handle(handle: bytes) -> bool:
    if len(handle) == DRIVER_HANDLE_BYTES:
        return True
    kind = handle[1:2]
    return kind in _HANDLE_KINDS and (kind == b"e" or len(handle) == 2 + DRIVER_HANDLE_BYTES)


def _is_device(value: object) -> TypeGuard[int | str]:
    return (type(value) is int and value >= 0) or (type(value) is str and _UUID.fullmatch(value) is not None)


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Layout of tensors. `num_spanned`: number of elements in memory from the first to the last."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    num_spanned: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements are contiguous in memory, in row-major order."""
        expected = 1
        for size, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and step != expected:
                return self.num_bytes == 0
            expected *= size
        return True


def checked_layout(where: str, dtype: str, shape: object, stride: object) -> TensorLayout:
    """Check and make a layout. RequestRejected: its message begins with `where`."""
    kind = dtype_named(dtype, where)
    whole, steps = tensor_shape(shape, f"{where}: shape"), sizes(stride, f"{where}: stride")
    layout = TensorLayout(kind, whole, steps, _num_spanned(where, whole, steps))
    if max(layout.num_spanned, layout.num_bytes) > _MAX_INT:
        raise RequestRejected(f"{where}: the tensor reaches beyond any storage")
    return layout


def contiguous_layout(dtype: torch.dtype, shape: tuple[int, ...]) -> TensorLayout:
    """The layout of a contiguous tensor."""
    *steps, num_elements = itertools.accumulate(reversed(shape), operator.mul, initial=1)
    return TensorLayout(dtype, shape, tuple(reversed(steps)), num_elements)


class TensorForm:
    """Names and layouts of a payload's tensors, which are the same in many payloads.

    Args:
        layout_T: index of each tensor's layout.

    Attributes:
        headers: filled by `describe`.
    """

    def __init__(
        self, names: Sequence[str], layouts: Sequence[TensorLayout], layout_T: NDArray[np.int64]
    ) -> None:
        self.names = names
        self.headers: list[TensorHeader] = []
        self._layouts = layouts
        self._layout_T = layout_T
        self.itemsize_T = self._each([layout.dtype.itemsize for layout in layouts])
        self.num_bytes_T = self._each([layout.num_bytes for layout in layouts])
        self.num_spanned_T = self._each([layout.num_spanned for layout in layouts])
        self.is_contiguous_T = self._each([layout.is_contiguous for layout in layouts]).astype(bool)
        self.num_bytes: int = sum(self.num_bytes_T.tolist())

    @classmethod
    def of(cls, names: Sequence[str], layouts: Iterable[TensorLayout]) -> Self:
        """Make the form of tensors that have one layout each; `describe` is done."""
        numbers: dict[TensorLayout, int] = {}
        layout_T = [numbers.setdefault(layout, len(numbers)) for layout in layouts]
        form = cls(names, list(numbers), np.array(layout_T, dtype=np.int64))
        form.describe(0, len(names))
        return form

    @cached_property
    def digest(self) -> bytes:
        """Hash of names and layouts. Forms with equal hashes are equal."""
        return blake2b(
            f"{self.names}{self._layouts}".encode() + self._layout_T.tobytes(), digest_size=16
        ).digest()

    def describe(self, first: int, end: int) -> None:
        """Append the headers of tensors `first` to `end`. Call it for all tensors in order."""
        layouts = self._layouts
        for name, number in zip(self.names[first:end], self._layout_T[first:end].tolist(), strict=True):
            layout = layouts[number]
            self.headers.append(TensorHeader(name, layout.shape, layout.dtype))

    def layout(self, index: int) -> TensorLayout:
        return self._layouts[int(self._layout_T[index])]

    def _each(self, by_layout: Sequence[int]) -> NDArray[np.int64]:
        return np.array(by_layout, dtype=np.int64)[self._layout_T]


@dataclass(frozen=True, slots=True, eq=False)
class TensorTable:
    """Tensors that were checked to lie within their storages, which are not opened yet.

    Attributes:
        storages: references to memory; None: an empty storage.
        storage_T, offset_T: index of each tensor's storage, and its offset there, in elements.
    """

    form: TensorForm
    storages: Sequence[AnyStorageRef | None]
    storage_T: NDArray[np.int64]
    offset_T: NDArray[np.int64]

    @classmethod
    def of(cls, refs: Sequence[tuple[str, TensorRef]]) -> Self:
        """Make a table of tensors that were checked one by one."""
        layouts = (
            TensorLayout(ref.dtype, ref.shape, ref.stride, _num_spanned(name, ref.shape, ref.stride))
            for name, ref in refs
        )
        form = TensorForm.of([name for name, _ in refs], layouts)
        numbers: dict[AnyStorageRef | None, int] = {}
        storage_T = [numbers.setdefault(ref.storage, len(numbers)) for _, ref in refs]
        offset_T = [ref.offset for _, ref in refs]
        columns = (np.array(column, dtype=np.int64) for column in (storage_T, offset_T))
        return cls(form, list(numbers), *columns)

    @classmethod
    def checked(
        cls,
        form: TensorForm,
        storages: Sequence[AnyStorageRef | None],
        storage_T: NDArray[np.int64],
        offset_T: NDArray[np.int64],
    ) -> Self:
        """Make and check a table. RequestRejected: some tensor does not lie within its storage."""
        made = cls(form, storages, storage_T, offset_T)
        is_known_T = (storage_T >= 0) & (storage_T < len(storages))
        for index in np.flatnonzero(~is_known_T)[:1].tolist():
            raise RequestRejected(
                f"{form.names[index][:200]}: storage {storage_T[index]}: the payload has {len(storages)}"
            )
        num_bytes_S = np.array([0 if one is None else one.num_bytes for one in storages], dtype=np.int64)
        available_T = num_bytes_S[storage_T]
        is_within_T = offset_T <= available_T // form.itemsize_T - form.num_spanned_T
        is_right_T = is_within_T & (offset_T >= 0) & (form.num_bytes_T <= available_T)
        for index in np.flatnonzero(~is_right_T)[:1].tolist():
            made.ref(index)  # Raises the error that says what is wrong.
            raise AssertionError("the two checks of a tensor's place differ")
        return made

    def ref(self, index: int) -> TensorRef:
        """Check and make the reference to one tensor. RequestRejected: it does not lie within its storage."""
        layout, storage = self.form.layout(index), self.storages[int(self.storage_T[index])]
        where = self.form.names[index][:200]
        offset = int(self.offset_T[index])
        return tensor_within(where, storage, layout.dtype, offset, layout.shape, layout.stride)

    def refs(self) -> Iterator[tuple[str, TensorRef]]:
        return ((name, self.ref(index)) for index, name in enumerate(self.form.names))

    @property
    def used_storages(self) -> list[AnyStorageRef]:
        """References to the storages that have tensors."""
        listed = (self.storages[number] for number in sorted(set(self.storage_T.tolist())))
        return [storage for storage in listed if storage is not None]
