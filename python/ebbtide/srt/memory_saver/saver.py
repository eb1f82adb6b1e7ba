"""Where arenas come from: one per memory tag, from the backend that the engine was started with."""

from __future__ import annotations

from typing import Protocol

from ebbtide.srt.memory_saver.arena import Arena
from ebbtide.srt.memory_saver.tags import MemoryTag
from ebbtide.srt.memory_saver.torch_arena import TORCH_GRANULARITY, TorchArena, TorchMemory
from ebbtide.srt.memory_saver.virtual_arena import ChunkPool, VirtualArena
from ebbtide.srt.memory_saver.virtual_memory.base import VirtualMemory


class ArenaSource(Protocol):
    """Makes arenas of one kind."""

    @property
    def granularity(self) -> int:
        """Bytes: of what chunks should be a multiple."""

    def arena(self, tag: MemoryTag, num_bytes: int, chunk_bytes: int | None = None) -> Arena:
        """A released arena, its memory taken in pieces of `chunk_bytes` where that can be chosen.

        OutOfDeviceMemory: addresses, or memory that is taken from the start, could not be had.
        """


class MemorySaver(ArenaSource, Protocol):
    """Where all arenas of an engine come from."""

    def chunk_pool(self, chunk_bytes: int) -> ChunkPool | None:
        """What makes arenas that pass chunks on to one another; None where memory cannot change places."""


class VirtualMemorySaver:
    """Arenas over virtual memory, of the host or of a CUDA device."""

    def __init__(self, vm: VirtualMemory) -> None:
        self._vm = vm

    @property
    def granularity(self) -> int:
        return self._vm.granularity

    def arena(self, tag: MemoryTag, num_bytes: int, chunk_bytes: int | None = None) -> Arena:
        return VirtualArena(tag, num_bytes, self._vm, chunk_bytes)

    def chunk_pool(self, chunk_bytes: int) -> ChunkPool:
        return ChunkPool(self._vm, chunk_bytes)


class PlainMemory:
    """Arenas for an engine that never gives memory back: torch allocates them, and a release is an error.

    A shadow is more of the same memory; to swap is to exchange the bytes, in about the time of four copies.
    """

    granularity = TORCH_GRANULARITY

    def __init__(self, device: TorchMemory) -> None:
        self._device = device

    def arena(self, tag: MemoryTag, num_bytes: int, chunk_bytes: int | None = None) -> Arena:
        return TorchArena(tag, num_bytes, self._device)

    def chunk_pool(self, chunk_bytes: int) -> None:
        """Memory that torch allocates cannot change places."""
