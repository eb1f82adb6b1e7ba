"""Clients that leave before their answer has begun; answers that go before the reply of what ended them."""

import asyncio
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from ebbtide.srt.entrypoints.http_answers import answer_events, answer_whole, while_connected


async def leaving() -> dict[str, Any]:
    return {"type": "http.disconnect"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_generation_that_is_still_being_prepared_is_cancelled(stream: bool) -> None:
    async def script() -> None:
        was_cancelled = asyncio.Event()

        async def preparing() -> Any:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                was_cancelled.set()
                raise

        answer = (
            answer_events(leaving, preparing(), lambda chunk: None)
            if stream
            else answer_whole(leaving, preparing())
        )
        with pytest.raises(ClientDisconnect):
            await answer
        await was_cancelled.wait()

    asyncio.run(script())


def test_an_answer_goes_before_a_reply_that_is_read_a_turn_later() -> None:
    async def script() -> list[str]:
        loop = asyncio.get_running_loop()
        sent: list[str] = []
        generation, reply = loop.create_future(), loop.create_future()

        async def staying() -> dict[str, Any]:
            return await loop.create_future()

        async def generate() -> None:
            await while_connected(staying, finish())
            sent.append("aborted answer")

        async def finish() -> None:
            await generation

        async def pause() -> None:
            await reply
            sent.append("reply of the pause")

        endpoints = asyncio.gather(pause(), generate())
        for _ in range(4):  # until both endpoints wait
            await asyncio.sleep(0)
        generation.set_result(None)
        await asyncio.sleep(0)
        reply.set_result(None)
        await endpoints
        return sent

    assert asyncio.run(script()) == ["aborted answer", "reply of the pause"]
