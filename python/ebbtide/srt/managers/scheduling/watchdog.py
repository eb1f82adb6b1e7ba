"""Notices that a rank's loop stands still, says where, and ends the process."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

from ebbtide.srt.errors import HUNG_EXIT_STATUS

logger = logging.getLogger(__name__)

# How many looks are taken within a limit, so that it is exceeded by a tenth at most.
_LOOKS_PER_LIMIT: Final = 10


class Watchdog:
    """A thread that looks at what a loop is doing.

    Time in which it could not look is not counted: then the whole process stood still (SIGSTOP, a container
    that is frozen), and the loop had no chance to go on.

    Args:
        activity: what the loop is doing, and since when, on the monotonic clock; None: it waits for messages.
        limit_s: when one thing takes longer, `end` is called with what to say of it.
        soft_limit_s: when it takes longer, that is logged once with the stacks of all threads; None: never.
    """

    def __init__(
        self,
        activity: Callable[[], tuple[str, float] | None],
        limit_s: float,
        soft_limit_s: float | None,
        end: Callable[[str], None],
    ) -> None:
        self._activity = activity
        self._limit_s = limit_s
        self._soft_limit_s = soft_limit_s
        self._end = end
        self._reported: tuple[str, float] | None = None
        self._interval_s = min(limit_s, soft_limit_s or limit_s) / _LOOKS_PER_LIMIT
        self._looked_s = time.monotonic()
        self._seen: tuple[str, float] | None = None
        self._stood_still_s = 0.0

    def start(self) -> None:
        """Look until the process ends."""
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def look(self) -> None:
        """Compare what the loop is doing with the limits."""
        now, current = time.monotonic(), self._activity()
        late_s, self._looked_s = now - self._looked_s - self._interval_s, now
        if current != self._seen:
            self._seen, self._stood_still_s = current, 0.0
        if late_s > self._interval_s:
            self._stood_still_s += late_s
        if current is None:
            return
        what, since_s = current
        taken_s = now - since_s - self._stood_still_s
        if taken_s > self._limit_s:
            message = f"{what} has not ended within {self._limit_s:g} s (--watchdog-timeout)"
            # Stacks do not say whose they are, and those of several ranks may lie in one log.
            logger.critical("%s; where every thread stands:", message)
            dump_stacks()
            self._end(message)
        elif self._soft_limit_s is not None and taken_s > self._soft_limit_s and current != self._reported:
            self._reported = current
            logger.error(
                "%s takes longer than %g s (--soft-watchdog-timeout); where every thread stands:",
                *(what, self._soft_limit_s),
            )
            dump_stacks()

    def _run(self) -> None:
        while True:
            time.sleep(self._interval_s)
            self.look()


def dump_stacks() -> None:
    """Write where every thread of this process stands to its standard error."""
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)


def end_hung_process(say: Callable[[str], None], message: str) -> None:
    """End this process, whatever its other threads hang in."""
    logger.critical("the process ends: %s", message)
    say(message)
    os._exit(HUNG_EXIT_STATUS)
