"""Streams of a loop in another thread: how they end when their reader is interrupted within."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from fixtures.deadlines import HANG_S

from ebbtide.srt.entrypoints.loop_thread import LoopThread


class Stream:
    """A chunk, and then nothing; to end it takes some turns of the loop.

    Attributes:
        waits, has_ended: set once it does, and has.
        faults: what the loop has reported.
    """

    def __init__(self, runner: LoopThread) -> None:
        self.waits, self.has_ended = threading.Event(), threading.Event()
        self.faults: list[Any] = []
        runner.wait(self._listen())

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: self.faults.append(context))

    async def chunks(self) -> AsyncGenerator[int, None]:
        try:
            yield 1
            self.waits.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            self.has_ended.set()


async def nothing() -> None:
    pass


@pytest.fixture
def runner() -> Iterator[LoopThread]:
    runner = LoopThread()
    yield runner
    runner.close(nothing())


def test_streams_that_nobody_reads_to_their_end_are_closed_with_the_loop() -> None:
    closed: list[int] = []

    async def numbers() -> AsyncGenerator[int, None]:
        for number in range(2):
            yield number

    async def nested(depth: int) -> AsyncGenerator[int, None]:
        # As those of a response are: bytes, text, lines.
        try:
            async for chunk in nested(depth - 1) if depth else numbers():
                yield chunk
        finally:
            await asyncio.sleep(0)
            closed.append(depth)

    async def read_one() -> None:
        async for _ in nested(6):
            return

    runner = LoopThread()
    runner.wait(read_one())
    runner.close(nothing())
    assert closed == [6, 5, 4, 3, 2, 1, 0]


def test_the_end_waits_for_tasks_behind_what_ends_them() -> None:
    runner, is_over = LoopThread(), threading.Event()

    async def wait() -> bool:
        return await asyncio.to_thread(is_over.wait, HANG_S)

    waiting = runner.submit(wait())
    runner.close(nothing(), is_over.set)
    assert waiting.result(0)


def test_a_reader_that_is_cancelled_ends_a_stream_in_silence(runner: LoopThread) -> None:
    stream = Stream(runner)

    async def read() -> None:
        async for _ in runner.stream(stream.chunks()):
            pass

    async def script() -> None:
        reading = asyncio.create_task(read())
        await asyncio.to_thread(stream.waits.wait, HANG_S)
        reading.cancel()
        await asyncio.wait([reading])
        assert reading.cancelled()

    asyncio.run(script())
    assert stream.has_ended.wait(HANG_S)
    assert stream.faults == []


def test_a_reader_that_is_interrupted_ends_a_stream_and_hears_of_nothing_else(
    runner: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Stream(runner)
    chunks = runner.iterate(stream.chunks())
    assert next(chunks) == 1

    def interrupted(future: Future[Any]) -> None:
        monkeypatch.undo()
        assert stream.waits.wait(HANG_S)
        raise KeyboardInterrupt

    monkeypatch.setattr(Future, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(chunks)
    assert stream.has_ended.wait(HANG_S)


def test_a_stream_that_is_left_between_two_chunks_is_closed(runner: LoopThread) -> None:
    stream = Stream(runner)
    chunks = runner.iterate(stream.chunks())
    assert next(chunks) == 1
    chunks.close()
    assert stream.has_ended.is_set()
