"""Clients that leave before their answer has begun."""

import asyncio
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from ebbtide.srt.entrypoints.http_answers import answer_events, answer_whole


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
            answer_events(leaving, preparing(), lambda generation: generation.stream())
            if stream
            else answer_whole(leaving, preparing())
        )
        with pytest.raises(ClientDisconnect):
            await answer
        await asyncio.wait_for(was_cancelled.wait(), 60)

    asyncio.run(script())
