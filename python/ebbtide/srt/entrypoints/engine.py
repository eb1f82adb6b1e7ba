"""The engine in Python: its event loop runs in a thread of its own. Source: wire_api section 6."""

from __future__ import annotations

import asyncio
import sys
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from threading import Thread
from typing import TYPE_CHECKING, Any, Self

from ebbtide.srt.config import resolve
from ebbtide.srt.entrypoints.engine_methods import EngineMethods
from ebbtide.srt.entrypoints.launch.child_process import EarlyProcesses
from ebbtide.srt.entrypoints.launch.console import READING_CONFIG, StageLine
from ebbtide.srt.entrypoints.loop_thread import LoopThread
from ebbtide.srt.entrypoints.service import EngineService
from ebbtide.srt.managers import io_struct
from ebbtide.srt.managers.api.live_generation import LiveGeneration
from ebbtide.srt.server_args import ServerArgs

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from ebbtide.trainer.payload_encoding import PayloadEncoder


class EngineStream:
    """The chunks of a request, for `for` and for `async for`. Leaving the loop early aborts the request.

    Each chunk is made in the reader's thread when it is read. So unread chunks take no memory, and a chunk
    costs no switch of threads. As with a generator, an error or a cancelled reader ends the stream. A second
    reader at the same time gets a RuntimeError.

    Args:
        runner: the event loop of the service and the generation; the stream is built there.
    """

    def __init__(self, runner: LoopThread, service: EngineService, generation: LiveGeneration) -> None:
        self._runner = runner
        self._service = service
        self._generation = generation
        self._is_open = True
        self._is_read = False
        service.heap.enter()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> dict[str, Any]:
        self._begin()
        try:
            if not (self._is_open and await self._generation.has_next()):
                raise StopAsyncIteration
            return self._next_chunk()
        except BaseException:
            self._end()
            raise
        finally:
            self._is_read = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> dict[str, Any]:
        self._begin()
        try:
            if not (self._is_open and self._generation.wait_next()):
                raise StopIteration
            return self._next_chunk()
        except BaseException:
            self._end()
            raise
        finally:
            self._is_read = False

    def close(self) -> None:
        """End the stream. A request that is not finished is aborted. Idempotent."""
        self._refuse_second()
        self._end()

    async def aclose(self) -> None:
        """As `close`."""
        self.close()

    def __del__(self) -> None:
        self._end()

    def _begin(self) -> None:
        if self._is_open:
            self._runner.check_open()
        self._refuse_second()
        self._is_read = True

    def _refuse_second(self) -> None:
        if self._is_read:
            raise RuntimeError("this stream is being read: it has one reader")

    def _next_chunk(self) -> dict[str, Any]:
        chunk = self._generation.next_chunk()
        meta = chunk["meta_info"]
        if meta["finish_reason"] is not None:
            # A copy, since the reader may change its dictionary before the call runs.
            self._runner.call(partial(self._service.metrics.note, meta.copy()))
        return chunk

    def _end(self) -> None:
        if self._is_open:
            self._is_open = False
            self._runner.call(self._generation.close)
            self._runner.call(self._service.heap.leave)


