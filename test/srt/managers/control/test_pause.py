"""Pausing and continuing: control_semantics section 1.1, on the real scheduler with null parts."""

import pytest

from ebbtide.srt.managers.io_struct import (
    AbortReq,
    AbortReqOutput,
    ContinueGenerationReqInput,
    ContinueGenerationReqOutput,
    Expire,
    FinishReason,
    PauseGenerationReqInput,
    PauseGenerationReqOutput,
    PauseMode,
    Refusal,
)
from ebbtide.testing import SchedulerHarness

PROMPT = range(1, 20)
ORDER = [PauseMode.WAIT, PauseMode.IN_PLACE, PauseMode.RETRACT, PauseMode.ABORT]


def paused(harness: SchedulerHarness, mode: PauseMode) -> PauseGenerationReqOutput:
    return harness.apply(PauseGenerationReqInput(mode=mode), PauseGenerationReqOutput)


def continued(harness: SchedulerHarness) -> ContinueGenerationReqOutput:
    return harness.apply(ContinueGenerationReqInput(), ContinueGenerationReqOutput)


@pytest.fixture
def harness() -> SchedulerHarness:
    return SchedulerHarness()


def test_the_default_mode_is_abort() -> None:
    assert PauseGenerationReqInput().mode is PauseMode.ABORT


@pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.RETRACT])
def test_a_pause_stops_forward_passes_and_continue_goes_on_where_it_stood(
    harness: SchedulerHarness, mode: PauseMode
) -> None:
    undisturbed = SchedulerHarness()
    expected = undisturbed.generate(PROMPT)
    undisturbed.run_until_idle()
    rid = harness.generate(PROMPT)
    second = harness.generate(range(100, 120), max_new_tokens=12)
    harness.turn(5)
    reply = paused(harness, mode)
    num_running = 2 if mode is PauseMode.IN_PLACE else 0
    assert (reply.changed, reply.mode) == (True, mode)
    assert (reply.num_running, reply.num_retracted) == (num_running, 2 - num_running)
    assert (reply.num_aborted, reply.num_queued) == (0, 2 - num_running)
    steps = harness.runner.num_steps
    harness.turn(10)
    assert harness.runner.num_steps == steps
    assert not harness.scheduler.is_runnable, "a paused engine sleeps"
    assert continued(harness).changed
    harness.run_until_idle()
    assert harness.outputs[rid].token_ids == undisturbed.outputs[expected].token_ids
    assert harness.outputs[rid].num_retractions == (1 if mode is PauseMode.RETRACT else 0)
    assert harness.outputs[second].finish == FinishReason("length", length=12)


def test_pause_abort_ends_running_and_queued_requests_with_what_they_have(harness: SchedulerHarness) -> None:
    rids = [harness.generate(PROMPT, seed=seed, max_new_tokens=60) for seed in range(10)]
    harness.turn(6)
    reply = paused(harness, PauseMode.ABORT)
    assert (reply.num_aborted, reply.num_running, reply.num_queued) == (10, 0, 0)
    outputs = [harness.outputs[rid] for rid in rids]
    assert {output.finish for output in outputs} == {
        FinishReason("abort", message="Aborted by pause_generation")
    }
    assert outputs[0].token_ids


def test_a_prefill_in_progress_is_retracted_too(harness: SchedulerHarness) -> None:
    rid = harness.generate(range(1, 60), max_new_tokens=5)
    harness.turn(1)
    assert harness.outputs[rid].token_ids == []
    assert paused(harness, PauseMode.RETRACT).num_retracted == 1
    continued(harness)
    harness.run_until_idle()
    assert harness.outputs[rid].finish == FinishReason("length", length=5)


def test_requests_that_arrive_while_paused_wait(harness: SchedulerHarness) -> None:
    for mode in (PauseMode.IN_PLACE, PauseMode.RETRACT, PauseMode.ABORT):
        paused(harness, mode)
        rid = harness.generate(PROMPT, max_new_tokens=3)
        harness.turn(5)
        assert harness.outputs[rid].finish is None
        continued(harness)
        harness.run_until_idle()
        assert harness.outputs[rid].finish == FinishReason("length", length=3)


