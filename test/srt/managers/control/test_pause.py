"""Pausing and continuing: control_semantics section 1.1, on the real scheduler with null parts."""

import pytest
from fixtures.control import PROMPT, Harness

from ebbtide.srt.managers.io_struct import AbortReq, FinishReason, PauseGenerationReqInput, PauseMode
from ebbtide.srt.model_executor.batch_plan import PassOutOfMemory

ORDER = [PauseMode.WAIT, PauseMode.IN_PLACE, PauseMode.RETRACT, PauseMode.ABORT]


@pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.RETRACT])
def test_a_pause_stops_forward_passes_and_continue_goes_on_where_it_stood(
    harness: Harness, mode: PauseMode
) -> None:
    undisturbed = Harness()
    expected = undisturbed.generate(PROMPT)
    undisturbed.run_until_idle()
    assert not harness.proceed().changed, "it was not paused"
    rid = harness.generate(PROMPT)
    second = harness.generate(range(100, 120), max_new_tokens=12)
    harness.turn(5)
    reply = harness.pause(mode)
    num_running = 2 if mode is PauseMode.IN_PLACE else 0
    assert (reply.changed, reply.mode) == (True, mode)
    assert (reply.num_running, reply.num_retracted) == (num_running, 2 - num_running)
    assert (reply.num_aborted, reply.num_queued) == (0, 2 - num_running)
    steps = harness.runner.num_steps
    harness.turn(10)
    assert harness.runner.num_steps == steps
    assert not harness.scheduler.is_runnable, "a paused engine sleeps"
    assert harness.proceed().changed
    harness.assert_end(second, length=12)
    assert harness.outputs[rid].token_ids == undisturbed.outputs[expected].token_ids
    assert harness.outputs[rid].num_retractions == (1 if mode is PauseMode.RETRACT else 0)


def test_pause_abort_ends_running_and_queued_requests_with_what_they_have(harness: Harness) -> None:
    assert PauseGenerationReqInput().mode is PauseMode.ABORT
    rids = [harness.generate(PROMPT, seed=seed, max_new_tokens=60) for seed in range(10)]
    harness.turn(6)
    reply = harness.pause(PauseMode.ABORT)
    assert (reply.num_aborted, reply.num_running, reply.num_queued) == (10, 0, 0)
    aborted = FinishReason("abort", message="Aborted by pause_generation")
    assert {harness.outputs[rid].finish for rid in rids} == {aborted}
    assert harness.outputs[rids[0]].token_ids
    # Once more, and it ends what has come since.
    late = harness.generate(PROMPT)
    harness.turn()
    assert harness.pause(PauseMode.ABORT).num_aborted == 1
    assert harness.outputs[late].finish == aborted


def test_a_prefill_in_progress_is_retracted_too(harness: Harness) -> None:
    rid = harness.generate(range(1, 60), max_new_tokens=5)
    harness.turn(1)
    assert harness.outputs[rid].token_ids == []
    assert harness.pause(PauseMode.RETRACT).num_retracted == 1
    harness.proceed()
    harness.assert_end(rid, length=5)


@pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.RETRACT, PauseMode.ABORT])
def test_requests_that_arrive_while_paused_wait(harness: Harness, mode: PauseMode) -> None:
    harness.pause(mode)
    rid = harness.begin_request(max_new_tokens=3)
    assert harness.outputs[rid].finish is None
    harness.proceed()
    harness.assert_end(rid, length=3)


@pytest.mark.parametrize("first", ORDER)
@pytest.mark.parametrize("second", ORDER)
def test_a_second_pause_only_escalates(harness: Harness, first: PauseMode, second: PauseMode) -> None:
    if first is not PauseMode.WAIT:
        harness.begin_request()
    harness.pause(first)
    reply = harness.pause(second)
    assert reply.mode is harness.now.paused is max(first, second, key=ORDER.index)
    assert reply.changed is (ORDER.index(second) > ORDER.index(first))
    assert reply.num_running == (1 if reply.mode is PauseMode.IN_PLACE and first is not PauseMode.WAIT else 0)


def test_aborting_under_pause_in_place_frees_the_request_at_once(harness: Harness) -> None:
    rid = harness.begin_request()
    harness.pause(PauseMode.IN_PLACE)
    assert harness.do(AbortReq(rid=rid)).changed
    assert harness.outputs[rid].finish is not None


class TestWait:
    def test_it_answers_when_the_running_requests_have_ended(self, harness: Harness) -> None:
        running = harness.begin_request(max_new_tokens=10)
        call = harness.call(PauseGenerationReqInput(mode=PauseMode.WAIT))
        later = harness.begin_request(max_new_tokens=2)
        assert call not in harness.replies
        harness.turn_until(lambda: call in harness.replies)
        assert harness.outputs[running].finish == FinishReason("length", length=10)
        assert harness.outputs[later].token_ids == [], "nothing new is admitted"
        reply = harness.reply(call)
        assert (reply.mode, reply.num_running, reply.num_queued) == (PauseMode.WAIT, 0, 1)
        harness.proceed()
        harness.assert_end(later, length=2)

    @pytest.mark.parametrize("by", ["its deadline", "continue", *ORDER[1:]])
    def test_what_ends_it_refuses_it(self, harness: Harness, by: str) -> None:
        harness.begin_request()
        call = harness.call(PauseGenerationReqInput(mode=PauseMode.WAIT, timeout_s=1000.0))
        harness.turn(2)
        if by == "its deadline":
            harness.expire(call)
            assert harness.refusal(call).fields["num_running"] == 1
        elif by == "continue":
            assert not harness.proceed().changed
        else:
            assert harness.pause(PauseMode(by)).mode == by
            assert "superseded" in harness.refusal(call).message
            harness.proceed()
        assert harness.refusal(call).status == 409
        later = harness.generate(PROMPT, max_new_tokens=2)
        harness.assert_end(later, length=2)


@pytest.fixture(params=["pool", "states"])
def retracting(request: pytest.FixtureRequest) -> tuple[Harness, list[str]]:
    """Requests of which the engine itself is about to retract some, and who they are."""
    is_short = request.param == "pool"
    harness = Harness(num_pages=26) if is_short else Harness(num_checkpoints=5)
    rids = [harness.begin_request(max_new_tokens=50) for _ in range(2)]
    if not is_short:
        harness.runner.faults.append(PassOutOfMemory("none"))
    return harness, rids


def test_a_drain_waits_for_whom_the_engine_retracts_meanwhile(
    retracting: tuple[Harness, list[str]],
) -> None:
    harness, rids = retracting
    call = harness.call(PauseGenerationReqInput(mode=PauseMode.WAIT))
    late = harness.generate(PROMPT, max_new_tokens=4)
    harness.turn_until(lambda: call in harness.replies)
    assert harness.reply(call).num_running == 0
    assert sum(harness.outputs[rid].num_retractions for rid in rids) > 0
    assert [harness.num_tokens(rid) for rid in (*rids, late)] == [50, 50, 0]
    harness.proceed()
    harness.assert_end(late, length=4)


def test_whom_the_engine_retracts_while_an_update_drains_ends_on_the_old_weights(
    retracting: tuple[Harness, list[str]],
) -> None:
    harness, rids = retracting
    late = harness.generate(PROMPT, max_new_tokens=4)
    harness.update(3, weight_version="3")
    harness.assert_end(late, length=4)
    assert sum(harness.outputs[rid].num_retractions for rid in rids) > 0
    assert [harness.versions(rid) for rid in (*rids, late)] == [["default"], ["default"], ["3"]]
