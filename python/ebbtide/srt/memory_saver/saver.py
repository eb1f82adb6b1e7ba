"""Where arenas come from: one per memory tag, from the backend that the engine was started with."""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol

import torch

from ebbtide.srt.errors import EngineError, OutOfDeviceMemory
from ebbtide.srt.memory_saver.arena import Arena, ArenaState
from ebbtide.srt.memory_saver.tags import MemoryTag
from ebbtide.srt.memory_saver.virtual_arena import ChunkPool, VirtualArena
from ebbtide.srt.memory_saver.virtual_memory.base import VirtualMemory

# Chunks mean nothing here; what is laid out in them is laid out as on a device's own pages.
TORCH_GRANULARITY = 2 << 20
# Three copies per piece: one that fits into the device's cache is read from there the second time.
EXCHANGE_BYTES = 16 << 20


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


class TorchMemory(Protocol):
    """What these arenas need of the device that their memory is on."""

    @property
    def name(self) -> str: ...
    def synchronize(self) -> None: ...

    def free_bytes(self) -> int: ...

    def trim(self) -> None: ...


class TorchArena(Arena):
    """Memory that is there from the first to the last moment: released only until it is first resumed."""

    def __init__(self, tag: MemoryTag, num_bytes: int, device: TorchMemory) -> None:
        super().__init__(tag, num_bytes)
        self._state = ArenaState.RELEASED
        self._device = device
        self._bytes = self._allocate()

    @property
    def state(self) -> ArenaState:
        return self._state

    @property
    def is_whole(self) -> bool:
        return self.is_resident

    @property
    def resident_bytes(self) -> int:
        return self.virtual_bytes if self.is_resident else 0

    @property
    def address(self) -> int:
        return self._bytes.data_ptr()

    def shrink(self, num_bytes: int) -> int:
        return 0

    def close(self) -> None:
        if self._state is ArenaState.CLOSED:
            return
        self._state = ArenaState.CLOSED
        self._bytes = self._bytes[:0].clone()
        self._device.trim()

    def close_by_chunks(self) -> Generator[int, None, None]:
        self.close()
        yield self.virtual_bytes

    def _flat(self) -> torch.Tensor:
        return self._bytes

    def _resume_by_chunks(self, *, at_once: bool) -> Generator[int, None, None]:
        self._state = ArenaState.RESIDENT
        yield self.virtual_bytes

    def _release(self) -> int:
        if self.num_bytes:
            raise EngineError("memory_saver_backend is 'none': this memory stays resident")
        self._state = ArenaState.RELEASED
        return 0

    def _twin(self) -> TorchArena:
        """Memory of torch's own, also of an arena that is released in another way."""
        return TorchArena(self.tag, self.num_bytes, self._device)

    def _exchange(self, other: Arena, *, maps_former: bool) -> None:
        assert isinstance(other, TorchArena)
        try:
            # All memory that is needed is taken before the first byte moves.
            piece_bytes = min(self.num_bytes, EXCHANGE_BYTES)
            spare = torch.empty(piece_bytes, dtype=torch.uint8, device=self._device.name)
        except torch.OutOfMemoryError as error:
            raise OutOfDeviceMemory(piece_bytes, self._device.free_bytes()) from error
        self._device.synchronize()
        ours, theirs = (arena._bytes[: self.num_bytes] for arena in (self, other))
        pieces = zip(torch.split(ours, EXCHANGE_BYTES), torch.split(theirs, EXCHANGE_BYTES), strict=True)
        for here, there in pieces:
            kept = spare[: here.nbytes].copy_(here)
            here.copy_(there)
            there.copy_(kept)
        self._device.synchronize()

    def _allocate(self) -> torch.Tensor:
        try:
            return torch.empty(self.num_bytes, dtype=torch.uint8, device=self._device.name)
        except torch.OutOfMemoryError as error:
            raise OutOfDeviceMemory(self.num_bytes, self._device.free_bytes()) from error
