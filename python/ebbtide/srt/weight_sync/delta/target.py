"""A rank's parameters, as those who change some of their elements see them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ebbtide.srt.memory_saver.arena import Shadow
from ebbtide.srt.model_executor.host_copies import upload
from ebbtide.srt.model_executor.weight_copies import Destination
from ebbtide.srt.model_executor.weight_store import WeightStore
from ebbtide.srt.weight_sync.delta.patch import Place

# `Place.numbers` of a tensor that is not there.
_NOWHERE: Final = [0] * 8


@dataclass(frozen=True)
class PlaceTable:
    """Where T tensors lie on this rank, in `Place.numbers`: on the host, and where a kernel reads it."""

    rows_T8: NDArray[np.int64]
    on_device_T8: Tensor

    @classmethod
    def of(cls, places: Sequence[list[int] | None], device: torch.device) -> Self:
        """None: a tensor that nobody needs."""
        rows = [_NOWHERE if place is None else place for place in places]
        rows_T8 = np.array(rows, dtype=np.int64).reshape(-1, len(_NOWHERE))
        return cls(rows_T8, upload(rows_T8, device))


class StoreTarget:
    """The parameters of a store: live, or those of a staged copy."""

    def __init__(self, store: WeightStore, shadow: Shadow | None) -> None:
        self._store = store
        self._shadow = shadow

    def destination(self, name: str) -> Destination | None:
        """Where a tensor goes; None if nobody needs it."""
        return self._store.destination(name, self._shadow)

    def table(self, names: Sequence[str]) -> PlaceTable:
        """Where these tensors lie, counted in elements of `base`: in every copy of a store at the same place.

        It is kept: from one update to the next they are the same as a rule.
        """
        notes = self._store.notes
        known: tuple[list[str], PlaceTable] | None = notes.get(PlaceTable)
        if known is not None and known[0] == names:
            return known[1]
        table = PlaceTable.of([self._numbers(name) for name in names], self._store.device)
        notes[PlaceTable] = (list(names), table)
        return table

    def _numbers(self, name: str) -> list[int] | None:
        destination = self._store.destination(name, None)
        if destination is None:
            return None
        live = self._store.arena.view(0, (0,), destination.region.dtype)
        return Place.of(destination, self._store.shape(name)).numbers(live)

    def base(self, dtype: torch.dtype) -> Tensor:
        """All memory of the parameters, as integers."""
        memory = self._store.arena if self._shadow is None else self._shadow
        return memory.view(0, (memory.num_bytes // dtype.itemsize,), dtype)
