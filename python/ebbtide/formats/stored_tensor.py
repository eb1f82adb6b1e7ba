"""Tensors in memory that others may still change, a file or shared memory: read, never mapped.

A page that is mapped from a file that somebody cuts short ends the process that touches it (SIGBUS). A read
that falls short is an error that can be answered.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, Protocol

import torch
from torch import Tensor

# What is converted from one type to another goes through memory of this size, which stays in the cache.
CACHED_BYTES: Final = 1 << 20


class Storage(Protocol):
    """Bytes that are read by their position."""

    def read_into(self, room: memoryview, offset: int) -> None:
        """Fill `room` with the bytes from `offset` on.

        Raises:
            RequestRejected: 400, they cannot be read, or are not all there. It names the storage.
        """


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A strided view of a storage, whose elements are read when they are asked for.

    Attributes:
        offset: of the first element in the storage, in bytes.
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
        """A tensor whose elements lie one behind the other from `offset` (bytes) on."""
        stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        return cls(storage, offset, shape, stride, dtype)

    def dim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def narrow(self, dim: int, start: int, length: int) -> StoredTensor:
        """As torch's: a view of part of a dimension."""
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        offset = self.offset + start * self.stride[dim] * self.dtype.itemsize
        return replace(self, offset=offset, shape=shape)

    def split(self, num_rows: int) -> Iterator[StoredTensor | Tensor]:
        """Views of at most `num_rows` rows each; a tensor whose rows are interleaved is read whole."""
        if any(outer < inner for outer, inner in pairwise(self.stride)):
            yield from torch.split(self.read(), num_rows)
            return
        for start in range(0, max(1, self.shape[0]), num_rows):
            yield self.narrow(0, start, min(num_rows, self.shape[0] - start))

    def read(self) -> Tensor:
        """The elements, in host memory of their own.

        Raises:
            RequestRejected: 400, as the storage's `read_into`.
        """
        return self._read(pin=False)

    def copy_to(self, room: Tensor) -> None:
        """Read the elements into a tensor of the same shape, on any device; returns when they are there.

        Raises:
            RequestRejected: 400, as the storage's `read_into`; some of `room` may have been written.
        """
        is_alike = room.dtype == self.dtype and room.stride() == self.stride
        if is_alike and room.device.type == "cpu" and room.is_contiguous():
            self.storage.read_into(_bytes_of(room), self.offset)
        elif room.device.type != "cpu" or self.dim() == 0:
            room.copy_(self._read(pin=room.is_cuda))
        else:
            num_rows = max(1, CACHED_BYTES // max(1, room[:1].nbytes))
            for piece, rows in zip(self.split(num_rows), torch.split(room, num_rows), strict=True):
                rows.copy_(whole(piece))

    def _read(self, *, pin: bool) -> Tensor:
        """The span from the first element to the last, seen through the strides."""
        if math.prod(self.shape) == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        span = torch.empty(last + 1, dtype=self.dtype, pin_memory=pin)
        self.storage.read_into(_bytes_of(span), self.offset)
        return span.as_strided(self.shape, self.stride)


def read_exactly(descriptor: int, room: memoryview, offset: int) -> int:
    """Fill `room` from an open file; returns how many bytes were there. Raises OSError."""
    done = 0
    while done < len(room):
        num_bytes = os.preadv(descriptor, [room[done:]], offset + done)
        if num_bytes == 0:
            break
        done += num_bytes
    return done


def whole(tensor: Tensor | StoredTensor) -> Tensor:
    """The tensor itself, or what is stored of it, read."""
    return tensor.read() if isinstance(tensor, StoredTensor) else tensor


def copy_into(room: Tensor, tensor: Tensor | StoredTensor) -> None:
    """`room.copy_` for both kinds."""
    if isinstance(tensor, StoredTensor):
        tensor.copy_to(room)
    else:
        room.copy_(tensor)


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor in host memory."""
    return tensor.view(-1).view(torch.uint8).numpy().data
