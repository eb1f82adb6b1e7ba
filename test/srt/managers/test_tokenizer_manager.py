"""The life of a request, told by a scripted scheduler: answers, streams, aborts, and the engine's death."""

import asyncio
import base64
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from fixtures.deadlines import HANG_S
from fixtures.logprobs import PositionLogprobs, columns
from fixtures.scripted_engine import STATE, Engine, chunks_of, run, scripted, start
from fixtures.tokenizers import byte_level

from ebbtide.srt.errors import EngineError, RequestRejected
from ebbtide.srt.managers.api.live_generation import COST_AT_ONCE, STREAMS_PER_TURN, LiveGeneration
from ebbtide.srt.managers.io_struct import (
    AbortGeneration,
    AbortReq,
    AbortReqOutput,
    ControlCall,
    ControlReply,
    FinishReason,
    PingReqInput,
    PingReqOutput,
    RequestOutput,
    StreamedTokens,
    TokenizedGenerateReqInput,
    TokenOutput,
)
from ebbtide.srt.managers.text.tokenizer import Tokenizer

STOP = FinishReason("stop", 2)
LENGTH = FinishReason("length", length=3)
ABORT = FinishReason("abort", message="Aborted by /abort_request")


async def answer(engine: Engine, fields: dict[str, Any], *outputs: RequestOutput, **more: Any) -> Any:
    """The result of a request whose outputs are these."""
    generation = await engine.manager.prepare(fields)
    result = asyncio.create_task(generation.result())
    await asyncio.sleep(0)
    await engine.send(*outputs, **more)
    return await result


# ---------------------------------------------------------------------------------------------- the answer


@scripted()
async def test_the_answer_has_every_field(engine: Engine) -> None:
    output = RequestOutput(
        "r",
        [7, 8, 2],
        finish=STOP,
        start=start(),
        version_starts=[("7", 0), ("8", 2)],
        kv_versions=["7", "8"],
        prefill_starts=[("7", 0), ("8", 1)],
        num_retractions=1,
        num_nonfinite=2,
    )
    body = await answer(engine, {"input_ids": [5, 6], "rid": "r"}, output, texts=[" Paris."], version="8")
    meta = body["meta_info"]
    assert (body["text"], body["output_ids"]) == (" Paris.", [7, 8, 2])
    latencies = {name: meta.pop(name) for name in ("e2e_latency", "queue_time", "first_token_latency")}
    assert latencies["queue_time"] == 0.25
    assert 0 <= latencies["first_token_latency"] <= latencies["e2e_latency"]
    assert meta == {
        "id": "r",
        "finish_reason": {"type": "stop", "matched": 2},
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "cached_tokens": 1,
        "reasoning_tokens": 0,
        "num_retractions": 1,
        "dp_rank": 0,
        "weight_version": "8",
        "weight_versions": [
            {"version": "7", "start": 0, "end": 2},
            {"version": "8", "start": 2, "end": 3},
        ],
        "kv_weight_versions": ["7", "8"],
        "prefill_weight_versions": [
            {"version": "7", "start": 0, "end": 1},
            {"version": "8", "start": 1, "end": 2},
        ],
        "num_nonfinite": 2,
        "precision": {"weights": "fp8", "kv_cache": "bfloat16"},
    }
    assert set(body) == {"text", "output_ids", "meta_info"}


@scripted()
async def test_the_answer_names_fields_that_nothing_is_known_of(engine: Engine) -> None:
    output = RequestOutput("r", [7], finish=STOP, start=start())
    misspelt = {"max_new_tokens": 3, "retrun_logprob": True, "image_data": False, "none": None}
    body = await answer(engine, {"input_ids": [5], "rid": "r", **misspelt}, output)
    assert body["meta_info"]["ignored_fields"] == ["max_new_tokens", "retrun_logprob"]
    many = {f"{number:03}{'x' * 999}": 1 for number in range(99)}
    body = await answer(engine, {"input_ids": [5], "rid": "r", **many}, output)
    assert sum(map(len, body["meta_info"]["ignored_fields"])) == 10 * 50


