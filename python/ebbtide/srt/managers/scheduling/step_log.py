"""Log lines every so many forward passes (`--decode-log-interval`), and one when requests have to wait."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ebbtide.srt.managers.scheduling.schedule_policy import SchedulePolicy

logger = logging.getLogger(__name__)


class StepLog:
    """Writes the lines. It reads a clock, and nothing that it says decides anything: ranks may differ in it.

    Args:
        interval: forward passes from one line to the next; 0: no lines at all.
        clock: seconds.
    """

    def __init__(
        self, policy: SchedulePolicy, interval: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._policy = policy
        self._interval = interval
        self._clock = clock
        self._last_line_s = clock()
        self._num_steps = 0
        self._num_sampled = 0
        self._is_blocked = False

    def note_step(self, num_sampled: int) -> None:
        """A forward pass has sampled so many tokens."""
        self._is_blocked = False
        self._num_steps += 1
        self._num_sampled += num_sampled
        if self._num_steps == self._interval:
            self._write()
            self._num_steps = self._num_sampled = 0

    def note_blocked(self, reason: str) -> None:
        """No forward pass may run. The first time since the last one, a line says why."""
        policy = self._policy
        if self._is_blocked or not self._interval:
            return
        self._is_blocked = True
        logger.info(
            "nothing runs: %s: running=%d queued=%d weight_version=%s",
            reason,
            len(policy.running),
            len(policy.waiting),
            policy.commit.version,
        )

    def _write(self) -> None:
        policy, allocator = self._policy, self._policy.allocator
        now_s = self._clock()
        elapsed_s, self._last_line_s = now_s - self._last_line_s, now_s
        num_used = allocator.num_pages - allocator.num_free - policy.cache.num_evictable_pages
        logger.info(
            "steps: passes=%d elapsed_s=%.2f running=%d queued=%d tokens_per_s=%.1f kv_pages=%d/%d "
            "weight_version=%s",
            self._num_steps,
            elapsed_s,
            len(policy.running),
            len(policy.waiting),
            self._num_sampled / elapsed_s if elapsed_s > 0 else 0.0,
            num_used,
            allocator.num_pages,
            policy.commit.version,
        )