class Engine(EngineMethods):
    """An LLM inference engine in Python: it starts its own processes and opens no port.

    The constructor returns when the engine is ready. Use it as a context manager, or call `shutdown`. Methods
    may be called from any thread. Each method `m` blocks; its coroutine `async_m` works in any event loop.
    Control methods return the reply's JSON body as a dict, as over HTTP (docs/control_plane.md).

    While streams run, older objects of the process are hidden from Python's garbage collector (`gc.freeze`),
    unless the caller has frozen some: scanning them all would delay every stream.

    Args:
        server_args: all arguments at once, instead of `kwargs`.
        **kwargs: fields of `ServerArgs`, such as `model_path`; `ebbtide serve --help` explains them.
            `log_level` is "error" unless given.

    Raises:
        ConfigurationError: the engine cannot start with these arguments; the message says why.
        EngineError: a process died at start; none is left running. Methods raise it if the engine has failed
            or was shut down.
        RequestRejected: from methods only: the request was refused, and nothing has changed.
    """

    # Until the loop thread exists there is nothing to finalize.
    _finalizer: Callable[[], object] = staticmethod(lambda: None)

    def __init__(self, *, server_args: ServerArgs | None = None, **kwargs: Any) -> None:
        if server_args is not None and kwargs:
            raise TypeError(f"server_args stands for all arguments, also for {', '.join(sorted(kwargs))}")
        if server_args is None:
            server_args = ServerArgs(**{"log_level": "error", **kwargs})
        self.server_args = server_args
        service = self._service = self._start(server_args)
        try:
            self._runner = LoopThread()
            # No process is left behind when the engine is garbage-collected or the interpreter exits.
            self._finalizer = weakref.finalize(self, self._runner.end, service.close, service.shutdown)
            if "torch" in sys.modules:
                # A caller that has torch will send tensors. Import now, so the first update does not wait.
                encoding = "ebbtide.trainer.payload_encoding"
                Thread(target=import_module, args=[encoding], name="preparing", daemon=True).start()
            self._runner.wait(self._service.open())
        except BaseException:
            self.shutdown()
            raise

    @classmethod
    def _start(cls, server_args: ServerArgs) -> EngineService:
        """Start the engine's processes. `ebbtide.testing` overrides this to start others."""
        with EarlyProcesses(server_args) as early:
            with StageLine() as stages:
                stages.show("", READING_CONFIG)
                config = resolve(server_args)
            return EngineService(config, early=early)

    # ------------------------------------------------------------------------------------------- its methods

    async def _generate(self, fields: Mapping[str, Any]) -> Any:
        return await self._runner.run(self._start_or_finish(fields))

    async def _carry_out(self, kind: type[io_struct.ControlRequest], fields: Mapping[str, Any]) -> Any:
        return await self._runner.run(self._service.control(kind, fields))

    async def _transition(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        return await self._runner.run(self._service.transition(fields))

    async def _new_encoder(self) -> PayloadEncoder:
        # Imports torch, which a caller with tensors has imported already.
        from ebbtide.trainer.payload_encoding import PayloadEncoder, WholeEncoder

        # Ranks on other machines can open neither shared memory nor GPU memory of this one.
        if self.server_args.nnodes > 1:
            return WholeEncoder()
        return PayloadEncoder(self._service.rank_devices, self.server_args.tp_size)

    async def _read(self, what: str, **query: Any) -> dict[str, Any]:
        return await self._runner.run(self._service.read(what, **query))

    @property
    def weight_version(self) -> str:
        self._runner.check_open()
        return self._service.state.weight_version

    def serve_dashboard(self, port: int = 0) -> str:
        """Serve the dashboard on loopback, without a key, as long as the engine lives.

        Args:
            port: TCP port; 0: a free one.

        Returns:
            The page's URL.

        Raises:
            ConfigurationError: the port is taken.
        """
        from starlette.applications import Starlette
        from starlette.middleware import Middleware
        from starlette.middleware.trustedhost import TrustedHostMiddleware
        from starlette.routing import Route

        from ebbtide.srt.entrypoints.pages import Dashboard
        from ebbtide.srt.entrypoints.routing import endpoints

        answered = endpoints(Dashboard(self._service))
        routes = [Route(path, endpoint) for route, endpoint in answered for path in route.paths]
        # Against DNS rebinding, with which another site's page could read this one.
        names = Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])
        application = Starlette(routes=routes, middleware=[names])
        return self._runner.wait(self._open_door(application, "127.0.0.1", port)) + "/dashboard"

    def serve_http(self, port: int = 0) -> str:
        """Serve everything that `ebbtide serve` does, on `server_args.host`, as long as the engine lives.

        Args:
            port: TCP port; 0: a free one.

        Returns:
            The URL.

        Raises:
            ConfigurationError: the port is taken.
        """
        from ebbtide.srt.entrypoints.http_server import create_app  # seconds of imports

        application = create_app(self._service)
        return self._runner.wait(self._open_door(application, self.server_args.host, port))

    async def _open_door(self, application: ASGIApp, host: str, port: int) -> str:
        from ebbtide.srt.entrypoints.connection import Door

        door = Door(application, host, port)
        self._service.at_close.append(door.close)
        door.start()
        return door.url

    # --------------------------------------------------------------------------------------------- lifetime

    @property
    def is_down(self) -> bool:
        """Whether the engine has failed."""
        return self._service.is_down

    def shutdown(self) -> None:
        """End the engine. Returns when its processes are gone; waiting calls raise `EngineError`. Idempotent.

        Unlike the other blocking methods it also works inside a running event loop, which it blocks briefly.
        """
        self._finalizer()
        # If two calls run at once, the second waits here for the first.
        self._service.shutdown()
        self.forget_mapped()

    async def async_shutdown(self) -> None:
        """Like `shutdown`."""
        await asyncio.to_thread(self.shutdown)

    def _end(self) -> None:
        self.shutdown()

    # -------------------------------------------------------------------------------------------- internals

    async def _start_or_finish(self, given: Mapping[str, Any]) -> Any:
        generation = await self._service.manager.prepare(given)
        if generation.is_stream:
            return EngineStream(self._runner, self._service, generation)
        result = await generation.result()
        await self._service.metrics.note_all(result)
        return result