@scripted()
async def test_a_request_that_never_ran_is_answered_in_full(engine: Engine) -> None:
    fields = {"input_ids": [5, 6], "rid": "r", "return_logprob": True, "logprob_start_len": 0}
    body = await answer(engine, fields, RequestOutput("r", [], finish=ABORT), texts=[""])
    meta = body["meta_info"]
    assert (body["text"], body["output_ids"]) == ("", [])
    assert meta["weight_versions"] == [{"version": "1", "start": 0, "end": 0}]
    assert meta["finish_reason"] == {
        "type": "abort",
        "message": "Aborted by /abort_request",
        "status_code": None,
        "err_type": None,
    }
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (2, 0, 0)
    assert meta["output_token_logprobs"] == meta["input_token_logprobs"] == []
    assert meta["queue_time"] == meta["e2e_latency"] == meta["first_token_latency"] > 0


@scripted()
async def test_logprobs(engine: Engine) -> None:
    fields = {
        "input_ids": [5, 6],
        "rid": "r",
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
        "token_ids_logprob": [9, 8],
        "return_text_in_logprobs": True,
        "return_prompt_token_ids": True,
    }
    predicted = PositionLogprobs(-1.5, [(-0.25, 4), (-1.5, 6)], [-9.0, -8.0])
    output = RequestOutput(
        "r",
        [7],
        finish=LENGTH,
        start=start(input_logprobs=columns(PositionLogprobs(None), predicted)),
        logprobs=columns(PositionLogprobs(0.0, [(0.0, 7), (-float("inf"), 3)], [float("-inf"), -2.0])),
    )
    body = await answer(engine, fields, output)
    meta = body["meta_info"]
    text = {token_id: byte_level().decode([token_id]) for token_id in range(10)}
    lowest = -3.4028234663852886e38
    assert body["prompt_token_ids"] == [5, 6]
    assert meta["output_token_logprobs"] == [(0.0, 7, text[7])]
    assert meta["output_top_logprobs"] == [[(0.0, 7, text[7]), (lowest, 3, text[3])]]
    assert meta["output_token_ids_logprobs"] == [[(lowest, 9, text[9]), (-2.0, 8, text[8])]]
    assert meta["output_token_logprobs_length"] == 1
    assert meta["input_token_logprobs"] == [(None, 5, text[5]), (-1.5, 6, text[6])]
    assert meta["input_top_logprobs"] == [None, [(-0.25, 4, text[4]), (-1.5, 6, text[6])]]
    assert meta["input_token_ids_logprobs"] == [None, [(-9.0, 9, text[9]), (-8.0, 8, text[8])]]
    assert isinstance(meta["output_token_logprobs"][0][0], float)
    # The most likely tokens as arrays, in the place of the triples.
    fields["return_flat_raw_output_top_logprobs"] = True
    numbers = (await answer(engine, fields, output))["meta_info"]
    fields["return_flat_raw_top_logprobs_b64"] = True
    packed = (await answer(engine, fields, output))["meta_info"]
    name = "output_top_logprobs"
    assert "output_top_logprobs" not in numbers.keys() | packed.keys()
    for told in (numbers, packed):
        assert (told[f"{name}_shape"], told[f"{name}_null_prefix"]) == ([1, 2], 0)
    assert (numbers[f"{name}_val_flat"], numbers[f"{name}_idx_flat"]) == ([0.0, lowest], [7, 3])
    for part in ("val", "idx"):
        flat = f"{name}_{part}_flat"
        array = np.frombuffer(base64.b64decode(packed[f"{flat}_b64"]), packed[f"{flat}_b64_dtype"])
        assert array.tolist() == numbers[flat]
    # Texts are null and lists are absent unless they are asked for.
    fields = {"input_ids": [5], "rid": "r", "return_logprob": True}
    output = RequestOutput("r", [7], finish=LENGTH, start=start(), logprobs=columns(PositionLogprobs(-1.0)))
    meta = (await answer(engine, fields, output))["meta_info"]
    assert meta["output_token_logprobs"] == [(-1.0, 7, None)]
    assert not [name for name in meta if "top" in name or "ids_logprobs" in name]


