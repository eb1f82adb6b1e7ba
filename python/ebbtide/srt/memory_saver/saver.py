"""Memory savers: they make the arenas, by the backend that the engine was started with.

The library torch_memory_saver ends the process if the driver refuses, if memory is out at a resume, or if
memory is paused or resumed twice. So each call is made only in the state that allows it, and after a check
that there is room. (A process that takes the room at the same moment cannot be guarded against.)
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from importlib import import_module
from secrets import token_hex
from typing import Any, Protocol

import torch

from ebbtide.srt.errors import ConfigurationError, EngineError, OutOfDeviceMemory
from ebbtide.srt.memory_saver import MemoryTag
from ebbtide.srt.memory_saver.arena import Arena, ArenaState, round_up
from ebbtide.srt.memory_saver.virtual_arena import ChunkPool, VirtualArena
from ebbtide.srt.memory_saver.virtual_memory import VirtualMemory
from ebbtide.srt.slices import Slices

_PRELOAD_STEM = "torch_memory_saver_hook_mode_preload"
# torch cuts smaller requests out of segments of the first size; the second is the size of the driver's pages.
# A request for whole segments gets exactly those, so all bytes that are released become free.
_SEGMENT_BYTES = 20 << 20
_PAGE_BYTES = 2 << 20
# Left free at a resume: for the driver's tables, and for other processes that come and go.
MARGIN_BYTES = 256 << 20
# There are no chunks here, but the KV pool is laid out as if there were, on pages like a device's own.
TORCH_GRANULARITY = 2 << 20
# Bytes exchanged at a time, with three copies. A piece that fits the device's cache is read from there again.
EXCHANGE_BYTES = 16 << 20


class ArenaSource(Protocol):
    """Makes arenas of one kind."""

    @property
    def granularity(self) -> int:
        """Bytes of which chunk sizes should be a multiple."""

    def arena(self, tag: MemoryTag, num_bytes: int, chunk_bytes: int | None = None) -> Arena:
        """A released arena. Its memory is taken in pieces of `chunk_bytes`, if the backend can do that.

        OutOfDeviceMemory: there is no address range, or no memory for a backend that takes it right away.
        """


class MemorySaver(ArenaSource, Protocol):
    """Makes all arenas of an engine."""

    def chunk_pool(self, chunk_bytes: int) -> ChunkPool | None:
        """A pool whose arenas pass chunks on to each other; None: the backend cannot move memory."""


class VirtualMemorySaver:
    """Makes arenas over virtual memory, of the host or of a CUDA device."""

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
    """Makes arenas that never give memory back: torch allocates them, and a release is an error.

    A shadow is more of the same memory. A swap exchanges the bytes, which takes as long as about four copies.
    """

    granularity = TORCH_GRANULARITY

    def __init__(self, device: SavedDevice) -> None:
        self._device = device

    def arena(self, tag: MemoryTag, num_bytes: int, chunk_bytes: int | None = None) -> Arena:
        return TorchArena(tag, num_bytes, self._device)

    def chunk_pool(self, chunk_bytes: int) -> None:
        """None: memory that torch allocates cannot be moved."""


class SavedDevice(Protocol):
    """What arenas need of their device."""

    @property
    def name(self) -> str: ...
    def synchronize(self) -> None: ...

    def free_bytes(self) -> int: ...

    def trim(self) -> None: ...

    def virtual_memory(self) -> VirtualMemory: ...


class TorchArena(Arena):
    """Memory of torch's allocator, taken at once. Its state is released until the first resume."""

    def __init__(self, tag: MemoryTag, num_bytes: int, device: SavedDevice) -> None:
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

    def close_by_chunks(self) -> Slices[None]:
        self.close()
        yield self.virtual_bytes

    def _flat(self) -> torch.Tensor:
        return self._bytes

    def _resume_by_chunks(self, *, at_once: bool) -> Slices[None]:
        self._state = ArenaState.RESIDENT
        yield self.virtual_bytes

    def _release(self) -> int:
        if self.num_bytes:
            raise EngineError("memory_saver_backend is 'none': this memory stays resident")
        self._state = ArenaState.RELEASED
        return 0

    def _twin(self) -> TorchArena:
        """A shadow in plain memory of torch's allocator, also for subclasses."""
        return TorchArena(self.tag, self.num_bytes, self._device)

    def _exchange(self, other: Arena) -> None:
        assert isinstance(other, TorchArena)
        try:
            # Take all memory before the first byte moves, so that a failure changes nothing.
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


def open_memory_saver(backend: str, device: SavedDevice) -> MemorySaver:
    """Open the backend "auto", "torch_memory_saver" or "none". ConfigurationError: it does not work here."""
    match backend:
        case "auto":
            return VirtualMemorySaver(device.virtual_memory())
        case "torch_memory_saver":
            return TorchMemorySaverBackend(device)
        case _:
            return PlainMemory(device)


