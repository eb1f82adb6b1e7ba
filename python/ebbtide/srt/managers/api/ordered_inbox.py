"""What the engine sends, in an order that clients can rely on: the outputs of aborted requests, then replies.

Outputs come by way of the detokenizer and replies directly, so a reply may overtake them. A client that is
informed that generation is paused, or that new weights serve, may take every later answer for one of the new
weights.
"""

from __future__ import annotations

from collections.abc import Sequence

from ebbtide.srt.managers.io_struct import ControlReply, ManagerInput, TextOutput, TokenOutput
from ebbtide.srt.managers.wire.channel import AsyncReceiveEnd


class OrderedInbox:
    """Holds a reply back until everything that its replica had aborted before it has been handed out.

    A reply never comes in one batch with the outputs that it follows: readers have their turn in between.
    """

    def __init__(self, inbox: AsyncReceiveEnd[ManagerInput]) -> None:
        self._inbox = inbox
        self._num_aborts: dict[int, int] = {}
        self._held: list[ControlReply] = []

    async def receive_async(self) -> Sequence[ManagerInput]:
        """What there is, after waiting for it. Cancelling it loses nothing."""
        due = [reply for reply in self._held if not self._is_early(reply)]
        if due:
            self._held = [reply for reply in self._held if self._is_early(reply)]
            return due
        arrived = await self._inbox.receive_async()
        given = []
        for message in arrived:
            if isinstance(message, ControlReply) and self._is_early(message):
                self._held.append(message)
            else:
                given.append(message)
        for message in given:
            if isinstance(message, TextOutput | TokenOutput) and message.abort_number is not None:
                self._num_aborts[message.dp_rank] = message.abort_number
        return given

    def close(self) -> None:
        """Close the inbox behind it. Idempotent."""
        self._inbox.close()

    def _is_early(self, reply: ControlReply) -> bool:
        return reply.aborts_before > self._num_aborts.get(reply.dp_rank, 0)