class Spelling(Tokenizer):
    """Decodes when it is told to. A test that waits for it in the event loop never comes to that."""

    def __init__(self) -> None:
        super().__init__(byte_level().hf)
        self.go = threading.Event()

    def decode(self, *args: Any, **options: Any) -> str:
        assert self.go.wait(HANG_S)
        return super().decode(*args, **options)


@scripted(tokenizer=Spelling)
async def test_the_loop_goes_on_while_many_logprobs_are_put_together(engine: Engine) -> None:
    width, num_tokens = 400, COST_AT_ONCE // 400 + 1
    fields = {"return_logprob": True, "top_logprobs_num": width, "return_text_in_logprobs": True}
    generation = await engine.manager.prepare({"input_ids": [[5], [6]], "rid": ["a", "b"], **fields})
    result = asyncio.create_task(generation.result())
    top = [(-1.0, token_id) for token_id in range(width)]
    logprobs = columns(*[PositionLogprobs(-1.0, top)] * num_tokens)
    for rid in ("a", "b"):
        await engine.send(
            RequestOutput(rid, [7] * num_tokens, finish=LENGTH, start=start(), logprobs=logprobs)
        )
        assert not result.done()
    engine.tokenizer.go.set()
    answers = await result
    assert [body["meta_info"]["id"] for body in answers] == ["a", "b"]
    assert [len(body["meta_info"]["output_top_logprobs"][-1]) for body in answers] == [width] * 2


@scripted(has_tokenizer=False)
async def test_without_a_tokenizer_there_is_no_text(engine: Engine) -> None:
    generation = await engine.manager.prepare({"input_ids": [5], "rid": "r"})
    output = RequestOutput("r", [7], finish=LENGTH, start=start())
    await engine.send_message(TokenOutput(weight_version="1", outputs=[output]))
    body = await generation.result()
    assert isinstance(body, dict)
    assert body["output_ids"] == [7]
    assert "text" not in body


@pytest.mark.parametrize(
    "long", [{"sampling_params": {"stop": "z" * 5_000_000, "n": 2}}, {"cache_salt": "z" * 5_000_000}]
)
def test_outputs_are_kept_for_requests_that_continue_them_while_there_is_room(long: dict[str, Any]) -> None:
    async def script(engine: Engine) -> None:
        num_samples = long.get("sampling_params", {}).get("n", 1)
        for name in ("a", "b"):
            rids = [f"{name}_{index}" for index in range(num_samples)]
            outputs = [RequestOutput(rid, [7], finish=LENGTH, start=start()) for rid in rids]
            await answer(engine, {"input_ids": [[5]], "rid": name, **long}, *outputs)
            # What the outputs of a request have in common is there once.
            assert all(engine.manager.ended.find([rid]) for rid in rids)
        assert engine.manager.ended.find(["a_0", "a_1"]) is None

    run(script)


@scripted()
async def test_a_batch_is_answered_in_order_and_only_when_whole(engine: Engine) -> None:
    generation = await engine.manager.prepare(
        {"input_ids": [[5], [6]], "rid": "r", "sampling_params": {"n": 2}}
    )
    sent = await engine.received(4)
    assert [message.rid for message in sent] == ["r_0", "r_1", "r_2", "r_3"]
    result = asyncio.create_task(generation.result())
    for index in (3, 1, 0):
        await engine.send(RequestOutput(f"r_{index}", [index], finish=LENGTH, start=start()))
    assert not result.done()
    await engine.send(RequestOutput("r_2", [2], finish=LENGTH, start=start()))
    assert [(body["output_ids"], "index" in body) for body in await result] == [
        ([index], False) for index in range(4)
    ]
    body = await answer(engine, {"input_ids": [[5]], "rid": ["s"]}, RequestOutput("s", [1], finish=LENGTH))
    assert [one["output_ids"] for one in body] == [[1]], "a batch of one is a batch"


