"""Signs of life: every process of an engine gives them, and the one that started it looks for them.

A process that is stopped, or whose threads all wait for one that never lets go, cannot say so itself. Those
that wait for it notice first, and would be blamed.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Final

LOOKS_PER_LIMIT: Final = 10
_BEATS_PER_LIMIT: Final = 2 * LOOKS_PER_LIMIT


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
