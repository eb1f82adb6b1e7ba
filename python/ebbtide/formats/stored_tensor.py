"""Tensors in files or shared memory that other processes may still change: they are read, never mapped.

If another process truncates a mapped file, access to it kills this process (SIGBUS). A read then returns less
data, which can be refused.
"""

from __future__ import annotations

import fcntl
import math
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Final, Protocol

import torch
from torch import Tensor

from ebbtide.formats.tensor_refs import NUM_COUNTERS, CudaStorageRef, StorageRef
from ebbtide.srt.errors import RequestRejected

HEADER_BYTES: Final = 64
SHARED_MEMORY: Final = Path("/dev/shm")
KEEP_ALIVE: Final = "keep the sending process and its tensors alive until the update is answered"
_COUNT: Final = struct.Struct("=i")
COUNTER: Final = struct.Struct("=q")


class Storage(Protocol):
    """Bytes that can be read at any offset."""

    def read_into(self, room: memoryview, offset: int) -> None:
        """Fill `room` with the bytes from `offset` on. RequestRejected (400): there are fewer."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A strided view of a storage. Its elements are read on demand.

    Attributes:
        offset: of the first element, in bytes.
        stride: in elements.
    """

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def contiguous(
        cls, storage: Storage, offset: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> StoredTensor:
        """A contiguous tensor that begins at `offset` (bytes)."""
        stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        return cls(storage, offset, shape, stride, dtype)

    def dim(self) -> int:
        return len(self.shape)

    def narrow(self, dim: int, start: int, length: int) -> StoredTensor:
        """A view of `length` indices of a dimension, like `torch.Tensor.narrow`."""
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        offset = self.offset + start * self.stride[dim] * self.dtype.itemsize
        return replace(self, offset=offset, shape=shape)

    def split(self, num_rows: int) -> Iterator[StoredTensor | Tensor]:
        """Yield views of at most `num_rows` rows. If strides are not descending, the tensor is read whole."""
        if any(outer < inner for outer, inner in pairwise(self.stride)):
            yield from torch.split(self.read(), num_rows)
            return
        for start in range(0, max(1, self.shape[0]), num_rows):
            yield self.narrow(0, start, min(num_rows, self.shape[0] - start))

    def read(self) -> Tensor:
        """Read the elements into new host memory."""
        return self._read(pin=False)

    def copy_to(self, room: Tensor) -> None:
        """Read the elements into a tensor of the same shape, on any device; returns when they are there."""
        is_alike = room.dtype == self.dtype and room.stride() == self.stride
        if is_alike and room.device.type == "cpu" and room.is_contiguous():
            self.storage.read_into(_bytes_of(room), self.offset)
        else:
            room.copy_(self._read(pin=room.is_cuda))

    def _read(self, *, pin: bool) -> Tensor:
        """Read the span from the first element to the last, and view it with the strides."""
        if math.prod(self.shape) == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        span = torch.empty(last + 1, dtype=self.dtype, pin_memory=pin)
        self.storage.read_into(_bytes_of(span), self.offset)
        return span.as_strided(self.shape, self.stride)


def read_exactly(descriptor: int, room: memoryview, offset: int) -> int:
    """Read from an open file into `room`; returns the number of bytes, fewer at its end. Raises OSError."""
    done = 0
    while done < len(room):
        num_bytes = os.preadv(descriptor, [room[done:]], offset + done)
        if num_bytes == 0:
            break
        done += num_bytes
    return done


def whole(tensor: Tensor | StoredTensor) -> Tensor:
    """The tensor itself, or a stored one read into host memory."""
    return tensor.read() if isinstance(tensor, StoredTensor) else tensor


def copy_into(room: Tensor, tensor: Tensor | StoredTensor) -> None:
    """Copy a tensor of either kind into `room`, of the same shape."""
    if isinstance(tensor, StoredTensor):
        tensor.copy_to(room)
    else:
        room.copy_(tensor)


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data


def object_path(handle: bytes) -> Path:
    """Path of the shared-memory object of a torch handle, such as `/torch_<pid>_<n>_<n>`."""
    return SHARED_MEMORY / os.fsdecode(handle).removeprefix("/")


class SharedBlock:
    """A block of shared memory of another process, open for reads by position.

    Args:
        handle: torch's.
        num_bytes: that the payload says it has.

    Attributes:
        references: that this process holds to it.

    Raises:
        RequestRejected: it cannot be opened, is no regular file, or is smaller.
    """

    def __init__(self, handle: bytes, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.references: set[StorageRef] = set()
        self._path = object_path(handle)
        try:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise RequestRejected(f"{self} cannot be opened ({error.strerror}): {KEEP_ALIVE}") from error
        try:
            self._check()
        except RequestRejected:
            os.close(self._descriptor)
            raise

    def read_into(self, room: memoryview, offset: int) -> None:
        """Fill `room` with the bytes from `offset` on. RequestRejected (400): the block was truncated."""
        num_bytes = read_exactly(self._descriptor, room, HEADER_BYTES + offset)
        if num_bytes < len(room):
            raise RequestRejected(
                f"{self} was cut short: it ends within the {len(room)} bytes from {offset} on. {KEEP_ALIVE}"
            )

    def close(self) -> None:
        """Close the file, without dropping the references."""
        os.close(self._descriptor)

    def drop(self) -> None:
        """Subtract the references from the block's count, remove the block if none is left, and close it."""
        with closing(self):
            # Ranks may drop references at the same time. The sender keeps its own until all have.
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            count = os.pread(self._descriptor, _COUNT.size, 0)
            if len(count) < _COUNT.size or not self._path.exists():
                return  # It was truncated, or removed: at a count of 0, torch would try to remove it again.
            [before] = _COUNT.unpack(count)
            os.pwrite(self._descriptor, _COUNT.pack(before - len(self.references)), 0)
            if before == len(self.references):
                self._path.unlink(missing_ok=True)

    def __str__(self) -> str:
        return f"shared memory /{self._path.name}"

    def _check(self) -> None:
        found = os.fstat(self._descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise RequestRejected(f"{self} is not what torch makes")
        held_bytes = max(found.st_size - HEADER_BYTES, 0)
        if held_bytes < self.num_bytes:
            raise RequestRejected(f"{self} holds {held_bytes} bytes, the payload says {self.num_bytes}")


class Counters:
    """The sender's files of reference counts, each opened once.

    They are read and written by position: if a mapped file were truncated, access would kill this process.
    """

    def __init__(self) -> None:
        self._files: dict[bytes, int | None] = {}

    def add(self, ref: CudaStorageRef, change: int) -> int | None:
        """Add to the count of a reference; returns the new count, or None if the file or count is missing."""
        if ref.counter_file not in self._files:
            self._files[ref.counter_file] = _opened(ref.counter_file)
        descriptor = self._files[ref.counter_file]
        if descriptor is None:
            return None
        at = HEADER_BYTES + ref.counter_index * COUNTER.size
        found = os.pread(descriptor, COUNTER.size, at)
        if len(found) < COUNTER.size:
            return None
        [value] = COUNTER.unpack(found)
        if change:
            os.pwrite(descriptor, COUNTER.pack(value + change), at)
        return int(value + change)

    def close(self) -> None:
        """Close the files. Idempotent; `add` opens them again."""
        while self._files:
            _, descriptor = self._files.popitem()
            if descriptor is not None:
                os.close(descriptor)


def _opened(counter_file: bytes) -> int | None:
    try:
        descriptor = os.open(object_path(counter_file), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_size < HEADER_BYTES + NUM_COUNTERS * COUNTER.size:
        os.close(descriptor)
        return None
    return descriptor


def is_held(counter_file: bytes) -> bool:
    """Whether a sender still locks its file of counts, which means that its memory may stay mapped."""
    try:
        descriptor = os.open(object_path(counter_file), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False
