"""The stream of an `Engine`, read where its reader is: in any event loop, or in a thread without one."""

from __future__ import annotations

from functools import partial
from typing import Any, Self

from ebbtide.srt.entrypoints.loop_thread import LoopThread
from ebbtide.srt.entrypoints.service import EngineService
from ebbtide.srt.managers.api.live_generation import LiveGeneration


class EngineStream:
    """The chunks of a request, for `for` and for `async for`. Leaving it early aborts the request.

    A chunk is made by the reader that asks for it: of hundreds of streams none holds chunks that were not
    read, and no chunk takes a switch of threads. As with a generator, an error ends it, and so does a reader
    that is cancelled; a second reader at once is refused with a RuntimeError.

    Args:
        runner: the loop to which the others belong, and in which this is made.
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
        """Read no more. Idempotent."""
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
            # The reader may change its own.
            self._runner.call(partial(self._service.metrics.note, meta.copy()))
        return chunk

    def _end(self) -> None:
        if self._is_open:
            self._is_open = False
            self._runner.call(self._generation.close)
            self._runner.call(self._service.heap.leave)
