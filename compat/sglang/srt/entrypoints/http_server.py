"""SGLang's server, and `app`, an application with Ebbtide's endpoints. Source: wire_api section 8.

`app` has its routes from the start, so that frameworks can add and remove some. Requests go to the engine to
which `launch_server` or `set_global_state` binds it later.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import uvicorn
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ebbtide.srt.config import resolve
from ebbtide.srt.entrypoints.http_server import create_app, serve
from ebbtide.srt.entrypoints.launch.console import configure_logging
from ebbtide.srt.entrypoints.launch.launcher import launch_node
from ebbtide.srt.entrypoints.service import EngineService
from ebbtide.srt.errors import EngineError, error_body
from ebbtide.srt.server_args import bare_host
from sglang._asking import ask
from sglang._core import EngineCore
from sglang.srt.entrypoints.engine import Engine as Engine, _launch_subprocesses as _launch_subprocesses
from sglang.srt.managers.tokenizer_manager import ServerStatus, TokenizerManager
from sglang.srt.server_args import PortArgs, ServerArgs as ServerArgs

logger = logging.getLogger(__name__)

# The time that running requests get when the server stops.
_STOP_TIMEOUT_S = 2
_WARMUP_TIMEOUT_S = 120.0
_POLL_S = 0.1


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
    """An engine in this process, in parts as `_launch_subprocesses` returns them."""

    tokenizer_manager: TokenizerManager
    template_manager: Any
    scheduler_info: Any


def _make_app() -> FastAPI:
    # Without a service, since only the routes are read here.
    known = create_app(cast(EngineService, object()))
    made = FastAPI(openapi_url=None)
    for route in known.routes:
        if isinstance(route, Route):
            made.router.routes.append(_Route(route))
    made.add_exception_handler(HTTPException, _answer_http_exception)
    return made


class _Route(APIRoute):
    """A route of `app`. Frameworks look for this class, `APIRoute`, to find routes to remove."""

    def __init__(self, known: Route) -> None:
        super().__init__(
            known.path, _endpoint, methods=known.methods, name=known.name, include_in_schema=False
        )
        self.app = _endpoints


async def _endpoint(request: Request) -> Response:
    """Placeholder in the list of routes. It is never called: `_Route` calls `_endpoints` instead."""
    raise NotImplementedError


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(f"{request.method} {request.url.path}: {error.detail}", error.status_code)


def _error(message: str, status: int) -> Response:
    return JSONResponse(error_body(message, status), status)


_endpoints = _Endpoints()
app = _make_app()


def set_global_state(state: _GlobalState) -> None:
    """Bind `app` to an engine in this process. It may then be served from any event loop."""
    _endpoints.bind(state.tokenizer_manager.core.application())


def launch_server(server_args: ServerArgs) -> None:
    """Serve `app` until SIGINT or SIGTERM; on other nodes of an engine, run their ranks.

    Raises:
        ConfigurationError, EngineError: as Ebbtide's own `launch_server`.
    """
    if server_args.node_rank > 0:
        launch_node(server_args)
        return
    configure_logging(server_args, "server")
    serve(lambda: resolve(server_args), application=_bound_to)


def _execute_server_warmup(server_args: ServerArgs) -> bool:
    """Wait until the server has generated a token; returns whether it has within `_WARMUP_TIMEOUT_S`."""
    url = f"{server_args.url()}/health_generate"
    deadline_s = time.monotonic() + _WARMUP_TIMEOUT_S
    while time.monotonic() < deadline_s:
        try:
            ask(url, server_args.api_key, timeout_s=_WARMUP_TIMEOUT_S)
            return True
        except OSError as error:  # No connection yet, or an HTTP error.
            failure = error
            time.sleep(_POLL_S)
    logger.error("%s did not answer: %s", url, failure)
    return False


def _setup_and_run_http_server(
    server_args: ServerArgs,
    tokenizer_manager: TokenizerManager,
    template_manager: Any,
    port_args: PortArgs,
    scheduler_infos: Sequence[dict[str, Any]],
    subprocess_watchdog: Any,
    execute_warmup_func: Callable[[ServerArgs], bool] = _execute_server_warmup,
    launch_callback: Callable[[], None] | None = None,
) -> None:
    """Serve `app` for an engine of `Engine._launch_subprocesses` until SIGINT or SIGTERM; then end it.

    Args:
        execute_warmup_func: called in a thread unless `skip_server_warmup`; returns whether the server is up.
        launch_callback: called in that thread when the server is up.

    Raises:
        EngineError: a process of the engine died.
    """
    set_global_state(_GlobalState(tokenizer_manager, template_manager, scheduler_infos[0]))
    server = _Server(server_args, tokenizer_manager.core)

    def get_ready() -> None:
        if not server_args.skip_server_warmup and not execute_warmup_func(server_args):
            tokenizer_manager.server_status = ServerStatus.UnHealthy
            return
        tokenizer_manager.server_status = ServerStatus.Up
        if launch_callback is not None:
            launch_callback()

    threading.Thread(target=get_ready, name="sglang-warmup", daemon=True).start()
    try:
        server.run()
        has_died = tokenizer_manager.core.is_down
    finally:
        tokenizer_manager.core.shutdown()
    if has_died:
        raise EngineError("a process of the engine died: the server has stopped")


class _Server(uvicorn.Server):
    """A server that also stops when the engine has failed."""

    def __init__(self, server_args: ServerArgs, core: EngineCore) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=bare_host(server_args.host),
                port=server_args.port,
                lifespan="off",
                log_config=None,
                log_level=server_args.log_level_http or server_args.log_level,
                timeout_graceful_shutdown=_STOP_TIMEOUT_S,
            )
        )
        self._core = core

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._core.is_down

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn's own would raise the signal again at its end, before the engine is shut down.
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGINT, signal.SIGTERM)
        previous = {number: signal.signal(number, self.handle_exit) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


async def health_generate(request: Request) -> Response:
    """The endpoint of `/health_generate`, for the client's own routes."""
    return _Forwarded("/health_generate")


def _bound_to(service: EngineService) -> ASGIApp:
    _endpoints.bind(create_app(service))
    return app


class _Forwarded(Response):
    """A response that another path of `app` gives."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _endpoints({**scope, "path": self._path, "raw_path": self._path.encode()}, receive, send)
