"""The dashboard of an engine in Python, which has no port otherwise."""

from __future__ import annotations

import asyncio
import socket

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.routing import Route

from ebbtide.srt.entrypoints.dashboard.routes import Dashboard
from ebbtide.srt.entrypoints.service import EngineService
from ebbtide.srt.errors import ConfigurationError

HOST = "127.0.0.1"


class DashboardServer:
    """Serves the page to this machine alone: there is no key that it could ask for.

    Args:
        port: 0 for a free one.

    Attributes:
        url: of the page.

    Raises:
        ConfigurationError: the port is taken.
    """

    def __init__(self, service: EngineService, port: int) -> None:
        self._socket = socket.socket()
        try:
            self._socket.bind((HOST, port))
        except OSError as error:
            self._socket.close()
            raise ConfigurationError(f"port {port} of {HOST} cannot be had: {error.strerror}") from None
        self.url = f"http://{HOST}:{self._socket.getsockname()[1]}/dashboard"
        routes = [Route(path, endpoint) for path, endpoint in Dashboard(service).routes().items()]
        # The page of another site could read what is told here if its own name came to lead here.
        names = Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])
        app = Starlette(routes=routes, middleware=[names])
        config = uvicorn.Config(app, lifespan="off", log_config=None, log_level="error")
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
