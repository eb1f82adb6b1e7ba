"""Long prompts share the road, an agent's next turn comes first, and masks follow the tokens."""

from typing import Any

import pytest
from fixtures.control import CountingShelf, Harness, null_tokens

from ebbtide.srt.managers.io_struct import (
    GetLoadReqInput,
    PauseMode,
)
from ebbtide.srt.model_executor.batch_plan import BatchPlan, PendingStep
from ebbtide.testing import default_schedule


def turns_to_first_token(harness: Harness, rid: str) -> int:
    turns = 0
    while not harness.outputs[rid].token_ids:
        harness.turn()
        turns += 1
    return turns


@pytest.mark.parametrize("num_long", [1, 6])
def test_a_short_prompt_does_not_wait_for_long_ones(num_long: int) -> None:
    def shares(share: float) -> Harness:
        schedule = default_schedule(chunked_prefill_size=16, prefill_share=share, max_running_requests=16)
        return Harness(num_pages=1024, context_len=512, schedule=schedule)

    took = {}
    for share in (0.25, 1.0):
        harness = shares(share)
        long = [harness.generate(range(n, n + 400), max_new_tokens=2) for n in range(num_long)]
        harness.turn(3)
        took[share] = turns_to_first_token(harness, harness.generate(range(800, 804), max_new_tokens=2))
        harness.run_until_idle()
        assert [len(harness.outputs[rid].token_ids) for rid in long] == [2] * num_long
    assert took[0.25] <= 3
    assert took[1.0] >= 20


