"""The control plane as a whole: nothing is forgotten, nothing is answered twice or by another's reply."""

import pytest
from fixtures.control import Harness, updating

from ebbtide.srt.managers.control import Activity, Operation
from ebbtide.srt.managers.control.operations import Operations
from ebbtide.srt.managers.io_struct import (
    CONTROL_REQUESTS,
    AnyReply,
    ControlRequest,
    FlushCacheReqInput,
    GetLoadReqInput,
    InitWeightsUpdateGroupReqInput,
    PauseGenerationReqInput,
    PauseMode,
    PingReqInput,
    PingReqOutput,
)


def test_every_request_has_a_handler() -> None:
    assert set(Harness().scheduler.control.handlers) == set(CONTROL_REQUESTS)


def test_a_handler_that_fails_is_an_answer_and_not_the_end(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness()

    def fail(request: PingReqInput) -> PingReqOutput:
        raise ZeroDivisionError("a bug")

    working = harness.scheduler.control.handlers[PingReqInput]
    harness.scheduler.control.handlers[PingReqInput] = fail
    refusal = harness.refuse(PingReqInput())
    assert (refusal.status, refusal.message) == (500, "PingReqInput failed: ZeroDivisionError: a bug")
    assert "a bug" in caplog.text
    harness.scheduler.control.handlers[PingReqInput] = working
    harness.do(PingReqInput())


@pytest.mark.parametrize("kind", [Activity.WORKING, Activity.ALONE])
def test_who_waits_for_what_another_ends_needs_no_further_turn(kind: Activity) -> None:
    replies: dict[str, AnyReply] = {}
    operations = Operations(replies.__setitem__)
    has_ended = False

    def waiting() -> Operation:
        while not has_ended:
            yield Activity.WAITING
        return PingReqOutput()

    def working() -> Operation:
        nonlocal has_ended
        yield kind
        has_ended = True
        return PingReqOutput()

    for call_id, operation in (("waits", waiting()), ("works", working())):
        operations.start(call_id, PingReqInput(), operation, lambda: None)
    operations.advance(lambda: None)
    assert set(replies) == {"works", "waits"}


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize(
    "waiting",
    [
        InitWeightsUpdateGroupReqInput(master_address="a", master_port=1, rank_offset=1, world_size=4),
        updating(1, is_sent=True, pause_mode=PauseMode.RETRACT),
        updating(1),
        PauseGenerationReqInput(mode=PauseMode.WAIT),
        FlushCacheReqInput(timeout_s=1000.0),
    ],
    ids=["group", "broadcast", "drain", "pause", "flush"],
)
def test_passes_overlap_beside_an_operation_that_merely_waits(
    waiting: ControlRequest, num_ranks: int
) -> None:
    harness = Harness(num_ranks=num_ranks)
    for rank in harness.ranks:
        rank.weights.lateness = 60
    harness.generate(range(1, 9), max_new_tokens=100)
    harness.turn(5)
    call = harness.call(waiting)
    harness.turn(5)
    for _ in range(20):
        harness.turn()
        assert {len(rank.runner.under_way) for rank in harness.ranks} == {int(harness.schedule.overlap)}
    assert call not in harness.replies
    harness.turn_until(lambda: call in harness.replies)
    assert harness.reply(call).success
    harness.run_until_idle()
    assert not harness.runner.under_way


def test_questions_leave_the_pass_under_way_which_counts_as_not_done() -> None:
    harness = Harness()
    harness.generate(range(1, 9), max_new_tokens=100)
    harness.turn(5)
    for _ in range(20):
        num_launched = harness.runner.num_steps
        pinged, asked = harness.call(PingReqInput()), harness.call(GetLoadReqInput())
        harness.turn()
        assert harness.reply(pinged).success
        num_done = sum(harness.reply(asked).loads[0].step_counts)
        assert num_launched - num_done == int(harness.schedule.overlap)
