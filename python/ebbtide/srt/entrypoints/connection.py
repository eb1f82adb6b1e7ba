"""HTTP connections with limits on the size and time of requests, and a server inside an engine in Python."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from ebbtide.srt.entrypoints.launch.placement import bind
from ebbtide.srt.errors import error_body

# For the URL and the headers together.
MAX_HEAD_BYTES: Final = 1 << 16
# How long a request may take from its first byte to the end of its headers.
HEAD_PATIENCE_S: Final = 30.0


class BoundedConnection(HttpToolsProtocol):
    """A connection that limits the size of a request's URL and headers, and the time until they have arrived.

    uvicorn limits neither, and keys are only checked later. Bodies are limited by `BodyReader`.
    """

    # Bytes since the request began, or since the last part of its body: the parser keeps them in memory.
    _held_bytes = 0
    _is_in_head = False
    _is_too_long = False
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # A client that sends nothing is treated like one that is idle between requests.
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
        # Trailers after a chunked body are dropped.
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
        """Answer an error of the parser."""
        self._refuse(*((431, _TOO_LONG) if self._is_too_long else (400, msg)))

    def _end_head(self) -> None:
        self._held_bytes, self._is_in_head = 0, False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, status: int, message: str) -> None:
        """Answer with an error and close. While an earlier request is being answered, only close."""
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
    """Serves an application in the engine's event loop, at `url`. Port 0: a free port. Raises as `bind`."""

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
        """Start serving in the running event loop."""
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))

    async def close(self) -> None:
        """Stop serving. End the timeline's streams first, since open streams delay this."""
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving
        self._socket.close()
