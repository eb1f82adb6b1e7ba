"""The control plane's view of the weights, over the weight store and the weight sources."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import suppress
from typing import Any

from ebbtide.srt.config import EngineConfig
from ebbtide.srt.errors import OutOfDeviceMemory, RequestRejected
from ebbtide.srt.managers.control.ports import IncomingWeights, Slices, Staging
from ebbtide.srt.managers.io_struct import (
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromTensorReqInput,
    WeightUpdateRequest,
)
from ebbtide.srt.memory_saver.arena import Shadow
from ebbtide.srt.model_executor.weight_store import WeightStore
from ebbtide.srt.weight_sync.disk_source import open_checkpoint
from ebbtide.srt.weight_sync.source import WeightSource
from ebbtide.srt.weight_sync.tensor_source import open_tensor_payload


class EngineWeights:
    """Opens updates, and finds room for them."""

    def __init__(self, store: WeightStore, config: EngineConfig) -> None:
        self.names = store.names
        self._store = store
        self._config = config

    def open(self, request: WeightUpdateRequest) -> IncomingWeights:
        return _Incoming(self._source(request), self._store)

    def stage(self, *, in_place: bool) -> Generator[int, None, Staging]:
        if not in_place:
            with suppress(OutOfDeviceMemory):
                return _Staged(self._store, (yield from self._store.arena.stage_by_chunks()))
        return _InPlace()

    def read(self, name: str, max_rows: int) -> list[Any]:
        rows: list[Any] = self._store.read(name, max_rows).tolist()
        return rows

    def _source(self, request: WeightUpdateRequest) -> WeightSource:
        match request:
            case UpdateWeightFromDiskReqInput():
                architecture = self._config.model.architecture
                return open_checkpoint(request.model_path, request.load_format, architecture=architecture)
            case UpdateWeightsFromTensorReqInput():
                return open_tensor_payload(
                    request.serialized_named_tensors,
                    request.load_format,
                    custom_weight_loaders=self._config.update.custom_weight_loaders,
                )
            case _:
                raise RequestRejected(f"{type(request).__name__} is not a weight source of this engine", 501)


class _InPlace:
    """Writes go straight into the live weights."""

    is_staged = False
    shadow = None

    def complete(self, written: frozenset[str]) -> Slices:
        """There is no copy to complete."""
        yield from ()

    def commit(self) -> None:
        """Everything is where it belongs."""

    def close(self) -> None:
        """Nothing is held."""


class _Staged:
    """Writes go into a second copy of the weights."""

    is_staged = True

    def __init__(self, store: WeightStore, shadow: Shadow) -> None:
        self.shadow = shadow
        self._store = store

    def complete(self, written: frozenset[str]) -> Slices:
        return self._store.complete(self.shadow, written)

    def commit(self) -> None:
        self._store.commit(self.shadow)

    def close(self) -> None:
        self.shadow.close()


class _Incoming:
    """One update's tensors, checked against the model by their headers."""

    def __init__(self, source: WeightSource, store: WeightStore) -> None:
        self._source = source
        self._store = store
        ignored = [entry for entry in source.entries if not source.direct and store.ignored(entry.name)]
        self.num_ignored = len(ignored)
        self.num_tensors = len(source.entries) - len(ignored)
        self._problems = [
            {"name": problem.name, "reason": problem.reason}
            for entry in source.entries
            if (problem := store.check(entry.name, entry.shape, entry.dtype, source.direct)) is not None
        ]
        covered = [store.covered(entry.name, source.direct) for entry in source.entries if not self._problems]
        self.names = frozenset[str]().union(*covered)

    def problems(self) -> list[dict[str, str]]:
        return self._problems

    def write(self, staging: Staging) -> Slices:
        assert isinstance(staging, _InPlace | _Staged)
        for name, tensor in self._source:
            yield self._store.write(name, tensor, staging.shadow, self._source.direct)

    def close(self) -> None:
        self._source.close()
