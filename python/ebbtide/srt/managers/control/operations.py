"""Control requests that take more than one turn of the loop: waiting or working in slices."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.control.ports import DeadlinePassed, Operation, OutOfStep, Progress
from ebbtide.srt.managers.io_struct import AnyReply, ControlRequest, Refusal

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Pending:
    request: ControlRequest
    operation: Operation
    progress: Progress = Progress.WORKING


class Operations:
    """The operations under way, oldest first.

    Args:
        reply: sends the one reply of the request with this id.
    """

    def __init__(self, reply: Callable[[str, AnyReply], None]) -> None:
        self._reply = reply
        self._pending: dict[str, _Pending] = {}

    @property
    def is_working(self) -> bool:
        """Whether any of them wants another slice, rather than waits."""
        return not self.stands_alone and self._any(Progress.WORKING, Progress.COPYING)

    @property
    def needs_boundary(self) -> bool:
        """Whether any of them may do what a forward pass under way must not see."""
        return self._any(Progress.WORKING, Progress.WAITING, Progress.ALONE)

    @property
    def stands_alone(self) -> bool:
        """Whether one of them waits for other ranks, and everything else for it."""
        return self._any(Progress.ALONE)

    @property
    def any_pending(self) -> bool:
        return bool(self._pending)

    def start(self, call_id: str, request: ControlRequest, operation: Operation) -> None:
        """Run the first slice. The reply follows when the operation ends, maybe at once."""
        self._pending[call_id] = _Pending(request, operation)
        self._turn(call_id, operation.__next__)

    def is_pending(self, call_id: str) -> bool:
        return call_id in self._pending

    def advance(self) -> None:
        """Give each one slice, oldest first: what an older one has done, a younger one sees at once."""
        alone = [call_id for call_id, pending in self._pending.items() if pending.progress is Progress.ALONE]
        for call_id in alone or list(self._pending):
            pending = self._pending.get(call_id)
            if pending is not None:
                self._turn(call_id, pending.operation.__next__)

    def expire(self, call_id: str) -> None:
        """Its deadline has passed. Does nothing for an operation that has ended."""
        pending = self._pending.get(call_id)
        if pending is not None:
            operation = pending.operation
            self._turn(call_id, lambda: operation.throw(DeadlinePassed()))

    def cancel(self, kind: type[ControlRequest], refusal: RequestRejected) -> None:
        """End every pending request of this kind with a refusal."""
        for call_id, pending in list(self._pending.items()):
            if isinstance(pending.request, kind):
                operation = pending.operation
                self._turn(call_id, lambda operation=operation: operation.throw(refusal))  # type: ignore[misc]

    def _turn(self, call_id: str, turn: Callable[[], Progress]) -> None:
        pending = self._pending[call_id]
        try:
            pending.progress = turn()
        except StopIteration as end:
            self._end(call_id, end.value)
        except OutOfStep:
            raise
        except Exception as error:
            self._end(call_id, refusal(pending.request, error))

    def _any(self, *kinds: Progress) -> bool:
        return any(pending.progress in kinds for pending in self._pending.values())

    def _end(self, call_id: str, reply: AnyReply) -> None:
        del self._pending[call_id]
        self._reply(call_id, reply)


def refusal(request: ControlRequest, error: Exception) -> Refusal:
    """The reply to a request that raised: the caller's fault as it says, anything else is ours and logged."""
    if isinstance(error, RequestRejected):
        return Refusal(status=error.status, message=error.message, fields=error.fields)
    logger.error("%s failed", type(request).__name__, exc_info=error)
    return Refusal(status=500, message=f"{type(request).__name__} failed: {type(error).__name__}: {error}")
