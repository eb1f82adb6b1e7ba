"""The memory behind each tag, as the control plane releases and resumes it."""

from __future__ import annotations

from ebbtide.srt.memory_saver.arena import Arena
from ebbtide.srt.memory_saver.backup import HostBackup
from ebbtide.srt.model_executor.weight_store import WeightStore


class ArenaMemory:
    """An arena whose contents are lost when it is released."""

    keeps_contents = False

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

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
        return self._arena.release()

    def resume(self) -> int:
        return self._arena.resume()


class BackedUpWeights(ArenaMemory):
    """The weights arena with a copy in host memory, so that a release keeps its contents."""

    keeps_contents = True

    def __init__(self, store: WeightStore) -> None:
        super().__init__(store.arena)
        self._store = store
        self._backup = HostBackup(store.arena)

    @property
    def backup_bytes(self) -> int:
        return self._backup.num_bytes

    def prepare_release(self) -> None:
        self._backup.save(self._store.generation)

    def resume(self) -> int:
        mapped_bytes = super().resume()
        self._backup.restore()
        return mapped_bytes
