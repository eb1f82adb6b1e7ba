"""The pages that the prefix cache has of windows: unlike others, they are kept and evicted one by one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Generic, TypeVar

Run = TypeVar("Run")

# In place of the id of a page that the cache does not have.
MISSING = -1


class WindowPages(Generic[Run]):
    """Who keeps which page, and those that nobody keeps in the order in which they were let go.

    Attributes:
        idle: page → when it was let go.
    """

    def __init__(self) -> None:
        self.idle: OrderedDict[int, int] = OrderedDict()
        self._runs: dict[int, Run] = {}
        self._num_leases: dict[int, int] = {}

    def place(self, pages: Iterable[int], run: Run, now: int) -> None:
        """Pages that no lease keeps yet are part of a run, or of another one than before."""
        for page in pages:
            if page == MISSING:
                continue
            if page not in self._runs:
                self.idle[page] = now
            self._runs[page] = run

    def keep(self, pages: Sequence[int]) -> None:
        """One more lease keeps these pages."""
        for page in pages:
            self._num_leases[page] = self._num_leases.get(page, 0) + 1
            self.idle.pop(page, None)

    def let_go(self, pages: Sequence[int], now: int) -> None:
        """A lease keeps these pages no more; the last is the first to be evicted."""
        for page in reversed(pages):
            self._num_leases[page] -= 1
            if not self._num_leases[page]:
                del self._num_leases[page]
                self.idle[page] = now

    def remove(self, page: int) -> Run:
        """The run of an idle page, which is in it no more."""
        del self.idle[page]
        return self._runs.pop(page)

    def relocate(self, target_of: Mapping[int, int]) -> None:
        """Some pages have moved to others."""
        self.idle = OrderedDict((target_of.get(page, page), since) for page, since in self.idle.items())
        self._runs = {target_of.get(page, page): run for page, run in self._runs.items()}
        self._num_leases = {target_of.get(page, page): count for page, count in self._num_leases.items()}
