"""Ebbtide's engine in this process, with what SGLang's entry points need beyond `Engine`'s methods."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.types import ASGIApp, Receive, Scope, Send

import ebbtide
from ebbtide.srt.entrypoints.loop_thread import refuse_in_event_loop
from ebbtide.srt.errors import EngineError
from ebbtide.srt.managers import io_struct

T = TypeVar("T")


class EngineCore(ebbtide.Engine):
    """An engine that takes control requests by name, and can serve HTTP from any event loop."""

    async def ask(self, name: str, fields: Mapping[str, Any]) -> Any:
        """Send a control request; returns the reply's body.

        Args:
            name: of the request's class.

        Raises:
            RequestRejected, EngineError: as the methods of `Engine`.
        """
        kind = getattr(io_struct, name, None)
        if kind is None:
            raise EngineError(f"{name} is not in this version")
        return await self._runner.run(self._service.control(kind, fields))

    def wait(self, work: Coroutine[Any, Any, T], twin: str) -> T:
        """Run a coroutine to its end; returns its result.

        Args:
            twin: name of the coroutine function to use in an event loop, for the error message.

        Raises:
            RuntimeError: an event loop runs in this thread.
        """
        try:
            refuse_in_event_loop(twin)
        except RuntimeError:
            work.close()
            raise
        return self._runner.wait(work)

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine without waiting for it."""
        self._runner.submit(work)

    def sizes(self) -> dict[str, Any]:
        """What SGLang's scheduler reports when it starts: sizes of the KV pool and of prompts, in tokens."""
        info: dict[str, Any] = self._runner.wait(self._service.server_info())
        return {name: info[name] for name in ("max_total_num_tokens", "max_req_input_len") if name in info}

    @property
    def is_down(self) -> bool:
        """Whether the engine has failed."""
        return self._service.is_down

    def application(self) -> ASGIApp:
        """An ASGI application with this engine's endpoints, for any event loop."""
        # Imported here, since it takes seconds, and an engine alone does not need it.
        from ebbtide.srt.entrypoints.http_server import create_app

        inner = create_app(self._service)

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            if self._runner.is_current:
                await inner(scope, receive, send)
                return
            # The endpoints run in the engine's loop, the connection stays in this one.
            loop = asyncio.get_running_loop()
            await self._runner.run(
                _run(inner, dict(scope), _elsewhere(receive, loop), _elsewhere(send, loop))
            )

        return serve


async def _run(application: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    await application(scope, receive, send)


def _elsewhere(
    function: Callable[..., Awaitable[Any]], loop: asyncio.AbstractEventLoop
) -> Callable[..., Awaitable[Any]]:
    """Wrap a coroutine function so that it runs in the loop of another thread."""

    async def there(*arguments: Any) -> Any:
        return await function(*arguments)

    async def call(*arguments: Any) -> Any:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(there(*arguments), loop))

    return call
