"""The scheduler's inbox: messages in, replies and state out, deadlines turned into messages."""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from typing import Protocol

from ebbtide.srt.managers.io_struct import (
    AnyReply,
    ControlReply,
    Expire,
    ManagerInput,
    SchedulerInput,
    StateReport,
)


class InputEnd(Protocol):
    def receive(self, timeout_s: float | None) -> Sequence[SchedulerInput]: ...


class ManagerEnd(Protocol):
    def send(self, message: ManagerInput) -> None: ...


class Inbox:
    """What one rank's loop reads from and answers to.

    Deadlines live here and not in the control plane: time reaches the state machines as an `Expire` message,
    so that they stay free of clocks.
    """

    def __init__(self, messages: InputEnd, manager: ManagerEnd) -> None:
        self._messages = messages
        self._manager = manager
        self._deadlines: list[tuple[float, str]] = []
        self._replies: list[ControlReply] = []
        self._reported: StateReport | None = None

    def receive(self, *, block: bool) -> list[SchedulerInput]:
        """What has arrived. With `block`, sleeps until there is something, a deadline included."""
        timeout_s: float | None = None if block else 0.0
        if block and self._deadlines:
            timeout_s = max(0.0, self._deadlines[0][0] - time.monotonic())
        messages = list(self._messages.receive(timeout_s))
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            messages.append(Expire(id=heapq.heappop(self._deadlines)[1]))
        return messages

    def reply(self, call_id: str, reply: AnyReply) -> None:
        """Answer a control request, with the next `answer`."""
        self._replies.append(ControlReply(id=call_id, reply=reply))

    def answer(self, report: StateReport) -> None:
        """Send the state, if it has changed, and behind it the replies: who has a reply finds it agrees."""
        if report != self._reported:
            self._reported = report
            self._manager.send(report)
        for reply in self._replies:
            self._manager.send(reply)
        self._replies.clear()

    def set_deadline(self, call_id: str, timeout_s: float) -> None:
        heapq.heappush(self._deadlines, (time.monotonic() + timeout_s, call_id))
