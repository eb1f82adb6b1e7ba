"""The time for which control requests keep forward passes from running."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager

from ebbtide.srt.managers.io_struct import STALL_BOUNDS_S, ControlRequest, StallCounts


class Stall:
    """The longest time for which one request, or all of one update, kept the loop from a forward pass."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._began_s: float | None = None

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Within, a turn of it is taken."""
        started_s = time.perf_counter()
        try:
            yield
        finally:
            self._note(started_s)

    @property
    def lasts(self) -> bool:
        """Whether it has begun and not ended."""
        return self._began_s is not None

    def begin(self) -> None:
        """No forward pass can run from here to `end`, whatever the loop does meanwhile."""
        if self._began_s is None:
            self._began_s = time.perf_counter()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Within, a forward pass comes to its end that was launched before."""
        started_s = time.perf_counter()
        yield
        if self._began_s is not None:
            self._began_s += time.perf_counter() - started_s

    def end(self) -> None:
        """Forward passes can run again."""
        if self._began_s is not None:
            self._note(self._began_s)
            self._began_s = None

    def _note(self, started_s: float) -> None:
        self.longest_s = max(self.longest_s, time.perf_counter() - started_s)


class StallTally:
    """The stalls of all requests that have ended, by kind."""

    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = {}
        self._sums_s: dict[str, float] = {}

    def note(self, request: ControlRequest, stall: Stall) -> None:
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
