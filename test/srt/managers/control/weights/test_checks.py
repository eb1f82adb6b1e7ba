"""Checksums, copies and comparisons of the weights: one answer for all ranks, never of half a change."""

from functools import partial
from typing import Any

import pytest
from fixtures.control import Harness, updating

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.io_struct import (
    Canary,
    CheckWeightsReqInput,
    EndWeightUpdateReqInput,
    PauseMode,
    ReleaseMemoryOccupationReqInput,
    UpdateWeightFromDiskReqInput,
)
from ebbtide.srt.memory_saver import MemoryTag
from ebbtide.srt.model_executor.batch_plan import PassOutOfMemory

WEIGHTS = MemoryTag.WEIGHTS
IDS = [5, 6, 7, 8, 9]
# The runner's logprob of weights that are all 1: of the four parameters, 1 + 2 + 3 + 4.
OF_ONES = -10 / 1024


@pytest.fixture(params=[1, 3], ids=["one rank", "three ranks"])
def harness(request: pytest.FixtureRequest) -> Harness:
    return Harness(num_ranks=request.param)


def ask(action: Any, *skipped: str) -> CheckWeightsReqInput:
    return CheckWeightsReqInput(action=action, skip_tensor_list=list(skipped) or None)


def check(harness: Harness, action: str, *skipped: str) -> Any:
    return harness.do(ask(action, *skipped))


def test_checksums_tell_weights_apart(harness: Harness) -> None:
    first = check(harness, "checksum")
    assert len(first.by_rank) == len(harness.ranks)
    harness.update(5)
    assert check(harness, "checksum").per_engine_checksum != first.per_engine_checksum
    harness.update(0)
    assert check(harness, "checksum").per_engine_checksum == first.per_engine_checksum
    assert set(check(harness, "checksum", "0", "3").by_rank[0].checksums) == {"layer.1", "layer.2"}


def test_weights_that_were_filled_and_sent_again_are_those_of_the_snapshot(harness: Harness) -> None:
    harness.update(5)
    check(harness, "snapshot")
    rid = harness.begin_request(max_new_tokens=8, num_turns=3)
    check(harness, "reset_tensors")
    assert not harness.now.can_run
    num_tokens = harness.num_tokens(rid)
    harness.refused(ask("compare"), 400, "layer.0")
    assert "4 tensors are stale" in check(harness, "checksum").message
    assert "stale" in harness.refuse(ask("snapshot")).message
    harness.turn(5)
    assert harness.num_tokens(rid) == num_tokens, "it waits until they are back"
    harness.update(5, pause_mode=PauseMode.RETRACT)
    harness.assert_end(rid, length=8)
    check(harness, "compare")
    assert harness.refuse(ask("compare")).status == 409, "the snapshot was freed"


def test_a_difference_is_refused_and_named_and_the_snapshot_stays(harness: Harness) -> None:
    check(harness, "snapshot")
    harness.update(7, 2)
    refusal = harness.refused(ask("compare"), 400, "1 parameters are not those of the snapshot: layer.2")
    assert refusal.fields["errors"][0]["name"] == "layer.2"
    check(harness, "compare", "layer.2")


def test_what_is_skipped_is_not_filled_and_nothing_is_under_an_update(harness: Harness) -> None:
    harness.begin()
    harness.refused(ask("reset_tensors"), 409, "session")
    assert harness.now.can_run
    harness.abort_session()
    check(harness, "reset_tensors", "layer.1")
    assert harness.scheduler.control.memory.content.missing == {"layer.0", "layer.2", "layer.3"}
    assert harness.values == [None, 0, None, None]


@pytest.mark.parametrize("action", ["checksum", "snapshot", "compare", "reset_tensors"])
def test_released_weights_are_not_looked_at(harness: Harness, action: str) -> None:
    check(harness, "snapshot")
    harness.release(WEIGHTS)
    assert harness.refuse(ask(action)).status == 409
    harness.resume(WEIGHTS)
    if action == "snapshot":
        assert "stale" in harness.refuse(ask(action)).message
    harness.update(0)
    check(harness, "compare")


@pytest.mark.parametrize("action", ["checksum", "snapshot", "compare"])
def test_nothing_is_said_of_weights_that_changed_meanwhile(harness: Harness, action: str) -> None:
    check(harness, "snapshot")
    for rank in harness.ranks:
        rank.weights.slowness = 1
    for change in (ReleaseMemoryOccupationReqInput(tags=(WEIGHTS,)), ask("reset_tensors")):
        call = harness.call(ask(action))
        harness.turn()
        assert call not in harness.replies
        harness.call(change)
        harness.run_until_idle()
        refusal = harness.refusal(call)
        assert (refusal.status, "meanwhile" in refusal.message) == (409, True)
        harness.resume(WEIGHTS)
        harness.update(0)
    # The refused one has left the snapshot as it was.
    check(harness, "compare")


