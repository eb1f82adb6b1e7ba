"""Flushing the prefix cache: control_semantics section 3, on the real scheduler with null parts."""

import pytest

from ebbtide.srt.managers.io_struct import (
    Expire,
    FinishReason,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    PauseGenerationReqInput,
    PauseGenerationReqOutput,
    PauseMode,
    ReleaseMemoryOccupationReqInput,
    ReleaseMemoryOccupationReqOutput,
)
from ebbtide.srt.memory_saver.tags import MemoryTag
from ebbtide.testing import SchedulerHarness

PROMPT = range(1, 20)


def flush(harness: SchedulerHarness, timeout_s: float = 0.0) -> FlushCacheReqOutput:
    return harness.apply(FlushCacheReqInput(timeout_s=timeout_s), FlushCacheReqOutput)


@pytest.fixture
def harness() -> SchedulerHarness:
    return SchedulerHarness()


def test_an_idle_engine_flushes_everything(harness: SchedulerHarness) -> None:
    harness.generate(PROMPT, max_new_tokens=9)
    harness.run_until_idle()
    reply = flush(harness)
    assert (reply.success, reply.fully_flushed, reply.freed_tokens) == (True, True, 24)
    assert harness.scheduler.policy.allocator.num_free == harness.num_pages
    rid = harness.generate(PROMPT)
    harness.run_until_idle()
    assert harness.outputs[rid].cached_tokens == 0


def test_what_running_requests_use_stays_and_the_rest_goes(harness: SchedulerHarness) -> None:
    harness.generate(range(200, 220), max_new_tokens=1)
    harness.run_until_idle()
    harness.generate(PROMPT, max_new_tokens=40)
    harness.turn(4)
    reply = flush(harness)
    assert (reply.success, reply.fully_flushed, reply.freed_tokens) == (False, False, 20)


def test_with_a_timeout_it_waits_for_the_running_requests(harness: SchedulerHarness) -> None:
    rid = harness.generate(PROMPT, max_new_tokens=10)
    harness.turn(3)
    reply = flush(harness, timeout_s=1000.0)
    assert reply.fully_flushed
    assert harness.outputs[rid].finish is not None


def test_running_requests_can_be_made_to_let_go(harness: SchedulerHarness) -> None:
    rid = harness.generate(PROMPT, max_new_tokens=40)
    harness.turn(4)
    assert harness.apply(FlushCacheReqInput(retract_running=True), FlushCacheReqOutput).fully_flushed
    harness.run_until_idle()
    assert (harness.outputs[rid].finish, harness.outputs[rid].num_retractions) == (
        FinishReason("length", length=40),
        1,
    )


def test_at_its_deadline_it_says_that_it_is_not_full(harness: SchedulerHarness) -> None:
    harness.generate(PROMPT, max_new_tokens=60)
    harness.turn(3)
    call = harness.call(FlushCacheReqInput(timeout_s=1000.0))
    harness.turn(3)
    harness.deliver(Expire(id=call))
    harness.turn()
    reply = harness.replies[call]
    assert isinstance(reply, FlushCacheReqOutput)
    assert reply.fully_flushed is False


def test_waiting_requests_never_block_it(harness: SchedulerHarness) -> None:
    rid = harness.generate(PROMPT)
    harness.turn(4)
    harness.apply(PauseGenerationReqInput(mode=PauseMode.RETRACT), PauseGenerationReqOutput)
    reply = flush(harness)
    assert reply.fully_flushed
    assert harness.outputs[rid].finish is None


def test_it_is_legal_while_the_kv_cache_is_released(harness: SchedulerHarness) -> None:
    harness.apply(
        ReleaseMemoryOccupationReqInput(tags=(MemoryTag.KV_CACHE,)), ReleaseMemoryOccupationReqOutput
    )
    reply = flush(harness)
    assert (reply.fully_flushed, reply.freed_tokens) == (True, 0)


@pytest.mark.parametrize("timeout_s", [-1.0, float("nan")])
def test_a_timeout_that_is_none_is_refused(harness: SchedulerHarness, timeout_s: float) -> None:
    assert harness.refuse(FlushCacheReqInput(timeout_s=timeout_s)).status == 400
