"""Streams of a request, told by a scripted scheduler: what each chunk holds."""

import json
from typing import Any

import pytest
from fixtures.logprobs import PositionLogprobs, columns
from fixtures.scripted_engine import Engine, chunks_of, run, scripted, start

from ebbtide.srt.managers.io_struct import FinishReason, RequestOutput, StreamedTokens, TokenOutput
from ebbtide.srt.managers.wire.generation import LOWEST_LOGPROB

LENGTH = FinishReason("length", length=3)


async def next_chunk(stream: Any) -> dict[str, Any]:
    chunk = await anext(stream)
    assert isinstance(chunk, dict)
    json.dumps(chunk, allow_nan=False)
    return chunk


async def two_chunks(engine: Engine) -> list[dict[str, Any]]:
    fields = {
        "input_ids": [5, 6],
        "rid": "r",
        "stream": True,
        "return_logprob": True,
        "logprob_start_len": 1,
    }
    stream = chunks_of(await engine.manager.prepare(fields))
    first = RequestOutput(
        "r",
        [7],
        start=start(input_logprobs=columns(PositionLogprobs(None))),
        version_starts=[("1", 0)],
        logprobs=columns(PositionLogprobs(-1.0)),
    )
    await engine.send(first, texts=["a"])
    chunks = [await next_chunk(stream)]
    second = RequestOutput(
        "r",
        [8, 9],
        finish=LENGTH,
        version_starts=[("1", 0), ("2", 2)],
        logprobs=columns(PositionLogprobs(-2.0), PositionLogprobs(-3.0)),
    )
    await engine.send(second, texts=["bc"], version="2")
    chunks.append(await next_chunk(stream))
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    return chunks


@scripted()
async def test_a_cumulative_stream_repeats_what_was_there(engine: Engine) -> None:
    first, last = await two_chunks(engine)
    assert (first["text"], first["output_ids"]) == ("a", [7])
    assert (last["text"], last["output_ids"]) == ("abc", [7, 8, 9])
    meta = first["meta_info"]
    assert meta["finish_reason"] is None
    assert meta["output_token_logprobs"] == [(-1.0, 7, None)]
    assert meta["weight_versions"] == [{"version": "1", "start": 0, "end": 1}]
    assert "e2e_latency" not in meta
    meta = last["meta_info"]
    assert [triple[1] for triple in meta["output_token_logprobs"]] == [7, 8, 9]
    assert meta["input_token_logprobs"] == first["meta_info"]["input_token_logprobs"] == [(None, 6, None)]
    assert meta["weight_versions"][1] == {"version": "2", "start": 2, "end": 3}
    assert {"e2e_latency", "queue_time", "first_token_latency"} <= set(meta)
    assert "index" not in first


@scripted(incremental=True)
async def test_an_incremental_stream_holds_what_is_new(engine: Engine) -> None:
    first, last = await two_chunks(engine)
    assert (last["text"], last["output_ids"]) == ("bc", [8, 9])
    meta = last["meta_info"]
    assert [triple[1] for triple in meta["output_token_logprobs"]] == [8, 9]
    assert (meta["completion_tokens"], meta["output_token_logprobs_length"]) == (3, 3)
    assert [span["end"] for span in meta["weight_versions"]] == [2, 3]
    assert first["meta_info"]["input_token_logprobs"] == [(None, 6, None)]
    assert "input_token_logprobs" not in meta


@pytest.mark.parametrize("incremental", [False, True])
def test_chunks_that_a_slow_reader_left_lying_become_one(incremental: bool) -> None:
    async def script(engine: Engine) -> None:
        stream = chunks_of(await engine.manager.prepare({"input_ids": [5], "rid": "r", "stream": True}))
        for token_id in range(10):
            await engine.send(RequestOutput("r", [token_id], start=start() if token_id == 0 else None))
        chunk = await next_chunk(stream)
        assert chunk["output_ids"] == list(range(10))
        assert chunk["text"] == "<1>" * 10
        await engine.send(RequestOutput("r", [10], finish=LENGTH))
        assert (await next_chunk(stream))["output_ids"] == ([10] if incremental else list(range(11)))

    run(script, incremental=incremental)


@pytest.mark.parametrize("incremental", [False, True])
def test_tokens_of_many_streams_at_once_come_with_their_logprobs_and_versions(incremental: bool) -> None:
    async def script(engine: Engine) -> None:
        def logprob(token_id: int) -> PositionLogprobs:
            return PositionLogprobs(float("-inf") if token_id == 2 else -token_id)

        async def send(token_id: int) -> None:
            streamed = StreamedTokens(["r"], [token_id], columns(logprob(token_id)))
            text = TokenOutput(
                weight_version="2", outputs=[], texts=[], streamed=(streamed,), streamed_texts=(["a"],)
            )
            await engine.send_message(text)

        fields = {"input_ids": [5], "rid": "r", "stream": True, "return_logprob": True}
        stream = chunks_of(await engine.manager.prepare(fields))
        versions = [("1", 0), ("2", 1)]
        await engine.send(
            RequestOutput("r", [0], start=start(), version_starts=versions, logprobs=columns(logprob(0)))
        )
        seen = 0
        for sent in ([], [1], [2, 3, 4], [5]):
            for token_id in sent:
                await send(token_id)
            chunk, seen = await next_chunk(stream), seen + (len(sent) or 1)
            ids = (sent or [0]) if incremental else list(range(seen))
            meta = chunk["meta_info"]
            assert chunk["output_ids"] == ids
            assert meta["output_token_logprobs"] == [
                (LOWEST_LOGPROB if token_id == 2 else -token_id, token_id, None) for token_id in ids
            ]
            assert meta["output_token_logprobs_length"] == meta["completion_tokens"] == seen
            spans = [("1", 0, 1), ("2", 1, seen)][: 1 if seen == 1 else 2]
            assert [tuple(span.values()) for span in meta["weight_versions"]] == spans

    run(script, incremental=incremental)


@scripted()
async def test_a_batch_streams_with_the_index_of_each_output(engine: Engine) -> None:
    stream = chunks_of(await engine.manager.prepare({"input_ids": [[5], [6]], "rid": "r", "stream": True}))
    await engine.send(RequestOutput("r_1", [1], start=start()))
    assert (await next_chunk(stream))["index"] == 1
    await engine.send(RequestOutput("r_0", [0], finish=LENGTH), RequestOutput("r_1", [2], finish=LENGTH))
    chunks = {chunk["index"]: chunk["output_ids"] async for chunk in stream}
    assert chunks == {0: [0], 1: [1, 2]}
