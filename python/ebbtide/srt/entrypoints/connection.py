"""Connections whose requests are bounded in bytes and in time; and a port for an engine in Python."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from ebbtide.srt.entrypoints.launch.placement import bind
from ebbtide.srt.errors import error_body

# Of the URL and the headers together, as with uvicorn's parser that is written in Python.
MAX_HEAD_BYTES: Final = 1 << 16
# From the first byte of a request to the end of its headers.
HEAD_PATIENCE_S: Final = 30.0


class BoundedConnection(HttpToolsProtocol):
    """A connection that refuses a request while its URL and headers arrive, before a key is looked at.

    uvicorn leaves the length of both open, and waits for them for ever; bodies are the application's.
    """

    # What came since the request began, or since the last part of its body: the parser holds it.
    _held_bytes = 0
    _is_in_head = False
    _is_too_long = False
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Who says nothing at all is as one who has said everything.
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._held_bytes += len(data)
        super().data_received(data)
        if self._held_bytes > MAX_HEAD_BYTES:
            self._refuse(431, _TOO_LONG)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._held_bytes, self._is_in_head = 0, True
        self._head_timer = self.loop.call_later(HEAD_PATIENCE_S, self._refuse, 408, _TOO_SLOW)

    def on_header(self, name: bytes, value: bytes) -> None:
        # Those behind a body have no meaning here.
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._end_head()
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > MAX_HEAD_BYTES:
            self._is_too_long = True
            raise ValueError("an error of the parser, which `send_400_response` answers")
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._held_bytes = 0
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        """Refuse what the parser does not take."""
        self._refuse(*((431, _TOO_LONG) if self._is_too_long else (400, msg)))

    def _end_head(self) -> None:
        self._held_bytes, self._is_in_head = 0, False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, status: int, message: str) -> None:
        """Answer, and close; only close while the answer to an earlier request is on its way."""
        self._end_head()
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            body = msgspec.json.encode(error_body(message, status))
            headers: list[tuple[bytes, Any]] = [
                *self.server_state.default_headers,
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
            ]
            lines = (name + b": " + value + b"\r\n" for name, value in headers)
            self.transport.write(STATUS_LINE[status] + b"".join(lines) + b"\r\n" + body)
        self.transport.close()


_TOO_LONG: Final = f"the URL and the headers: expected at most {MAX_HEAD_BYTES} bytes together"
_TOO_SLOW: Final = f"the URL and the headers: expected within {HEAD_PATIENCE_S:g} s"


class Door:
    """Serves an application in the engine's event loop, at `url`. Port 0: a free one. Raises as `bind`."""

    def __init__(self, application: ASGIApp, host: str, port: int) -> None:
        self._socket = bind(host, port)
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(
            application, http=BoundedConnection, lifespan="off", log_config=None, log_level="error"
        )
        self._server = uvicorn.Server(config)
        self._serving: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Serve from here on, in the running loop."""
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))

    async def close(self) -> None:
        """End. The streams of the timeline have been ended before."""
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving
        self._socket.close()
