"""Which state lies in which slot: those of running requests, and checkpoints of prefixes. Plain Python."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class StateSlots:
    """The slots of a `StatePool`: one for each row of the page table, then one to spare, then checkpoints.

    Attributes:
        num_rows: of running requests.
        interval: tokens from one checkpoint of a long prompt or output to the next: whole pages.
        first_page: id of the first slot's first page.
        pages_per_slot: see `StatePool`.
    """

    num_rows: int
    num_checkpoints: int
    interval: int
    first_page: int
    pages_per_slot: int

    @property
    def num_slots(self) -> int:
        return self.num_rows + 1 + self.num_checkpoints

    @property
    def num_pages(self) -> int:
        return self.num_slots * self.pages_per_slot

    def pages(self, slot: int) -> range:
        """The ids of a slot's pages."""
        first = self.first_page + slot * self.pages_per_slot
        return range(first, first + self.pages_per_slot)


class CachedRun(Protocol):
    """A run of cached pages. `checkpoints`: number of its first pages → slot of the state behind them."""

    checkpoints: dict[int, int]


class Checkpoints:
    """The slots of checkpoints: free, about to be published by a request, or attached to a cached prefix.

    Whoever begins with a prefix gets a copy of its checkpoint before anything else is launched, so attached
    ones may be evicted at any time; the one used longest ago goes first.
    """

    def __init__(self, slots: StateSlots) -> None:
        self.slots = slots
        self._free = list(range(slots.num_slots - 1, slots.num_rows, -1))
        self._runs: OrderedDict[int, CachedRun] = OrderedDict()

    @property
    def attached(self) -> list[int]:
        """Slots of cached prefixes, the one used longest ago first."""
        return list(self._runs)

    def take(self) -> int | None:
        """A slot to write a state to; None: requests hold all of them."""
        if not self._free and self._runs:
            slot, run = self._runs.popitem(last=False)
            run.checkpoints = {end: other for end, other in run.checkpoints.items() if other != slot}
            return slot
        return self._free.pop() if self._free else None

    def give_back(self, slot: int) -> None:
        """A slot that was taken, or attached to a run that has forgotten it, holds nothing any more."""
        assert slot not in self._free, f"slot {slot} is free already"
        self._runs.pop(slot, None)
        self._free.append(slot)

    def attach(self, run: CachedRun, num_pages: int, slot: int) -> None:
        """The slot holds the state behind the first pages of a run, which has none there."""
        run.checkpoints[num_pages] = slot
        self._runs[slot] = run

    def detach_all(self) -> None:
        """What attached slots hold will be lost."""
        for run in self._runs.values():
            run.checkpoints = {}
        self._free += self._runs
        self._runs.clear()

    def note_used(self, slot: int) -> None:
        """A request begins with this checkpoint."""
        self._runs.move_to_end(slot)
