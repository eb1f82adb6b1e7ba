"""Updates that change what they find, as custom weight loaders do: on a whole copy, or not at all."""

from __future__ import annotations

from typing import Any

import pytest

from ebbtide.srt.errors import EngineError, RequestRejected
from ebbtide.srt.managers.io_struct import (
    AbortWeightUpdateReqInput,
    AnyControlRequest,
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
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


@pytest.fixture(params=[1, 3], ids=lambda count: f"ranks{count}")
def harness(request: pytest.FixtureRequest) -> SchedulerHarness:
    harness = SchedulerHarness(num_ranks=request.param)
    assert update(harness, written(5)).success
    return harness


def written(value: int, *names: str) -> UpdateWeightFromDiskReqInput:
    manifest: dict[str, Any] = {"names": names} if names else {}
    return UpdateWeightFromDiskReqInput(model_path=str(value), manifest=manifest)


def added(value: int, **manifest: Any) -> UpdateWeightFromDiskReqInput:
    return UpdateWeightFromDiskReqInput(model_path=str(value), manifest={"needs_copy": True, **manifest})


def update(harness: SchedulerHarness, request: AnyControlRequest) -> UpdateWeightsReqOutput:
    return harness.apply(request, UpdateWeightsReqOutput)


def begin(harness: SchedulerHarness) -> None:
    harness.apply(BeginWeightUpdateReqInput(), WeightSessionReqOutput)


def assert_hold(harness: SchedulerHarness, *values: int | None) -> None:
    """The parameters in order, on every rank."""
    assert [list(rank.weights.live.values()) for rank in harness.ranks] == [list(values)] * len(harness.ranks)


def test_it_finds_the_weights_that_serve(harness: SchedulerHarness) -> None:
    update(harness, added(2))
    assert_hold(harness, 7, 7, 7, 7)
    update(harness, added(3))
    assert_hold(harness, 10, 10, 10, 10)


def test_in_a_session_it_finds_what_was_staged(harness: SchedulerHarness) -> None:
    begin(harness)
    update(harness, written(20, "layer.0"))
    update(harness, added(1))
    update(harness, written(30, "layer.1"))
    update(harness, added(2))
    update(harness, written(40, "layer.2"))
    assert_hold(harness, 5, 5, 5, 5)
    update(harness, EndWeightUpdateReqInput())
    assert_hold(harness, 23, 32, 40, 8)


def test_after_a_failure_of_another_update_it_finds_the_old_values_there(harness: SchedulerHarness) -> None:
    begin(harness)
    update(harness, added(1))
    request = written(30, "layer.1")
    harness.ranks[-1].weights.faults["write"] = RequestRejected("cannot be done here")
    harness.refuse(request)
    update(harness, added(1))
    update(harness, EndWeightUpdateReqInput())
    assert_hold(harness, 7, 6, 7, 7)


@pytest.mark.parametrize("staged_before", [False, True])
def test_one_that_failed_leaves_a_session_that_can_only_be_aborted(
    harness: SchedulerHarness, staged_before: bool
) -> None:
    begin(harness)
    if staged_before:
        update(harness, written(20))
    harness.ranks[-1].weights.faults["write"] = EngineError("half-way")
    assert "half-way" in harness.refuse(added(1)).message
    for request in (added(1), written(20), EndWeightUpdateReqInput(allow_incomplete=True)):
        refusal = harness.refuse(request)
        assert (refusal.status, "abort_weight_update" in refusal.message) == (400, True)
    assert_hold(harness, 5, 5, 5, 5)
    harness.apply(AbortWeightUpdateReqInput(), WeightSessionReqOutput)
    update(harness, added(1))
    assert_hold(harness, 6, 6, 6, 6)


@pytest.mark.parametrize("step", ["open", "stage", "complete", "map"])
def test_one_that_failed_before_anything_was_written_can_be_sent_again(
    harness: SchedulerHarness, step: str
) -> None:
    begin(harness)
    if step != "stage":
        update(harness, written(20, "layer.0"))
    harness.ranks[-1].weights.faults[step] = RequestRejected("cannot be done here")
    assert "cannot be done here" in harness.refuse(added(1)).message
    update(harness, added(1))
    # What cannot be opened is not known by name.
    update(harness, EndWeightUpdateReqInput(allow_incomplete=step == "open"))
    assert_hold(harness, *([6, 6, 6, 6] if step == "stage" else [21, 6, 6, 6]))


def test_without_room_for_a_copy_it_is_refused_at_once(harness: SchedulerHarness) -> None:
    rid = harness.generate(range(1, 20), max_new_tokens=60)
    harness.turn(3)
    harness.ranks[-1].weights.num_staged = 0
    refusal = harness.refuse(added(1))
    assert (refusal.status, "release kv_cache" in refusal.message) == (400, True)
    # It did not wait for what runs.
    assert harness.outputs[rid].finish is None
    assert_hold(harness, 5, 5, 5, 5)
    harness.run_until_idle()
    assert len(harness.outputs[rid].token_ids) == 60


def test_stale_weights_are_nothing_to_change(harness: SchedulerHarness) -> None:
    harness.apply(ReleaseMemoryOccupationReqInput(tags=WEIGHTS), ReleaseMemoryOccupationReqOutput)
    harness.apply(ResumeMemoryOccupationReqInput(tags=WEIGHTS), ResumeMemoryOccupationReqOutput)
    assert "written whole" in harness.refuse(added(1)).message
    update(harness, written(3))
    update(harness, added(1))
    assert_hold(harness, 4, 4, 4, 4)


def test_in_a_session_in_place_it_is_refused_and_the_rest_goes_on(harness: SchedulerHarness) -> None:
    harness.ranks[0].weights.num_staged = 0
    begin(harness)
    update(harness, written(20, "layer.0"))
    assert "there is none" in harness.refuse(added(1)).message
    assert update(harness, EndWeightUpdateReqInput(allow_incomplete=True)).content == "valid"
    assert_hold(harness, 20, 5, 5, 5)


def test_an_update_of_nothing_changes_nothing(harness: SchedulerHarness) -> None:
    assert update(harness, added(1, names=[])).num_tensors == 0
    assert_hold(harness, 5, 5, 5, 5)
    begin(harness)
    for request in (added(1, names=[]), written(20, "layer.0"), added(1, names=[])):
        update(harness, request)
    update(harness, EndWeightUpdateReqInput())
    assert_hold(harness, 20, 5, 5, 5)
