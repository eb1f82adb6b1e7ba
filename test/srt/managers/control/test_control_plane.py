"""The control plane as a whole: nothing is forgotten, nothing is answered twice or by another's reply."""

from __future__ import annotations

import msgspec
import pytest

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.api.request_fields import build_request
from ebbtide.srt.managers.io_struct import (
    CONTROL_REQUESTS,
    ControlCall,
    ControlRequest,
    FlushCacheReqInput,
    InitWeightsUpdateGroupReqInput,
    PauseGenerationReqInput,
    PauseMode,
    PingReqInput,
    PingReqOutput,
    ReleaseMemoryOccupationReqInput,
    SchedulerInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromTensorReqInput,
)
from ebbtide.srt.memory_saver.tags import MemoryTag
from ebbtide.testing import SchedulerHarness


def test_every_request_has_a_handler() -> None:
    assert set(SchedulerHarness().scheduler.control.handlers) == set(CONTROL_REQUESTS)


def test_a_handler_that_fails_is_an_answer_and_not_the_end(caplog: pytest.LogCaptureFixture) -> None:
    harness = SchedulerHarness()

    def fail(request: PingReqInput) -> PingReqOutput:
        raise ZeroDivisionError("a bug")

    working = harness.scheduler.control.handlers[PingReqInput]
    harness.scheduler.control.handlers[PingReqInput] = fail
    refusal = harness.refuse(PingReqInput())
    assert (refusal.status, refusal.message) == (500, "PingReqInput failed: ZeroDivisionError: a bug")
    assert "a bug" in caplog.text
    harness.scheduler.control.handlers[PingReqInput] = working
    harness.apply(PingReqInput(), PingReqOutput)


def test_requests_travel_as_they_are() -> None:
    request = UpdateWeightsFromTensorReqInput(
        serialized_named_tensors=[b"\x80\x04", b""], pause_mode=PauseMode.RETRACT, weight_version=3
    )
    call = ControlCall(id="1", request=request)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(call), type=SchedulerInput) == call


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize(
    "waiting",
    [
        InitWeightsUpdateGroupReqInput(master_address="a", master_port=1, rank_offset=1, world_size=4),
        UpdateWeightFromDiskReqInput(
            model_path="1", manifest={"is_sent": True}, pause_mode=PauseMode.RETRACT
        ),
        UpdateWeightFromDiskReqInput(model_path="1"),
        PauseGenerationReqInput(mode=PauseMode.WAIT),
        FlushCacheReqInput(timeout_s=1000.0),
    ],
    ids=["group", "broadcast", "drain", "pause", "flush"],
)
def test_passes_overlap_beside_an_operation_that_merely_waits(
    waiting: ControlRequest, num_ranks: int
) -> None:
    harness = SchedulerHarness(num_ranks=num_ranks)
    for rank in harness.ranks:
        rank.weights.lateness = 60
    harness.generate(range(1, 9), max_new_tokens=100)
    harness.turn(5)
    call = harness.call(waiting)
    harness.turn(5)
    for _ in range(20):
        harness.turn()
        assert {rank.runner.num_under_way for rank in harness.ranks} == {int(harness.schedule.overlap)}
    assert call not in harness.replies
    harness.turn_until(lambda: call in harness.replies)
    assert harness.replies[call].success
    harness.run_until_idle()
    assert harness.runner.num_under_way == 0


class TestBuildRequest:
    def test_null_means_not_given_and_unknown_fields_are_named(self) -> None:
        request, ignored = build_request(PauseGenerationReqInput, {"mode": None, "zeal": 1, "about": 2})
        assert request == PauseGenerationReqInput()
        assert ignored == ["about", "zeal"]

    def test_base64_becomes_bytes(self) -> None:
        request, _ = build_request(UpdateWeightsFromTensorReqInput, {"serialized_named_tensors": ["gAQ="]})
        assert request.serialized_named_tensors == [b"\x80\x04"]

    @pytest.mark.parametrize(
        ("kind", "fields", "parts"),
        [
            (ReleaseMemoryOccupationReqInput, {"tags": ["kv"]}, ["'kv'", "$.tags[0]", *MemoryTag]),
            (PauseGenerationReqInput, {"mode": "hard"}, ["'hard'", "$.mode", *PauseMode]),
            (PauseGenerationReqInput, {"timeout_s": "soon"}, ["float", "str", "$.timeout_s"]),
            (FlushCacheReqInput, {"timeout_s": [1]}, ["float", "array", "$.timeout_s"]),
            (UpdateWeightsFromTensorReqInput, {}, ["serialized_named_tensors"]),
            (UpdateWeightsFromTensorReqInput, {"serialized_named_tensors": ["!"]}, ["base64"]),
            (
                UpdateWeightsFromTensorReqInput,
                {"serialized_named_tensors": [], "selector": "half"},
                ["'half'", "target", "draft", "all"],
            ),
        ],
    )
    def test_what_does_not_fit_says_what_was_expected(
        self, kind: type[ControlRequest], fields: dict[str, object], parts: list[str]
    ) -> None:
        with pytest.raises(RequestRejected) as caught:
            build_request(kind, fields)
        assert caught.value.status == 400
        assert all(part in caught.value.message for part in parts), caught.value.message
