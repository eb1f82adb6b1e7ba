"""Arenas whose memory the library torch_memory_saver takes away and brings back.

The library ends the process when the driver refuses, when memory is out at a resume, and when memory is
paused or resumed twice. So it is asked for one thing at a time, in the one state in which it can be done, and
only after looking whether there is room. (A process that takes the room in the same instant cannot be
guarded against.)
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import suppress
from importlib import import_module
from secrets import token_hex
from typing import Any

import torch

from ebbtide.srt.errors import ConfigurationError, OutOfDeviceMemory
from ebbtide.srt.memory_saver.arena import Arena, ArenaState, round_up
from ebbtide.srt.memory_saver.graph_pool import keep_for_ever
from ebbtide.srt.memory_saver.saver import TORCH_GRANULARITY, TorchArena, TorchMemory
from ebbtide.srt.memory_saver.tags import MemoryTag

_PRELOAD_STEM = "torch_memory_saver_hook_mode_preload"
# torch cuts smaller requests out of segments of this size, and pages of the driver are this large: a request
# for whole segments is given exactly those, so that bytes released are bytes free.
_SEGMENT_BYTES = 20 << 20
_PAGE_BYTES = 2 << 20
# Left free at a resume: the driver needs room for its tables, and other processes come and go.
MARGIN_BYTES = 256 << 20


def preload_environment() -> dict[str, str]:
    """What to set for a child process so that the library is there before anything else (mode preload).

    ConfigurationError: it is not installed, or not for this CUDA.
    """
    try:
        path = _module("torch_memory_saver.utils").get_binary_path_from_package(_PRELOAD_STEM)
    except RuntimeError as error:
        raise ConfigurationError(f"torch_memory_saver: {error}") from error
    present = os.environ.get("LD_PRELOAD")
    return {"LD_PRELOAD": f"{path}:{present}" if present else str(path)}


def hook_mode() -> str:
    """How the library gets at allocations in this process: "preload" if it was preloaded, else "torch"."""
    return "preload" if "torch_memory_saver" in os.environ.get("LD_PRELOAD", "") else "torch"


class TorchMemorySaverBackend:
    """Arenas of one allocation each, made in a region of the library that is theirs alone.

    A release is a pause of the region, a resume a resume. A shadow is memory of torch's own; to swap is to
    exchange the bytes, in about the time of four copies. `library`: what
    `torch_memory_saver.torch_memory_saver` is; None: that.

    ConfigurationError: the library is not installed, or cannot work in this process.
    """

    granularity = TORCH_GRANULARITY

    def __init__(self, device: TorchMemory, library: Any = None) -> None:
        self._device = device
        if library is None:
            library = _module("torch_memory_saver").torch_memory_saver
            with suppress(AttributeError):  # it can be set once in a process, and will have been to the same
                library.hook_mode = hook_mode()
        self._library = library
        # Destroyed as the interpreter ends, it would free its pools outside of any region and call exit(1).
        keep_for_ever(library)

    def arena(self, tag: MemoryTag, num_bytes: int, chunk_bytes: int | None = None) -> Arena:
        if not num_bytes:
            return TorchArena(tag, 0, self._device)
        return _SavedArena(tag, num_bytes, self._device, self._library)

    def chunk_pool(self, chunk_bytes: int) -> None:
        """What the library has taken away it brings back to the same place only."""


class _SavedArena(TorchArena):
    """One allocation in a region of its own: two of one name would be paused together."""

    def __init__(self, tag: MemoryTag, num_bytes: int, device: TorchMemory, library: Any) -> None:
        self._region = f"{tag}-{token_hex(4)}"
        self._library = library
        super().__init__(tag, num_bytes, device)
        self.virtual_bytes = _whole_segments(num_bytes)
        # Dropped, its memory could be given out again while it is paused.
        keep_for_ever(self._bytes)
        self._library.pause(self._region)

    def close(self) -> None:
        """Give the memory back. The addresses stay taken: the library cannot free what it has paused."""
        if self.is_resident:
            self._release()
        self._state = ArenaState.CLOSED

    def _resume_by_chunks(self, *, at_once: bool) -> Generator[int, None, None]:
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
