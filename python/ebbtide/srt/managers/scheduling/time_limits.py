"""How long a request may wait for its first step, how long it may run, and how long its masks may take.

The clock is the leader's alone: a limit comes to every rank as an `Expire` message, and what it means then is
read off the request, which stands alike on all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from ebbtide.srt.managers.scheduling.live_requests import LiveRequests
from ebbtide.srt.managers.scheduling.request import Phase, Req
from ebbtide.srt.managers.scheduling.schedule_policy import SchedulePolicy
from ebbtide.srt.managers.text.grammar import TOO_SLOW

if TYPE_CHECKING:
    from ebbtide.srt.config import ScheduleConfig

WAITING: Final = "waiting-request-"
RUNNING: Final = "running-request-"
SLOW_MASKS: Final = "slow-masks-"


class TimeLimits:
    """Ends requests at their limits.

    Args:
        set_deadline: has an `Expire` of this id come after so many seconds.
    """

    def __init__(
        self,
        config: ScheduleConfig,
        policy: SchedulePolicy,
        requests: LiveRequests,
        set_deadline: Callable[[str, float], None],
    ) -> None:
        self._waiting_s = config.waiting_timeout_s
        self._running_s = config.running_timeout_s
        self._policy = policy
        self._requests = requests
        self._set_deadline = set_deadline

    def note_queued(self, req: Req) -> None:
        """A request has been queued."""
        if self._waiting_s is not None:
            self._set_deadline(f"{WAITING}{req.arrival}", self._waiting_s)

    def note_started(self, req: Req) -> None:
        """A request begins to run, for the first time."""
        if self._running_s is not None:
            self._set_deadline(f"{RUNNING}{req.arrival}", self._running_s)

    def note_slow_masks(self, arrival: int) -> None:
        """The masks of the request that arrived as this one have taken longer than they may."""
        self._set_deadline(f"{SLOW_MASKS}{arrival}", 0.0)

    def expire(self, deadline_id: str) -> bool:
        """Whether this was a limit of a request; ends it, if it still waits for its first step, or runs."""
        if deadline_id.startswith(WAITING):
            req = self._find(deadline_id.removeprefix(WAITING))
            if req is not None and req.phase in (Phase.HELD, Phase.WAITING) and not req.has_begun:
                self._end(req, f"Aborted: it has waited {self._waiting_s:g} s (SGLANG_REQ_WAITING_TIMEOUT)")
            return True
        if deadline_id.startswith(RUNNING):
            req = self._find(deadline_id.removeprefix(RUNNING))
            if req is not None:
                self._end(req, f"Aborted: it has run {self._running_s:g} s (SGLANG_REQ_RUNNING_TIMEOUT)")
            return True
        if deadline_id.startswith(SLOW_MASKS):
            req = self._find(deadline_id.removeprefix(SLOW_MASKS))
            grammar = None if req is None else req.spec.params.grammar
            if req is not None and grammar is not None:
                self._end(req, f"Aborted: sampling_params.{grammar.kind}: {TOO_SLOW}")
            return True
        return False

    def _find(self, arrival: str) -> Req | None:
        """The live request that arrived as this one; another may have its rid by now."""
        live = (*self._policy.running, *self._policy.queued)
        return next((req for req in live if req.arrival == int(arrival)), None)

    def _end(self, req: Req, message: str) -> None:
        self._requests.abort([req.rid], message)
