"""Phases: work of several ranks, each with its own speed and failures, that ends with a vote.

All ranks get the same messages in the same order, so most decisions agree by themselves. Work whose outcome
may differ between ranks (memory runs out, tensors arrive late) is done in a phase. The vote gives it the same
outcome on all ranks, at the same place among their messages.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar

from ebbtide.srt.errors import EngineError, RequestRejected
from ebbtide.srt.managers.control import BETWEEN_PASSES, Activity, OutOfStep, Work
from ebbtide.srt.managers.control.pace import Ranks, ending_rank
from ebbtide.srt.managers.io_struct import AnyControlRequest, Refusal
from ebbtide.srt.managers.wire.message import Decision

logger = logging.getLogger(__name__)

T = TypeVar("T")
Fact = TypeVar("Fact")

# How an operation waits for the vote, by kind of phase.
WAITS_AS: Final = {
    Activity.WORKING: Activity.HOLDING,
    Activity.WAITING: Activity.WAITING,
    Activity.COPYING: Activity.WAITING,
    Activity.ALONE: Activity.ALONE,
}


class Polls(Protocol):
    """Takes the votes of this rank."""

    def open(self, phase: int) -> None: ...
    def cast(self, phase: int, failure: Refusal | None, fact: Any, *, ends: bool) -> None: ...

    def close(self, phase: int) -> None:
        """Forget the phase, decided or not."""


@dataclass
class _Phase:
    """One rank's part in a phase."""

    kind: Activity
    _work: Work[Any]
    _fact: Callable[[Any], Any]
    has_voted: bool = field(default=False, init=False)
    is_waiting: bool = field(default=False, init=False)
    result: Any = field(default=None, init=False)
    decision: Decision | None = field(default=None, init=False)

    def step(self) -> tuple[Refusal | None, Any] | None:
        """Do the next slice; returns None, or at the end the vote: a failure or a fact."""
        failure: Refusal | None
        try:
            self.is_waiting = next(self._work) is Activity.WAITING
            return None
        except StopIteration as end:
            self.result = end.value
            failure, fact = None, self._fact(end.value)
        except OutOfStep:
            raise
        except Exception as error:
            failure, fact = _failure(error), None
        self.has_voted = True
        return failure, fact


class ManyRanks(Ranks):
    """One of several ranks. Each has its part in every phase.

    Args:
        propose: lets all ranks carry out a request, if this rank is the leader.
    """

    is_one = False

    def __init__(self, polls: Polls, propose: Callable[[AnyControlRequest], None]) -> None:
        self._polls = polls
        self._propose = propose
        self._numbers = itertools.count()
        self._phases: dict[int, _Phase] = {}

    def phase(self, kind: Activity, work: Work[T]) -> Work[T]:
        result, _ = yield from self.survey(kind, work, lambda result: None)
        return result

    def survey(self, kind: Activity, work: Work[T], fact: Callable[[T], Fact]) -> Work[tuple[T, list[Fact]]]:
        if kind in BETWEEN_PASSES:
            yield Activity.BOUNDARY
        number = next(self._numbers)
        phase = self._phases[number] = _Phase(kind, work, fact)
        self._polls.open(number)
        try:
            while phase.decision is None:
                yield WAITS_AS[kind]
        finally:
            del self._phases[number]
            self._polls.close(number)
            work.close()
        if phase.decision.failure is not None:
            raise _error(phase.decision.failure)
        return phase.result, list(phase.decision.facts)

    def certainly(self, act: Callable[[], T]) -> T:
        with ending_rank("this rank could not do what the others have done, and ends"):
            return act()

    def propose(self, request: AnyControlRequest) -> None:
        self._propose(request)

    @property
    def is_working(self) -> bool:
        return any(not phase.has_voted and not phase.is_waiting for phase in self._due().values())

    def work(self) -> None:
        for number, phase in self._due().items():
            if phase.has_voted:
                continue
            vote = phase.step()
            if vote is not None:
                failure, fact = vote
                ends = failure is not None and phase.kind is Activity.WAITING
                self._polls.cast(number, failure, fact, ends=ends)

    def decide(self, decision: Decision) -> bool:
        # The operation may have been ended before the decision, by a deadline or another request.
        phase = self._phases.get(decision.phase)
        if phase is None:
            return True
        phase.decision = decision
        # Work beside passes takes no such memory. So passes check for it only once or twice in an update.
        return phase.kind in BETWEEN_PASSES

    def _due(self) -> dict[int, _Phase]:
        """The phases to work on: while one stands alone, only that."""
        alone = {number: phase for number, phase in self._phases.items() if phase.kind is Activity.ALONE}
        return alone or dict(self._phases)


def _failure(error: Exception) -> Refusal:
    if isinstance(error, RequestRejected):
        return Refusal(status=error.status, message=error.message, fields=error.fields)
    logger.error("this rank's part of a control request failed", exc_info=error)
    return Refusal(status=500, message=f"{type(error).__name__}: {error}")


def _error(failure: Refusal) -> Exception:
    if failure.status == 500:
        return EngineError(failure.message)
    return RequestRejected(failure.message, failure.status, **failure.fields)
