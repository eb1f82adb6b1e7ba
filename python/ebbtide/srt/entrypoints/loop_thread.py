"""An event loop in a thread of its own, for callers that have no event loop, or another one."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from concurrent.futures import Future
from typing import Any, Concatenate, ParamSpec, TypeVar

import uvloop

from ebbtide.srt.errors import EngineError

P = ParamSpec("P")
T = TypeVar("T")


class LoopThread:
    """An event loop in a daemon thread. Other loops, and threads without a loop, run coroutines in it.

    `owner`: what it belongs to, for messages.
    """

    def __init__(self, owner: str = "engine") -> None:
        self._owner = owner
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"ebbtide-{owner}", daemon=True)
        # Re-entrant: the garbage collector may run a finalizer that takes it in the same thread.
        self._lock = threading.RLock()
        self._is_open = True
        self._owner_pid = os.getpid()
        self._thread.start()

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    @property
    def _is_ours(self) -> bool:
        """Whether this is the process with the thread. A fork has the loop, but not the thread."""
        return os.getpid() == self._owner_pid

    def check_open(self) -> None:
        if not self._is_ours:
            raise EngineError(
                f"the {self._owner} belongs to process {self._owner_pid}, and this is a fork: use it there"
            )
        if not self._is_open:
            raise EngineError(f"the {self._owner} has been shut down")

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the loop. Raises EngineError: the loop was closed, or this is a fork."""
        try:
            # Before the lock, which may be locked forever in a fork.
            self.check_open()
            # Under the lock, so that nothing is submitted to a stopped loop, where it would never run.
            with self._lock:
                self.check_open()
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        except EngineError:
            work.close()
            raise

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine that runs in the loop, from this or any other loop."""
        if self.is_current:
            return await work
        return await asyncio.wrap_future(self.submit(work))

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop and wait for it, from a thread without a loop."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            # If Ctrl-C ends the wait, cancel the work too.
            future.cancel()
            raise

    async def stream(self, chunks: AsyncGenerator[T, None]) -> AsyncGenerator[T]:
        """Iterate in any loop over an async generator that runs in this loop."""
        try:
            while (chunk := await self.run(_next(chunks))) is not None:
                yield chunk
        finally:
            self.call(lambda: asyncio.ensure_future(_end(chunks)))

    def iterate(self, chunks: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        """Iterate in a thread without a loop over an async generator that runs in this loop."""
        try:
            while (chunk := self.wait(_next(chunks))) is not None:
                yield chunk
        finally:
            # An engine that was shut down has closed the generator.
            with contextlib.suppress(EngineError):
                self.wait(_end(chunks))

    def call(self, function: Callable[[], object]) -> None:
        """Call a function in the loop. Does nothing if the loop was closed, or in a fork."""
        if not self._is_ours:
            return
        with self._lock:
            if self._is_open:
                self._loop.call_soon_threadsafe(function)

    def close(self, last: Coroutine[Any, Any, None], then: Callable[[], None] = lambda: None) -> None:
        """Refuse new work, run `last`, call `then`, wait for all running tasks, and end the thread.

        `then`: called in this thread. It may end what tasks wait for.
        """
        with self._lock:
            self._is_open = False
        asyncio.run_coroutine_threadsafe(last, self._loop).result()
        then()
        asyncio.run_coroutine_threadsafe(_finish(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def end(self, last: Callable[[], Coroutine[Any, Any, None]], then: Callable[[], None]) -> None:
        """Like `close`, but callable where the garbage collector runs, even in the loop's thread.

        Does nothing in a fork. `last`: makes the last coroutine.
        """
        if not self._is_ours:
            return
        if self.is_current:
            # The loop's thread cannot wait for its own end.
            threading.Thread(target=self.end, args=(last, then)).start()
            return
        self.close(last(), then)


async def _finish() -> None:
    await _finish_tasks()
    # Closing generators that were not read to their end starts more tasks.
    await asyncio.get_running_loop().shutdown_asyncgens()
    await _finish_tasks()


async def _finish_tasks() -> None:
    await asyncio.sleep(0)  # let scheduled callbacks create their tasks
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others)
        await asyncio.sleep(0)


def blocking(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], T]:
    """Make the blocking version of a coroutine method. Its object needs a `_runner`, a `LoopThread`.

    The blocking method raises RuntimeError in a running event loop.
    """

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        refuse_in_event_loop(method.__name__)
        # By its name, since a subclass may override the method.
        answer: Any = self._runner.wait(getattr(self, method.__name__)(*args, **kwargs))
        return self._runner.iterate(answer) if isinstance(answer, AsyncGenerator) else answer  # type: ignore[no-any-return]

    vars(call).pop("__isabstractmethod__", None)
    call.__name__ = method.__name__.removeprefix("async_")
    call.__qualname__ = method.__qualname__.replace(method.__name__, call.__name__)
    return call


def refuse_in_event_loop(twin: str) -> None:
    """Refuse a blocking call in an event loop. `twin`: name of the coroutine to await instead.

    Raises RuntimeError: an event loop runs in this thread.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(
        f"a plain call would block the event loop of this thread: await its twin `{twin}(...)`"
    )


async def _next(chunks: AsyncGenerator[T, None]) -> T | None:
    """The next chunk; None at the end."""
    return await anext(chunks, None)


async def _end(chunks: AsyncGenerator[T, None]) -> None:
    """Close a generator. One that is still running was cancelled, and ends by itself."""
    if not chunks.ag_running:  # type: ignore[attr-defined]
        await chunks.aclose()
