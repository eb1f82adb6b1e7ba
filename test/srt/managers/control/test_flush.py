"""Flushing the prefix cache: control_semantics section 3, on the real scheduler with null parts."""

from fixtures.control import PROMPT, Harness

from ebbtide.srt.managers.io_struct import FlushCacheReqInput
from ebbtide.srt.memory_saver.tags import MemoryTag


def test_an_idle_engine_flushes_everything(harness: Harness) -> None:
    harness.generate(PROMPT, max_new_tokens=9)
    harness.run_until_idle()
    reply = harness.flush()
    assert (reply.success, reply.fully_flushed, reply.freed_tokens) == (True, True, 24)
    assert harness.scheduler.policy.allocator.num_free == harness.num_pages
    rid = harness.generate(PROMPT)
    harness.run_until_idle()
    assert harness.outputs[rid].cached_tokens == 0
    harness.release(MemoryTag.KV_CACHE)
    assert harness.flush().freed_tokens == 0, "a released pool may be flushed, and has nothing"


def test_what_running_requests_use_stays_until_they_are_made_to_let_go(harness: Harness) -> None:
    harness.generate(range(200, 220), max_new_tokens=1)
    harness.run_until_idle()
    rid = harness.begin_request(max_new_tokens=40)
    reply = harness.flush()
    assert (reply.success, reply.fully_flushed, reply.freed_tokens) == (False, False, 20)
    assert harness.flush(retract_running=True).fully_flushed
    harness.assert_end(rid, length=40)
    assert harness.outputs[rid].num_retractions == 1


def test_with_a_timeout_it_waits_for_the_running_requests_until_its_deadline(harness: Harness) -> None:
    rid = harness.begin_request(max_new_tokens=30)
    call = harness.call(FlushCacheReqInput(timeout_s=1000.0))
    harness.turn(3)
    harness.expire(call)
    assert harness.reply(call).fully_flushed is False
    assert harness.flush(timeout_s=1000.0).fully_flushed
    assert harness.outputs[rid].finish is not None


def test_waiting_requests_never_block_it(harness: Harness) -> None:
    rid = harness.begin_request()
    harness.pause()
    assert harness.flush().fully_flushed
    assert harness.outputs[rid].finish is None
