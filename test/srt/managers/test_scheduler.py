"""The scheduler on null parts: what requests get, whatever the pool, the batching and the neighbours."""

from collections.abc import Sequence

import pytest
from fixtures.control import Harness, null_tokens

from ebbtide.srt.managers.io_struct import (
    AbortReq,
    FinishReason,
    PauseMode,
)
from ebbtide.srt.server_args import OWN_SCHEDULE_POLICIES
from ebbtide.testing import default_schedule


def prompt_of(length: int, first: int = 1) -> Sequence[int]:
    return range(first, first + length)


def test_requests_whose_next_token_depends_on_all_before_run_beside_others() -> None:
    harness = Harness()
    penalised = harness.generate(prompt_of(5), seed=1, max_new_tokens=10, frequency_penalty=0.5)
    plain = harness.generate(prompt_of(6), seed=2, max_new_tokens=20)
    harness.run_until_idle()
    assert harness.outputs[penalised].token_ids == null_tokens(1, 10)
    assert harness.outputs[plain].token_ids == null_tokens(2, 20)


@pytest.mark.parametrize(
    ("policy", "chunk"),
    [*((policy, 5) for policy in OWN_SCHEDULE_POLICIES), ("fcfs", None), ("lpm", 1), ("lof", 16)],
)
def test_chunking_and_policy_do_not_change_outputs(policy: str, chunk: int | None) -> None:
    schedule = default_schedule(chunked_prefill_size=chunk, policy=policy, max_running_requests=3)
    harness = Harness(schedule=schedule, num_ranks=2)
    rids = [harness.generate(prompt_of(30, index % 3), seed=index) for index in range(8)]
    harness.run_until_idle()
    assert [harness.outputs[rid].token_ids for rid in rids] == [null_tokens(s, 16) for s in range(8)]


