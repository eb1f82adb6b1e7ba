"""Clients that leave before their answer has begun; streams that fail; answers and replies in order."""

import asyncio
import json
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from fixtures.deadlines import HANG_S
from starlette.requests import ClientDisconnect

from ebbtide.srt.entrypoints.http_answers import AnswerWriter, answer_events, answer_whole, while_connected
from ebbtide.srt.entrypoints.openai.answers import CallWriter
from ebbtide.srt.entrypoints.openai.requests import completion_call
from ebbtide.srt.entrypoints.openai.routes import Calls
from ebbtide.srt.entrypoints.request_body import BodyReader
from ebbtide.srt.managers.api.live_generation import COST_AT_ONCE, OUTPUT_COST


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
            answer_events(leaving, preparing(), lambda chunk: None, AnswerWriter())
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


def test_a_stream_that_fails_ends_with_an_error_and_the_end_of_all_streams() -> None:
    class Generation:
        async def has_next(self) -> bool:
            return True

        num_chunks = 0

        def next_chunk(self) -> dict[str, Any]:
            self.num_chunks += 1
            return {"text": "a" if self.num_chunks < 3 else "\ud83d"}  # no text: it cannot be encoded

        def close(self) -> None:
            pass

    async def script() -> list[bytes]:
        async def staying() -> dict[str, Any]:
            return await asyncio.get_running_loop().create_future()

        async def starting() -> Any:
            return Generation()

        sent: list[bytes] = []

        async def send(message: Any) -> None:
            sent.append(message.get("body", b""))

        answer = await answer_events(staying, starting(), lambda chunk: None, AnswerWriter())
        await answer({}, staying, send)
        return b"".join(sent).split(b"\n\n")

    *chunks, error, done, nothing = asyncio.run(script())
    assert chunks == [b'data: {"text":"a"}'] * 2
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == 500
    assert (done, nothing) == (b"data: [DONE]", b"")


def test_the_event_loop_goes_on_while_an_answer_of_many_outputs_is_written() -> None:
    meta = {"prompt_tokens": 1, "completion_tokens": 1, "cached_tokens": 0}
    outputs = [{"text": "a", "output_ids": [1], "meta_info": meta}] * (COST_AT_ONCE // OUTPUT_COST + 1)
    goes_on = threading.Event()

    class Generation:
        async def result(self) -> Any:
            return outputs

    class Writer(CallWriter):
        def answer(self, pieces: Any, usage: Any) -> Any:
            assert goes_on.wait(HANG_S)
            return {"num_choices": len(pieces)}

    async def script() -> bytes:
        async def staying() -> dict[str, Any]:
            return await asyncio.get_running_loop().create_future()

        async def prepare(*args: Any, **options: Any) -> Generation:
            return Generation()

        async def note_all(result: Any) -> None:
            asyncio.get_running_loop().call_soon(goes_on.set)

        manager = SimpleNamespace(prepare=prepare, in_thread=asyncio.to_thread)
        metrics = SimpleNamespace(note_all=note_all)
        models = SimpleNamespace(held=lambda name: nullcontext())
        service: Any = SimpleNamespace(manager=manager, metrics=metrics, models=models)
        request: Any = SimpleNamespace(receive=staying, client=None, headers={})
        call = completion_call({"prompt": [1], "n": len(outputs)}, "tide", None)
        writer = Writer(call)
        return bytes((await Calls(service, BodyReader()).answer(request, call, writer, "int32")).body)

    assert json.loads(asyncio.run(script())) == {"num_choices": len(outputs)}
