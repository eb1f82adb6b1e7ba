"""What requests ask of the weights: which versions they wait for, and what updates do to them."""

import pytest
from fixtures.control import Harness

from ebbtide.srt.managers.io_struct import (
    FinishReason,
    GetLoadReqInput,
    PauseMode,
    UpdateWeightVersionReqInput,
    VersionContract,
)
from ebbtide.testing import default_schedule

PROMPT = range(1, 10)


def update(harness: Harness, version: str, *, mode: PauseMode = PauseMode.IN_PLACE) -> None:
    flush = mode is not PauseMode.IN_PLACE
    assert harness.update(1, weight_version=version, pause_mode=mode, flush_cache=flush).success


def finish_of(harness: Harness, rid: str) -> str | None:
    finish = harness.outputs[rid].finish
    return None if finish is None else finish.kind


def test_requests_wait_for_their_version_while_others_run_and_the_engine_sleeps() -> None:
    harness = Harness(num_ranks=2)
    wanted = {
        "ten": VersionContract(min_version="10"),
        "nine": VersionContract(exact_version="9"),
        "named": VersionContract(min_version="final"),
        "default": VersionContract(exact_version="default"),
    }
    for rid, contract in wanted.items():
        harness.generate(PROMPT, rid=rid, contract=contract, max_new_tokens=4)
    free = harness.generate(PROMPT, max_new_tokens=4)
    harness.run_until_idle()
    ended = {rid for rid in (*wanted, free) if finish_of(harness, rid)}
    assert ended == {"default", free}
    load = harness.do(GetLoadReqInput()).loads[0]
    assert (load.num_waiting_reqs, load.num_held_reqs) == (3, 3)
    # Of both that ran, whose prompts are the same and computed once but for the last page: pass by pass, nine
    # tokens and then one at a time.
    num_cached = len(PROMPT) - 1
    assert load.step_tokens == 2 * (len(PROMPT) + 3) - num_cached
    assert sum(load.step_counts[3:]) == 0 < load.step_counts[2]
    for version, more in (("9", {"nine"}), ("11", {"ten"}), ("final", {"named"})):
        update(harness, version)
        harness.run_until_idle()
        ended |= more
        assert {rid for rid in (*wanted, free) if finish_of(harness, rid)} == ended
        assert {harness.outputs[rid].version_starts[0][0] for rid in more} == {version}


@pytest.mark.parametrize("version", ["default", "3"])
def test_a_version_that_has_passed_is_refused_whether_it_waits_or_comes(version: str) -> None:
    harness = Harness()
    if version == "3":
        waiting = harness.generate(PROMPT, contract=VersionContract(exact_version="3"))
    update(harness, "5")
    late = harness.generate(PROMPT, contract=VersionContract(exact_version=version))
    harness.run_until_idle()
    refused = FinishReason(
        "abort", message=f"exact_weight_version: {version!r} has passed, '5' serves", status_code=409
    )
    assert harness.outputs[late].finish == refused
    if version == "3":
        assert harness.outputs[waiting].finish == refused


@pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.RETRACT])
def test_a_request_ends_as_stale_with_one_update_more_than_it_allows(
    mode: PauseMode,
) -> None:
    harness = Harness(num_ranks=2)
    contracts = [VersionContract(max_lag=lag) for lag in (0, 1, 2)]
    rids = [harness.generate(PROMPT, contract=one, max_new_tokens=60) for one in contracts]
    exact = harness.generate(PROMPT, contract=VersionContract(exact_version="default"), max_new_tokens=60)
    harness.turn_until(lambda: all(harness.outputs[rid].token_ids for rid in (*rids, exact)))
    update(harness, "1", mode=mode)
    assert [finish_of(harness, rid) for rid in (*rids, exact)] == ["stale", None, None, "stale"]
    assert 0 < len(harness.outputs[rids[0]].token_ids) < 60
    # Another name for the same weights is no update.
    harness.do(UpdateWeightVersionReqInput(new_version="1b"))
    update(harness, "2", mode=mode)
    harness.run_until_idle()
    assert [finish_of(harness, rid) for rid in rids] == ["stale", "stale", "length"]
    assert len(harness.outputs[rids[2]].token_ids) == 60


def test_what_an_update_leaves_open_is_for_the_request_to_say() -> None:
    harness = Harness()
    kept, anew, ended = (
        harness.generate(PROMPT, contract=VersionContract(on_update=choice), max_new_tokens=30)
        for choice in ("continue", "recompute", "abort")
    )
    harness.turn_until(lambda: all(harness.outputs[rid].token_ids for rid in (kept, anew, ended)))
    update(harness, "1")
    harness.run_until_idle()
    outputs = harness.outputs
    assert [finish_of(harness, rid) for rid in (kept, anew, ended)] == ["length", "length", "abort"]
    assert (outputs[kept].num_retractions, outputs[kept].prefill_starts) == (0, [("default", 0)])
    assert (outputs[anew].num_retractions, outputs[anew].prefill_starts) == (1, [("1", 0)])
    # The old prompt's pages are in the cache: what wants new KV must not begin with them, others may.
    again = harness.generate(PROMPT)
    harness.run_until_idle()
    assert outputs[again].prefill_starts == [("default", 0), ("1", 8)]


def test_the_spans_of_a_prompt_begin_where_other_weights_went_on_with_it() -> None:
    harness = Harness(schedule=default_schedule(chunked_prefill_size=4))
    rid = harness.generate(range(1, 101), max_new_tokens=2)
    harness.turn_until(lambda: bool(harness.scheduler.policy.running))
    update(harness, "1")
    harness.run_until_idle()
    starts = harness.outputs[rid].prefill_starts
    assert [version for version, _ in starts] == ["default", "1"]
    assert starts[1][1] in range(4, 100, 4), "a chunk is 4 tokens"


def test_the_load_says_how_many_tokens_of_kv_each_version_computed() -> None:
    """What requests share counts for each of them."""
    harness = Harness()
    first = harness.generate(PROMPT, max_new_tokens=40)
    harness.turn_until(lambda: len(harness.outputs[first].token_ids) >= 3)
    rids = [first, harness.generate(PROMPT, max_new_tokens=40, seed=1)]
    harness.turn_until(lambda: all(len(harness.outputs[rid].token_ids) >= 3 for rid in rids))
    assert harness.outputs[rids[1]].cached_tokens > 0

    def num_computed() -> int:
        # All but the last token of each, which is fed back with the next step.
        return sum(len(PROMPT) + len(harness.outputs[rid].token_ids) - 1 for rid in rids)

    harness.pause(PauseMode.IN_PLACE)
    by_old = num_computed()
    update(harness, "5")
    harness.proceed()
    harness.turn_until(lambda: num_computed() >= by_old + 6)
    harness.pause(PauseMode.IN_PLACE)
    load = harness.do(GetLoadReqInput()).loads[0]
    assert load.kv_tokens == {"default": by_old, "5": num_computed() - by_old}
