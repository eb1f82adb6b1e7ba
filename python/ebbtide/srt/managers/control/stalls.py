"""The time for which control requests keep forward passes from running."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager

from ebbtide.srt.managers.io_struct import STALL_BOUNDS_S, ControlRequest, StallCounts


class LongestStall:
    """The longest turn of one request, or the longest time for which everything else waited for it."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._alone_since_s: float | None = None

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Within, a turn of the request is taken."""
        started_s = time.perf_counter()
        try:
            yield
        finally:
            since_s = started_s if self._alone_since_s is None else self._alone_since_s
            self.longest_s = max(self.longest_s, time.perf_counter() - since_s)

    def stand(self, *, is_alone: bool) -> None:
        """Whether no forward pass may run until its next turn."""
        if not is_alone:
            self._alone_since_s = None
        elif self._alone_since_s is None:
            self._alone_since_s = time.perf_counter()


class StallTally:
    """The stalls of all requests that have ended, by kind."""

    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = {}
        self._sums_s: dict[str, float] = {}

    def note(self, request: ControlRequest, stall: LongestStall) -> None:
        """A request has ended."""
        path = request.row.path
        if path is None:
            return  # asked by the engine itself, at every look
        name = path.removeprefix("/")
        counts = self._counts.setdefault(name, [0] * (len(STALL_BOUNDS_S) + 1))
        counts[bisect_left(STALL_BOUNDS_S, stall.longest_s)] += 1
        self._sums_s[name] = self._sums_s.get(name, 0.0) + stall.longest_s

    def report(self) -> dict[str, StallCounts]:
        """The counts of each kind of request, by its path without the slash."""
        return {
            name: StallCounts(counts=counts, sum_s=self._sums_s[name])
            for name, counts in self._counts.items()
        }
