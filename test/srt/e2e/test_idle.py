"""An engine that may not run costs nothing: no process of it spins, and nothing that it was asked is lost."""

import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from fixtures.deadlines import HANG_S
from fixtures.references import Reference
from fixtures.servers import wait_until, wait_until_idle

from ebbtide.srt.entrypoints.engine import Engine as EngineClass

NUM_TOKENS = 24
PROMPTS = [[5 * index + 1, 80, 3 + index] for index in range(4)]
NUM_LONG = 200
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
LONG = {**GREEDY, "max_new_tokens": NUM_LONG}


def ask(engine: EngineClass, pool: ThreadPoolExecutor) -> list[Future[Any]]:
    return [
        pool.submit(engine.generate, input_ids=prompt, sampling_params=GREEDY, timeout_s=HANG_S)
        for prompt in PROMPTS
    ]


def num_queued(engine: EngineClass) -> int:
    # A pause in the mildest mode changes nothing where one stands already.
    return int(engine.pause_generation("wait")["num_queued"])


@pytest.mark.parametrize("is_asleep", [False, True])
def test_a_stopped_engine_with_work_in_its_queue_idles(
    engine_a: EngineClass, reference_a: Reference, is_asleep: bool
) -> None:
    engine = engine_a
    running = engine.generate(input_ids=PROMPTS[0], sampling_params=LONG, stream=True)
    last = next(running)
    # None, where the stream has ended meanwhile.
    stopped = (
        engine.release_memory_occupation(["kv_cache"]) if is_asleep else engine.pause_generation("in_place")
    )
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = ask(engine, pool)
        num_held = len(PROMPTS) + stopped["num_retracted"]
        wait_until(lambda: num_queued(engine) == num_held, "the requests have arrived")
        if is_asleep:
            engine.continue_generation()
        reason = "kv_cache is released" if is_asleep else "paused(in_place)"
        assert engine.memory_occupation()["reason"] == reason
        assert set(engine._service.pids) == {"scheduler", "detokenizer"}
        wait_until_idle({"api": os.getpid(), **engine._service.pids})
        assert not any(answer.done() for answer in answers)
        engine.resume_memory_occupation()
        engine.continue_generation()
        outputs = [answer.result()["output_ids"] for answer in answers]
    assert [len(output) for output in outputs] == [NUM_TOKENS] * len(PROMPTS)
    assert all(map(reference_a.accepts, PROMPTS, outputs))
    # Where this process had no turn for long, that chunk was the last.
    *_, last = (last, *running)
    interrupted = last["output_ids"]
    assert reference_a.accepts(PROMPTS[0], interrupted)
    assert last["meta_info"]["finish_reason"]["type"] == "length"
