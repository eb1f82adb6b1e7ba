"""The engine over HTTP. Source: wire_api sections 1 to 3."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any, TypeVar

import msgspec
import uvicorn
import uvloop
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ebbtide.srt.config import EngineConfig, HttpConfig, resolve
from ebbtide.srt.entrypoints.control_routes import (
    CONTROL_ROUTES,
    NOT_IMPLEMENTED,
    ControlRoute,
    query_fields,
)
from ebbtide.srt.entrypoints.process import configure_logging
from ebbtide.srt.entrypoints.request_body import read_fields
from ebbtide.srt.entrypoints.service import EngineService
from ebbtide.srt.errors import ConfigurationError, EngineError, RequestRejected, error_body
from ebbtide.srt.managers.generation import Generation
from ebbtide.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

T = TypeVar("T")
Endpoint = Callable[[Request], Awaitable[Response]]

ALL_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]
BACKLOG = 2048
# A full queue refuses within a turn of the scheduler's loop. That long a stream waits for its first chunk
# before it answers 200, so that the refusal can still be a status.
REFUSAL_WAIT_S = 0.5
# What is still being answered when the server stops has that long.
STOP_TIMEOUT_S = 2


# ------------------------------------------------------------------------------------------- the application


def create_app(service: EngineService) -> FastAPI:
    """The application over an engine whose service is open by the time of the first request."""
    app = FastAPI(openapi_url=None)
    endpoints = _Endpoints(service)
    app.add_route("/", endpoints.root, methods=["GET"])
    app.add_route("/generate", endpoints.generate, methods=["POST", "PUT"])
    for path, endpoint in endpoints.information().items():
        app.add_route(path, endpoint, methods=["GET"])
    for path, route in CONTROL_ROUTES.items():
        app.add_route(path, endpoints.control(route), methods=list(route.methods))
    app.add_route("/transition", endpoints.transition, methods=["POST"])
    for path in NOT_IMPLEMENTED:
        app.add_route(path, _not_implemented, methods=ALL_METHODS)
    app.add_exception_handler(RequestRejected, _answer_rejection)
    app.add_exception_handler(EngineError, endpoints.answer_failure)
    app.add_exception_handler(HTTPException, _answer_http_exception)
    app.add_exception_handler(ClientDisconnect, _answer_nobody)
    app.add_exception_handler(Exception, _answer_bug)
    return app


class Json(Response):
    """A JSON body. Non-finite numbers, which JSON lacks, come out as null."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def _error(message: str, status: int, **fields: Any) -> Json:
    return Json(error_body(message, status, **fields), status)


class _Endpoints:
    """What is behind each path."""

    def __init__(self, service: EngineService) -> None:
        self._service = service

    def information(self) -> dict[str, Endpoint]:
        """The paths that only tell something."""
        return {
            "/health": self._health,
            "/health_generate": self._health_generate,
            "/ready": self._ready,
            "/model_info": self._model_info,
            "/get_model_info": self._model_info,
            "/server_info": self._server_info,
            "/get_server_info": self._server_info,
            "/memory_occupation": self._memory_occupation,
            "/get_weight_version": self._weight_version,
        }

    async def root(self, request: Request) -> Response:
        return Response()

    async def generate(self, request: Request) -> Response:
        fields = await read_fields(request.stream())
        generation = self._service.manager.prepare(fields)
        if not generation.is_stream:
            return Json(await _while_connected(request.receive, generation.result()))
        events = _Events(generation)
        try:
            await _while_connected(request.receive, events.wait_for_first(REFUSAL_WAIT_S))
        except BaseException:
            generation.close()
            raise
        return events

    def control(self, route: ControlRoute) -> Endpoint:
        """The endpoint of a control route. A client that disconnects does not end it."""

        async def endpoint(request: Request) -> Response:
            body = await read_fields(request.stream(), route.binary_fields)
            fields = query_fields(route, request.query_params) | body
            status, reply = route.answer(fields, await self._service.control(route.request, fields))
            return Response(status_code=status) if reply is None else Json(reply, status)

        return endpoint

    async def transition(self, request: Request) -> Response:
        return Json(await self._service.transitions.run(await read_fields(request.stream())))

    async def answer_failure(self, request: Request, error: Exception) -> Response:
        """500; 503 when the engine is down or going down."""
        return _error(str(error), 503 if self._service.is_down else 500)

    async def _health(self, request: Request) -> Response:
        return await _healthy(self._service.check_health())

    async def _health_generate(self, request: Request) -> Response:
        return await _healthy(self._service.check_generation())

    async def _ready(self, request: Request) -> Response:
        state = self._service.state
        return Json({"success": True, "message": ""}) if state.can_run else _error(state.reason, 503)

    async def _model_info(self, request: Request) -> Response:
        return Json(self._service.model_info())

    async def _server_info(self, request: Request) -> Response:
        return Json(await self._service.server_info())

    async def _memory_occupation(self, request: Request) -> Response:
        return Json(await self._service.memory_occupation())

    async def _weight_version(self, request: Request) -> Response:
        return Json({"success": True, "message": "", "weight_version": self._service.state.weight_version})


async def _healthy(check: Awaitable[None]) -> Response:
    try:
        await check
    except (EngineError, RequestRejected) as error:
        return _error(str(error), 503)
    return Response()