@pytest.mark.parametrize("chunk", [1, 3, None])
@pytest.mark.parametrize("page_size", [1, 4])
def test_retraction_in_a_tiny_pool_changes_nothing_in_outputs(page_size: int, chunk: int | None) -> None:
    """A chunk of one token in the middle of a second prefill is no decode step."""
    schedule = default_schedule(chunked_prefill_size=chunk)
    harness = Harness(num_pages=64 // page_size, page_size=page_size, schedule=schedule)
    rids = [harness.generate(prompt_of(7, 10 * seed), seed=seed, max_new_tokens=30) for seed in range(5)]
    harness.run_until_idle()
    outputs = [harness.outputs[rid] for rid in rids]
    assert [output.token_ids for output in outputs] == [null_tokens(seed, 30) for seed in range(5)]
    assert sum(output.num_retractions for output in outputs) > 0
    assert outputs[0].num_retractions == 0, "the oldest is never the one to go"


def test_requests_of_one_prompt_prefill_it_once() -> None:
    harness = Harness(num_pages=256, context_len=256)
    rids = [harness.generate(prompt_of(33), seed=seed) for seed in range(8)]
    harness.run_until_idle()
    assert [harness.outputs[rid].cached_tokens for rid in rids] == [0] + [32] * 7


def test_without_a_prefix_cache_nothing_is_reused_and_nobody_waits_for_it() -> None:
    harness = Harness(
        num_pages=256,
        context_len=256,
        enable_prefix_cache=False,
        schedule=default_schedule(chunked_prefill_size=512),
    )
    rids = [harness.generate(prompt_of(33), seed=seed, max_new_tokens=4) for seed in range(8)]
    harness.run_until_idle()
    assert [harness.outputs[rid].cached_tokens for rid in rids] == [0] * 8
    assert harness.runner.num_steps == 4


def test_short_prompts_of_a_group_start_together() -> None:
    harness = Harness(page_size=16, schedule=default_schedule(chunked_prefill_size=512))
    for seed in range(8):
        harness.generate(prompt_of(10), seed=seed, max_new_tokens=4)
    harness.run_until_idle()
    assert harness.runner.num_steps == 4


def test_namespaces_share_nothing() -> None:
    harness = Harness()
    first = harness.generate(prompt_of(20), namespace=("a",))
    harness.run_until_idle()
    other = harness.generate(prompt_of(20), namespace=("b",))
    same = harness.generate(prompt_of(20), namespace=("a",))
    harness.run_until_idle()
    assert [harness.outputs[rid].cached_tokens for rid in (first, other, same)] == [0, 0, 16]


def test_scoring_without_output_ends_after_the_prefill() -> None:
    harness = Harness()
    rid = harness.generate(prompt_of(40), max_new_tokens=0)
    harness.run_until_idle()
    assert harness.outputs[rid].token_ids == []
    assert harness.outputs[rid].finish == FinishReason("length", length=0)


def test_eos_and_stop_token_ids_end_a_request_unless_ignored() -> None:
    tokens = null_tokens(0, 16)
    harness = Harness(eos_token_ids=frozenset({tokens[5]}))
    by_eos = harness.generate(prompt_of(4))
    by_stop = harness.generate(prompt_of(4), stop_token_ids=[tokens[2]])
    ignored = harness.generate(prompt_of(4), stop_token_ids=[tokens[2]], ignore_eos=True)
    harness.run_until_idle()
    assert harness.outputs[by_eos].token_ids == tokens[:6]
    assert harness.outputs[by_eos].finish == FinishReason("stop", matched=tokens[5])
    assert harness.outputs[by_stop].finish == FinishReason("stop", matched=tokens[2])
    assert harness.outputs[ignored].token_ids == tokens


def test_a_full_queue_refuses_the_next_request_and_keeps_the_others() -> None:
    harness = Harness(schedule=default_schedule(max_queued_requests=2))
    harness.pause(PauseMode.IN_PLACE)
    kept = [harness.generate(prompt_of(4), seed=seed) for seed in range(2)]
    refused = harness.generate(prompt_of(4))
    harness.turn()
    finish = harness.outputs[refused].finish
    assert finish is not None
    assert (finish.kind, finish.status_code) == ("abort", 503)
    assert "max_queued_requests is 2" in finish.message
    harness.proceed()
    harness.run_until_idle()
    assert [harness.outputs[rid].token_ids for rid in kept] == [null_tokens(s, 16) for s in range(2)]


def test_a_stream_gets_each_token_and_others_all_at_once() -> None:
    harness = Harness()
    stream = harness.generate(prompt_of(4), max_new_tokens=8)
    whole = harness.generate(prompt_of(4), max_new_tokens=8, stream=False)
    seen = []
    for _ in range(20):
        harness.turn()
        seen.append((len(harness.outputs[stream].token_ids), len(harness.outputs[whole].token_ids)))
        if harness.outputs[whole].finish and harness.outputs[stream].finish:
            break
    assert {count for count, _ in seen} >= set(range(1, 9))
    assert {count for _, count in seen} == {0, 8}


def test_an_abort_returns_the_tokens_so_far_and_frees_the_pages() -> None:
    harness = Harness()
    aborted = harness.generate(prompt_of(8), max_new_tokens=60)
    kept = harness.generate(prompt_of(8), seed=1)
    harness.turn(4)
    reply = harness.do(AbortReq(rid=aborted))
    assert (reply.changed, reply.num_aborted) == (True, 1)
    output = harness.outputs[aborted]
    assert output.finish == FinishReason("abort", message="Aborted by /abort_request")
    assert output.token_ids == null_tokens(0, len(output.token_ids))
    assert output.token_ids
    harness.run_until_idle()
    assert harness.outputs[kept].token_ids == null_tokens(1, 16)
    assert harness.flush().fully_flushed
    assert harness.scheduler.policy.allocator.num_free == 64
    reply = harness.do(AbortReq(rid=["nobody", ""]))
    assert (reply.changed, reply.num_aborted) == (False, 0)


def test_what_waits_is_aborted_without_tokens() -> None:
    harness = Harness(schedule=default_schedule(max_running_requests=2))
    rids = [harness.generate(prompt_of(8), seed=seed) for seed in range(5)]
    harness.turn(3)
    harness.abort(rids[4])
    harness.turn()
    assert harness.outputs[rids[4]].token_ids == []
    assert harness.outputs[rids[4]].finish == FinishReason("abort", message="Aborted: the client went away")
    assert harness.do(AbortReq(abort_all=True)).num_aborted == 4, "running and queued ones"
    assert all(harness.outputs[rid].finish is not None for rid in rids)
    assert not harness.scheduler.is_runnable


def test_newcomers_never_starve_the_oldest() -> None:
    harness = Harness(num_pages=16, context_len=64)
    oldest = harness.generate(prompt_of(8), max_new_tokens=50)
    for number in range(60):
        harness.generate(prompt_of(8, 10 * number), seed=number, max_new_tokens=30)
        harness.turn()
    assert harness.outputs[oldest].finish == FinishReason("length", length=50)
    assert harness.outputs[oldest].num_retractions == 0


def test_retracted_again_and_again_requests_still_end_in_their_order() -> None:
    harness = Harness(schedule=default_schedule(max_running_requests=3))
    rids = [harness.generate(prompt_of(8, 20 * seed), seed=seed, max_new_tokens=20) for seed in range(9)]
    ended: list[str] = []
    for _ in range(400):
        harness.turn(3)
        ended += [rid for rid in rids if harness.outputs[rid].finish and rid not in ended]
        if len(ended) == len(rids):
            break
        harness.pause(PauseMode.RETRACT)
        harness.proceed()
    assert ended == rids
    assert [harness.outputs[rid].token_ids for rid in rids] == [null_tokens(s, 20) for s in range(9)]
