"""Checksums, copies and comparisons of the weights: one answer for all ranks, never of half a change."""

from typing import Any

import pytest
from fixtures.control import Harness

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.io_struct import (
    CheckWeightsReqInput,
    PauseMode,
    ReleaseMemoryOccupationReqInput,
)
from ebbtide.srt.memory_saver.tags import MemoryTag

WEIGHTS = MemoryTag.WEIGHTS


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
    refusal = harness.refuse(ask("compare"))
    assert (refusal.status, "layer.0" in refusal.message) == (400, True)
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
    refusal = harness.refuse(ask("compare"))
    assert refusal.status == 400
    assert "1 parameters are not those of the snapshot: layer.2" in refusal.message
    assert refusal.fields["errors"][0]["name"] == "layer.2"
    check(harness, "compare", "layer.2")


def test_what_is_skipped_is_not_filled_and_nothing_is_under_an_update(harness: Harness) -> None:
    harness.begin()
    refusal = harness.refuse(ask("reset_tensors"))
    assert (refusal.status, "session" in refusal.message) == (409, True)
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
