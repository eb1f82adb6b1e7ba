"""Releasing and resuming memory, and flushes, on null parts: control_semantics sections 1.2 and 3."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from fixtures.control import PROMPT, Harness, updating

from ebbtide.srt.errors import EngineError, OutOfDeviceMemory
from ebbtide.srt.managers.control import kv_cache
from ebbtide.srt.managers.io_struct import (
    AbortReq,
    AnyControlRequest,
    FinishReason,
    FlushCacheReqInput,
    GetWeightsByNameReqInput,
    PauseGenerationReqInput,
    PauseMode,
    Preserve,
    Refusal,
    ReleaseMemoryOccupationReqInput,
    ResizeMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
)
from ebbtide.srt.memory_saver import MemoryTag
from ebbtide.testing.null_kv import CHUNK_BYTES, NullChunks, NullMemory, NullPageStore

WEIGHTS, KV_CACHE, CUDA_GRAPH = MemoryTag.WEIGHTS, MemoryTag.KV_CACHE, MemoryTag.CUDA_GRAPH
BYTES = {WEIGHTS: 2000, KV_CACHE: 5000, CUDA_GRAPH: 100}


def test_every_set_of_tags_gives_back_its_bytes_and_takes_them_again(harness: Harness) -> None:
    free = harness.device.free_bytes
    for tags in (tags for count in (1, 2, 3) for tags in itertools.combinations(MemoryTag, count)):
        expected = sum(BYTES[tag] for tag in tags)
        reply = harness.release(*tags)
        assert harness.device.free_bytes == free + expected
        assert (reply.device_free_bytes_before, reply.device_free_bytes_after) == (free, free + expected)
        assert reply.freed_bytes == {tag: BYTES[tag] for tag in tags}
        assert set(reply.tags) == set(tags)
        assert harness.resume(*tags).mapped_bytes == {tag: BYTES[tag] for tag in tags}
        assert harness.device.free_bytes == free


def test_no_tags_means_all(harness: Harness) -> None:
    assert harness.do(ReleaseMemoryOccupationReqInput(tags=None)).tags == list(MemoryTag)
    assert harness.device.used_bytes == 0
    assert {report.state for report in harness.now.ranks[0].tags.values()} == {"released"}


def test_doing_it_again_changes_nothing(harness: Harness) -> None:
    assert not harness.resume(WEIGHTS).changed
    assert harness.release(WEIGHTS, WEIGHTS).changed
    again = harness.release(WEIGHTS)
    assert (again.changed, again.freed_bytes) == (False, {WEIGHTS: 0})
    partly = harness.release()
    assert (partly.changed, partly.freed_bytes) == (True, {WEIGHTS: 0, KV_CACHE: 5000, CUDA_GRAPH: 100})


def test_after_a_release_that_broke_off_nothing_runs_and_the_next_one_gives_back_the_rest(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = harness.ranks[0].runner.needed[1]

    def break_off() -> int:
        memory.resident_bytes -= 1000
        raise EngineError("cuMemUnmap: the driver refused")

    rid = harness.generate(PROMPT, max_new_tokens=5)
    harness.turn(2)
    with monkeypatch.context() as patch:
        patch.setattr(memory, "release", break_off)
        assert harness.refuse(ReleaseMemoryOccupationReqInput(tags=(KV_CACHE,))).status == 500
    assert not harness.scheduler.is_runnable
    assert harness.release(KV_CACHE).freed_bytes == {KV_CACHE: 4000}
    harness.resume(KV_CACHE)
    harness.assert_end(rid, length=5)


def test_weights_whose_release_broke_off_are_stale(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_off() -> int:
        raise EngineError("cuMemUnmap: the driver refused")

    with monkeypatch.context() as patch:
        patch.setattr(harness.ranks[0].runner.needed[0], "release", break_off)
        assert harness.refuse(ReleaseMemoryOccupationReqInput(tags=(WEIGHTS,))).status == 500
    assert harness.resume(WEIGHTS).weights.content == "stale"


# What takes memory, or launches work on a device.
MAY_FAIL = (
    (NullPageStore, "save"),
    (NullPageStore, "restore"),
    (NullMemory, "prepare_release"),
    (NullMemory, "resume"),
    (NullChunks, "add"),
)


def count_and_fail(patch: pytest.MonkeyPatch, number: int) -> list[str]:
    """Have one of these calls fail; returns what will list them."""
    called: list[str] = []

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            called.append(name)
            if len(called) == number:
                raise RuntimeError(f"no memory at {name}")
            return function(*args)

        return call

    for owner, name in MAY_FAIL:
        patch.setattr(owner, name, counted(name, getattr(owner, name)))
    return called


def test_whatever_fails_in_a_sleep_is_told_and_undone_and_the_next_attempt_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for number in itertools.count(1):
        harness = Harness()
        rid = harness.begin_request(max_new_tokens=20)
        with monkeypatch.context() as patch:
            called = count_and_fail(patch, number)
            asleep = ReleaseMemoryOccupationReqInput(preserve=Preserve.LIVE, backup=True)
            replies = [harness.apply(each, object) for each in (asleep, ResumeMemoryOccupationReqInput())]
        refusals = [reply for reply in replies if isinstance(reply, Refusal)]
        if number > len(called):
            assert not refusals
            break
        assert [called[number - 1] in refusal.message for refusal in refusals] == [True]
        harness.resume()
        harness.assert_end(rid, length=20)
        assert (harness.page_store.num_bytes, harness.device.used_bytes) == (0, sum(BYTES.values()))
    assert {name for _, name in MAY_FAIL} == set(called)


def test_running_requests_survive_a_release_of_everything_but_no_cached_prefix_does(harness: Harness) -> None:
    rids = [harness.generate(PROMPT, seed=seed, max_new_tokens=20) for seed in range(10)]
    harness.turn(6)
    assert harness.release().num_retracted == 8
    late = harness.generate(range(100, 120), max_new_tokens=3)
    harness.turn(5)
    assert not harness.scheduler.is_runnable, "an engine without memory sleeps"
    harness.resume(WEIGHTS)
    harness.update(3, weight_version="3")
    harness.resume(KV_CACHE)
    harness.assert_end(*rids, length=20)
    assert harness.versions(late) == ["3"]
    harness.release(KV_CACHE)
    harness.resume(KV_CACHE)
    again = harness.generate(PROMPT)
    harness.run_until_idle()
    assert harness.outputs[again].cached_tokens == 0


def test_releasing_the_weights_alone_keeps_the_kv(harness: Harness) -> None:
    rid = harness.begin_request(max_new_tokens=20)
    assert harness.release(WEIGHTS).num_retracted == 0
    harness.resume(WEIGHTS)
    harness.update(1, flush_cache=False)
    harness.assert_end(rid, length=20)
    assert harness.outputs[rid].num_retractions == 0


def test_stale_weights_never_serve(harness: Harness) -> None:
    harness.release(WEIGHTS)
    assert "released" in harness.refuse(GetWeightsByNameReqInput(name="layer.2")).message
    weights = harness.resume(WEIGHTS).weights
    assert (weights.content, weights.num_missing) == ("stale", 4)
    rid = harness.generate(PROMPT, max_new_tokens=3)
    for layers in ((0, 1), (3,)):
        assert harness.update(7, *layers).content == "stale"
        harness.turn(5)
        assert harness.runner.num_steps == 0
    assert "1 parameters not written" in harness.now.reason
    assert harness.now.ranks[0].tags[WEIGHTS].missing == ["layer.2"]
    assert harness.refuse(GetWeightsByNameReqInput(name="layer.2")).status == 409
    assert harness.update(7, 2).content == "valid"
    harness.assert_end(rid, length=3)


def test_with_a_backup_the_weights_come_back_valid_as_the_release_asks_or_the_start() -> None:
    harness = Harness(keeps_weights=True)
    harness.release()
    report = harness.now.ranks[0].tags[WEIGHTS]
    assert (report.content, report.backup_bytes) == ("valid", 2000)
    rid = harness.generate(PROMPT, max_new_tokens=3)
    assert harness.resume().weights.content == "valid"
    harness.assert_end(rid, length=3)
    harness.release(backup=False)
    assert harness.resume().weights.content == "stale"
    harness = Harness(keeps_weights=False)
    harness.release(backup=True)
    # What is released already is not released again: its backup stays.
    assert not harness.release(backup=False).changed
    assert harness.resume().weights.content == "valid"


def test_cuda_graphs_come_back_by_themselves(harness: Harness) -> None:
    harness.release(CUDA_GRAPH)
    harness.assert_end(harness.generate(PROMPT, max_new_tokens=3), length=3)
    assert not harness.resume(CUDA_GRAPH).changed


def test_too_little_memory_refuses_the_resume_and_a_retry_works(harness: Harness) -> None:
    harness.release()
    harness.device.take(4000)
    refusal = harness.refuse(ResumeMemoryOccupationReqInput())
    assert (refusal.status, refusal.fields) == (409, {"needed_bytes": 7100, "free_bytes": 6000})
    assert harness.device.used_bytes == 4000, "what had been mapped is unmapped again"
    assert harness.resume(WEIGHTS).changed
    harness.device.used_bytes -= 4000
    assert harness.resume().mapped_bytes == {WEIGHTS: 0, KV_CACHE: 5000, CUDA_GRAPH: 100}


def test_pause_and_memory_are_two_things(harness: Harness) -> None:
    harness.pause(PauseMode.IN_PLACE)
    harness.release()
    harness.resume()
    harness.update(1)
    assert harness.now.paused is PauseMode.IN_PLACE
    rid = harness.generate(PROMPT, max_new_tokens=3)
    harness.turn(3)
    harness.release(KV_CACHE)
    assert harness.proceed().changed, "legal while memory is released"
    harness.turn(3)
    assert harness.runner.num_steps == 0
    harness.resume(KV_CACHE)
    harness.assert_end(rid, length=3)


def test_without_a_memory_saver_both_are_refused() -> None:
    harness = Harness(has_memory_saver=False)
    for request in (ReleaseMemoryOccupationReqInput(), ResumeMemoryOccupationReqInput()):
        assert harness.refuse(request).status == 409
    assert harness.device.used_bytes == 7100


def test_what_is_parked_goes_on_without_a_second_prefill_and_what_has_no_room_is_retracted(
    harness: Harness,
) -> None:
    # The store has room for 12 pages of 4 tokens: two requests of 5 pages and more, not three.
    rids = [harness.generate(range(first, first + 19), max_new_tokens=12) for first in (1, 30, 60)]
    harness.turn(5)
    reply = harness.release(KV_CACHE, preserve=Preserve.LIVE)
    assert (reply.num_parked, reply.num_retracted) == (2, 1)
    assert reply.parked_bytes > 0
    harness.resume(KV_CACHE)
    harness.assert_end(*rids, length=12)
    assert [harness.outputs[rid].num_retractions for rid in rids] == [0, 0, 1], "the youngest goes first"


@pytest.mark.parametrize("preserve", [Preserve.LIVE, Preserve.ALL])
def test_the_prefix_cache_is_parked_if_it_is_asked_for(harness: Harness, preserve: Preserve) -> None:
    harness.generate(PROMPT, max_new_tokens=1)
    harness.run_until_idle()
    harness.release(KV_CACHE, preserve=preserve)
    harness.resume(KV_CACHE)
    rid = harness.generate(PROMPT, max_new_tokens=1)
    harness.run_until_idle()
    assert (harness.outputs[rid].cached_tokens > 0) == (preserve is Preserve.ALL)


@pytest.mark.parametrize("by", ["a pause that retracts", "a commit that flushes"])
def test_parked_requests_become_retracted_ones(harness: Harness, by: str) -> None:
    rid = harness.begin_request(max_new_tokens=8, num_turns=3)
    harness.release(KV_CACHE, preserve=Preserve.LIVE)
    if by == "a commit that flushes":
        harness.update(5, flush_cache=True)
    else:
        harness.pause(PauseMode.RETRACT)
        harness.proceed()
    harness.resume(KV_CACHE)
    harness.run_until_idle()
    assert harness.outputs[rid].finish == FinishReason("length", length=8)
    assert harness.outputs[rid].num_retractions == 1


@pytest.mark.parametrize("preserve", [Preserve.LIVE, Preserve.ALL])
@pytest.mark.parametrize(
    "requests",
    [
        [PauseGenerationReqInput(mode=PauseMode.RETRACT), FlushCacheReqInput()],
        [AbortReq(abort_all=True), FlushCacheReqInput()],
        [updating(5, pause_mode=PauseMode.RETRACT, flush_cache=True)],
        [FlushCacheReqInput(retract_running=True)],
    ],
    ids=lambda requests: type(requests[0]).__name__,
)
def test_host_memory_is_given_back_once_nobody_needs_what_is_parked_in_it(
    harness: Harness, preserve: Preserve, requests: list[AnyControlRequest]
) -> None:
    harness.begin_request(max_new_tokens=8, num_turns=3)
    assert harness.release(KV_CACHE, preserve=preserve).parked_bytes > 0
    for request in requests:
        harness.do(request)
    assert harness.page_store.num_bytes == 0
    assert harness.now.ranks[0].tags[MemoryTag.KV_CACHE].backup_bytes == 0
    harness.resume(KV_CACHE)
    harness.proceed()
    harness.run_until_idle()
    assert [output.finish is not None for output in harness.outputs.values()] == [True]


def test_the_state_says_so_when_clients_have_gone_whose_kv_was_parked(harness: Harness) -> None:
    rid = harness.begin_request(max_new_tokens=8, num_turns=3)
    harness.release(KV_CACHE, preserve=Preserve.LIVE)
    assert harness.now.ranks[0].tags[KV_CACHE].backup_bytes > 0
    harness.abort(rid)
    harness.run_until_idle()
    assert harness.now.ranks[0].tags[KV_CACHE].backup_bytes == 0


def shrink(harness: Harness, num_tokens: int, preserve: Preserve = Preserve.NONE) -> Any:
    return harness.do(ResizeMemoryOccupationReqInput(num_tokens=num_tokens, preserve=preserve))


def test_a_resize_gives_what_is_asked_for_rounded_up_to_chunks_and_says_what_is_possible() -> None:
    """Chunks of 16 tokens, the last one of 8, which a request holds; a context is 128 tokens."""
    harness = Harness(num_pages=62)
    rids = [
        harness.generate(range(seed, seed + 60), seed=seed, max_new_tokens=60) for seed in (1, 100, 200, 300)
    ]
    harness.turn_until(lambda: harness.scheduler.policy.allocator.num_free < 2)
    for asked, given in ((200, 208), (208, 208), (209, 224), (247, 248), (1, None), (113, 128), (248, 248)):
        if given is None:
            refusal = harness.refuse(ResizeMemoryOccupationReqInput(num_tokens=asked))
            assert "128 to 248 tokens" in refusal.message
            continue
        reply = shrink(harness, asked)
        assert (reply.num_tokens, reply.chunk_tokens, reply.chunk_bytes) == (given, 16, CHUNK_BYTES)
    refusal = harness.refuse(ResizeMemoryOccupationReqInput(num_tokens=249))
    assert (refusal.fields["least_tokens"], refusal.fields["most_tokens"]) == (128, 248)
    assert "in chunks of 16 tokens" in refusal.message
    harness.run_until_idle()
    assert all(harness.outputs[rid].finish == FinishReason("length", length=60) for rid in rids)


@pytest.mark.parametrize("then", ["goes on", "is released", "is released and resumed", "has no memory"])
def test_a_resize_lets_passes_in_between_its_parts(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """Down in three parts, and up again in three."""
    monkeypatch.setattr(kv_cache, "PART_BYTES", CHUNK_BYTES)
    policy, whole = harness.scheduler.policy, 64 * harness.scheduler.policy.page_size
    chunk_tokens = policy.allocator.pages_per_chunk * policy.page_size
    for num_tokens in (whole - 3 * chunk_tokens, whole):
        rid = harness.begin_request(max_new_tokens=20, num_turns=3)
        num_steps = harness.runner.num_steps
        call = harness.call(ResizeMemoryOccupationReqInput(num_tokens=num_tokens))
        waits = harness.call(ResizeMemoryOccupationReqInput(num_tokens=num_tokens))
        harness.turn()
        assert call not in harness.replies
        if then.startswith("is released"):
            harness.release(KV_CACHE)
        if then == "is released and resumed":
            harness.resume(KV_CACHE)
        if then == "has no memory":
            harness.device.take(free := harness.device.free_bytes)
        harness.turn(3)
        if then == "has no memory":
            harness.device.used_bytes -= free
        if then == "is released":
            harness.resume(KV_CACHE)
        harness.run_until_idle()
        assert {call, waits} <= harness.replies.keys()
        if then == "goes on":
            assert harness.runner.num_steps >= num_steps + 2
            assert harness.reply(call).num_tokens == num_tokens
        harness.do(ResizeMemoryOccupationReqInput(num_tokens=num_tokens))
        assert policy.allocator.num_pages * policy.page_size == num_tokens
        assert (
            harness.device.used_bytes
            == sum(BYTES.values()) - (whole - num_tokens) // chunk_tokens * CHUNK_BYTES
        )
        assert harness.outputs[rid].finish == FinishReason("length", length=20)


@pytest.mark.parametrize("lazy", [False, True])
def test_requests_run_in_the_first_part_of_the_cache_while_the_rest_is_taken(
    harness: Harness, lazy: bool
) -> None:
    rid = harness.generate(PROMPT[:10], max_new_tokens=5)
    harness.turn(2)
    harness.release(KV_CACHE)
    call = harness.call(ResumeMemoryOccupationReqInput(tags=(KV_CACHE,), lazy=lazy))
    again = harness.call(ResumeMemoryOccupationReqInput())
    resized = harness.call(ResizeMemoryOccupationReqInput(num_tokens=200))
    harness.turn()
    assert (call in harness.replies) == lazy
    assert again not in harness.replies, "done means done for those that ask again, too"
    assert harness.device.used_bytes < sum(BYTES.values())
    # A pass comes ahead of the next part, although that takes no time.
    num_steps = harness.runner.num_steps
    harness.turn()
    assert harness.runner.num_steps == num_steps + 1
    assert resized not in harness.replies, "what is not there yet cannot be taken"
    harness.run_until_idle()
    mapped_bytes = harness.reply(call).mapped_bytes[KV_CACHE]
    assert (mapped_bytes < 5000) if lazy else (mapped_bytes == 5000)
    assert not harness.reply(again).changed
    assert harness.replies[resized].success
    assert harness.outputs[rid].finish == FinishReason("length", length=5)
    assert harness.device.free_bytes == 10_000 - 7100 + 3 * CHUNK_BYTES


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("preserve", list(Preserve))
def test_without_memory_for_the_rest_of_the_cache_it_is_released_again(
    harness: Harness, preserve: Preserve, lazy: bool
) -> None:
    rids = [harness.generate(PROMPT, seed=seed, max_new_tokens=20) for seed in range(3)]
    harness.turn(6)
    harness.release(KV_CACHE, preserve=preserve)
    call = harness.call(ResumeMemoryOccupationReqInput(tags=(KV_CACHE,), lazy=lazy))
    again = harness.call(ResumeMemoryOccupationReqInput())
    harness.turn()
    taken_bytes = harness.device.free_bytes
    harness.device.take(taken_bytes)
    harness.run_until_idle()
    assert lazy or harness.refusal(call).status == 409
    assert harness.refusal(again).status == 409
    assert harness.device.used_bytes == taken_bytes + BYTES[WEIGHTS] + BYTES[CUDA_GRAPH]
    assert (harness.page_store.num_bytes, harness.scheduler.policy.running) == (0, [])
    harness.device.used_bytes -= taken_bytes
    assert harness.resume(KV_CACHE).mapped_bytes == {KV_CACHE: 5000}
    harness.run_until_idle()
    assert all(harness.num_tokens(rid) == 20 for rid in rids)


def test_live_pages_move_together_before_a_request_loses_its_kv(harness: Harness) -> None:
    """Every chunk but the lowest has a page that is in use, and half of the pool is."""
    rids = [
        harness.generate([seed + 1] * 60, seed=seed, max_new_tokens=[2, 60][seed % 2]) for seed in range(4)
    ]
    harness.turn_until(lambda: all(harness.outputs[rid].finish for rid in rids[::2]))
    reply = shrink(harness, 32 * 4)
    assert (reply.num_tokens, reply.num_retracted, reply.num_parked) == (32 * 4, 0, 0)
    harness.run_until_idle()
    assert all(harness.num_tokens(rid) == 60 for rid in rids[1::2])


@pytest.mark.parametrize("preserve", [Preserve.NONE, Preserve.LIVE])
@pytest.mark.parametrize("then", ["the pool grows", "requests end", "a pause that retracts", "an abort"])
def test_what_has_no_room_in_a_smaller_pool_is_parked(
    harness: Harness, preserve: Preserve, then: str
) -> None:
    # Two share their prompt. The store has room for 12 pages.
    prompts = [[1] * 80, [2] * 80, [3] * 16, [3] * 16, [4] * 40]
    rids = [harness.generate(prompt, seed=seed, max_new_tokens=14) for seed, prompt in enumerate(prompts)]
    harness.turn_until(lambda: all(harness.outputs[rid].token_ids for rid in rids))
    reply = shrink(harness, 48 * 4, preserve)
    is_kept = preserve is Preserve.LIVE
    assert (reply.num_parked, reply.num_retracted) == ((2, 1) if is_kept else (0, 3))
    assert (reply.parked_bytes > 0) == is_kept
    if then == "an abort":
        harness.do(AbortReq(abort_all=True))
        assert harness.page_store.num_bytes == 0
        return
    if then == "a pause that retracts":
        harness.pause()
        assert harness.page_store.num_bytes == 0
        harness.proceed()
    elif then == "the pool grows":
        shrink(harness, 64 * 4)
    harness.run_until_idle()
    assert harness.now.ranks[0].tags[KV_CACHE].backup_bytes == 0
    assert all(harness.num_tokens(rid) == 14 for rid in rids)
    num_retractions = [harness.outputs[rid].num_retractions for rid in rids]
    if then != "a pause that retracts":
        assert num_retractions == ([0, 0, 0, 0, 1] if is_kept else [0, 0, 1, 1, 1])
    assert harness.page_store.num_bytes == 0


@pytest.mark.parametrize(("step", "num_running", "status"), [("save", 6, 409), ("move", 4, 500)])
def test_a_shrinking_that_breaks_off_loses_no_request_and_no_page(
    harness: Harness, step: str, num_running: int, status: int
) -> None:
    """Of six some have to be parked, while four have room when those that lie between have ended."""
    num_tokens, max_new_tokens = (24, [16] * 6) if step == "save" else (20, [2, 30] * 4)
    rids = [
        harness.generate([seed + 1] * num_tokens, seed=seed, max_new_tokens=count)
        for seed, count in enumerate(max_new_tokens)
    ]
    policy = harness.scheduler.policy
    harness.turn_until(lambda: all(harness.outputs[rid].token_ids for rid in rids))
    harness.turn_until(lambda: len(policy.running) == num_running)
    harness.page_store.faults[step] = OutOfDeviceMemory(2, 1)
    request = ResizeMemoryOccupationReqInput(num_tokens=32 * 4, preserve=Preserve.LIVE)
    assert harness.refuse(request).status == status
    assert (policy.allocator.num_pages, len(policy.running)) == (64, num_running)
    assert harness.page_store.num_bytes == 0
    assert harness.do(request).num_parked == (1 if step == "save" else 0)
    harness.run_until_idle()
    assert [harness.num_tokens(rid) for rid in rids] == max_new_tokens


# -------------------------------------------------------------------------------- flushing the prefix cache


def test_an_idle_engine_flushes_everything(harness: Harness) -> None:
    harness.generate(PROMPT, max_new_tokens=9)
    harness.run_until_idle()
    reply = harness.flush()
    assert (reply.success, reply.fully_flushed, reply.freed_tokens) == (True, True, 24)
    assert harness.scheduler.policy.allocator.num_free == harness.num_pages
    rid = harness.generate(PROMPT)
    harness.run_until_idle()
    assert harness.outputs[rid].cached_tokens == 0
    harness.release(KV_CACHE)
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
