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

    keeps_contents: bool = False

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

    def prepare_release(self, keep: bool) -> None:
        """Nothing survives, so nothing is saved."""
        assert not keep, "only weights are kept"

    def release(self) -> int:
        freed_bytes = self._arena.release()
        if self._trim is not None:
            self._trim()
        return freed_bytes

    def resume(self) -> int:
        return self._arena.resume()


class BackedUpWeights(ArenaMemory):
    """The weights arena with a copy in host memory, so that a release can keep its contents.

    Args:
        store: the weights.
        pinning: `Device.host_pinning`. Where there is one, and every release keeps the contents, the copy's
            memory is taken from now on in the background: pinned memory takes seconds to get.
        keeps_contents: whether releases that do not say keep them.
    """

    def __init__(
        self, store: WeightStore, pinning: HostPinning | None = None, *, keeps_contents: bool
    ) -> None:
        super().__init__(store.arena)
        self.keeps_contents = keeps_contents
        self._is_saved = False
        self._store = store
        self._backup = HostBackup(store.arena, pinning)
        if keeps_contents and pinning is not None:
            self._backup.start_allocating()

    @property
    def backup_bytes(self) -> int:
        return self._backup.num_bytes

    def prepare_release(self, keep: bool) -> None:
        if keep:
            self._backup.save(self._store.generation)
        self._is_saved = keep

    def resume(self) -> int:
        mapped_bytes = super().resume()
        if self._is_saved:
            self._backup.restore()
        return mapped_bytes
