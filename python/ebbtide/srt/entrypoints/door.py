"""HTTP for an engine in Python, which has no port otherwise: its dashboard, or all that a server answers."""

from __future__ import annotations

import asyncio
import socket

import uvicorn
from starlette.types import ASGIApp

from ebbtide.srt.entrypoints.connection import BoundedConnection
from ebbtide.srt.errors import ConfigurationError


class Door:
    """Serves an application in the engine's event loop.

    Args:
        application: over the engine's service.
        host: address to listen on.
        port: 0 for a free one.

    Attributes:
        url: where it is.

    Raises:
        ConfigurationError: the address cannot be had.
    """

    def __init__(self, application: ASGIApp, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise ConfigurationError(f"port {port} of {host} cannot be had: {error.strerror}") from None
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
