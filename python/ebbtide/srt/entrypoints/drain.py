"""The end of a server that serves what is in first."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from msgspec import Struct

from ebbtide.srt.entrypoints.bodies import Reply
from ebbtide.srt.managers.tokenizer_manager import TokenizerManager

logger = logging.getLogger(__name__)

DRAINING: Final = "the server is draining: it takes no more requests"


class DrainRequest(Struct, kw_only=True):
    """`timeout_s`: what has not ended by then is answered with 503; null: there is no limit."""

    timeout_s: float | None = None


class DrainReply(Reply, kw_only=True):
    """`num_live`: requests that are still served."""

    num_live: int


class Drain:
    """Waits for the last request.

    Attributes:
        on_end: called when all have ended, or time is up.
    """

    def __init__(self) -> None:
        self.on_end: Callable[[], None] = lambda: None
        self._waiting: asyncio.Task[None] | None = None

    @property
    def has_begun(self) -> bool:
        return self._waiting is not None

    def begin(self, manager: TokenizerManager, timeout_s: float | None) -> None:
        """Begin, or go on with another limit. Needs a running event loop."""
        if self._waiting is not None:
            self._waiting.cancel()
        self._waiting = asyncio.create_task(self._wait(manager, timeout_s))

    async def _wait(self, manager: TokenizerManager, timeout_s: float | None) -> None:
        logger.info("draining: %d requests will be served to their end", manager.num_live)
        try:
            async with asyncio.timeout(timeout_s):
                await manager.drain(DRAINING)
            logger.info("drained")
        except TimeoutError:
            logger.warning("the drain ended after %g s: %d requests were left", timeout_s, manager.num_live)
        self.on_end()
