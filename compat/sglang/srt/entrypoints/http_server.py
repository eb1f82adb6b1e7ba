"""The server, and `app`: Ebbtide's endpoints, for an engine that is started later. wire_api section 8.

`app` has its routes from the start, so that frameworks can add to them and take some away. What is left of
them leads to the engine that `launch_server` or `set_global_state` binds it to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ebbtide.srt.config import resolve
from ebbtide.srt.entrypoints.http_server import create_app, serve
from ebbtide.srt.entrypoints.node_server import launch_node
from ebbtide.srt.entrypoints.process import configure_logging
from ebbtide.srt.entrypoints.service import EngineService
from ebbtide.srt.errors import error_body
from sglang.srt.entrypoints.engine import Engine as Engine
from sglang.srt.entrypoints.engine import _launch_subprocesses as _launch_subprocesses
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.server_args import ServerArgs as ServerArgs


class _Endpoints:
    """The endpoints of the engine that `app` is bound to."""

    def __init__(self) -> None:
        self._application: ASGIApp | None = None

    def bind(self, application: ASGIApp) -> None:
        self._application = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._application is None:
            await _error("no engine has been started for this application", 503)(scope, receive, send)
        else:
            await self._application(scope, receive, send)


@dataclass
class _GlobalState:
    """An engine of this process, as `_launch_subprocesses` returns it in parts."""

    tokenizer_manager: TokenizerManager
    template_manager: Any
    scheduler_info: Any


def _make_app() -> FastAPI:
    # Of an engine only the first request would want something.
    known = create_app(cast(EngineService, object()))
    made = FastAPI(openapi_url=None)
    for route in known.routes:
        if isinstance(route, Route):
            made.router.routes.append(Route(route.path, _endpoints, methods=route.methods, name=route.name))
    made.add_exception_handler(HTTPException, _answer_http_exception)
    return made


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(f"{request.method} {request.url.path}: {error.detail}", error.status_code)


def _error(message: str, status: int) -> Response:
    return JSONResponse(error_body(message, status), status)


_endpoints = _Endpoints()
app = _make_app()


def set_global_state(state: _GlobalState) -> None:
    """Bind `app` to an engine of this process; it may then be served from any event loop."""
    _endpoints.bind(state.tokenizer_manager.core.application())


def launch_server(server_args: ServerArgs) -> None:
    """Serve `app` until SIGINT or SIGTERM; on the further nodes of an engine, lend it their ranks.

    Raises:
        ConfigurationError, EngineError: as Ebbtide's own `launch_server`.
    """
    if server_args.node_rank > 0:
        launch_node(server_args)
        return
    configure_logging(server_args.log_level, "server")
    serve(lambda: resolve(server_args), application=_bound_to)


async def health_generate(request: Request) -> Response:
    """The endpoint of `/health_generate`, for routes of the client's own."""
    return _Forwarded("/health_generate")


def _bound_to(service: EngineService) -> ASGIApp:
    _endpoints.bind(create_app(service))
    return app


class _Forwarded(Response):
    """The answer of another path."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _endpoints({**scope, "path": self._path, "raw_path": self._path.encode()}, receive, send)
