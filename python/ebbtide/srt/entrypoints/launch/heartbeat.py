"""Signs of life: every process of an engine gives them, and the one that started it looks for them.

A process that is stopped, or whose threads all wait for one that never lets go, cannot say so itself. Those
that wait for it notice first, and would be blamed.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ebbtide.srt.entrypoints.launch.child_process import ChildProcess

_LOOKS_PER_LIMIT: Final = 10
_BEATS_PER_LIMIT: Final = 2 * _LOOKS_PER_LIMIT
# So many looks in a row without a sign, and the process is given up: before those that wait for it reach the
# limit, which may be on another node.
_LOOKS_UNTIL_LOST: Final = 8
# After so many it is taken for the cause, where another process has given up already.
_LOOKS_UNTIL_SUSPECT: Final = 2
_STATES: Final = {
    "T": "it is stopped (SIGSTOP)",
    "t": "it is stopped by a debugger",
    "D": "it waits in the kernel",
}
_STOPPED: Final = frozenset("Tt")


def start_beating(descriptor: int, limit_s: float) -> None:
    """Give signs of life to the parent until the process ends, from a thread of their own.

    Args:
        descriptor: of the parent's `Pulse`.
        limit_s: the shortest limit that a `PulseWatch` of the parent has.
    """

    def beat() -> None:
        while True:
            os.eventfd_write(descriptor, 1)
            time.sleep(limit_s / _BEATS_PER_LIMIT)

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()


class Pulse:
    """The signs of life of one process, as its parent sees them.

    They are counted by the kernel: a parent that does not look keeps nobody waiting.

    Attributes:
        descriptor: for `start_beating` in the process.
        num_missed: looks in a row that have found no new sign.
    """

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.num_missed = 0

    def look(self) -> None:
        try:
            os.eventfd_read(self.descriptor)
            self.num_missed = 0
        except BlockingIOError:
            self.num_missed += 1

    def close(self) -> None:
        os.close(self.descriptor)


class PulseWatch:
    """Looks at the signs of life of an engine's processes.

    It counts looks and not seconds: where everything is frozen together, and goes on after hours, nobody is
    at fault.

    Args:
        limit_s: how long others wait for one of these; a process is given up a little earlier.
        flag: where that is set.
    """

    def __init__(self, children: Sequence[ChildProcess], limit_s: float, flag: str) -> None:
        self._children = children
        self._limit_s = limit_s
        self._flag = flag
        self._interval_s = limit_s / _LOOKS_PER_LIMIT
        self._next_s = time.monotonic() + self._interval_s

    @property
    def left_s(self) -> float:
        """Seconds until the next look."""
        return max(0.0, self._next_s - time.monotonic())

    def look(self) -> None:
        """Look at all of them, if it is time to."""
        if self.left_s > 0:
            return
        self._next_s = time.monotonic() + self._interval_s
        for child in self._children:
            child.pulse.look()

    @property
    def lost(self) -> str | None:
        """Which process is to be given up, and how it is; None: all live."""
        return self.suspect if self._silent(_LOOKS_UNTIL_LOST) else None

    @property
    def suspect(self) -> str | None:
        """The same, of one that others may have waited for.

        One that is stopped rather than one that has been silent for longer: it may only lack a turn.
        """
        silent = self._silent(_LOOKS_UNTIL_SUSPECT)
        if not silent:
            return None
        states = {child.pid: _state_of(child.pid) for child in silent}
        child = max(silent, key=lambda child: (states[child.pid] in _STOPPED, child.pulse.num_missed))
        silent_s = child.pulse.num_missed * self._interval_s
        state = states[child.pid]
        return (
            f"the {child.name} process has not answered for {silent_s:g} s "
            f"({self._flag} {self._limit_s:g}){f': {_STATES[state]}' if state in _STATES else ''}"
        )

    def _silent(self, num_looks: int) -> list[ChildProcess]:
        """Those of whom so many looks in a row have found nothing. Whoever has ended is no riddle."""
        return [
            child for child in self._children if child.pulse.num_missed >= num_looks and not child.has_ended
        ]


def _state_of(pid: int) -> str:
    """The system's letter for the state of a process that was started here and has not been waited for."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
