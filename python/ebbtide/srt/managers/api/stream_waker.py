"""Wakes the readers of streams a few at a time: replies do not wait behind the chunks of all of them."""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import Final, Protocol

# What the event loop may run of them before it looks at anything else: a millisecond.
STREAMS_PER_TURN: Final = 32


class Sleeper(Protocol):
    """Whose reader may be waiting."""

    def wake(self) -> None: ...


class StreamWaker:
    """A queue of readers to be woken. What arrives for one of them meanwhile is part of the same chunk."""

    def __init__(self) -> None:
        self._waiting: dict[Sleeper, None] = {}

    def wake_later(self, stream: Sleeper) -> None:
        """Wake its reader in one of the next turns of the event loop."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._turn)
        self._waiting[stream] = None

    def _turn(self) -> None:
        for stream in list(islice(self._waiting, STREAMS_PER_TURN)):
            del self._waiting[stream]
            stream.wake()
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._turn)
