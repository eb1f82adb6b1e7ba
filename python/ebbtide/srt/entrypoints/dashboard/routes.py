"""`GET /dashboard`: one page, and the events that it shows."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from importlib import resources

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ebbtide.srt.entrypoints.http_answers import Endpoint, while_connected
from ebbtide.srt.entrypoints.service import EngineService

logger = logging.getLogger(__name__)


class Dashboard:
    """The endpoints over the timeline of one engine."""

    def __init__(self, service: EngineService) -> None:
        self._service = service
        self._page = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")

    def routes(self) -> dict[str, Endpoint]:
        """Their paths, all of them GET."""
        return {"/dashboard": self._show, "/dashboard/events": self._events}

    async def _show(self, request: Request) -> Response:
        return HTMLResponse(self._page, headers={"Content-Security-Policy": _NOTHING_FROM_OUTSIDE})

    async def _events(self, request: Request) -> Response:
        return _EventStream(self._encoded(), media_type="text/event-stream")

    async def _encoded(self) -> AsyncIterator[bytes]:
        async for event in self._service.timeline.events():
            yield b"data: " + msgspec.json.encode(event) + b"\n\n"


# The page has its script and style in itself, and asks its own server alone.
_NOTHING_FROM_OUTSIDE = (
    "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "frame-ancestors 'none'"
)


class _EventStream(StreamingResponse):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self.stream_response(send))
        except ClientDisconnect:
            logger.debug("a viewer of the dashboard has left")