async def _not_implemented(request: Request) -> Response:
    return _error(f"{request.url.path} is not in this version", 501)


async def _answer_rejection(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestRejected)
    return Json(error.body, error.status)


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = {
        404: f"there is no {request.url.path}",
        405: f"{request.url.path} does not take {request.method}",
    }
    message = known.get(error.status_code, error.detail)
    return Json(error_body(message, error.status_code), error.status_code, dict(error.headers or {}))


async def _answer_nobody(request: Request, error: Exception) -> Response:
    # The client has gone; 499 is what access logs call that.
    return Response(status_code=499)


async def _answer_bug(request: Request, error: Exception) -> Response:
    return _error(f"{request.url.path} failed: {type(error).__name__}: {error}", 500)


# ---------------------------------------------------------------------------- streams and clients that leave


class _Events(StreamingResponse):
    """A generation as server-sent events. It is aborted when the client disconnects."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._chunks = generation.stream()
        self._first: asyncio.Task[dict[str, Any]] | None = None
        super().__init__(
            self._events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )

    async def wait_for_first(self, timeout_s: float) -> None:
        """Return with the first chunk, or after a while.

        Raises:
            RequestRejected, EngineError: the generation was refused, or failed, before it began.
        """
        self._first = asyncio.ensure_future(anext(self._chunks))
        await asyncio.wait([self._first], timeout=timeout_s)
        if self._first.done():
            self._first.result()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _while_connected(receive, self.stream_response(send))
        except ClientDisconnect:
            logger.debug("the client of a stream has disconnected")
        finally:
            if self._first is not None:
                self._first.cancel()
            self._generation.close()

    async def _events(self) -> AsyncIterator[bytes]:
        try:
            if self._first is not None:
                yield _event(await self._first)
            async for chunk in self._chunks:
                yield _event(chunk)
        except RequestRejected as error:
            yield _event({"error": error.body["error"]})
        except EngineError as error:
            yield _event({"error": error_body(str(error), 500)["error"]})
        yield b"data: [DONE]\n\n"


def _event(body: Any) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await something for a client; if that leaves, the work is cancelled.

    Raises:
        ClientDisconnect: it has left.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# ---------------------------------------------------------------------------------------------- the server


class _Stopped(BaseException):
    """A signal has asked for the end while the engine was starting."""


def launch_server(server_args: ServerArgs) -> None:
    """Serve until SIGINT or SIGTERM; returns then, with no process left.

    Raises:
        ConfigurationError: the server cannot start so. Seen before the model loads where that is possible.
        EngineError: a process of the engine died; what was asked of it has been answered with 503.
    """
    configure_logging(server_args.log_level, "server")
    serve(lambda: resolve(server_args))


def serve(configure: Callable[[], EngineConfig], targets: Mapping[str, str] | None = None) -> None:
    """As `launch_server`, for any configuration; `targets` are the processes, if not the usual ones."""
    try:
        with _raising_signals():
            config = configure()
            listener = _bind(config.http)
            service = EngineService(config, targets)
    except _Stopped:
        return
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            death = runner.run(_serve(service, listener, config))
    finally:
        service.shutdown()
    if death is not None:
        raise EngineError(death)


async def _serve(service: EngineService, listener: socket.socket, config: EngineConfig) -> str | None:
    """Serve until a signal comes (returns None), or the engine dies (returns how)."""
    server = _Server(
        uvicorn.Config(
            create_app(service),
            lifespan="off",
            log_config=None,
            log_level=config.http.log_level,
            timeout_graceful_shutdown=STOP_TIMEOUT_S,
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

    try:
        _on_signals(stop)
        await service.open(note_death)
        if not config.server_args.skip_server_warmup:
            await service.generate_one_token()
        _listen(listener, config.http)
        logger.info("ready: listening on %s", config.server_args.url())
        await server.serve(sockets=[listener])
    except EngineError:
        if not service.is_down:
            raise
    finally:
        await service.close()
        # While the loop still runs: a process that is seen to die now has someone to tell.
        await asyncio.to_thread(service.shutdown)
    return deaths[0] if deaths else None


class _Server(uvicorn.Server):
    def capture_signals(self) -> Any:
        # uvicorn would raise a signal again once it has stopped: the exit status is to be 0.
        return nullcontext()


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def _raising_signals() -> Iterator[None]:
    """Make SIGINT and SIGTERM raise `_Stopped`, so that what has been started is ended on the way out."""
    if not _is_main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Stopped

    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _on_signals(stop: Callable[[], None]) -> None:
    if _is_main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop)


def _bind(http: HttpConfig) -> socket.socket:
    """Take the port before the model loads. Nobody can connect until `_listen`."""
    try:
        found = socket.getaddrinfo(http.host, http.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigurationError(f"host {http.host!r}: {error.strerror or error}") from None
    # For a name such as localhost, rather the address that clients expect.
    family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        return listener
    except OSError as error:
        listener.close()
        raise _cannot_listen(http, error) from None


def _listen(listener: socket.socket, http: HttpConfig) -> None:
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        raise _cannot_listen(http, error) from None


def _cannot_listen(http: HttpConfig, error: OSError) -> ConfigurationError:
    return ConfigurationError(f"cannot listen on {http.host} port {http.port}: {error.strerror}")