@pytest.mark.parametrize("first", ORDER)
@pytest.mark.parametrize("second", ORDER)
def test_a_second_pause_only_escalates(
    harness: SchedulerHarness, first: PauseMode, second: PauseMode
) -> None:
    if first is not PauseMode.WAIT:
        harness.generate(PROMPT, max_new_tokens=60)
        harness.turn(4)
    paused(harness, first)
    reply = paused(harness, second)
    assert reply.mode is max(first, second, key=ORDER.index)
    assert reply.changed is (ORDER.index(second) > ORDER.index(first))
    assert harness.state is not None
    assert harness.state.paused is reply.mode
    assert reply.num_running == (1 if reply.mode is PauseMode.IN_PLACE and first is not PauseMode.WAIT else 0)


def test_pausing_again_in_mode_abort_ends_what_has_come_since(harness: SchedulerHarness) -> None:
    paused(harness, PauseMode.ABORT)
    rid = harness.generate(PROMPT)
    harness.turn()
    assert paused(harness, PauseMode.ABORT).num_aborted == 1
    assert harness.outputs[rid].finish is not None


def test_continue_while_running_changes_nothing(harness: SchedulerHarness) -> None:
    assert not continued(harness).changed


def test_aborting_under_pause_in_place_frees_the_request_at_once(harness: SchedulerHarness) -> None:
    rid = harness.generate(PROMPT, max_new_tokens=60)
    harness.turn(4)
    paused(harness, PauseMode.IN_PLACE)
    assert harness.apply(AbortReq(rid=rid), AbortReqOutput).changed
    assert harness.outputs[rid].finish is not None


class TestWait:
    def test_it_answers_when_the_running_requests_have_ended(self, harness: SchedulerHarness) -> None:
        running = harness.generate(PROMPT, max_new_tokens=10)
        harness.turn(3)
        call = harness.call(PauseGenerationReqInput(mode=PauseMode.WAIT))
        later = harness.generate(PROMPT, max_new_tokens=2)
        harness.turn(3)
        assert call not in harness.replies
        harness.turn_until(lambda: call in harness.replies)
        assert harness.outputs[running].finish == FinishReason("length", length=10)
        assert harness.outputs[later].token_ids == [], "nothing new is admitted"
        reply = harness.replies[call]
        assert isinstance(reply, PauseGenerationReqOutput)
        assert (reply.mode, reply.num_running, reply.num_queued) == (PauseMode.WAIT, 0, 1)
        continued(harness)
        harness.run_until_idle()
        assert harness.outputs[later].finish == FinishReason("length", length=2)

    def test_at_its_deadline_it_is_refused_and_generation_goes_on(self, harness: SchedulerHarness) -> None:
        harness.generate(PROMPT, max_new_tokens=60)
        harness.turn(3)
        call = harness.call(PauseGenerationReqInput(mode=PauseMode.WAIT, timeout_s=1000.0))
        harness.turn(2)
        harness.deliver(Expire(id=call))
        harness.turn()
        reply = harness.replies[call]
        assert isinstance(reply, Refusal)
        assert (reply.status, reply.fields["num_running"]) == (409, 1)
        later = harness.generate(PROMPT, max_new_tokens=2)
        harness.run_until_idle()
        assert harness.outputs[later].finish == FinishReason("length", length=2)

    @pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.RETRACT, PauseMode.ABORT])
    def test_a_pause_in_another_mode_supersedes_it(self, harness: SchedulerHarness, mode: PauseMode) -> None:
        harness.generate(PROMPT, max_new_tokens=60)
        harness.turn(3)
        call = harness.call(PauseGenerationReqInput(mode=PauseMode.WAIT))
        harness.turn()
        assert paused(harness, mode).mode is mode
        reply = harness.replies[call]
        assert isinstance(reply, Refusal)
        assert reply.status == 409
        assert "superseded" in reply.message

    def test_continue_ends_it(self, harness: SchedulerHarness) -> None:
        harness.generate(PROMPT, max_new_tokens=60)
        harness.turn(3)
        call = harness.call(PauseGenerationReqInput(mode=PauseMode.WAIT))
        harness.turn()
        assert not continued(harness).changed
        reply = harness.replies[call]
        assert isinstance(reply, Refusal)
        assert reply.status == 409
        later = harness.generate(PROMPT, max_new_tokens=2)
        harness.run_until_idle()
        assert harness.outputs[later].finish is not None

    def test_a_negative_timeout_is_refused(self, harness: SchedulerHarness) -> None:
        refusal = harness.refuse(PauseGenerationReqInput(mode=PauseMode.WAIT, timeout_s=-1.0))
        assert refusal.status == 400
