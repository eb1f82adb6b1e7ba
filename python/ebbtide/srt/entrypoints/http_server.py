"""The engine over HTTP. Source: wire_api sections 1 to 3."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import uvicorn
import uvloop
from fastapi import FastAPI
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ebbtide.srt.config import EngineConfig, resolve
from ebbtide.srt.entrypoints.anthropic import AnthropicApi, with_own_errors
from ebbtide.srt.entrypoints.connection import BoundedConnection
from ebbtide.srt.entrypoints.http_answers import DIRECT_SEND, Json, error_answer
from ebbtide.srt.entrypoints.launch.child_process import EarlyProcesses
from ebbtide.srt.entrypoints.launch.console import (
    READING_CONFIG,
    StageLine,
    Stopped,
    configure_logging,
    is_main_thread,
    raising_signals,
)
from ebbtide.srt.entrypoints.launch.launcher import launch_node
from ebbtide.srt.entrypoints.launch.placement import bind, cannot_listen
from ebbtide.srt.entrypoints.metrics.observers import TraceContext
from ebbtide.srt.entrypoints.middleware import FRAMED_BY_NONE, AccessCheck, OneSpelling, RequestIds
from ebbtide.srt.entrypoints.openai.routes import Calls, OpenAIApi
from ebbtide.srt.entrypoints.openai.tokenization import read_chat_template
from ebbtide.srt.entrypoints.pages import Dashboard, StaticPages
from ebbtide.srt.entrypoints.request_body import BodyReader
from ebbtide.srt.entrypoints.routes import (
    CONTROL_ROUTES,
    NOT_IMPLEMENTED,
    NativeApi,
    binary_fields,
    control_endpoint,
)
from ebbtide.srt.entrypoints.routing import endpoints
from ebbtide.srt.entrypoints.service import EngineService
from ebbtide.srt.entrypoints.vllm.generate import TokensApi
from ebbtide.srt.entrypoints.vllm.routes import vllm_endpoints
from ebbtide.srt.errors import EngineError, RequestRejected, error_body
from ebbtide.srt.server_args import ServerArgs
from ebbtide.srt.this_process import freeze_heap, raise_file_limit
from ebbtide.version import __version__

logger = logging.getLogger(__name__)

ALL_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]
BACKLOG = 2048
# How long answers may still take when the server stops. Then the remaining connections are closed.
STOP_TIMEOUT_S = 2
# A second SIGTERM this soon does not end a drain: coreutils' `timeout` signals its child, then its group.
ONE_STOP_S = 1.0
# Longer than client libraries keep an idle connection (httpx 5 s, aiohttp 15 s). If the server closed it
# first, it could do so just when a request is being sent.
KEEP_ALIVE_S = 75
# Sent as Retry-After with 503: the queue is full, or the server drains.
RETRY_AFTER_S = 1


# ------------------------------------------------------------------------------------------- the application


def create_app(service: EngineService) -> FastAPI:
    """Make the application. The service must be open before the first request."""
    # FastAPI's own OpenAPI document would not describe our types, and its page loads from another site.
    app = _Application(openapi_url=None, redirect_slashes=False)
    bodies, weight_bodies = BodyReader(), BodyReader()
    calls = Calls(service, bodies)
    parts = (
        *(NativeApi(service, bodies), StaticPages(service), Dashboard(service)),
        *(OpenAIApi(service, bodies, calls), AnthropicApi(service, calls)),
        TokensApi(service, bodies, calls),
    )
    answered = [*itertools.chain.from_iterable(map(endpoints, parts)), *vllm_endpoints(service, bodies)]
    for route, endpoint in answered:
        for path in route.paths:
            app.add_route(path, endpoint, methods=list(route.methods))
    for path, kind in CONTROL_ROUTES.items():
        reader = weight_bodies if binary_fields(kind) else bodies
        app.add_route(path, control_endpoint(service, kind, reader), methods=list(kind.row.methods))
    for path in NOT_IMPLEMENTED:
        app.add_route(path, _not_implemented, methods=ALL_METHODS)

    async def answer_failure(request: Request, error: Exception) -> Response:
        assert isinstance(error, EngineError)
        # 503 when the engine is down or going down.
        return error_answer(str(error), 503 if service.is_down else error.status, **error.fields)

    app.add_exception_handler(RequestRejected, _answer_rejection)
    app.add_exception_handler(EngineError, answer_failure)
    app.add_exception_handler(HTTPException, _answer_http_exception)
    app.add_exception_handler(ClientDisconnect, _answer_nobody)
    app.add_exception_handler(Exception, _answer_bug)
    # A request passes the middleware that is added last first.
    app.add_middleware(TraceContext, tracing=lambda: service.tracing)
    for layer in (AccessCheck, OneSpelling, RequestIds):
        app.add_middleware(layer, service=service)
    return app


class _Application(FastAPI):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[DIRECT_SEND] = send
        await super().__call__(scope, receive, with_own_errors(scope, send))


async def _not_implemented(request: Request) -> Response:
    path = request.url.path
    # NeMo-RL reads this field of all answers of its own routes.
    fields = {"ok": False} if path.startswith("/nemo-rl/") else {}
    return error_answer(f"{path} is not implemented in this version", 501, **fields)


async def _answer_rejection(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestRejected)
    answer = Json(error.body, error.status)
    if error.status == 503:
        answer.headers["Retry-After"] = str(RETRY_AFTER_S)
    if error.status == 408:
        # The rest of the body may still arrive, and is not read.
        answer.headers["Connection"] = "close"
    return answer


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = {
        404: f"there is no {request.url.path}",
        405: f"{request.url.path} does not take {request.method}",
    }
    message = known.get(error.status_code, error.detail)
    return Json(error_body(message, error.status_code), error.status_code, dict(error.headers or {}))


async def _answer_nobody(request: Request, error: Exception) -> Response:
    # The client has disconnected; 499 stands for that in access logs.
    return Response(status_code=499)


async def _answer_bug(request: Request, error: Exception) -> Response:
    return error_answer(f"{request.url.path} failed: {type(error).__name__}: {error}", 500)


# ---------------------------------------------------------------------------------------------- the server


def launch_server(server_args: ServerArgs, early: EarlyProcesses | None = None) -> None:
    """Serve until SIGINT or SIGTERM. On nodes other than 0, only run the node's ranks.

    All processes have ended when it returns or raises.

    `early`: processes of the engine that have been started already.

    Raises:
        Stopped: a signal came before the server was ready.
        ConfigurationError: the server cannot start with these arguments; raised before the model is loaded if
            possible.
        EngineError: a process of the engine died. Its open requests were answered with 503.
    """
    if server_args.node_rank > 0:
        launch_node(server_args, early)
        return
    configure_logging(server_args, "server")
    serve(lambda: resolve(server_args), early=early)


def serve(
    configure: Callable[[], EngineConfig],
    targets: Mapping[str, str] | None = None,
    early: EarlyProcesses | None = None,
    application: Callable[[EngineService], ASGIApp] = create_app,
) -> None:
    """Like `launch_server`, for any configuration.

    Args:
        configure: makes the configuration.
        targets: the processes to start, see `NodeProcesses`; None: the usual ones.
        application: makes the application to serve.
    """
    service: EngineService | None = None
    raise_file_limit()
    try:
        with raising_signals():
            with StageLine() as stages:
                stages.show("", READING_CONFIG)
                config = configure()
            read_chat_template(config.server_args.chat_template)  # raises errors now, not at the first chat
            listener = bind(config.server_args.host, config.server_args.port)
            service = EngineService(config, targets, early)
    except Stopped:
        if service is not None:
            service.shutdown()
        raise
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            death = runner.run(_serve(service, listener, config, application(service)))
    finally:
        service.shutdown()
    if death is not None:
        raise EngineError(death)


async def _serve(
    service: EngineService, listener: socket.socket, config: EngineConfig, application: ASGIApp
) -> str | None:
    """Serve until a signal comes (returns None) or a process dies (returns the reason).

    Raises Stopped: the signal came before the server was ready.
    """
    server = _Server(
        uvicorn.Config(
            application,
            http=BoundedConnection,
            lifespan="off",
            log_config=None,
            log_level=config.server_args.log_level_http,
            timeout_graceful_shutdown=2 * STOP_TIMEOUT_S,
            timeout_keep_alive=KEEP_ALIVE_S,
            headers=[FRAMED_BY_NONE],
        )
    )
    deaths: list[str] = []

    def note_death(message: str) -> None:
        logger.critical("the server stops: %s", message)
        deaths.append(message)
        server.should_exit = True

    def stop() -> None:
        service.fail("the server is shutting down")
        server.should_exit = True

    drain_began_s = -math.inf
    is_ready = False

    def terminate() -> None:
        nonlocal drain_began_s
        timeout_s = config.server_args.drain_timeout_s
        if timeout_s and server.started and not service.is_draining:
            drain_began_s = time.monotonic()
            service.drain(timeout_s)
        elif time.monotonic() - drain_began_s > ONE_STOP_S:
            stop()

    try:
        _on_signals({signal.SIGINT: stop, signal.SIGTERM: terminate})
        await service.open(note_death, stop)
        if not config.server_args.skip_server_warmup:
            await service.generate_one_token()
        freeze_heap()
        try:
            listener.listen(BACKLOG)
        except OSError as error:
            raise cannot_listen(config.server_args.host, config.server_args.port, error) from None
        is_ready = not server.should_exit
        logger.info("ready: listening on %s", config.server_args.url())
        if sys.stderr.isatty():
            Console(stderr=True).print(welcome(service))
        await server.serve(sockets=[listener])
    except EngineError:
        if not service.is_down:
            raise
    finally:
        await service.close()
        # End the processes while the event loop still runs, so that the death of one can still be reported.
        await asyncio.to_thread(service.shutdown)
    if not deaths and not is_ready:
        raise Stopped
    return deaths[0] if deaths else None


class _Server(uvicorn.Server):
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Closing the connections ends their answers quietly; uvicorn would cancel them and log errors.
        leaving = asyncio.get_running_loop().call_later(STOP_TIMEOUT_S, self._leave_clients)
        try:
            await super().shutdown(sockets)
        finally:
            leaving.cancel()

    def _leave_clients(self) -> None:
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    def capture_signals(self) -> Any:
        # uvicorn would raise the signal again after it has stopped, but the exit status should be 0.
        return nullcontext()


def _on_signals(handlers: Mapping[int, Callable[[], None]]) -> None:
    if is_main_thread():
        for number, handler in handlers.items():
            asyncio.get_running_loop().add_signal_handler(number, handler)


MB = 1e6


def welcome(service: EngineService) -> Panel:
    """Make the panel that a ready server prints: its model, its addresses, and commands to try."""
    config, state = service.config, service.state
    url = config.server_args.url()
    memory = ", ".join(
        f"{tag} {sum(rank.tags[tag].resident_bytes for rank in state.ranks) / MB:,.0f} MB"
        for tag in state.ranks[0].tags
        if any(rank.tags[tag].virtual_bytes for rank in state.ranks)
    )
    parallel = config.parallel
    device = config.runtime.device.partition(":")[0]
    table = Table.grid(padding=(0, 2))
    for name, value in (
        ("model", f"{config.model.served_model_name} (weights {state.weight_version}, {config.model.dtype})"),
        ("device", device if parallel.num_ranks == 1 else f"{parallel.num_ranks} x {device}"),
        ("memory", memory),
        ("server", url),
        ("dashboard", f"{url}/dashboard"),
        ("HTTP API", f"{url}/docs"),
        ("try", "ebbtide chat · ebbtide status · ebbtide top"),
    ):
        table.add_row(f"[dim]{name}[/]", value)
    return Panel.fit(table, title=f"Ebbtide {__version__}", border_style="cyan")
