"""The memory behind each tag, as the control plane releases and resumes it."""

from __future__ import annotations

from collections.abc import Callable

from ebbtide.srt.memory_saver.arena import Arena
from ebbtide.srt.memory_saver.backup import HostBackup, HostPinning
from ebbtide.srt.model_executor.weight_store import WeightStore


class ArenaMemory:
    """An arena whose contents are lost when it is released.

    Args:
        arena: the memory.
        trim: called after a release, to give memory back that was only kept for reuse; `Device.trim`.
        is_needed: no forward pass may run without it.
    """

    keeps_contents = False

    def __init__(
        self, arena: Arena, trim: Callable[[], None] | None = None, *, is_needed: bool = True
    ) -> None:
        self.is_needed = is_needed
        self._arena = arena
        self._trim = trim

    @property
    def virtual_bytes(self) -> int:
        return self._arena.virtual_bytes

    @property
    def resident_bytes(self) -> int:
        return self._arena.resident_bytes

    @property
    def backup_bytes(self) -> int:
        return 0

    def prepare_release(self) -> None:
        """Nothing survives, so nothing is saved."""

    def release(self) -> int:
        freed_bytes = self._arena.release()
        if self._trim is not None:
            self._trim()
        return freed_bytes

    def resume(self) -> int:
        return self._arena.resume()


class BackedUpWeights(ArenaMemory):
    """The weights arena with a copy in host memory, so that a release keeps its contents.

    Args:
        store: the weights.
        pinning: `Device.host_pinning`. Where there is one, the copy's memory is taken from now on in the
            background: pinned memory takes seconds to get.
    """

    keeps_contents = True

    def __init__(self, store: WeightStore, pinning: HostPinning | None = None) -> None:
        super().__init__(store.arena)
        self._store = store
        self._backup = HostBackup(store.arena, pinning)
        if pinning is not None:
            self._backup.start_allocating()

    @property
    def backup_bytes(self) -> int:
        return self._backup.num_bytes

    def prepare_release(self) -> None:
        self._backup.save(self._store.generation)

    def resume(self) -> int:
        mapped_bytes = super().resume()
        self._backup.restore()
        return mapped_bytes
