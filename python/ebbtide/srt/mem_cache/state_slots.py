"""The slots of recurrent states: of running requests, and checkpoints of cached prefixes. Plain Python."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class StateSlots:
    """The slots of a `StatePool`: one for each row of the page table, then one to spare, then checkpoints.

    Attributes:
        num_rows: how many requests may run.
        interval: tokens between two checkpoints of a long prompt or output; a multiple of the page size.
        first_page: page id of the first slot's first page.
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
    """A run of cached pages. `checkpoints`: number of pages → slot of the state after them."""

    checkpoints: dict[int, int]


class Checkpoints:
    """The slots of checkpoints: free, held by a request that will publish them, or attached to a cached
    prefix.

    A request that begins with a prefix gets a copy of its checkpoint before anything else is launched. So
    attached ones may be evicted at any time, the least recently used first.
    """

    def __init__(self, slots: StateSlots) -> None:
        self.slots = slots
        self._free = list(range(slots.num_slots - 1, slots.num_rows, -1))
        self._runs: OrderedDict[int, CachedRun] = OrderedDict()

    @property
    def attached(self) -> list[int]:
        """Slots of cached prefixes, the least recently used first."""
        return list(self._runs)

    def take(self) -> int | None:
        """Take a slot for a state, evicting one if none is free. None: requests hold all slots."""
        if not self._free and self._runs:
            slot, run = self._runs.popitem(last=False)
            run.checkpoints = {end: other for end, other in run.checkpoints.items() if other != slot}
            return slot
        return self._free.pop() if self._free else None

    def give_back(self, slot: int) -> None:
        """Free a slot that was taken, or that its run has forgotten."""
        assert slot not in self._free, f"slot {slot} is free already"
        self._runs.pop(slot, None)
        self._free.append(slot)

    def attach(self, run: CachedRun, num_pages: int, slot: int) -> None:
        """Attach a slot with the state after the first `num_pages` pages of a run."""
        run.checkpoints[num_pages] = slot
        self._runs[slot] = run

    def last(self, runs: Iterable[tuple[CachedRun, int]]) -> tuple[int, int | None, int]:
        """The last checkpoint of a prefix: pages before it (0: there is none), its slot, and pages in all.

        Args:
            runs: the runs of the prefix, each with how many of its pages belong to it.
        """
        depth, found, slot = 0, 0, None
        for run, num_pages in runs:
            end = max((end for end in run.checkpoints if end <= num_pages), default=None)
            if end is not None:
                found, slot = depth + end, run.checkpoints[end]
            depth += num_pages
        return found, slot, depth

    def split(self, run: CachedRun, upper: CachedRun, num_pages: int) -> None:
        """Divide the checkpoints of a run whose first pages were moved to `upper`."""
        slots, run.checkpoints = run.checkpoints, {}
        for end, slot in slots.items():
            part, before = (upper, 0) if end <= num_pages else (run, num_pages)
            self.attach(part, end - before, slot)

    def cut(self, run: CachedRun, num_pages: int) -> None:
        """Free the checkpoints of a run after its first `num_pages` pages, which are all it keeps."""
        for end in [end for end in run.checkpoints if end > num_pages]:
            self.give_back(run.checkpoints.pop(end))

    def detach_all(self) -> None:
        """Free all attached slots, whose contents will be lost."""
        for run in self._runs.values():
            run.checkpoints = {}
        self._free += self._runs
        self._runs.clear()

    def note_used(self, slot: int) -> None:
        """Note that a request begins with this checkpoint."""
        self._runs.move_to_end(slot)
