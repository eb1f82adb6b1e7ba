"""Control requests from the API process: each call gets its own reply, whoever else calls or goes away."""

from __future__ import annotations

import asyncio
import itertools

from ebbtide.srt.errors import EngineError, RequestRejected
from ebbtide.srt.managers.io_struct import (
    AnyControlRequest,
    AnyReply,
    ControlCall,
    ControlReply,
    Refusal,
    Reply,
)
from ebbtide.srt.managers.wire.channel import SendEnd


class ControlClient:
    """Sends control requests and hands each caller the reply with its id. Lives in one event loop."""

    def __init__(self, scheduler: SendEnd[ControlCall]) -> None:
        self._scheduler = scheduler
        self._ids = itertools.count()
        self._waiting: dict[str, asyncio.Future[AnyReply]] = {}
        self._failure: str | None = None

    async def call(self, request: AnyControlRequest, timeout_s: float | None = None) -> Reply:
        """Send a request and wait for its reply.

        A caller that is cancelled or runs out of time does not take its request back: that is carried out,
        and the reply is dropped. Time limits that are part of a request are the scheduler's affair.

        Args:
            timeout_s: how long to wait for the reply; None for ever.

        Raises:
            RequestRejected: the request was refused; nothing has changed.
            EngineError: the engine failed, or did not answer in time.
        """
        if self._failure is not None:
            raise EngineError(self._failure)
        call_id = str(next(self._ids))
        future: asyncio.Future[AnyReply] = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = future
        try:
            self._scheduler.send(ControlCall(id=call_id, request=request))
            async with asyncio.timeout(timeout_s):
                reply = await future
        except TimeoutError:
            name = type(request).__name__
            raise EngineError(f"{name}: the engine gave no reply within {timeout_s:g} s") from None
        finally:
            del self._waiting[call_id]
        return _accepted(reply)

    def resolve(self, message: ControlReply) -> None:
        """Hand a reply to its caller, if that still waits."""
        future = self._waiting.get(message.id)
        if future is not None and not future.done():
            future.set_result(message.reply)

    def fail(self, message: str) -> None:
        """End every call that waits, and those to come, with an `EngineError`."""
        self._failure = message
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(EngineError(message))


def _accepted(reply: AnyReply) -> Reply:
    if not isinstance(reply, Refusal):
        return reply
    fields = reply.fields
    if "errors" in fields:
        # What all ranks of a replica found alike is listed once, as the first one's.
        fields = {**fields, "errors": [{"rank": 0, **error} for error in fields["errors"]]}
    if reply.status < 500:
        raise RequestRejected(reply.message, reply.status, **fields)
    raise EngineError(reply.message, **fields)
