"""Checksums, copies and comparisons of the weights: one answer for all ranks, never of half a change."""

from __future__ import annotations

import pytest

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.io_struct import (
    AbortWeightUpdateReqInput,
    BeginWeightUpdateReqInput,
    CheckWeightsReqInput,
    CheckWeightsReqOutput,
    PauseMode,
    Refusal,
    ReleaseMemoryOccupationReqInput,
    ReleaseMemoryOccupationReqOutput,
    ResumeMemoryOccupationReqInput,
    ResumeMemoryOccupationReqOutput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsReqOutput,
    WeightSessionReqOutput,
)
from ebbtide.srt.memory_saver.tags import MemoryTag
from ebbtide.testing import SchedulerHarness

WEIGHTS = (MemoryTag.WEIGHTS,)


@pytest.fixture(params=[1, 3], ids=["one rank", "three ranks"])
def harness(request: pytest.FixtureRequest) -> SchedulerHarness:
    return SchedulerHarness(num_ranks=request.param)


def ask(action: str, *skipped: str) -> CheckWeightsReqInput:
    return CheckWeightsReqInput(action=action, skip_tensor_list=list(skipped) or None)  # type: ignore[arg-type]


def check(harness: SchedulerHarness, action: str, *skipped: str) -> CheckWeightsReqOutput:
    return harness.apply(ask(action, *skipped), CheckWeightsReqOutput)


def update(harness: SchedulerHarness, value: int, **manifest: object) -> None:
    request = UpdateWeightFromDiskReqInput(
        model_path=str(value), manifest=manifest, pause_mode=PauseMode.RETRACT
    )
    harness.apply(request, UpdateWeightsReqOutput)


def test_checksums_tell_weights_apart(harness: SchedulerHarness) -> None:
    first = check(harness, "checksum")
    assert len(first.by_rank) == len(harness.ranks)
    update(harness, 5)
    second = check(harness, "checksum")
    assert second.per_engine_checksum != first.per_engine_checksum
    update(harness, 0)
    assert check(harness, "checksum").per_engine_checksum == first.per_engine_checksum
    assert set(check(harness, "checksum", "0", "3").by_rank[0].checksums) == {"layer.1", "layer.2"}


def test_weights_that_were_filled_and_sent_again_are_those_of_the_snapshot(harness: SchedulerHarness) -> None:
    update(harness, 5)
    check(harness, "snapshot")
    check(harness, "reset_tensors")
    assert harness.state is not None
    assert not harness.state.can_run
    refusal = harness.refuse(ask("compare"))
    assert (refusal.status, "layer.0" in refusal.message) == (409, True)
    update(harness, 5)
    assert harness.state.can_run
    check(harness, "compare")
    # It was freed.
    assert harness.refuse(ask("compare")).status == 409


def test_a_difference_is_refused_and_named_and_the_snapshot_stays(harness: SchedulerHarness) -> None:
    check(harness, "snapshot")
    update(harness, 7, names=["layer.2"])
    refusal = harness.refuse(ask("compare"))
    assert refusal.status == 400
    assert "1 parameters are not those of the snapshot: layer.2" in refusal.message
    assert refusal.fields["errors"][0]["name"] == "layer.2"
    check(harness, "compare", "layer.2")


def test_what_is_skipped_is_not_filled(harness: SchedulerHarness) -> None:
    check(harness, "reset_tensors", "layer.1")
    missing = harness.scheduler.control.memory.content.missing
    assert missing == {"layer.0", "layer.2", "layer.3"}
    assert all(rank.weights.live["layer.1"] == 0 for rank in harness.ranks)


def test_a_request_that_runs_waits_until_the_weights_are_back(harness: SchedulerHarness) -> None:
    rid = harness.generate([1, 2, 3], max_new_tokens=8)
    harness.turn(3)
    check(harness, "reset_tensors")
    num_tokens = len(harness.outputs[rid].token_ids)
    harness.turn(5)
    assert len(harness.outputs[rid].token_ids) == num_tokens < 8
    update(harness, 4)
    harness.run_until_idle()
    assert len(harness.outputs[rid].token_ids) == 8


@pytest.mark.parametrize("action", ["checksum", "snapshot", "compare", "reset_tensors"])
def test_released_weights_are_not_looked_at(harness: SchedulerHarness, action: str) -> None:
    check(harness, "snapshot")
    harness.apply(ReleaseMemoryOccupationReqInput(tags=WEIGHTS), ReleaseMemoryOccupationReqOutput)
    assert harness.refuse(ask(action)).status == 409
    harness.apply(ResumeMemoryOccupationReqInput(tags=WEIGHTS), ResumeMemoryOccupationReqOutput)
    if action == "reset_tensors":
        # What holds nothing may be filled with anything.
        check(harness, action)
    else:
        assert "stale" in harness.refuse(ask(action)).message
    update(harness, 0)
    check(harness, "compare")


@pytest.mark.parametrize("action", ["checksum", "snapshot", "compare"])
def test_nothing_is_said_of_weights_that_changed_meanwhile(harness: SchedulerHarness, action: str) -> None:
    check(harness, "snapshot")
    for rank in harness.ranks:
        rank.weights.slowness = 1
    for change in (
        ReleaseMemoryOccupationReqInput(tags=WEIGHTS),
        ask("reset_tensors"),
    ):
        call_id = harness.call(ask(action))
        harness.turn()
        assert call_id not in harness.replies
        harness.call(change)
        harness.turn_until(lambda call_id=call_id: call_id in harness.replies)  # type: ignore[misc]
        refusal = harness.replies[call_id]
        assert isinstance(refusal, Refusal)
        assert (refusal.status, "meanwhile" in refusal.message) == (409, True)
        harness.apply(ResumeMemoryOccupationReqInput(tags=WEIGHTS), ResumeMemoryOccupationReqOutput)
        update(harness, 0)
    # The refused one has left the snapshot as it was.
    check(harness, "compare")


def test_weights_are_not_filled_under_an_update(harness: SchedulerHarness) -> None:
    harness.apply(BeginWeightUpdateReqInput(), WeightSessionReqOutput)
    refusal = harness.refuse(ask("reset_tensors"))
    assert (refusal.status, "session" in refusal.message) == (409, True)
    assert harness.state is not None
    assert harness.state.can_run
    harness.apply(AbortWeightUpdateReqInput(), WeightSessionReqOutput)
    check(harness, "reset_tensors")


def test_a_rank_that_has_no_room_for_a_snapshot_is_named_and_no_other_keeps_one() -> None:
    harness = SchedulerHarness(num_ranks=3)
    harness.ranks[1].weights.faults["check"] = RequestRejected("no room", 409)
    refusal = harness.refuse(ask("snapshot"))
    assert (refusal.status, refusal.message) == (409, "rank 1: no room")
    assert harness.refuse(ask("compare")).message.startswith("there is no snapshot")


def test_a_rank_whose_weights_differ_is_named() -> None:
    harness = SchedulerHarness(num_ranks=3)
    check(harness, "snapshot")
    harness.ranks[2].weights.write({"layer.1": 9})
    refusal = harness.refuse(ask("compare"))
    assert refusal.status == 400
    assert refusal.message.startswith("rank 2: 1 parameters")
