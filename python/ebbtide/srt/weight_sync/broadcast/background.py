"""Calls that may last as long as a peer likes, in threads that nothing waits for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Final, Generic, TypeVar

T = TypeVar("T")

# Longer than leaving takes, unless a peer does not let go. The thread that leaves outlives that.
LEAVE_S: Final = 10.0


class InThread(Generic[T]):
    """A call in a thread of its own, which the end of the process does not wait for: its peer may hang."""

    def __init__(self, name: str, call: Callable[[], T]) -> None:
        self._future: Future[T] = Future()
        threading.Thread(target=self._run, args=(call,), name=name, daemon=True).start()

    @property
    def is_done(self) -> bool:
        return self._future.done()

    def ends_within(self, timeout_s: float) -> bool:
        """Wait for the end, but no longer than this; whether it has come."""
        return bool(wait([self._future], timeout_s).done)

    def result(self) -> T:
        """What the call returned or raised; only once it is done."""
        return self._future.result(timeout=0)

    def _run(self, call: Callable[[], T]) -> None:
        try:
            result = call()
        except BaseException as error:
            # The frames are taken off it: they hold a connection that is to end, and others wait for that.
            # Whoever drops it last waits as long as a peer likes: neither this thread, nor who asks for the
            # result.
            held = [error.__traceback__]
            threading.Thread(target=_drop, args=(threading.current_thread(), held), daemon=True).start()
            self._future.set_exception(error.with_traceback(None))
        else:
            self._future.set_result(result)


def _drop(user: threading.Thread, held: list[Any]) -> None:
    """Let go of what a thread has used, once it has ended."""
    user.join()
    held.clear()


class Leaving:
    """A group that is being left; it counts as left after a while, whatever its peers do."""

    def __init__(self, name: str, leave: Callable[[], None]) -> None:
        self._thread = InThread(f"leave-{name}", leave)
        self._until_s = time.monotonic() + LEAVE_S

    @property
    def is_done(self) -> bool:
        return self._thread.is_done or time.monotonic() > self._until_s
