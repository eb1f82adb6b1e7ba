"""A copy of an arena in host memory, for contents that must survive a release."""

from __future__ import annotations

import torch

from ebbtide.srt.errors import EngineError
from ebbtide.srt.memory_saver.arena import Arena
from ebbtide.srt.memory_saver.virtual_memory.host import HostVirtualMemory


class HostBackup:
    """One host buffer per arena, taken at the first save and kept, with the generation of what it holds.

    Whoever writes to the arena counts generations; contents that have not changed are not copied again.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._buffer = Arena(arena.tag, arena.num_bytes, HostVirtualMemory())
        self._generation: int | None = None

    @property
    def generation(self) -> int | None:
        """The generation that was saved last; None before the first save."""
        return self._generation

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory held: none before the first save."""
        return self._buffer.resident_bytes

    def save(self, generation: int) -> None:
        """Copy the resident arena to the host, unless this generation is there already.

        Raises:
            EngineError: the arena is released: its contents are gone.
            OutOfDeviceMemory: the host has no room for the buffer; nothing was changed.
        """
        self._require_resident()
        if generation == self._generation:
            return
        self._buffer.resume()
        self._generation = None  # until the copy is whole
        _contents(self._buffer).copy_(_contents(self._arena))
        self._generation = generation

    def restore(self) -> None:
        """Copy what was saved back into the resident arena.

        Raises:
            EngineError: nothing was saved, or the arena is released.
        """
        self._require_resident()
        if self._generation is None:
            raise EngineError(f"there is no backup of {self._arena.tag} to restore")
        _contents(self._arena).copy_(_contents(self._buffer))

    def close(self) -> None:
        """Give the host memory back. Idempotent."""
        self._buffer.close()
        self._generation = None

    def _require_resident(self) -> None:
        if not self._arena.is_resident:
            raise EngineError(f"{self._arena.tag} is released: there is nothing to copy from or to")


def _contents(arena: Arena) -> torch.Tensor:
    return arena.view(0, (arena.num_bytes,), torch.uint8)