# ------------------------------------------------------------------------------ aborts, limits and rejections


@scripted()
async def test_a_refused_request_sends_nothing(engine: Engine) -> None:
    with pytest.raises(RequestRejected, match="vocabulary"):
        await engine.manager.prepare({"input_ids": [[5], [5000]]})
    masks = {"sampling_params": {"top_k": 5}, "return_sampling_mask": True, "stream": True}
    with pytest.raises(RequestRejected, match="chunks repeat"):
        await engine.manager.prepare({"input_ids": [5], **masks})
    assert engine.nothing_sent()
    assert engine.manager.num_live == 0


@pytest.mark.parametrize("second", ["r", "r_1", ["x", "r"]])
@scripted()
async def test_a_rid_is_taken_until_its_last_output(engine: Engine, second: Any) -> None:
    generation = await engine.manager.prepare({"input_ids": [[5], [6]], "rid": "r"})
    again = {"input_ids": [5] if isinstance(second, str) else [[5], [6]], "rid": second}
    with pytest.raises(RequestRejected, match="still running"):
        await engine.manager.prepare(again)
    await engine.send(*(RequestOutput(f"r_{index}", [1], finish=LENGTH) for index in (0, 1)))
    await generation.result()
    (await engine.manager.prepare(again)).close()


@pytest.mark.parametrize("stream", [False, True])
@scripted()
async def test_a_reader_that_goes_away_aborts_what_is_still_to_come(engine: Engine, stream: bool) -> None:
    generation = await engine.manager.prepare({"input_ids": [[5], [6]], "rid": "r", "stream": stream})
    await engine.received(2)
    await engine.send(RequestOutput("r_0", [1], finish=LENGTH, start=start()))
    if stream:
        chunks = chunks_of(generation)
        await anext(chunks)
        await chunks.aclose()
    else:
        task = asyncio.create_task(generation.result())
        await asyncio.sleep(0)
        task.cancel()
    (abort,) = await engine.received()
    assert isinstance(abort, AbortGeneration)
    assert abort.rid == "r_1"
    generation.close()
    assert engine.nothing_sent()


@scripted()
async def test_late_outputs_of_an_abandoned_request_do_not_reach_the_next_of_its_name(engine: Engine) -> None:
    (await engine.manager.prepare({"input_ids": [5], "rid": "r"})).close()
    with pytest.raises(RequestRejected, match="still running"):
        await engine.manager.prepare({"input_ids": [5], "rid": "r"})
    await engine.send(RequestOutput("r", [1], start=start()))
    await engine.send(RequestOutput("r", [2], finish=ABORT))
    assert engine.manager.num_live == 0
    body = await answer(engine, {"input_ids": [5], "rid": "r"}, RequestOutput("r", [3], finish=LENGTH))
    assert body["output_ids"] == [3]


@scripted()
async def test_a_timeout_aborts_and_keeps_the_tokens_so_far(engine: Engine) -> None:
    generation = await engine.manager.prepare({"input_ids": [5], "rid": "r", "timeout_s": 0.01})
    request, abort = await engine.received() + await engine.received()
    assert isinstance(request, TokenizedGenerateReqInput)
    assert isinstance(abort, AbortGeneration)
    assert "timeout" in abort.message
    reason = FinishReason("abort", message=abort.message)
    await engine.send(RequestOutput("r", [1, 2], finish=reason, start=start()))
    body = await generation.result()
    assert isinstance(body, dict)
    assert body["output_ids"] == [1, 2]
    assert body["meta_info"]["finish_reason"]["message"] == abort.message


