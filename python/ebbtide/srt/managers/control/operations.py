"""Control requests that take more than one turn of the loop: they wait, also in line, or work in slices."""

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
    """An operation that has not ended.

    Attributes:
        request: None: background work that no reply waits for.
        is_joint: several replicas commit it together.
        overruled: why it is to be given up, as soon as that is safe: while it drains, or is prepared.
        is_overdue: its deadline passed while it was prepared.
        is_fenced: the extra time after that has passed too.
        stall: how long it has kept forward passes from running.
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
        reply: sends the reply to the request with this id; before it, `Prepared` if it is joint.

    Attributes:
        stalls: of all requests that have ended, also those that took one turn.
    """

    def __init__(self, reply: Callable[[str, AnyReply], None]) -> None:
        self.stalls = StallTally()
        self._reply = reply
        self._pending: dict[str, _Pending] = {}
        self._numbers = itertools.count()

    @property
    def is_working(self) -> bool:
        """Whether any operation wants another slice now."""
        return not self.stands_alone and self._any(Activity.WORKING, Activity.COPYING)

    @property
    def stands_alone(self) -> bool:
        """Whether an operation waits for other ranks, and everything else must wait for it."""
        return self._any(Activity.ALONE)

    @property
    def is_fenced(self) -> bool:
        """Whether other replicas may have committed an operation whose verdict has not come here."""
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
        """Run the first slice. The reply is sent when the operation ends, which may be at once."""
        self._pending[call_id] = _Pending(request, operation, is_joint)
        self._turn(call_id, operation.__next__, settle)

    def go_on(self, work: Work[object]) -> None:
        """Do work in the background, from the next turn on. No reply waits for it; a failure is logged."""
        self._pending[f"work-{next(self._numbers)}"] = _Pending(None, _unanswered(work), is_joint=False)

    def is_pending(self, call_id: str) -> bool:
        return call_id in self._pending

    def advance(self, settle: Callable[[], None]) -> None:
        """Give each operation one slice, oldest first, so that younger ones see what older ones have done.

        Args:
            settle: commits the forward pass in flight; called only for operations that need it.
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
            # Others may have waited for one that has ended. Ask again: there may be no further turn.
            has_ended = any(call_id not in self._pending for call_id in asked)

    def decide(self, call_id: str, refusal: str | None) -> None:
        """Commit this joint operation now, or give it up for this reason. Ignored if it has ended.

        OutOfStep: the commit failed here, while other replicas have committed.
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
        """Note that the deadline of an operation has passed. Ignored if it has ended.

        Returns whether it gets more time, because it waits for a verdict that is on its way. When that has
        passed too, no request runs until the verdict comes, and the verdict is asked for.
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
        """Run one slice, and what must follow it at once; end the operation if it is done.

        Args:
            settle: commits the forward pass in flight; by default there is none.
        """
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
        """Within, hold a place in the line. Yields a function: whether the place is at the front."""
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
    """Times the stages of an update, from its first slice to its reply. Stages follow without a gap.

    decode: read and check the payload, on all ranks. wait: for earlier updates. stage: find memory, and write
    what does not overwrite serving weights. drain: wait for requests to end, and for a pass boundary. canary:
    the trial pass. vote: wait until all replicas are ready. write: overwrite serving weights. commit: the new
    weights begin to serve. release: give memory back.
    """

    def __init__(self) -> None:
        self._began_s = time.perf_counter()
        self._ms: dict[str, float] = {}

    def end(self, name: str) -> None:
        """Add the time since the last `end` to this stage."""
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
    """The reply to a request that raised: a RequestRejected as it says, anything else as a logged 500."""
    if isinstance(error, Overruled):
        return GivenUp(status=error.status, message=error.message, left=error.left)
    if isinstance(error, RequestRejected):
        return Refusal(status=error.status, message=error.message, fields=error.fields)
    logger.error("%s failed", type(request).__name__, exc_info=error)
    return Refusal(status=500, message=f"{type(request).__name__} failed: {described(error)}")


def described(error: Exception) -> str:
    """A failure in words: the message of an EngineError; else the type and the message."""
    return str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
