"""Updates that change what they find, as custom weight loaders do: on a whole copy, or not at all."""

from typing import Any

import pytest
from fixtures.control import Harness, updating

from ebbtide.srt.errors import EngineError, RequestRejected
from ebbtide.srt.managers.io_struct import EndWeightUpdateReqInput, UpdateWeightFromDiskReqInput
from ebbtide.srt.memory_saver import MemoryTag


@pytest.fixture(params=[1, 3], ids=lambda count: f"ranks{count}")
def harness(request: pytest.FixtureRequest) -> Harness:
    harness = Harness(num_ranks=request.param)
    harness.update(5)
    return harness


def adding(value: int, **fields: Any) -> UpdateWeightFromDiskReqInput:
    """What is sent is added to all parameters."""
    return updating(value, needs_copy=True, **fields)


def test_in_a_session_it_finds_what_was_staged(harness: Harness) -> None:
    harness.begin()
    harness.update(20, 0)
    harness.do(adding(1))
    harness.update(30, 1)
    harness.do(adding(2))
    harness.update(40, 2)
    assert harness.values == [5, 5, 5, 5]
    harness.end()
    assert harness.values == [23, 32, 40, 8]


def test_after_a_failure_of_another_update_it_finds_the_old_values_there(harness: Harness) -> None:
    harness.begin()
    harness.do(adding(1))
    harness.ranks[-1].weights.faults["write"] = RequestRejected("cannot be done here")
    harness.refuse(updating(30, 1))
    harness.do(adding(1))
    harness.end()
    assert harness.values == [7, 6, 7, 7]


@pytest.mark.parametrize("staged_before", [False, True])
def test_one_that_failed_leaves_a_session_that_can_only_be_aborted(
    harness: Harness, staged_before: bool
) -> None:
    harness.begin()
    if staged_before:
        harness.update(20)
    harness.ranks[-1].weights.faults["write"] = EngineError("half-way")
    assert "half-way" in harness.refuse(adding(1)).message
    for request in (adding(1), updating(20), EndWeightUpdateReqInput(allow_incomplete=True)):
        harness.refused(request, 400, "abort_weight_update")
    assert harness.values == [5, 5, 5, 5]
    harness.abort_session()
    harness.do(adding(1))
    assert harness.values == [6, 6, 6, 6]


@pytest.mark.parametrize("step", ["open", "stage", "complete", "map"])
def test_one_that_failed_before_anything_was_written_can_be_sent_again(harness: Harness, step: str) -> None:
    harness.begin()
    if step != "stage":
        harness.update(20, 0)
    harness.ranks[-1].weights.faults[step] = RequestRejected("cannot be done here")
    assert "cannot be done here" in harness.refuse(adding(1)).message
    harness.do(adding(1))
    # What cannot be opened is not known by name.
    harness.end(allow_incomplete=step == "open")
    assert harness.values == ([6, 6, 6, 6] if step == "stage" else [21, 6, 6, 6])


def test_without_room_for_a_copy_it_is_refused_at_once(harness: Harness) -> None:
    rid = harness.begin_request()
    harness.ranks[-1].weights.num_staged = 0
    harness.refused(adding(1), 400, "release kv_cache")
    assert harness.outputs[rid].finish is None, "it did not wait for what runs"
    assert harness.values == [5, 5, 5, 5]
    harness.assert_end(rid, length=60)


def test_stale_weights_are_nothing_to_change(harness: Harness) -> None:
    harness.release(MemoryTag.WEIGHTS)
    harness.resume(MemoryTag.WEIGHTS)
    assert "written whole" in harness.refuse(adding(1)).message
    harness.update(3)
    harness.do(adding(1))
    assert harness.values == [4, 4, 4, 4]


def test_in_a_session_in_place_it_is_refused_and_the_rest_goes_on(harness: Harness) -> None:
    harness.ranks[0].weights.num_staged = 0
    harness.begin()
    harness.update(20, 0)
    assert "there is none" in harness.refuse(adding(1)).message
    assert harness.end(allow_incomplete=True).content == "valid"
    assert harness.values == [20, 5, 5, 5]
