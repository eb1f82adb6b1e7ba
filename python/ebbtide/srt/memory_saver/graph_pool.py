"""Puts the scratch memory of CUDA graphs into an arena, so that it can be released while the graphs stay.

Captured graphs keep intermediate results at fixed addresses, here in an arena. After a resume the addresses
are valid again. The contents need not survive: only outputs outlive a replay, and they are read before a
release.
"""

from __future__ import annotations

import ctypes
from bisect import insort
from collections.abc import Callable
from typing import Any

import torch

from ebbtide.srt.errors import EngineError
from ebbtide.srt.memory_saver.arena import Arena, round_up
from ebbtide.srt.memory_saver.saver import keep_for_ever, let_go

# The alignment that torch expects of device memory.
ALIGNMENT_BYTES = 512

_ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)


class BlockCutter:
    """A first-fit allocator over a range of bytes."""

    def __init__(self, num_bytes: int) -> None:
        self._free: list[tuple[int, int]] = [(0, num_bytes)]  # (start, end), in order, never touching
        self._taken: dict[int, int] = {}
        self.peak_bytes = 0

    @property
    def taken_bytes(self) -> int:
        return sum(end - start for start, end in self._taken.items())

    def take(self, num_bytes: int) -> int | None:
        size = round_up(max(1, num_bytes), ALIGNMENT_BYTES)
        for index, (start, end) in enumerate(self._free):
            if end - start >= size:
                self._free[index : index + 1] = [(start + size, end)] if end - start > size else []
                self._taken[start] = start + size
                self.peak_bytes = max(self.peak_bytes, start + size)
                return start
        return None

    def give(self, start: int) -> None:
        insort(self._free, (start, self._taken.pop(start)))
        merged: list[tuple[int, int]] = []
        for block in self._free:
            if merged and merged[-1][1] == block[0]:
                block = (merged.pop()[0], block[1])
            merged.append(block)
        self._free = merged


class GraphPool:
    """A torch memory pool for `torch.cuda.graph(pool=...)` whose memory is an arena's, used by nothing else.

    The arena must be resident during capture and replay. Where it is full, torch raises OutOfMemoryError.
    While a graph is captured no other thread may allocate or free CUDA memory: torch calls back into Python
    with its allocator locked.

    Run what is to be captured once before, on the stream of the capture: libraries then have their lasting
    workspaces (cuBLAS has one per stream) outside of the arena, where other work may use them at any time.

    To close: first the graphs (`graph.reset()`) and every tensor made during capture, then this pool, then
    the arena.

    Args:
        make_pool: makes the pool, and an object that must outlive it, from the addresses of the two C
            functions; None: a torch.cuda.MemPool and its allocator.
    """

    def __init__(self, arena: Arena, make_pool: Callable[[int, int], tuple[Any, Any]] | None = None) -> None:
        # The first attribute, so that it is destroyed first: the pool then still calls the functions below.
        self._pool: Any = None
        self._arena = arena
        self._blocks = BlockCutter(arena.num_bytes)
        # Never hand out the first block: the arena may be an allocation of torch, with the same address.
        self._blocks.take(ALIGNMENT_BYTES)
        self._functions = (_ALLOCATE(self._allocate), _FREE(self._free))
        addresses = [_address(function) for function in self._functions]
        make = make_pool if make_pool is not None else _torch_pool
        self._pool, self._allocator = make(*addresses)
        # At an exit without `close`, the pool must not be destroyed: its functions may be gone already.
        keep_for_ever(self._pool)

    @property
    def id(self) -> tuple[int, int]:
        """What `torch.cuda.graph(pool=...)` takes."""
        identity: tuple[int, int] = self._pool.id
        return identity

    @property
    def peak_bytes(self) -> int:
        """The most bytes of the arena, counted from its start, that were ever in use."""
        return self._blocks.peak_bytes

    def trim(self) -> int:
        """After the last capture, give up for good the memory that none has used; returns the bytes."""
        return self._arena.shrink(self.peak_bytes)

    def close(self) -> None:
        """Destroy torch's pool.

        EngineError: a graph, or a tensor made during capture, still uses memory of it.
        """
        if self._pool is not None:
            let_go(self._pool)
        self._pool = None  # torch gives its segments back now
        held_bytes = self._blocks.taken_bytes - ALIGNMENT_BYTES
        if held_bytes:
            raise EngineError(f"{held_bytes} bytes of the graph pool are still in use")

    def _allocate(self, num_bytes: int, device: int, stream: int | None) -> int | None:
        offset = self._blocks.take(num_bytes)
        if offset is None:
            return None
        if offset + num_bytes > self._arena.num_bytes:  # it was trimmed
            self._blocks.give(offset)
            return None
        return self._arena.address + offset

    def _free(self, address: int, num_bytes: int, device: int, stream: int | None) -> None:
        self._blocks.give(address - self._arena.address)


def _torch_pool(allocate: int, free: int) -> tuple[Any, Any]:
    allocator = torch._C._cuda_customAllocator(allocate, free)
    return torch.cuda.MemPool(allocator), allocator


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0
