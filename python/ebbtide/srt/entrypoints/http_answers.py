"""What endpoints answer with: JSON, errors, streams of events; and clients that leave before the answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeAlias, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ebbtide.srt.errors import EngineError, RequestRejected, error_body
from ebbtide.srt.managers.api.live_generation import LiveGeneration

logger = logging.getLogger(__name__)

T = TypeVar("T")
Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]

# A full queue refuses within a turn of the scheduler's loop. That long a stream waits for its first chunk
# before it answers 200, so that the refusal can still be a status.
REFUSAL_WAIT_S = 0.5


class Json(Response):
    """A JSON body. Non-finite numbers, which JSON lacks, come out as null."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def error_answer(message: str, status: int, **fields: Any) -> Json:
    """An error in the one shape that all of them have."""
    return Json(error_body(message, status, **fields), status)


async def answer_whole(receive: Receive, starting: Coroutine[Any, Any, LiveGeneration]) -> Any:
    """The result of a generation. It is aborted when the client disconnects.

    Raises:
        RequestRejected, EngineError: the generation was refused, or failed.
        ClientDisconnect: the client has left.
    """
    return await while_connected(receive, _finish(starting))


async def _finish(starting: Coroutine[Any, Any, LiveGeneration]) -> Any:
    return await (await starting).result()


async def answer_events(
    receive: Receive,
    starting: Coroutine[Any, Any, LiveGeneration],
    bodies: Callable[[LiveGeneration], AsyncIterator[Any]],
) -> Response:
    """A generation as server-sent events. It is aborted when the client disconnects.

    Args:
        bodies: what its chunks become, one event each; reads `generation.stream()`.

    Raises:
        RequestRejected, EngineError: the generation was refused, or failed, before it began.
        ClientDisconnect: the client has left.
    """
    events = _Events()
    try:
        await while_connected(receive, events.open(starting, bodies))
    except BaseException:
        events.drop()
        raise
    return events


class _Events(StreamingResponse):
    _generation: LiveGeneration | None = None
    _first: asyncio.Task[Any] | None = None

    def __init__(self) -> None:
        super().__init__(
            self._events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )

    async def open(
        self,
        starting: Coroutine[Any, Any, LiveGeneration],
        bodies: Callable[[LiveGeneration], AsyncIterator[Any]],
    ) -> None:
        """Start, and return with the first event, or after a while."""
        self._generation = await starting
        self._bodies = bodies(self._generation)
        self._first = asyncio.ensure_future(_next(self._bodies))
        await asyncio.wait([self._first], timeout=REFUSAL_WAIT_S)
        if self._first.done():
            self._first.result()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self.stream_response(send))
        except ClientDisconnect:
            logger.debug("the client of a stream has disconnected")
        finally:
            self.drop()

    def drop(self) -> None:
        """Nobody reads it any more."""
        if self._first is not None:
            self._first.cancel()
        if self._generation is not None:
            self._generation.close()

    async def _events(self) -> AsyncIterator[bytes]:
        try:
            if self._first is not None:
                yield _event(await self._first)
            async for body in self._bodies:
                yield _event(body)
        except RequestRejected as error:
            yield _event({"error": error.body["error"]})
        except EngineError as error:
            yield _event({"error": error_body(str(error), error.status)["error"]})
        yield b"data: [DONE]\n\n"


async def _next(bodies: AsyncIterator[T]) -> T:
    return await anext(bodies)


def _event(body: Any) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await something for a client; if that leaves, the work is cancelled.

    The caller goes on in the turn of the loop after the one in which the work ends, and no later: a reply
    that is read from the engine after the end of a generation is then not sent before its answer.

    Raises:
        ClientDisconnect: it has left.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    has_left = False

    def leave(_: asyncio.Future[None]) -> None:
        nonlocal has_left
        has_left = working.cancel()

    leaving.add_done_callback(leave)
    try:
        return await working
    except asyncio.CancelledError:
        if has_left:
            raise ClientDisconnect from None
        raise
    finally:
        leaving.remove_done_callback(leave)
        leaving.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
