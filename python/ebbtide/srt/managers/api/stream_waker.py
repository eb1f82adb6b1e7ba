"""Wakes the readers of streams a few at a time: replies do not wait behind the chunks of all of them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from contextlib import suppress
from typing import Final, TypeAlias

# What an event loop may run of them before it looks at anything else: a millisecond.
STREAMS_PER_TURN: Final = 32

# What a reader waits for: in its event loop, or in a thread without one.
Waiter: TypeAlias = asyncio.Future[None] | concurrent.futures.Future[None]


class StreamWaker:
    """Queues of readers to be woken, one for each event loop that has any.

    Whatever arrives for all readers of another loop before it has its turn wakes that loop once. `lock`: held
    by whoever delivers to streams, or takes from them.
    """

    def __init__(self) -> None:
        # Finalizers that the collector runs may ask for it again.
        self.lock = threading.RLock()
        self._waiting: dict[asyncio.AbstractEventLoop, list[Waiter]] = {}

    def wake_later(self, waiter: Waiter) -> None:
        """Wake a reader in one of the next turns of its event loop. Needs the lock."""
        if isinstance(waiter, concurrent.futures.Future):
            waiter.set_result(None)
            return
        loop = waiter.get_loop()
        if (waiting := self._waiting.get(loop)) is not None:
            waiting.append(waiter)
            return
        # The readers of loops that have been closed have gone.
        self._waiting = {one: queue for one, queue in self._waiting.items() if not one.is_closed()}
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(self._turn, loop)
            self._waiting[loop] = [waiter]

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        with self.lock:
            waiting = self._waiting[loop]
            woken = waiting[:STREAMS_PER_TURN]
            del waiting[:STREAMS_PER_TURN]
            if waiting:
                loop.call_soon(self._turn, loop)
            else:
                del self._waiting[loop]
        for waiter in woken:
            if not waiter.done():
                waiter.set_result(None)