@scripted()
async def test_a_request_that_ends_in_time_is_not_aborted(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    timers: list[Callable[[], None]] = []

    def set_timer(delay_s: float, act: Callable[[], None]) -> Any:
        timers.append(act)
        return SimpleNamespace(cancel=timers.clear)

    with monkeypatch.context() as patched:
        patched.setattr(asyncio.get_running_loop(), "call_later", set_timer)
        generation = await engine.manager.prepare({"input_ids": [5], "rid": "r", "timeout_s": 0.3})
    assert len(timers) == 1
    await engine.received()
    await engine.send(RequestOutput("r", [1], finish=LENGTH))
    await generation.result()
    for act in timers:
        act()
    await engine.manager.prepare({"input_ids": [5], "rid": "next"})
    assert [message.rid for message in await engine.received()] == ["next"]


@pytest.mark.parametrize(("status", "kind"), [(503, RequestRejected), (500, EngineError)])
@pytest.mark.parametrize("stream", [False, True])
@scripted()
async def test_an_abort_by_the_engine_is_an_error_and_ends_the_batch(
    engine: Engine, status: int, kind: type[Exception], stream: bool
) -> None:
    generation = await engine.manager.prepare({"input_ids": [[5], [6]], "rid": "r", "stream": stream})
    await engine.received(2)
    reason = FinishReason("abort", message="the queue is full", status_code=status)
    await engine.send(RequestOutput("r_1", [], finish=reason))
    with pytest.raises(kind, match="the queue is full") as caught:
        await drain(generation)
    assert getattr(caught.value, "status", 500) == status
    assert [message.rid for message in await engine.received()] == ["r_0"]


async def drain(generation: LiveGeneration) -> Any:
    if generation.is_stream:
        return [chunk async for chunk in chunks_of(generation)]
    return await generation.result()


@scripted()
async def test_an_abort_by_rid_reaches_every_output_of_its_batch(engine: Engine) -> None:
    await engine.manager.prepare({"input_ids": [[5], [6]], "rid": "batch"})
    await engine.received(2)
    for rid, expected in [
        ("batch", ["batch_0", "batch_1"]),
        ("batch_1", ["batch_1"]),
        (["batch", "unknown"], ["batch_0", "batch_1", "unknown"]),
        ("bat", ["bat"]),
    ]:
        task = asyncio.create_task(engine.manager.control.call(AbortReq(rid=rid, report=True)))
        (call,) = await engine.received()
        assert isinstance(call, ControlCall)
        assert call.request == AbortReq(rid=expected, report=True)
        await engine.send_message(ControlReply(id=call.id, reply=AbortReqOutput(changed=True, num_aborted=1)))
        assert isinstance(await task, AbortReqOutput)


# ------------------------------------------------------------------------------------- control and failure


@scripted()
async def test_a_reply_overtakes_the_chunks_of_many_streams(engine: Engine) -> None:
    rids = [f"r_{index}" for index in range(4 * STREAMS_PER_TURN)]
    chunks: dict[str, list[list[int]]] = {rid: [] for rid in rids}

    async def read(rid: str) -> None:
        fields = {"input_ids": [5], "rid": rid, "stream": True, "return_logprob": True}
        generation = await engine.manager.prepare(fields)
        async for chunk in chunks_of(generation):
            chunks[rid].append(chunk["output_ids"])
            logprobs = chunk["meta_info"]["output_token_logprobs"]
            assert logprobs == [(-token_id, token_id, None) for token_id in chunk["output_ids"]]

    async def ask() -> int:
        await engine.manager.control.call(PingReqInput())
        return sum(map(len, chunks.values()))

    def output(rid: str, token_id: int, finish: FinishReason | None = None) -> RequestOutput:
        logprobs = columns(PositionLogprobs(-token_id))
        return RequestOutput(rid, [token_id], finish, start() if finish is None else None, logprobs=logprobs)

    readers = [asyncio.create_task(read(rid)) for rid in rids]
    await engine.received(len(rids))
    asked = asyncio.create_task(ask())
    (call,) = await engine.received()
    engine.post(
        TokenOutput(weight_version="1", outputs=[output(rid, 1) for rid in rids]),
        TokenOutput(
            weight_version="1",
            outputs=[],
            streamed=(StreamedTokens(rids, [2] * len(rids), columns(*[PositionLogprobs(-2.0)] * len(rids))),),
        ),
        ControlReply(id=call.id, reply=PingReqOutput()),
    )
    # What is not read yet when the reply comes is one chunk in the end, whatever it was.
    assert await asked < len(rids)
    engine.post(TokenOutput(weight_version="1", outputs=[output(rid, 3, LENGTH) for rid in rids]))
    await asyncio.gather(*readers)
    assert all(each[-1] == [1, 2, 3] for each in chunks.values())


@pytest.mark.parametrize("stream", [False, True])
@scripted()
async def test_a_dead_engine_ends_everything_that_waits_and_everything_to_come(
    engine: Engine, stream: bool
) -> None:
    manager = engine.manager
    generation = await manager.prepare({"input_ids": [[5], [6]], "rid": "r", "stream": stream})
    tasks = [
        asyncio.create_task(drain(generation)),
        asyncio.create_task(manager.control.call(PingReqInput())),
    ]
    await asyncio.sleep(0)
    manager.fail("the scheduler died: SIGKILL")
    manager.fail("and then the rest of it")
    for task in (*tasks, manager.control.call(PingReqInput())):
        with pytest.raises(EngineError, match="SIGKILL"):
            await task
    with pytest.raises(EngineError, match="SIGKILL"):
        await manager.prepare({"input_ids": [5]})
    await engine.received(3)
    assert engine.nothing_sent()


@scripted()
async def test_an_answer_that_was_complete_survives_the_engine(engine: Engine) -> None:
    generation = await engine.manager.prepare({"input_ids": [5], "rid": "r"})
    await engine.send(RequestOutput("r", [1], finish=LENGTH))
    engine.manager.fail("the scheduler died")
    body = await generation.result()
    assert isinstance(body, dict)
    assert body["output_ids"] == [1]


@scripted()
async def test_closing_ends_what_waits_and_may_be_repeated(engine: Engine) -> None:
    task = asyncio.create_task((await engine.manager.prepare({"input_ids": [5]})).result())
    await asyncio.sleep(0)
    await engine.manager.close()
    with pytest.raises(EngineError, match="shut down"):
        await task
    await engine.manager.close()


class Nonsense(msgspec.Struct, tag=True):
    pass


@scripted()
async def test_a_message_that_cannot_be_read_fails_loudly(engine: Engine) -> None:
    task = asyncio.create_task(engine.manager.control.call(PingReqInput()))
    await engine.received()
    engine._outbox.send(Nonsense())
    with pytest.raises(EngineError, match="Nonsense"):
        await task


# ----------------------------------------------------------------------------------------- several replicas


def in_turn(outputs: Sequence[TokenizedGenerateReqInput]) -> list[TokenizedGenerateReqInput]:
    return [msgspec.structs.replace(output, dp_rank=index) for index, output in enumerate(outputs)]


@scripted(num_replicas=2, place=in_turn)
async def test_outputs_are_placed_before_they_are_sent(engine: Engine) -> None:
    await engine.manager.prepare({"input_ids": [[5], [6]]})
    assert [message.dp_rank for message in await engine.received(2)] == [0, 1]


@scripted(num_replicas=2)
async def test_the_state_is_that_of_all_replicas_once_each_has_spoken(engine: Engine) -> None:
    await engine.send_message(STATE)
    assert engine.manager.state is None
    other = msgspec.structs.replace(STATE, dp_rank=1, weight_version="2", can_run=False, reason="asleep")
    await engine.send_message(other)
    state = engine.manager.state
    assert state is not None
    assert (state.weight_version, state.reason) == ("mixed: 1, 2", "replica 1: asleep")
    await engine.send_message(msgspec.structs.replace(STATE, dp_rank=1))
    assert engine.manager.state == STATE
