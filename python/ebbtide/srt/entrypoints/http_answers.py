"""Answers of endpoints: JSON, errors, and event streams; and handling of clients that disconnect early."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeAlias, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ebbtide.srt.entrypoints.service import EngineService
from ebbtide.srt.errors import EngineError, RequestRejected, error_body
from ebbtide.srt.managers.api.ended_outputs import Caller
from ebbtide.srt.managers.api.live_generation import COST_AT_ONCE, OUTPUT_COST, LiveGeneration

logger = logging.getLogger(__name__)

T = TypeVar("T")
Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]

# Key of the server's own `send` in a request's scope. The start of an answer passes the application's
# middleware; the chunks that follow skip it, which is faster.
DIRECT_SEND = "ebbtide.direct_send"
# How long a stream waits for its first chunk before it answers 200. A full queue rejects the request sooner
# than that, and the rejection can then still be the answer's status.
REFUSAL_WAIT_S = 0.5


class Json(Response):
    """A JSON body with a final newline. Non-finite numbers, which JSON lacks, become null."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content) + b"\n"


def error_answer(message: str, status: int, **fields: Any) -> Json:
    """An error answer. All endpoints' errors have this shape, see `error_body`."""
    return Json(error_body(message, status, **fields), status)


def client_of(request: Request) -> Caller:
    """The client of a request: its host, and its key."""
    host = "" if request.client is None else request.client.host
    return Caller(host, request.headers.get("authorization") or request.headers.get("x-api-key", ""))


def server_event(body: Any, name: str | None = None) -> bytes:
    """A server-sent event with a JSON body."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + msgspec.json.encode(body) + b"\n\n"


class AnswerWriter:
    """Writes the answers and streams of `/generate`. Subclasses write those of other APIs."""

    def whole(self, result: Any) -> Any:
        """Make the body of an answer that is not streamed. `result`: an output, or a list of them."""
        return result

    def chunk(self, chunk: dict[str, Any]) -> bytes:
        """Encode the events of a chunk."""
        return server_event(chunk)

    def end(self) -> bytes:
        """Encode the events after the last chunk."""
        return b"data: [DONE]\n\n"

    def failure(self, error: Mapping[str, Any]) -> bytes:
        """Encode the end of a stream that has failed. `error`: as in the body of an error."""
        return server_event({"error": error}) + AnswerWriter.end(self)


async def answer_generation(
    receive: Receive,
    starting: Coroutine[Any, Any, LiveGeneration],
    service: EngineService,
    writer: AnswerWriter,
    *,
    is_stream: bool,
) -> Response:
    """Answer with a generation's result, or with its chunks as server-sent events.

    Args:
        receive: of the request; it tells when the client disconnects, which aborts the generation.
        starting: starts the generation.
        writer: writes the body, or the events.

    Raises:
        ClientDisconnect: the client has disconnected.
        Exception: whatever the generation fails with; if streamed, only before the stream has begun.
    """
    if is_stream:
        return await answer_events(receive, starting, service.metrics.note_chunk, writer)
    result = await answer_whole(receive, starting)
    await service.metrics.note_all(result)
    if _is_long(result):
        # In a thread, since writing it at once would block the event loop.
        return await service.manager.in_thread(lambda: Json(writer.whole(result)))
    return Json(writer.whole(result))


def _is_long(result: Any) -> bool:
    """Whether an answer takes long to write, because of many outputs or many logprobs."""
    outputs = result if isinstance(result, list) else [result]
    return sum(OUTPUT_COST + _num_logprobs(output["meta_info"]) for output in outputs) > COST_AT_ONCE


def _num_logprobs(meta: Mapping[str, Any]) -> int:
    lists = [meta.get(f"{side}_top_logprobs") for side in ("input", "output")]
    return sum(len(rows) * len(rows[-1] or ()) for rows in lists if rows)


async def answer_whole(receive: Receive, starting: Coroutine[Any, Any, LiveGeneration]) -> Any:
    """Wait for the result of a generation. Raises as `answer_generation`."""

    async def finish() -> Any:
        return await (await starting).result()

    return await while_connected(receive, finish())


async def answer_events(
    receive: Receive,
    starting: Coroutine[Any, Any, LiveGeneration],
    note_chunk: Callable[[Mapping[str, Any]], None],
    writer: AnswerWriter,
) -> Response:
    """Answer with a generation's chunks as server-sent events. `note_chunk`: is called with each chunk."""
    events = _Events(note_chunk, writer)
    try:
        await while_connected(receive, events.open(starting))
    except BaseException:
        events.drop()
        raise
    return events


class _Events(Response):
    """A stream of events. Not a `StreamingResponse`, whose layers would cost time for every chunk."""

    media_type = "text/event-stream"

    def __init__(self, note_chunk: Callable[[Mapping[str, Any]], None], writer: AnswerWriter) -> None:
        super().__init__(headers={"Cache-Control": "no-cache"})
        # The length is not known yet.
        del self.headers["content-length"]
        self._note_chunk = note_chunk
        self._writer = writer
        self._generation: LiveGeneration | None = None
        self._first: bytes | None = None

    async def open(self, starting: Coroutine[Any, Any, LiveGeneration]) -> None:
        """Start the generation, and wait for its first event, but no longer than `REFUSAL_WAIT_S`."""
        self._generation = await starting
        try:
            has_first = await asyncio.wait_for(self._generation.has_next(), REFUSAL_WAIT_S)
        except TimeoutError:
            return
        if has_first:
            self._first = self._next_event(self._generation)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send_all(send, scope.get(DIRECT_SEND, send)))
        except ClientDisconnect:
            logger.debug("the client of a stream has disconnected")
        finally:
            self.drop()

    def drop(self) -> None:
        """Close the generation. If it is not finished, this aborts it."""
        if self._generation is not None:
            self._generation.close()

    async def _send_all(self, begin: Send, send: Send) -> None:
        generation = self._generation
        assert generation is not None, "it has been opened"
        await begin({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            if self._first is not None:
                await send(_part(self._first))
            while await generation.has_next():
                await send(_part(self._next_event(generation)))
            last = self._writer.end()
        except (RequestRejected, EngineError) as error:
            last = self._writer.failure(error.body["error"])
        except Exception:  # a bug: end the stream properly, and log the details
            logger.exception("a stream has failed")
            last = self._writer.failure(error_body("internal error", 500)["error"])
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def _next_event(self, generation: LiveGeneration) -> bytes:
        chunk = generation.next_chunk()
        self._note_chunk(chunk)
        return self._writer.chunk(chunk)


def _part(event: bytes) -> Message:
    return {"type": "http.response.body", "body": event, "more_body": True}


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await work for a client. The work is cancelled if the client disconnects.

    The caller resumes in the event loop's next iteration after the work ends, and no later. So if the engine
    replies to something after the end of a generation, the generation's answer is sent first.

    Raises ClientDisconnect: the client has disconnected.
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