def test_a_snapshot_is_none_of_weights_that_changed_before_a_rank_came_to_it() -> None:
    harness = Harness(num_ranks=3)
    call = harness.call(ask("snapshot"))
    harness.call(ask("reset_tensors"))
    harness.run_until_idle()
    assert "meanwhile" in harness.refusal(call).message


def test_a_rank_that_has_no_room_for_a_snapshot_or_whose_weights_differ_is_named() -> None:
    harness = Harness(num_ranks=3)
    harness.ranks[1].weights.faults["check"] = RequestRejected("no room", 409)
    refusal = harness.refuse(ask("snapshot"))
    assert (refusal.status, refusal.message) == (409, "rank 1: no room")
    assert harness.refuse(ask("compare")).message.startswith("there is no snapshot"), "no other keeps one"
    check(harness, "snapshot")
    harness.ranks[2].weights.write({"layer.1": 9})
    refusal = harness.refuse(ask("compare"))
    assert refusal.status == 400
    assert refusal.message.startswith("rank 2: 1 parameters")


def trying(value: int, canary: Canary, **fields: Any) -> UpdateWeightFromDiskReqInput:
    return updating(value, weight_version=str(value), canary=canary, flush_cache=False, **fields)


@pytest.mark.parametrize("in_session", [False, True])
@pytest.mark.parametrize(
    ("value", "canary", "problem"),
    [
        (1, Canary(input_ids=IDS), ""),
        (1, Canary(input_ids=IDS, logprobs=[None, *[OF_ONES] * 4], atol=0.0), ""),
        (
            1,
            Canary(input_ids=IDS, logprobs=[OF_ONES] * 3 + [-0.5], atol=0.1),
            "token 4 -0.0098 instead of -0.5",
        ),
        (10, Canary(input_ids=IDS), "4 of 4 logprobs are not finite, the first that of token 1"),
    ],
)
def test_a_miss_leaves_the_old_weights_serving_and_a_hit_is_committed(
    harness: Harness, in_session: bool, value: int, canary: Canary, problem: str
) -> None:
    rids = [harness.generate(range(1, 10), seed=seed, max_new_tokens=100) for seed in range(2)]
    harness.turn_until(lambda: all(harness.outputs[rid].token_ids for rid in rids))
    request: Any = trying(value, canary, pause_mode=PauseMode.IN_PLACE)
    if in_session:
        harness.begin()
        harness.update(value, weight_version=str(value), flush_cache=False)
        request = EndWeightUpdateReqInput(canary=canary, pause_mode=PauseMode.IN_PLACE)
    if problem:
        harness.refused(request, 400, problem)
        assert harness.values == [0] * 4
    else:
        reply = harness.do(request)
        assert (reply.committed, reply.staged) == (True, True)
        assert "The canary's" in reply.message
    harness.run_until_idle()
    assert harness.now.weight_version == ("default" if problem else str(value))
    for seed, rid in enumerate(rids):
        tokens, starts = harness.outputs[rid].token_ids, harness.outputs[rid].version_starts
        changed = starts[1][1] if len(starts) > 1 else 100
        values = [0] * changed + [10] * (100 - changed)
        assert tokens == [harness.runner.token(seed, i, weights) for i, weights in enumerate(values)]


@pytest.mark.parametrize(
    ("canary", "problem"),
    [
        (Canary(input_ids=[1] * 17), "canary.input_ids: expected 2 to 16 tokens, got 17"),
        (Canary(input_ids=[1, 1000]), "canary.input_ids: 1000 is not in the vocabulary of 1000 ids"),
        (Canary(input_ids=IDS, logprobs=[0.0] * 5), "canary.logprobs: expected 4 finite numbers"),
    ],
)
def test_what_can_never_be_tried_is_refused_before_anything_is_written(canary: Canary, problem: str) -> None:
    harness = Harness()
    harness.refused(trying(1, canary), 400, problem)
    assert harness.weights.parameters.generation == 0


@pytest.mark.parametrize(
    ("case", "problem"),
    [
        ("no copy", "no second copy"),
        ("no kv", "needs kv_cache"),
        ("in a session", "give it to end_weight_update"),
        ("stale", "Stale weights must first be written"),
    ],
)
def test_where_it_cannot_be_tried_it_is_refused_before_anything_is_written(case: str, problem: str) -> None:
    harness = Harness()
    match case:
        case "no copy":
            harness.weights.num_staged = 0
        case "no kv":
            harness.release(MemoryTag.KV_CACHE)
        case "in a session":
            harness.begin()
        case _:
            harness.release(WEIGHTS)
            harness.resume(WEIGHTS)
    before = harness.values
    # Stale weights are not tried even if nothing is to be written.
    fields = {"names": []} if case == "stale" else {}
    harness.refused(trying(1, Canary(input_ids=IDS), **fields), 400, problem)
    assert harness.values == before


