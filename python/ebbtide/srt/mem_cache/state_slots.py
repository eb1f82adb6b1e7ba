"""Which state lies in which slot: those of running requests, and checkpoints of prefixes. Plain Python."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
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

    def last(self, runs: Iterable[tuple[CachedRun, int]]) -> tuple[int, int | None, int]:
        """The last checkpoint of a prefix: the pages before it (0: there is none), and its slot.

        Args:
            runs: that the prefix follows, each with how many of its pages.

        Returns also how many pages these are together.
        """
        depth, found, slot = 0, 0, None
        for run, num_pages in runs:
            end = max((end for end in run.checkpoints if end <= num_pages), default=None)
            if end is not None:
                found, slot = depth + end, run.checkpoints[end]
            depth += num_pages
        return found, slot, depth

    def split(self, run: CachedRun, upper: CachedRun, num_pages: int) -> None:
        """The first pages of a run have become another one before it."""
        slots, run.checkpoints = run.checkpoints, {}
        for end, slot in slots.items():
            part, before = (upper, 0) if end <= num_pages else (run, num_pages)
            self.attach(part, end - before, slot)

    def cut(self, run: CachedRun, num_pages: int) -> None:
        """A run has lost all but its first pages."""
        for end in [end for end in run.checkpoints if end > num_pages]:
            self.give_back(run.checkpoints.pop(end))

    def detach_all(self) -> None:
        """What attached slots hold will be lost."""
        for run in self._runs.values():
            run.checkpoints = {}
        self._free += self._runs
        self._runs.clear()

    def note_used(self, slot: int) -> None:
        """A request begins with this checkpoint."""
        self._runs.move_to_end(slot)
