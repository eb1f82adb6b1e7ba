"""Streams of `Engine` in the loop of their reader: what wakes it, what chunks leave behind, how they end."""

import asyncio
import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from fixtures.logprobs import PositionLogprobs, columns
from fixtures.scripted_engine import Engine, start

from ebbtide.srt.entrypoints.engine import EngineStream
from ebbtide.srt.entrypoints.loop_thread import LoopThread
from ebbtide.srt.managers.io_struct import FinishReason, RequestOutput, StreamedTokens, TokenOutput
from ebbtide.srt.this_process import NUM_FROZEN_BY_OWNER, HeapHold

NUM_STREAMS = 64
RIDS = [str(number) for number in range(NUM_STREAMS)]


class Streams:
    """Streams of a scripted engine, whose loop is a thread's."""

    def __init__(self) -> None:
        self.runner = LoopThread()
        self._service: Any = SimpleNamespace(heap=HeapHold(), metrics=Mock())
        self._engine = self.runner.wait(self._start())

    async def _start(self) -> Engine:
        engine = Engine()
        engine.manager.start()
        return engine

    def open(self) -> list[EngineStream]:
        return self.runner.wait(self._open())

    async def _open(self) -> list[EngineStream]:
        manager = self._engine.manager
        streams = [
            EngineStream(
                self.runner,
                self._service,
                await manager.prepare({"input_ids": [5], "rid": rid, "stream": True}),
            )
            for rid in RIDS
        ]
        await self._engine.received(NUM_STREAMS)
        for rid in RIDS:
            first = RequestOutput(rid, [1], start=start(), version_starts=[("1", 0)])
            await self._engine.send(first, texts=["a"])
        return streams

    def next_pass(self) -> None:
        """Each stream has one more token, which the manager has taken in."""
        tokens = StreamedTokens(RIDS, [7] * NUM_STREAMS, columns(*[PositionLogprobs(-1.0)] * NUM_STREAMS))
        texts = (["b"] * NUM_STREAMS,)
        self.send(
            TokenOutput(weight_version="1", outputs=[], texts=[], streamed=(tokens,), streamed_texts=texts)
        )

    def finish(self, rid: str) -> None:
        output = RequestOutput(rid, [9], finish=FinishReason("length", length=2))
        self.send(TokenOutput(weight_version="1", outputs=[output], texts=["c"]))

    def send(self, message: TokenOutput) -> None:
        self.runner.wait(self._engine.send_message(message))

    def aborted(self) -> set[str]:
        """The rids that the engine was asked to abort since the last look."""

        async def look() -> list[Any]:
            return self._engine._inbox.receive(0)

        return {message.rid for message in self.runner.wait(look())}

    def close(self) -> None:
        self.runner.close(self._engine.close())
        self._service.heap.thaw()


@pytest.fixture
def streams() -> Iterator[Streams]:
    streams = Streams()
    yield streams
    streams.close()


async def asked(opened: list[EngineStream]) -> "asyncio.Future[list[dict[str, Any]]]":
    """The next chunks of all of them, for which their readers wait."""
    chunks = asyncio.gather(*(anext(stream) for stream in opened))
    await asyncio.sleep(0)
    return chunks


def test_a_pass_wakes_a_loop_once_for_all_of_its_streams(streams: Streams) -> None:
    opened = streams.open()

    async def main() -> None:
        assert {chunk["text"] for chunk in await (await asked(opened))} == {"a"}
        loop = asyncio.get_running_loop()
        woken = Mock(side_effect=loop.call_soon_threadsafe)
        loop.call_soon_threadsafe = woken  # type: ignore[method-assign]
        for number in range(1, 4):
            reading = await asked(opened)
            streams.next_pass()
            assert [chunk["output_ids"] for chunk in await reading] == [[1] + [7] * number] * NUM_STREAMS
            assert woken.call_count == number

    asyncio.run(main())


def test_a_stream_is_read_by_threads_and_by_loops_until_it_ends(streams: Streams) -> None:
    first, second, *_ = streams.open()
    assert next(first)["output_ids"] == [1]
    streams.finish("0")
    assert [chunk["text"] for chunk in first] == ["ac"]
    assert list(first) == []

    async def main() -> None:
        assert (await anext(second))["output_ids"] == [1]
        # Reads it while nobody has another chunk.
        reading = asyncio.ensure_future(anext(second))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="one reader"):
            await anext(second)
        with pytest.raises(RuntimeError, match="one reader"):
            await second.aclose()
        streams.finish("1")
        assert (await reading)["text"] == "ac"
        assert [chunk async for chunk in second] == []

    asyncio.run(main())
    assert streams.aborted() == set()


def test_a_reader_that_leaves_aborts_its_request(streams: Streams) -> None:
    opened = streams.open()

    async def main() -> None:
        await (await asked(opened))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(opened[1]), 0.01)
        with pytest.raises(StopAsyncIteration):
            await anext(opened[1])
        await opened[2].aclose()

    asyncio.run(main())
    opened[3].close()
    next_one = opened.pop(4)
    del next_one
    assert streams.aborted() == {"1", "2", "3", "4"}


def test_a_loop_that_was_closed_while_it_waited_harms_nobody(streams: Streams) -> None:
    left, other, *_ = streams.open()
    loop = asyncio.new_event_loop()
    loop.run_until_complete(anext(left))
    waiting = loop.create_task(anext(left))  # type: ignore[arg-type]
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    next(other)
    streams.next_pass()
    assert next(other)["output_ids"] == [1, 7]
    waiting._log_destroy_pending = False  # type: ignore[attr-defined]


def is_frozen() -> bool:
    return gc.get_freeze_count() >= NUM_FROZEN_BY_OWNER


def test_the_callers_heap_is_frozen_while_streams_run_and_no_longer(streams: Streams) -> None:
    # All tests find it frozen: a heap that its owner has frozen stays so.
    hold = HeapHold()
    hold.enter()
    hold.leave()
    assert is_frozen()
    gc.unfreeze()
    try:
        opened = streams.open()
        assert is_frozen()
        opened.pop().close()
        assert streams.aborted() == {RIDS[-1]}
        assert is_frozen()
        opened.clear()
        assert streams.aborted() == set(RIDS[:-1])
        assert not is_frozen()
    finally:
        gc.freeze()