def test_its_pages_are_taken_from_the_youngest_request_and_nothing_is_lost() -> None:
    harness = Harness(num_pages=16, context_len=64)
    rids = [harness.generate(range(first, first + 20), seed=first, max_new_tokens=12) for first in (1, 100)]
    harness.turn_until(lambda: all(len(harness.outputs[rid].token_ids) > 4 for rid in rids))
    harness.pause(PauseMode.IN_PLACE)
    assert harness.do(trying(1, Canary(input_ids=list(range(1, 17))))).committed
    harness.proceed()
    harness.run_until_idle()
    assert [len(harness.outputs[rid].token_ids) for rid in rids] == [12, 12]
    assert [harness.outputs[rid].num_retractions for rid in rids] == [0, 1]


def test_without_room_for_its_pass_the_old_weights_serve(harness: Harness) -> None:
    rid = harness.begin_request(max_new_tokens=30)
    harness.pause(PauseMode.IN_PLACE)
    for rank in harness.ranks:
        rank.runner.faults.append(PassOutOfMemory("7 bytes are free"))
    harness.refused(trying(1, Canary(input_ids=IDS)), 400, "7 bytes are free")
    assert harness.values == [0] * 4
    harness.proceed()
    harness.assert_end(rid, length=30)


def test_ranks_make_sure_of_room_for_its_pass_and_again_for_the_next_one() -> None:
    """Each makes it at its own speed, and so before or behind a message that has ranks make sure."""
    harness = Harness(num_ranks=2)
    harness.pause(PauseMode.IN_PLACE)
    done: list[list[str]] = [[] for _ in harness.ranks]
    for rank, own in zip(harness.ranks, done, strict=True):
        launch = rank.runner.launch
        rank.runner.launch = lambda plan, own=own, launch=launch: own.append("pass") or launch(plan)  # type: ignore[method-assign]
        rank.runner.forget_room = partial(own.append, "forget")  # type: ignore[method-assign]
    harness.do(trying(1, Canary(input_ids=IDS)))
    for own in done:
        place = own.index("pass")
        assert own[place - 1 : place + 2] == ["forget", "pass", "forget"]


def test_ranks_keep_the_same_pages_whenever_each_runs_its_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(num_ranks=2, num_pages=16, context_len=64)
    leader, follower = harness.ranks
    policies = [rank.scheduler.policy for rank in harness.ranks]
    harness.generate(range(1, 29), max_new_tokens=1)
    harness.run_until_idle()
    rid = harness.generate(range(100, 128), max_new_tokens=30)
    harness.turn_until(lambda: policies[0].allocator.num_free < 2)
    harness.pause(PauseMode.IN_PLACE)
    control, num_steps = leader.scheduler.control, leader.runner.num_steps
    work = control.ranks.work
    monkeypatch.setattr(control.ranks, "work", lambda: None if control.operations.stands_alone else work())
    call = harness.call(trying(1, Canary(input_ids=IDS)))
    harness.turn_until(lambda: follower.runner.num_steps > num_steps)
    assert leader.runner.num_steps == num_steps
    harness.abort(rid)
    harness.turn()
    monkeypatch.undo()
    harness.turn_until(lambda: call in harness.replies)
    first, second = [(policy.allocator.num_free, policy.cache.num_evictable_pages) for policy in policies]
    assert first == second


@pytest.mark.parametrize("is_session", [False, True])
def test_a_deadline_in_the_middle_of_its_pass_keeps_no_rank_from_it(
    monkeypatch: pytest.MonkeyPatch, is_session: bool
) -> None:
    """The others would wait in there for the one that does not come."""
    harness = Harness(num_ranks=2)
    leader, follower = harness.ranks
    control, num_steps = leader.scheduler.control, leader.runner.num_steps
    work, canary = control.ranks.work, Canary(input_ids=IDS)
    monkeypatch.setattr(control.ranks, "work", lambda: None if control.operations.stands_alone else work())
    if is_session:
        harness.begin()
        harness.update(1)
        deadline, call = "weight-session-0", harness.call(EndWeightUpdateReqInput(canary=canary))
    else:
        deadline = call = harness.call(trying(1, canary))
    harness.turn_until(lambda: follower.runner.num_steps > num_steps)
    harness.expire(deadline)
    monkeypatch.undo()
    harness.turn_until(lambda: call in harness.replies)
    assert harness.refusal(call).status in (400, 409)
    assert harness.values == [0] * 4
    assert [rank.runner.num_steps - num_steps for rank in harness.ranks] == [1, 1]
    assert harness.update(2).success