def noted_passes(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The prompt tokens of each request of each pass that has any, from here on."""
    passes: list[list[int]] = []
    launch = harness.runner.launch

    def noted(plan: BatchPlan, **more: Any) -> PendingStep:
        if chunks := [int(number) for number in plan.num_new_R if number > 1]:
            passes.append(chunks)
        return launch(plan, **more)

    monkeypatch.setattr(harness.runner, "launch", noted)
    return passes


def passes_of_64(max_running_requests: int) -> Harness:
    """A pass has room for 8 prompts of a share each, and for 3 if streams wait for it."""
    schedule = default_schedule(
        chunked_prefill_size=64, prefill_share=0.125, max_running_requests=max_running_requests
    )
    return Harness(num_pages=1024, context_len=64, schedule=schedule)


@pytest.mark.parametrize(
    ("count", "stream", "interval", "passes"),
    [
        pytest.param(72, True, 1, [64, 64, *[24] * 18, 16], id="72 streams"),
        pytest.param(64, True, 1, [64, *[24] * 18, 16], id="64 streams"),
        pytest.param(40, True, 64, [64] * 5, id="long chunks"),
        pytest.param(40, False, 1, [64] * 5, id="whole answers"),
    ],
)
def test_passes_that_streams_wait_for_are_short_once_an_eighth_of_the_requests_decode(
    count: int, stream: bool, interval: int, passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = passes_of_64(max_running_requests=128)
    found = noted_passes(harness, monkeypatch)
    for n in range(0, 10 * count, 10):
        harness.generate(range(n, n + 8), stream=stream, stream_interval=interval)
    harness.run_until_idle()
    assert [*map(sum, found)] == passes


def test_one_stream_hardly_slows_the_prompts_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = passes_of_64(max_running_requests=64)
    found = noted_passes(harness, monkeypatch)
    stream = harness.generate(range(500, 508), max_new_tokens=40)
    harness.turn_until(lambda: bool(harness.outputs[stream].token_ids))
    for n in range(0, 360, 10):
        harness.generate(range(n, n + 8), stream=False)
    harness.run_until_idle()
    assert [*map(sum, found)] == [8, 64, 64, 64, 64, 24, 8]


def test_a_queue_that_has_no_place_yet_does_not_make_passes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = passes_of_64(max_running_requests=16)
    found = noted_passes(harness, monkeypatch)
    for n in range(0, 600, 10):
        harness.generate(range(n, n + 8), max_new_tokens=8 if n < 80 else 40)
    harness.turn_until(lambda: len(found) == 7)
    # Eight of them take the other places, and once the first eight have ended, three have theirs at a time.
    assert [*map(sum, found)] == [64, 24, 24, 16, 24, 24, 16]


def test_streams_that_were_retracted_come_back_as_soon_as_their_own_kv_is_there() -> None:
    """Three at a time, while those before them go on; one pass would have room for all."""
    harness = passes_of_64(max_running_requests=8)
    streams = [harness.generate(range(n, n + 3), max_new_tokens=30) for n in range(0, 80, 10)]
    harness.turn_until(lambda: all(len(harness.outputs[rid].token_ids) >= 5 for rid in streams))
    harness.pause(PauseMode.RETRACT)
    harness.flush()
    before = [len(harness.outputs[rid].token_ids) for rid in streams]
    harness.proceed()
    harness.turn_until(lambda: len(harness.outputs[streams[-1]].token_ids) > before[-1])
    more = [len(harness.outputs[rid].token_ids) - num for rid, num in zip(streams, before, strict=True)]
    assert more == [3, 3, 3, 2, 2, 2, 1, 1]
    load = harness.do(GetLoadReqInput()).loads[0]
    # Each had the KV of its prompt, and of its outputs but the last.
    assert load.recomputed_tokens == {"pause": sum(3 + num - 1 for num in before)}
    assert sum(load.kv_tokens.values()) >= sum(3 + num for num in before)
    harness.run_until_idle()
    assert all(len(harness.outputs[rid].token_ids) == 30 for rid in streams)


def test_whole_answers_that_were_retracted_come_back_in_whole_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = passes_of_64(max_running_requests=8)
    found = noted_passes(harness, monkeypatch)
    for n in range(0, 80, 10):
        harness.generate(range(n, n + 3), stream=False)
    harness.turn(3)
    harness.pause(PauseMode.RETRACT)
    harness.flush()
    harness.proceed()
    harness.run_until_idle()
    assert len(found) == 2


def test_a_prompt_that_steps_aside_before_it_has_any_kv_counts_for_none() -> None:
    schedule = default_schedule(chunked_prefill_size=16, prefill_share=0.25, max_running_requests=8)
    harness = Harness(num_pages=256, context_len=128, schedule=schedule)
    for prompt in (range(4), range(100, 140)):
        harness.generate(prompt, max_new_tokens=2)
    load = harness.do(GetLoadReqInput()).loads[0]
    while not load.kv_tokens:
        load = harness.do(GetLoadReqInput()).loads[0]
    assert (load.num_running_reqs, list(load.kv_tokens.values())) == (2, [4])


def test_long_prompts_step_aside_where_short_ones_end_but_not_twice_in_a_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    schedule = default_schedule(chunked_prefill_size=16, prefill_share=0.25, max_running_requests=64)
    harness = Harness(num_pages=1024, context_len=512, schedule=schedule)
    passes = noted_passes(harness, monkeypatch)
    long = harness.generate(range(40), max_new_tokens=2)
    harness.turn(2)
    for n in range(3):
        harness.generate(range(100 + 10 * n, 103 + 10 * n), max_new_tokens=2)
        harness.turn()
    # More of them than a share holds: the pass is long anyway.
    for n in range(2):
        harness.generate(range(200 + 10 * n, 203 + 10 * n), max_new_tokens=2)
    harness.turn()
    harness.run_until_idle()

    assert passes[:7] == [[4], [4], [3], [4, 3], [3], [4, 3, 3], [4]]
    assert len(harness.outputs[long].token_ids) == 2


def test_the_next_turn_of_a_conversation_overtakes_new_ones() -> None:
    schedule = default_schedule(max_running_requests=1)
    harness = Harness(num_pages=256, context_len=256, schedule=schedule)
    conversation = list(range(1, 41))
    first = harness.generate(conversation, max_new_tokens=8)
    harness.run_until_idle()
    busy = harness.generate(range(500, 510), max_new_tokens=20)
    harness.turn_until(lambda: bool(harness.outputs[busy].token_ids))
    others = [harness.generate(range(n, n + 30), max_new_tokens=2) for n in (600, 700)]
    said = [*conversation, *harness.outputs[first].token_ids, 7, 8, 9]
    turn = harness.generate(said, max_new_tokens=2)
    harness.turn_until(lambda: harness.outputs[turn].finish is not None)
    assert harness.outputs[turn].cached_tokens >= 40
    assert not any(harness.outputs[rid].token_ids for rid in others)
    harness.run_until_idle()
    assert all(harness.outputs[rid].finish is not None for rid in others)


def test_masks_are_made_of_the_tokens_before_whatever_is_in_flight_or_comes_in_between() -> None:
    harness = Harness(num_pages=64)
    harness.scheduler.grammars = CountingShelf()  # type: ignore[assignment]
    masked = [harness.generate(range(n, n + 9), grammar="any", max_new_tokens=40) for n in (1, 100)]
    plain = harness.generate(range(200, 209), seed=3, max_new_tokens=40)
    harness.turn_until(lambda: all(len(harness.outputs[rid].token_ids) > 4 for rid in masked))
    harness.pause(PauseMode.RETRACT)
    harness.proceed()
    harness.run_until_idle()
    assert [harness.outputs[rid].token_ids for rid in masked] == [list(range(40))] * 2
    assert harness.outputs[plain].token_ids == null_tokens(3, 40)
    assert harness.outputs[masked[0]].num_retractions >= 1
