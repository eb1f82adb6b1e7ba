"""An event loop of the engine's own, for callers that have none or another one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import uvloop

from ebbtide.srt.errors import EngineError

T = TypeVar("T")


class LoopThread:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ebbtide-engine", daemon=True)
        self._lock = threading.Lock()
        self._is_open = True
        self._thread.start()

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def check_open(self) -> None:
        if not self._is_open:
            raise EngineError("the engine has been shut down")

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the loop. Raises `EngineError` once the loop has been closed."""
        # The lock: what is submitted gets to run, or is refused, but never waits in a loop that has stopped.
        with self._lock:
            if self._is_open:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise EngineError("the engine has been shut down")

    def call(self, function: Callable[[], object]) -> None:
        """Call a function in the loop, unless that has been closed."""
        with self._lock:
            if self._is_open:
                self._loop.call_soon_threadsafe(function)

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Refuse further work, run `last`, wait for everything that still runs, and end the thread."""
        with self._lock:
            self._is_open = False
        asyncio.run_coroutine_threadsafe(_run_last(last), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _run_last(last: Coroutine[Any, Any, None]) -> None:
    await last
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others)


def refuse_in_event_loop(twin: str) -> None:
    """Refuse a plain call where it would block a loop; `twin` is what to call there."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(
        f"a plain call would block the event loop of this thread: use `await engine.{twin}(...)`"
    )


async def next_chunk(chunks: AsyncGenerator[T, None]) -> T | None:
    """The next one; None at the end."""
    return await anext(chunks, None)
