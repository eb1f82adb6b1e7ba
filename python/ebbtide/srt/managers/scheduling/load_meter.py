"""How much a replica has to do, and how fast it goes. Source: wire_api section 3.4, `/v1/loads`."""

from __future__ import annotations

import logging
import math
import time
from bisect import bisect_left
from dataclasses import dataclass

from ebbtide.srt.managers.io_struct import STEP_BOUNDS, Load
from ebbtide.srt.managers.scheduling.request import Req
from ebbtide.srt.managers.scheduling.schedule_policy import SchedulePolicy

logger = logging.getLogger(__name__)

# Throughput is measured over stretches of this many seconds in which steps run.
STRETCH_S = 1.0


@dataclass(eq=False)
class LoadMeter:
    """Measures the throughput, logs it, and reports the load.

    It reads a clock, so ranks may differ in it. No decision may depend on it.

    Args:
        log_interval: `--decode-log-interval`, forward passes between two log lines; 0: no lines.
    """

    _policy: SchedulePolicy
    _log_interval: int

    def __post_init__(self) -> None:
        self._logged_s = time.monotonic()
        self._num_unlogged_steps = self._num_unlogged_tokens = 0
        self._is_blocked = False
        self._stretch_start_s = self._last_step_s = -math.inf
        self._num_tokens = 0
        self._throughput = 0.0
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._step_counts = [0] * (len(STEP_BOUNDS) + 1)
        self._step_tokens = 0

    def note_step(self, num_tokens: int, num_sampled: int) -> None:
        """Note a step over `num_tokens` tokens that sampled `num_sampled`."""
        self._step_counts[bisect_left(STEP_BOUNDS, num_tokens)] += 1
        self._step_tokens += num_tokens
        now = time.monotonic()
        self._is_blocked = False
        self._num_unlogged_steps += 1
        self._num_unlogged_tokens += num_sampled
        if self._num_unlogged_steps == self._log_interval:
            self._log(now)
        previous_s, self._last_step_s = self._last_step_s, now
        if now - previous_s > STRETCH_S:
            # A new stretch begins with the end of this step: when it started is not known.
            self._end_stretch(previous_s)
            self._stretch_start_s = now
            return
        self._num_tokens += num_sampled
        if now - self._stretch_start_s >= STRETCH_S:
            self._end_stretch(now)

    def note_started(self, req: Req) -> None:
        """Note the first output of a request. One that never ran does not count for the hit rate."""
        if req.cached_tokens is not None:
            self._prompt_tokens += len(req.spec.prompt_ids)
            self._cached_tokens += req.cached_tokens

    def load(self, dp_rank: int, *, is_paused: bool) -> Load:
        """The present load, as `/v1/loads` reports it."""
        policy = self._policy
        is_idle = time.monotonic() - self._last_step_s > STRETCH_S
        if is_idle:
            self._end_stretch(self._last_step_s)
        num_running = len(policy.running)
        num_free = policy.allocator.num_free + policy.cache.num_evictable_pages
        num_used_tokens = policy.tokens_of(policy.allocator.num_pages - num_free)
        return Load(
            dp_rank=dp_rank,
            num_running_reqs=0 if is_paused else num_running,
            num_paused_reqs=num_running if is_paused else 0,
            num_waiting_reqs=len(policy.queued),
            num_used_tokens=num_used_tokens,
            num_total_tokens=num_used_tokens + sum(req.num_tokens for req in policy.queued),
            max_total_num_tokens=policy.tokens_of(policy.allocator.num_pages),
            max_running_requests=policy.config.max_running_requests,
            gen_throughput=0.0 if is_idle else self._throughput,
            last_gen_throughput=self._throughput,
            parked_bytes=policy.page_store.num_bytes,
            num_parked_reqs=sum(req.parked is not None for req in policy.queued),
            num_held_reqs=len(policy.held),
            step_counts=list(self._step_counts),
            step_tokens=self._step_tokens,
            recomputed_tokens={cause.value: count for cause, count in policy.pages.recomputed.items()},
            kv_tokens=policy.pages.tokens_by_version(policy.running),
            cache_hit_rate=self._cached_tokens / self._prompt_tokens if self._prompt_tokens else 0.0,
        )

    def note_blocked(self, reason: str) -> None:
        """Log why no forward pass may run, once until one has run again."""
        policy = self._policy
        if self._is_blocked or not self._log_interval:
            return
        self._is_blocked = True
        logger.info(
            "nothing runs: %s: running=%d queued=%d weight_version=%s",
            reason,
            len(policy.running),
            len(policy.waiting),
            policy.commit.version,
        )

    def _log(self, now: float) -> None:
        policy, allocator = self._policy, self._policy.allocator
        elapsed_s, self._logged_s = now - self._logged_s, now
        num_used = allocator.num_pages - allocator.num_free - policy.cache.num_evictable_pages
        logger.info(
            "steps: passes=%d elapsed_s=%.2f running=%d queued=%d tokens_per_s=%.1f kv_pages=%d/%d "
            "weight_version=%s",
            self._num_unlogged_steps,
            elapsed_s,
            len(policy.running),
            len(policy.waiting),
            self._num_unlogged_tokens / elapsed_s if elapsed_s > 0 else 0.0,
            num_used,
            allocator.num_pages,
            policy.commit.version,
        )
        self._num_unlogged_steps = self._num_unlogged_tokens = 0

    def _end_stretch(self, now: float) -> None:
        if self._num_tokens and now > self._stretch_start_s:
            self._throughput = self._num_tokens / (now - self._stretch_start_s)
        self._stretch_start_s, self._num_tokens = now, 0
