"""States on null parts: every pass goes on from the state of its own tokens, in overlapping steps too."""

import pytest
from fixtures.control import Harness, null_tokens

from ebbtide.srt.managers.io_struct import (
    PauseMode,
    Preserve,
)
from ebbtide.srt.memory_saver import MemoryTag
from ebbtide.testing import default_schedule

KV = (MemoryTag.KV_CACHE,)


@pytest.mark.parametrize("num_checkpoints", [0, 1, 30])
@pytest.mark.parametrize("chunk", [None, 5])
def test_prompts_that_share_much_or_little_go_on_from_checkpoints(
    num_checkpoints: int, chunk: int | None
) -> None:
    schedule = default_schedule(chunked_prefill_size=chunk, max_running_requests=3)
    harness = Harness(schedule=schedule, num_checkpoints=num_checkpoints, num_ranks=2)
    common = list(range(40))
    prompts = [[*common[: 9 * (index % 5)], *range(500 + index % 2, 520)] for index in range(24)]
    rids = [
        harness.generate(ids, seed=index, max_new_tokens=1 + 5 * (index % 7))
        for index, ids in enumerate(prompts)
    ]
    harness.run_until_idle()
    for index, rid in enumerate(rids):
        assert harness.outputs[rid].token_ids == null_tokens(index, 1 + 5 * (index % 7))
    if num_checkpoints == 30:
        again = harness.generate(prompts[0], seed=1, max_new_tokens=1)
        harness.run_until_idle()
        assert harness.outputs[again].cached_tokens == (len(prompts[0]) - 1) // 4 * 4
    policy = harness.scheduler.policy
    states = policy.pages.states
    assert states is not None
    policy.cache.flush()
    assert not policy.allocator.held
    assert not states.attached
    assert all(states.take() is not None for _ in range(num_checkpoints))
    assert states.take() is None


@pytest.mark.parametrize("preserve", Preserve)
def test_a_release_in_the_middle_keeps_no_checkpoint_that_it_has_not_saved(preserve: Preserve) -> None:
    harness = Harness(num_checkpoints=4)
    rids = [harness.generate(range(first, first + 30), seed=first, max_new_tokens=40) for first in (0, 50)]
    for turns in (1, 4, 9):
        harness.turn(turns)
        harness.release(*KV, preserve=preserve)
        harness.resume(*KV)
        # It begins with what is still cached.
        rids.append(harness.generate(range(30), seed=7, max_new_tokens=40))
    harness.pause(PauseMode.RETRACT)
    harness.proceed()
    harness.run_until_idle()
    seeds = (0, 50, 7, 7, 7)
    for seed, rid in zip(seeds, rids, strict=True):
        assert harness.outputs[rid].token_ids == null_tokens(seed, 40)


@pytest.mark.parametrize("preserve", Preserve)
def test_a_prompt_that_was_admitted_behind_others_has_no_state_to_keep(preserve: Preserve) -> None:
    harness = Harness(num_checkpoints=4)
    harness.generate(range(1), max_new_tokens=0)
    rid = harness.generate(range(1, 17), seed=5, max_new_tokens=4)
    harness.turn()
    assert harness.scheduler.policy.running, "it stands aside for the shorter one"
    reply = harness.release(*KV, preserve=preserve)
    assert reply.parked_bytes == 0 or preserve is Preserve.ALL
    harness.resume(*KV)
    harness.run_until_idle()
    assert harness.outputs[rid].token_ids == null_tokens(5, 4)


def test_who_begins_with_which_checkpoint() -> None:
    harness = Harness(num_checkpoints=6)

    def cached(*prompts: list[int]) -> list[int]:
        rids = [harness.generate(ids, seed=7, max_new_tokens=2) for ids in prompts]
        harness.run_until_idle()
        assert all(harness.outputs[rid].token_ids == null_tokens(7, 2) for rid in rids)
        return [harness.outputs[rid].cached_tokens for rid in rids]

    # Samples of a prompt begin with the state that the first of them has computed.
    assert cached(*[[*range(30)]] * 6) == [0, *[28] * 5]
    # Where a prompt leaves another, a third begins with their checkpoint.
    assert [cached([*range(22), *range(end, end + 9)]) for end in (100, 200)] == [[12], [20]]
    # There are six: those used longest ago go.
    firsts = (*range(300, 360, 10), 350, 0)
    assert [cached([*range(first, first + 13)]) for first in firsts] == [*[[0]] * 6, [12], [0]]


@pytest.mark.parametrize("by_version", [False, True])
def test_no_state_of_other_weights_is_found_after_any_of_many_updates(by_version: bool) -> None:
    """Versions share nothing even where nothing is flushed; where they would share, an update flushes."""
    harness = Harness(num_checkpoints=4, cache_by_version=by_version)
    for value in range(1, 8):
        harness.update(value, flush_cache=not by_version)
        for cached in (0, 28):
            rid = harness.generate(range(30), max_new_tokens=2)
            harness.run_until_idle()
            assert harness.outputs[rid].cached_tokens == cached
