"""Texts are tokenized beside the event loop, and the outputs of a long batch are sent in several turns of it:
what else happens meanwhile, told by a tokenizer that waits, and by what has been sent so far."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from fixtures.deadlines import HANG_S
from fixtures.scripted_engine import Engine, run, scripted
from fixtures.tokenizers import byte_level

from ebbtide.srt.errors import EngineError, RequestRejected
from ebbtide.srt.managers.io_struct import (
    AbortGeneration,
    AbortReq,
    AbortReqOutput,
    ControlCall,
    ControlReply,
    PauseGenerationReqInput,
    PauseGenerationReqOutput,
    PauseMode,
    Refusal,
    TokenizedGenerateReqInput,
)
from ebbtide.srt.managers.text.tokenizer import Tokenizer
from ebbtide.srt.managers.tokenizer_manager import (
    NUM_TOKENIZING_THREADS,
    OVERHEAD_TOKENS,
    PIECE_CHARACTERS,
    PIECE_TOKENS,
)


class Waiting(Tokenizer):
    """Tokenizes when it is told to go on. A test that waits for it in the event loop never comes to that."""

    def __init__(self) -> None:
        super().__init__(byte_level().hf)
        self.go = threading.Event()
        self.has_begun = threading.Event()
        self.texts: list[str] = []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.texts.append(text)
        self.has_begun.set()
        assert self.go.wait(HANG_S)
        return super().encode(text, add_special_tokens=add_special_tokens)


TEXT = {"text": "the dog", "rid": "slow"}
IDS = byte_level().encode("the dog")


async def begin(engine: Engine, fields: dict[str, Any] = TEXT) -> asyncio.Task[Any]:
    """A request whose text is being tokenized."""
    task = asyncio.create_task(engine.manager.prepare(fields))
    await asyncio.to_thread(engine.tokenizer.has_begun.wait, 60)
    return task


@scripted(tokenizer=Waiting)
async def test_other_requests_and_control_go_on_meanwhile(engine: Engine) -> None:
    slow = await begin(engine)
    await engine.manager.prepare({"input_ids": [5], "rid": "fast"})
    [fast] = await engine.received()
    assert fast.rid == "fast"
    assert not slow.done()
    engine.tokenizer.go.set()
    await slow
    [sent] = await engine.received()
    assert (sent.rid, sent.input_ids) == ("slow", IDS)


@scripted()
async def test_a_rendered_prompt_is_made_there_too(engine: Engine) -> None:
    threads: list[threading.Thread] = []

    def render() -> str:
        threads.append(threading.current_thread())
        return "the dog"

    await engine.manager.prepare({"rid": "r"}, render)
    [sent] = await engine.received()
    assert sent.input_ids == IDS
    assert threads != [threading.main_thread()]


@scripted(tokenizer=Waiting)
async def test_its_name_is_taken_and_free_again_if_it_is_refused(engine: Engine) -> None:
    slow = await begin(engine, {"text": "the dog " * 50, "rid": "r"})
    with pytest.raises(RequestRejected, match="still running"):
        await engine.manager.prepare({"input_ids": [5], "rid": "r"})
    engine.tokenizer.go.set()
    with pytest.raises(RequestRejected, match="context of 64"):
        await slow
    assert engine.manager.num_live == 0
    assert engine.nothing_sent()


@scripted(tokenizer=Waiting)
async def test_a_client_that_leaves_has_sent_nothing(engine: Engine) -> None:
    slow = await begin(engine)
    slow.cancel()
    with pytest.raises(asyncio.CancelledError):
        await slow
    engine.tokenizer.go.set()
    await engine.manager.prepare({"input_ids": [5], "rid": "slow"})
    [sent] = await engine.received()
    assert sent.input_ids == [5]


@scripted(tokenizer=Waiting)
async def test_what_nobody_waits_for_is_not_tokenized_to_its_end(engine: Engine) -> None:
    texts = ["a" * 200, "b" * PIECE_CHARACTERS, "c"]
    slow = await begin(engine, {"text": texts, "truncate_prompt_tokens": 4})
    slow.cancel()
    engine.tokenizer.go.set()
    # As many more as there are threads: all of them have come to their ends then.
    await asyncio.gather(*(engine.manager.in_thread(IDS.copy) for _ in range(NUM_TOKENIZING_THREADS)))
    assert "c" not in engine.tokenizer.texts


@scripted()
async def test_a_batch_in_pieces_keeps_its_order(engine: Engine) -> None:
    texts = ["one", "two" * PIECE_CHARACTERS, "three", "four" * PIECE_CHARACTERS]
    await engine.manager.prepare({"text": texts, "rid": "r", "truncate_prompt_tokens": 5})
    sent: Sequence[TokenizedGenerateReqInput] = await engine.received(4)
    assert [message.rid for message in sent] == ["r_0", "r_1", "r_2", "r_3"]
    assert [message.input_ids for message in sent] == [byte_level().encode(text)[-5:] for text in texts]


ABORTED = AbortReqOutput(changed=False, num_aborted=0)
PAUSED = PauseGenerationReqOutput(
    changed=True, mode=PauseMode.ABORT, num_running=0, num_retracted=0, num_aborted=0, num_queued=0
)


@pytest.mark.parametrize(
    ("request_", "reply", "message"),
    [
        (AbortReq(rid="slow"), ABORTED, "Aborted by /abort_request"),
        (AbortReq(abort_all=True), ABORTED, "Aborted by /abort_request"),
        (PauseGenerationReqInput(), PAUSED, "Aborted by pause_generation"),
    ],
)
@pytest.mark.parametrize("is_sent", [False, True])
@scripted(tokenizer=Waiting)
async def test_an_abort_meanwhile_ends_it_as_soon_as_it_is_known(
    engine: Engine, request_: Any, reply: Any, message: str, is_sent: bool
) -> None:
    slow = await begin(engine)
    control = asyncio.create_task(engine.manager.control.call(request_))
    [call] = await engine.received()
    if is_sent:
        # Behind the control request, which does not reach it.
        engine.tokenizer.go.set()
        await slow
    await engine.send_message(ControlReply(id=call.id, reply=reply))
    answered: Any = await control
    assert answered.num_aborted == 1
    engine.tokenizer.go.set()
    await slow
    sent, abort = await engine.received(2)
    assert sent.rid == "slow"
    assert abort == AbortGeneration(rid="slow", message=message)


@pytest.mark.parametrize(
    ("request_", "reply"),
    [
        (AbortReq(rid="another"), ABORTED),
        (PauseGenerationReqInput(mode=PauseMode.IN_PLACE), PAUSED),
        (PauseGenerationReqInput(), Refusal(status=409, message="not now")),
    ],
)
@scripted(tokenizer=Waiting)
async def test_what_aborts_nothing_leaves_it_alone(engine: Engine, request_: Any, reply: Any) -> None:
    slow = await begin(engine)
    control = asyncio.create_task(engine.manager.control.call(request_))
    [call] = await engine.received()
    await engine.send_message(ControlReply(id=call.id, reply=reply))
    await asyncio.wait([control])
    assert control.exception() is None or isinstance(control.exception(), RequestRejected)
    engine.tokenizer.go.set()
    await slow
    await engine.received()
    assert engine.nothing_sent()


@scripted()
async def test_the_time_of_a_request_runs_from_its_arrival(engine: Engine) -> None:
    await engine.manager.prepare({**TEXT, "timeout_s": 1e-9})
    sent, abort = await engine.received() + await engine.received()
    assert sent.rid == abort.rid == "slow"
    assert "timeout_s" in abort.message


@scripted(tokenizer=Waiting)
async def test_the_end_of_the_engine_waits_for_no_tokenizer(engine: Engine) -> None:
    slow = await begin(engine)
    engine.manager.fail("the scheduler died")
    with pytest.raises(EngineError, match="the scheduler died"):
        await slow
    engine.tokenizer.go.set()
    assert engine.nothing_sent()


# Sent in six turns.
NUM_OUTPUTS = 6 * PIECE_TOKENS // OVERHEAD_TOKENS
BATCH = {"input_ids": [[5]] * NUM_OUTPUTS, "rid": "r"}
RIDS = [f"r_{index}" for index in range(NUM_OUTPUTS)]


@scripted()
async def test_other_requests_are_sent_between_the_outputs_of_a_long_batch(engine: Engine) -> None:
    batch = asyncio.create_task(engine.manager.prepare(BATCH))
    sent = await engine.some()
    await engine.manager.prepare({"input_ids": [6], "rid": "fast"})
    await batch
    sent += await engine.received(NUM_OUTPUTS + 1 - len(sent))
    rids = [message.rid for message in sent]
    assert rids[-1] != "fast"
    rids.remove("fast")
    assert rids == RIDS


@scripted()
async def test_a_client_that_leaves_while_its_batch_is_sent_has_the_sent_part_aborted(engine: Engine) -> None:
    batch = asyncio.create_task(engine.manager.prepare(BATCH))
    messages = await engine.some()
    batch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await batch
    # The rids of the others are free.
    await engine.manager.prepare({"input_ids": [6], "rid": RIDS[-1]})
    while messages[-1].rid != RIDS[-1]:
        messages += await engine.some()
    sent = [message.rid for message in messages[:-1] if isinstance(message, TokenizedGenerateReqInput)]
    aborted = [message.rid for message in messages if isinstance(message, AbortGeneration)]
    assert 0 < len(sent) < NUM_OUTPUTS
    assert aborted == sent == RIDS[: len(sent)]
    assert engine.manager.num_live == len(sent) + 1


@scripted()
async def test_an_abort_while_a_batch_is_sent_ends_all_of_it(engine: Engine) -> None:
    batch = asyncio.create_task(engine.manager.prepare(BATCH))
    messages = await engine.some()
    control = asyncio.create_task(engine.manager.control.call(AbortReq(rid="r")))
    while not any(isinstance(message, ControlCall) for message in messages):
        messages += await engine.some()
    call = next(message for message in messages if isinstance(message, ControlCall))
    await batch
    await engine.send_message(ControlReply(id=call.id, reply=ABORTED))
    answered: Any = await control
    while len(messages) < NUM_OUTPUTS + 1 + answered.num_aborted:
        messages += await engine.some()
    # The scheduler ends what came before the call; the rest is ended by itself, once it has been sent.
    sent = [message.rid for message in messages if isinstance(message, TokenizedGenerateReqInput)]
    aborted = [message.rid for message in messages if isinstance(message, AbortGeneration)]
    assert sent == RIDS
    assert 0 < len(aborted) < NUM_OUTPUTS
    assert aborted == RIDS[messages.index(call) :]


@scripted()
async def test_the_end_of_the_engine_while_a_batch_is_sent_ends_it(engine: Engine) -> None:
    batch = asyncio.create_task(engine.manager.prepare(BATCH))
    await engine.some()
    engine.manager.fail("the scheduler died")
    with pytest.raises(EngineError, match="the scheduler died"):
        await batch
    assert engine.manager.num_live == 0


@scripted(tokenizer=Waiting)
async def test_bad_words_are_tokenized_beside_the_loop_once_for_all_prompts(engine: Engine) -> None:
    params = {"bad_words": ["the dog " * 64]}
    slow = await begin(engine, {"input_ids": [[5], [6]], "rid": "slow", "sampling_params": params})
    assert not slow.done()
    engine.tokenizer.go.set()
    await slow
    first, second = await engine.received(2)
    assert first.banned == second.banned != []
    assert len(engine.tokenizer.texts) == 2


@pytest.mark.parametrize(
    ("fields", "is_large"),
    [
        ({"input_ids": [1] * 60, "rid": ["a", "a"]}, False),
        ({"input_ids": [[1]] * 8, "rid": ["a"] * 8}, False),
        ({"input_ids": [[1]] * 300, "rid": ["a"] * 300}, True),
        ({"text": ["a"] * 300, "rid": ["a"] * 300}, True),
        ({"input_ids": [1], "sampling_params": {"n": 300, "top_p": 7}}, True),
        ({"input_ids": [1], "sampling_params": {"allowed_token_ids": [-1] * (1 << 17)}}, True),
        ({"input_ids": [1], "sampling_params": {"logit_bias": {str(key): "x" for key in range(300)}}}, True),
        ({"render": [lambda: "a"] * 8, "sampling_params": {"top_p": 7}}, False),
        ({"render": [lambda: "a"] * 300, "sampling_params": {"top_p": 7}}, True),
    ],
)
def test_the_loop_goes_on_while_a_large_request_is_read(fields: dict[str, Any], is_large: bool) -> None:
    render = fields.pop("render", None)

    async def script(engine: Engine) -> None:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        counting = asyncio.create_task(count())
        await asyncio.sleep(0)
        turns = 0
        with pytest.raises(RequestRejected):
            await engine.manager.prepare(fields, render)
        counting.cancel()
        assert (turns > 0) is is_large

    run(script)