def preload_environment() -> dict[str, str]:
    """The environment that makes a child process load the library before anything else (mode preload).

    ConfigurationError: it is not installed, or not for this CUDA.
    """
    try:
        path = _module("torch_memory_saver.utils").get_binary_path_from_package(_PRELOAD_STEM)
    except RuntimeError as error:
        raise ConfigurationError(f"torch_memory_saver: {error}") from error
    present = os.environ.get("LD_PRELOAD")
    return {"LD_PRELOAD": f"{path}:{present}" if present else str(path)}


def hook_mode() -> str:
    """How the library hooks allocations in this process: "preload" if it was preloaded, else "torch"."""
    return "preload" if "torch_memory_saver" in os.environ.get("LD_PRELOAD", "") else "torch"


class TorchMemorySaverBackend(PlainMemory):
    """Makes arenas of one allocation each, in a region of the library of their own. A release pauses it.

    A shadow is plain memory of torch's allocator.

    Args:
        library: None: `torch_memory_saver.torch_memory_saver`.

    ConfigurationError: the library is not installed, or cannot work in this process.
    """

    def __init__(self, device: SavedDevice, library: Any = None) -> None:
        super().__init__(device)
        if library is None:
            library = _module("torch_memory_saver").torch_memory_saver
            with suppress(AttributeError):  # it can be set only once per process, and always to the same
                library.hook_mode = hook_mode()
        self._library = library
        # If it were destroyed at exit, it would free its pools outside of any region, and call exit(1).
        keep_for_ever(library)

    def arena(self, tag: MemoryTag, num_bytes: int, chunk_bytes: int | None = None) -> Arena:
        if not num_bytes:
            return TorchArena(tag, 0, self._device)
        return _SavedArena(tag, num_bytes, self._device, self._library)


class _SavedArena(TorchArena):
    """One allocation in a region with a unique name: regions of one name are paused together."""

    def __init__(self, tag: MemoryTag, num_bytes: int, device: SavedDevice, library: Any) -> None:
        self._region = f"{tag}-{token_hex(4)}"
        self._library = library
        super().__init__(tag, num_bytes, device)
        self.virtual_bytes = _whole_segments(num_bytes)
        # If it were freed, torch could hand its memory out again while it is paused.
        keep_for_ever(self._bytes)
        self._library.pause(self._region)

    def close(self) -> None:
        """Give the memory back. The addresses stay taken: the library cannot free what it has paused."""
        if self.is_resident:
            self._release()
        self._state = ArenaState.CLOSED

    def _resume_by_chunks(self, *, at_once: bool) -> Slices[None]:
        self._require_room(self.virtual_bytes)
        self._library.resume(self._region)
        self._state = ArenaState.RESIDENT
        yield self.virtual_bytes

    def _release(self) -> int:
        self._device.synchronize()  # the library unmaps at once
        self._library.pause(self._region)
        self._state = ArenaState.RELEASED
        return self.virtual_bytes

    def _allocate(self) -> torch.Tensor:
        num_bytes = _whole_segments(self.num_bytes)
        self._require_room(num_bytes)
        try:
            with self._library.region(tag=self._region, enable_cpu_backup=False):
                return torch.empty(num_bytes, dtype=torch.uint8, device=self._device.name)
        except torch.OutOfMemoryError as error:
            raise OutOfDeviceMemory(num_bytes, self._device.free_bytes()) from error

    def _require_room(self, num_bytes: int) -> None:
        if self._device.free_bytes() >= num_bytes + MARGIN_BYTES:
            return
        self._device.trim()
        free = self._device.free_bytes()
        if free < num_bytes + MARGIN_BYTES:
            raise OutOfDeviceMemory(num_bytes, max(0, free - MARGIN_BYTES))


def _whole_segments(num_bytes: int) -> int:
    return max(_SEGMENT_BYTES, round_up(num_bytes, _PAGE_BYTES))


def _module(name: str) -> Any:
    if "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
        raise ConfigurationError(
            "memory_saver_backend=torch_memory_saver does not work with expandable_segments: take it out of "
            "PYTORCH_CUDA_ALLOC_CONF"
        )
    try:
        return import_module(name)
    except ImportError as error:
        raise ConfigurationError(
            "memory_saver_backend=torch_memory_saver needs that package: pip install 'ebbtide[cuda]'"
        ) from error


def keep_for_ever(subject: object) -> None:
    """Take a reference that is never dropped, except by `let_go`."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(subject))


def let_go(subject: object) -> None:
    """Drop the reference that `keep_for_ever` took."""
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(subject))
