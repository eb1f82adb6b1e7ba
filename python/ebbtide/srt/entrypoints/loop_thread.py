"""An event loop of the engine's own, for callers that have none or another one."""

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
    """An event loop in a daemon thread.

    What belongs to it can be asked for from any other loop, and from threads without one. `owner`: whose it
    is, for messages.
    """

    def __init__(self, owner: str = "engine") -> None:
        self._owner = owner
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"ebbtide-{owner}", daemon=True)
        # Finalizers that the collector runs may ask for it again.
        self._lock = threading.RLock()
        self._is_open = True
        self._owner_pid = os.getpid()
        self._thread.start()

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    @property
    def _is_ours(self) -> bool:
        """Whether this is the process of the thread: a fork has the loop without it."""
        return os.getpid() == self._owner_pid

    def check_open(self) -> None:
        if not self._is_ours:
            raise EngineError(
                f"the {self._owner} belongs to process {self._owner_pid}, and this is a fork: ask it there"
            )
        if not self._is_open:
            raise EngineError(f"the {self._owner} has been shut down")

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the loop. Raises `EngineError` once that has been closed, and in a fork."""
        try:
            # Ahead of the lock: a fork may have got it held, for ever.
            self.check_open()
            # What is submitted gets to run, or is refused, but never waits in a loop that has stopped.
            with self._lock:
                self.check_open()
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        except EngineError:
            work.close()
            raise

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await a coroutine in the loop, from whichever loop this is."""
        if self.is_current:
            return await work
        return await asyncio.wrap_future(self.submit(work))

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop and wait for it, from a thread without a loop."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            # Ctrl-C ends the wait: what was waited for ends too.
            future.cancel()
            raise

    async def stream(self, chunks: AsyncGenerator[T, None]) -> AsyncGenerator[T]:
        """What a generator of the loop yields, for any loop."""
        try:
            while (chunk := await self.run(_next(chunks))) is not None:
                yield chunk
        finally:
            self.call(lambda: asyncio.ensure_future(_end(chunks)))

    def iterate(self, chunks: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        """What a generator yields, for a thread without a loop."""
        try:
            while (chunk := self.wait(_next(chunks))) is not None:
                yield chunk
        finally:
            # An engine that was shut down has ended them.
            with contextlib.suppress(EngineError):
                self.wait(_end(chunks))

    def call(self, function: Callable[[], object]) -> None:
        """Call a function in the loop, unless that has been closed, or this is a fork."""
        if not self._is_ours:
            return
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

    def end(self, last: Callable[[], Coroutine[Any, Any, None]], then: Callable[[], None]) -> None:
        """As `close`, from wherever the garbage collector runs: in this thread too. In a fork nothing ends.

        `then`: called behind it.
        """
        if not self._is_ours:
            return
        if self.is_current:
            # It cannot wait for itself.
            threading.Thread(target=self.end, args=(last, then)).start()
            return
        self.close(last())
        then()


async def _run_last(last: Coroutine[Any, Any, None]) -> None:
    await last
    await _finish_tasks()
    # Generators that nobody read to their end are closed by tasks of their own, the one within another last.
    await asyncio.get_running_loop().shutdown_asyncgens()
    await _finish_tasks()


async def _finish_tasks() -> None:
    await asyncio.sleep(0)  # those that are about to begin
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others)
        await asyncio.sleep(0)


def blocking(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], T]:
    """The plain twin of a coroutine method of whoever has a `_runner`. Works where no event loop runs."""

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        refuse_in_event_loop(method.__name__)
        # By its name: the method may be another one where the class of `self` has its own.
        answer: Any = self._runner.wait(getattr(self, method.__name__)(*args, **kwargs))
        return self._runner.iterate(answer) if isinstance(answer, AsyncGenerator) else answer  # type: ignore[no-any-return]

    vars(call).pop("__isabstractmethod__", None)
    call.__name__ = method.__name__.removeprefix("async_")
    call.__qualname__ = method.__qualname__.replace(method.__name__, call.__name__)
    return call


def refuse_in_event_loop(twin: str) -> None:
    """Refuse a plain call where it would block a loop; `twin` is what to call there."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(
        f"a plain call would block the event loop of this thread: await its twin `{twin}(...)`"
    )


async def _next(chunks: AsyncGenerator[T, None]) -> T | None:
    """The next one; None at the end."""
    return await anext(chunks, None)


async def _end(chunks: AsyncGenerator[T, None]) -> None:
    """Close it, unless its reader was cancelled within: then it ends of that."""
    if not chunks.ag_running:  # type: ignore[attr-defined]
        await chunks.aclose()
