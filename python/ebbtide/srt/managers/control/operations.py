"""Control requests that take more than one turn of the loop: waiting, in line too, or working in slices."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from ebbtide.srt.errors import EngineError, RequestRejected
from ebbtide.srt.managers.control import (
    BETWEEN_PASSES,
    Activity,
    DeadlinePassed,
    Operation,
    OutOfStep,
    Overruled,
    Work,
)
from ebbtide.srt.managers.control.pace import Stall, StallTally
from ebbtide.srt.managers.io_struct import (
    AnyReply,
    ControlRequest,
    GivenUp,
    Prepared,
    Refusal,
)

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Pending:
    """An operation that is not done.

    Attributes:
        is_joint: several replicas commit it together.
        overruled: why it is to be given up, where that leaves nobody in the middle of something.
        is_overdue: its deadline came while it was prepared.
        is_fenced: so did the end of what it was given beyond that.
        stall: for how long it has kept forward passes from running.
    """

    request: ControlRequest | None
    operation: Operation | Work[None]
    is_joint: bool
    activity: Activity = Activity.WORKING
    overruled: Overruled | None = None
    is_overdue: bool = False
    is_fenced: bool = False
    stall: Stall = field(default_factory=Stall)


class Operations:
    """The operations under way, oldest first.

    Args:
        reply: sends the one reply of the request with this id; ahead of it, `Prepared` if it is joint.

    Attributes:
        stalls: of the requests that have ended, those that took one turn among them.
    """

    def __init__(self, reply: Callable[[str, AnyReply], None]) -> None:
        self.stalls = StallTally()
        self._reply = reply
        self._pending: dict[str, _Pending] = {}
        self._numbers = itertools.count()

    @property
    def is_working(self) -> bool:
        """Whether any of them wants another slice, rather than waits."""
        return not self.stands_alone and self._any(Activity.WORKING, Activity.COPYING)

    @property
    def stands_alone(self) -> bool:
        """Whether one of them waits for other ranks, and everything else for it."""
        return self._any(Activity.ALONE)

    @property
    def is_fenced(self) -> bool:
        """Whether other replicas may have committed what waits for its verdict here."""
        return any(one.is_fenced and one.activity is Activity.PREPARED for one in self._pending.values())

    @property
    def any_pending(self) -> bool:
        return bool(self._pending)

    def start(
        self,
        call_id: str,
        request: ControlRequest,
        operation: Operation,
        settle: Callable[[], None],
        *,
        is_joint: bool = False,
    ) -> None:
        """Run the first slice. The reply follows when the operation ends, maybe at once."""
        self._pending[call_id] = _Pending(request, operation, is_joint)
        self._turn(call_id, operation.__next__, settle)

    def go_on(self, work: Work[object]) -> None:
        """Have work done that no reply waits for, from the next turn on; a failure is logged."""
        self._pending[f"work-{next(self._numbers)}"] = _Pending(None, _unanswered(work), is_joint=False)

    def is_pending(self, call_id: str) -> bool:
        return call_id in self._pending

    def advance(self, settle: Callable[[], None]) -> None:
        """Give each one slice, oldest first: what an older one has done, a younger one sees at once.

        Args:
            settle: ends the forward pass under way; called only for those that need it.
        """
        has_ended = True
        while has_ended:
            alone = [key for key, pending in self._pending.items() if pending.activity is Activity.ALONE]
            asked = alone or list(self._pending)
            for call_id in asked:
                pending = self._pending.get(call_id)
                if pending is None or pending.activity is Activity.PREPARED:
                    continue
                if pending.activity in BETWEEN_PASSES:
                    settle()
                self._turn(call_id, pending.operation.__next__, settle)
            # Who was asked before, or not at all, may wait for what has ended; no other turn need come.
            has_ended = any(call_id not in self._pending for call_id in asked)

    def decide(self, call_id: str, refusal: str | None) -> None:
        """Commit this joint operation now, or give it up for this reason. One that has ended stays so.

        OutOfStep: the commit failed, and others have done it.
        """
        pending = self._pending.get(call_id)
        if pending is None:
            return
        if refusal is None:
            assert pending.activity is Activity.PREPARED
            self._turn(call_id, lambda: _certainly(pending.operation))
        else:
            pending.overruled = Overruled(refusal)
            # A turn without a slice: it ends the operation now if that is safe, else as soon as it is.
            self._turn(call_id, lambda: pending.activity)

    def expire(self, call_id: str) -> bool:
        """Its deadline has passed. Does nothing for an operation that has ended.

        Returns whether it waits for a verdict, which is on its way: once more its time may pass. The second
        time nothing is served until it comes, and it is asked for.
        """
        pending = self._pending.get(call_id)
        if pending is None:
            return False
        if pending.activity is Activity.PREPARED:
            if not pending.is_overdue:
                pending.is_overdue = True
                return True
            pending.is_fenced = True
            self._reply(call_id, Prepared(is_overdue=True))
            return False
        self._turn(call_id, partial(pending.operation.throw, DeadlinePassed()))
        return False

    def cancel(self, kind: type[ControlRequest], refusal: RequestRejected) -> None:
        """End every pending request of this kind with a refusal."""
        for call_id, pending in list(self._pending.items()):
            if isinstance(pending.request, kind):
                self._turn(call_id, partial(pending.operation.throw, refusal))

    def _turn(
        self, call_id: str, turn: Callable[[], Activity], settle: Callable[[], None] = lambda: None
    ) -> None:
        """Take a turn, and what follows it at once. Without `settle` no forward pass is under way."""
        pending = self._pending[call_id]
        try:
            with pending.stall.measure():
                self._take_turn(call_id, pending, turn, settle)
            if pending.activity is Activity.ALONE:
                pending.stall.begin()
            else:
                pending.stall.end()
        except StopIteration as end:
            self._end(call_id, end.value)
        except OutOfStep:
            raise
        except Exception as error:
            self._end(call_id, refusal(pending.request, error))

    def _take_turn(
        self, call_id: str, pending: _Pending, turn: Callable[[], Activity], settle: Callable[[], None]
    ) -> None:
        pending.activity = self._to_boundary(turn(), pending.operation, settle)
        if pending.overruled and pending.activity in (Activity.DRAINING, Activity.PREPARED):
            pending.activity = pending.operation.throw(pending.overruled)
        elif pending.activity is Activity.PREPARED:
            if pending.is_joint:
                self._reply(call_id, Prepared())
            else:
                pending.activity = self._to_boundary(next(pending.operation), pending.operation, settle)

    def _to_boundary(
        self, activity: Activity, operation: Operation | Work[None], settle: Callable[[], None]
    ) -> Activity:
        while activity is Activity.BOUNDARY:
            settle()
            activity = next(operation)
        return activity

    def _any(self, *kinds: Activity) -> bool:
        return any(pending.activity in kinds for pending in self._pending.values())

    def _end(self, call_id: str, reply: AnyReply | None) -> None:
        ended = self._pending.pop(call_id)
        ended.stall.end()
        if ended.request is not None:
            self.stalls.note(ended.request, ended.stall)
        if reply is not None:
            self._reply(call_id, reply)


class Line:
    """Operations that wait for each other."""

    def __init__(self) -> None:
        self._places: list[object] = []

    @property
    def is_empty(self) -> bool:
        return not self._places

    @contextmanager
    def turn(self) -> Iterator[Callable[[], bool]]:
        """A place in the line; yields what tells whether it has come to the front."""
        place = object()
        self._places.append(place)
        try:
            yield lambda: self._places[0] is place
        finally:
            self._places.remove(place)


def wait_until(is_true: Callable[[], bool], refusal: str, status: int = 409) -> Work[None]:
    """Wait while forward passes run. Raises RequestRejected with this message at the deadline."""
    try:
        while not is_true():
            yield Activity.WAITING
    except DeadlinePassed:
        raise RequestRejected(refusal, status) from None


def in_turn(has_come: Callable[[], bool], refusal: str, status: int) -> Work[None]:
    """Wait for the front of a line. `refusal`: how the message at the deadline begins."""
    return wait_until(has_come, f"{refusal}: an earlier update was still waiting at the deadline", status)


class Stages:
    """The stages of one operation, from its first slice to its reply; every moment belongs to one of them.

    decode: the payload is read and checked, on all ranks. wait: for the updates before it. stage: a place is
    found, and what overwrites no weights that serve is written. drain: requests end first, and a boundary
    comes. canary: the trial pass. vote: all replicas are ready. write: what does overwrite them is written.
    commit: other weights begin to serve. release: memory is given back.
    """

    def __init__(self) -> None:
        self._began_s = time.perf_counter()
        self._ms: dict[str, float] = {}

    def end(self, name: str) -> None:
        """What was done since the last stage ended was this; more of the same adds to it."""
        now_s = time.perf_counter()
        self._ms[name] = self._ms.get(name, 0.0) + 1e3 * (now_s - self._began_s)
        self._began_s = now_s

    @property
    def is_committed(self) -> bool:
        return "commit" in self._ms

    @property
    def took_ms(self) -> dict[str, float]:
        return {name: round(ms, 3) for name, ms in self._ms.items()}


def _unanswered(work: Work[object]) -> Work[None]:
    try:
        yield from work
    except OutOfStep:
        raise
    except RequestRejected as error:
        logger.warning("%s", error.message)
    except Exception as error:
        logger.error("background work of a control request failed", exc_info=error)


def _certainly(operation: Operation | Work[None]) -> Activity:
    try:
        return next(operation)
    except StopIteration:
        raise
    except Exception as error:
        raise OutOfStep(
            f"this rank could not commit what all replicas commit, and ends: {type(error).__name__}: {error}"
        ) from error


def refusal(request: ControlRequest | None, error: Exception) -> Refusal:
    """The reply to a request that raised: the caller's fault as it says, anything else is ours and logged."""
    if isinstance(error, Overruled):
        return GivenUp(status=error.status, message=error.message, left=error.left)
    if isinstance(error, RequestRejected):
        return Refusal(status=error.status, message=error.message, fields=error.fields)
    logger.error("%s failed", type(request).__name__, exc_info=error)
    return Refusal(status=500, message=f"{type(request).__name__} failed: {described(error)}")


def described(error: Exception) -> str:
    """What a message says of a failure: of one that the engine has put into words, these."""
    return str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
