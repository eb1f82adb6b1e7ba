"""A rank's parameters, as those who change some of their elements see them."""

from __future__ import annotations

import torch
from torch import Tensor

from ebbtide.srt.memory_saver.arena import Shadow
from ebbtide.srt.model_executor.weight_store import Destination, WeightStore
from ebbtide.srt.weight_sync.delta.patch import Place


class StoreTarget:
    """The parameters of a store: live, or those of a staged copy.

    Args:
        known: what `numbers` said before, by name: it is the same for every copy of a store.
    """

    def __init__(self, store: WeightStore, shadow: Shadow | None, known: dict[str, list[int] | None]) -> None:
        self._store = store
        self._shadow = shadow
        self._known = known

    def destination(self, name: str) -> Destination | None:
        """Where a tensor goes; None if nobody needs it."""
        return self._store.destination(name, self._shadow)

    def numbers(self, name: str) -> list[int] | None:
        """As `Place.numbers`, of that."""
        if name not in self._known:
            destination = self._store.destination(name, None)
            if destination is None:
                self._known[name] = None
            else:
                place = Place.of(destination, self._store.shape(name))
                live = self._store.arena.view(0, (0,), destination.region.dtype)
                self._known[name] = place.numbers(live)
        return self._known[name]

    def base(self, dtype: torch.dtype) -> Tensor:
        """All memory of the parameters, as integers."""
        memory = self._store.arena if self._shadow is None else self._shadow
        return memory.view(0, (memory.num_bytes // dtype.itemsize,), dtype)
