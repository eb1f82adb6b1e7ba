"""Requests that are asked to end while they move: whoever gets them next hears of it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from ebbtide.ray.continuation import Continuation
from ebbtide.ray.controller import Replica
from ebbtide.srt.errors import EbbtideError

# A replica that does not know a request yet is asked again so soon.
AGAIN_S: Final = 0.1


class Aborts:
    """What the fleet has been asked to end, among the requests that it works on."""

    def __init__(self) -> None:
        self._asked: dict[str, asyncio.Event] = {}

    @contextmanager
    def known(self, rid: str) -> Iterator[asyncio.Event]:
        """While the fleet works on this request. The event is set once it is asked to end."""
        self._asked[rid] = asked = asyncio.Event()
        try:
            yield asked
        finally:
            # Another one may have come under the same name.
            if self._asked.get(rid) is asked:
                del self._asked[rid]

    def ask(self, rids: Collection[str], abort_all: bool) -> None:
        """An abort has come: of these, or of all."""
        for rid in self._asked if abort_all else rids:
            if rid in self._asked:
                self._asked[rid].set()


@contextmanager
def repeated(asked: asyncio.Event, replica: Replica, output: Continuation) -> Iterator[None]:
    """While a replica works on a request: one that moved there ends even if its abort came before it."""

    async def repeat() -> None:
        await asked.wait()
        with suppress(EbbtideError):
            while True:
                await replica.ask("abort_request", output.rid)
                await asyncio.sleep(AGAIN_S)

    task = asyncio.create_task(repeat()) if output.num_moves else None
    try:
        yield
    finally:
        if task is not None:
            task.cancel()
