"""Releasing and resuming memory: control_semantics section 1.2, on the real scheduler with null parts."""

import itertools

import pytest

from ebbtide.srt.errors import EngineError
from ebbtide.srt.managers.control.memory_occupation import WeightContent
from ebbtide.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    ContinueGenerationReqOutput,
    FinishReason,
    GetWeightsByNameReqInput,
    PauseGenerationReqInput,
    PauseGenerationReqOutput,
    PauseMode,
    Preserve,
    ReleaseMemoryOccupationReqInput,
    ReleaseMemoryOccupationReqOutput,
    ResumeMemoryOccupationReqInput,
    ResumeMemoryOccupationReqOutput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsReqOutput,
)
from ebbtide.srt.memory_saver.tags import MemoryTag
from ebbtide.testing import NullDevice, SchedulerHarness

WEIGHTS, KV_CACHE, CUDA_GRAPH = MemoryTag.WEIGHTS, MemoryTag.KV_CACHE, MemoryTag.CUDA_GRAPH
BYTES = {WEIGHTS: 2000, KV_CACHE: 5000, CUDA_GRAPH: 100}
PROMPT = range(1, 20)


def release(
    harness: SchedulerHarness, *tags: MemoryTag, backup: bool | None = None
) -> ReleaseMemoryOccupationReqOutput:
    request = ReleaseMemoryOccupationReqInput(tags=tags, backup=backup)
    return harness.apply(request, ReleaseMemoryOccupationReqOutput)


def resume(harness: SchedulerHarness, *tags: MemoryTag) -> ResumeMemoryOccupationReqOutput:
    return harness.apply(ResumeMemoryOccupationReqInput(tags=tags), ResumeMemoryOccupationReqOutput)


def update(harness: SchedulerHarness, value: int, **fields: object) -> UpdateWeightsReqOutput:
    request = UpdateWeightFromDiskReqInput(model_path=str(value), **fields)  # type: ignore[arg-type]
    return harness.apply(request, UpdateWeightsReqOutput)


@pytest.fixture
def harness() -> SchedulerHarness:
    return SchedulerHarness()


def test_missing_names_are_sorted_when_they_change_and_not_whenever_they_are_reported() -> None:
    content = WeightContent(frozenset({"b", "a", "c"}))
    content.lose(frozenset({"c", "b"}))
    report = content.report()
    assert report.missing == ["b", "c"]
    assert content.report() is report
    content.note_written(frozenset({"b"}))
    assert content.report().missing == ["c"]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_set_of_tags_gives_back_its_bytes_and_takes_them_again(
    harness: SchedulerHarness, count: int
) -> None:
    for tags in itertools.combinations(MemoryTag, count):
        expected = sum(BYTES[tag] for tag in tags)
        free = harness.device.free_bytes
        reply = release(harness, *tags)
        assert harness.device.free_bytes == free + expected
        assert (reply.device_free_bytes_before, reply.device_free_bytes_after) == (free, free + expected)
        assert reply.freed_bytes == {tag: BYTES[tag] for tag in tags}
        assert set(reply.tags) == set(tags)
        again = resume(harness, *tags)
        assert again.mapped_bytes == {tag: BYTES[tag] for tag in tags}
        assert harness.device.free_bytes == free


@pytest.mark.parametrize("tags", [None, ()])
def test_no_tags_means_all(harness: SchedulerHarness, tags: tuple[MemoryTag, ...] | None) -> None:
    reply = harness.apply(ReleaseMemoryOccupationReqInput(tags=tags), ReleaseMemoryOccupationReqOutput)
    assert reply.tags == list(MemoryTag)
    assert harness.device.used_bytes == 0
    assert harness.state is not None
    assert {report.state for report in harness.state.ranks[0].tags.values()} == {"released"}


def test_doing_it_again_changes_nothing(harness: SchedulerHarness) -> None:
    assert not resume(harness, WEIGHTS).changed
    assert release(harness, WEIGHTS, WEIGHTS).changed
    again = release(harness, WEIGHTS)
    assert (again.changed, again.freed_bytes) == (False, {WEIGHTS: 0})
    partly = release(harness)
    assert partly.freed_bytes == {WEIGHTS: 0, KV_CACHE: 5000, CUDA_GRAPH: 100}
    assert partly.changed


def test_after_a_release_that_broke_off_nothing_runs_and_the_next_one_gives_back_the_rest(
    harness: SchedulerHarness, monkeypatch: pytest.MonkeyPatch
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
    assert release(harness, KV_CACHE).freed_bytes == {KV_CACHE: 4000}
    resume(harness, KV_CACHE)
    harness.run_until_idle()
    assert harness.outputs[rid].finish == FinishReason("length", length=5)


def test_running_requests_survive_a_release_of_everything(harness: SchedulerHarness) -> None:
    rids = [harness.generate(PROMPT, seed=seed, max_new_tokens=20) for seed in range(10)]
    harness.turn(6)
    reply = release(harness)
    assert reply.num_retracted == 8
    late = harness.generate(PROMPT, max_new_tokens=3)
    harness.turn(5)
    assert not harness.scheduler.is_runnable, "an engine without memory sleeps"
    resume(harness, WEIGHTS)
    update(harness, 3, weight_version="3")
    resume(harness, KV_CACHE)
    harness.run_until_idle()
    for rid in rids:
        assert harness.outputs[rid].finish == FinishReason("length", length=20)
    assert harness.outputs[late].version_starts == [("3", 0)]


def test_releasing_the_kv_cache_empties_the_prefix_cache(harness: SchedulerHarness) -> None:
    harness.generate(PROMPT)
    harness.run_until_idle()
    release(harness, KV_CACHE)
    resume(harness, KV_CACHE)
    rid = harness.generate(PROMPT)
    harness.run_until_idle()
    assert harness.outputs[rid].cached_tokens == 0


def test_releasing_the_weights_alone_keeps_the_kv(harness: SchedulerHarness) -> None:
    rid = harness.generate(PROMPT, max_new_tokens=20)
    harness.turn(5)
    assert release(harness, WEIGHTS).num_retracted == 0
    resume(harness, WEIGHTS)
    update(harness, 1, flush_cache=False)
    harness.run_until_idle()
    assert harness.outputs[rid].num_retractions == 0
    assert harness.outputs[rid].finish == FinishReason("length", length=20)


def test_stale_weights_never_serve(harness: SchedulerHarness) -> None:
    release(harness, WEIGHTS)
    reply = resume(harness, WEIGHTS)
    assert (reply.weights.content, reply.weights.num_missing) == ("stale", 4)
    rid = harness.generate(PROMPT, max_new_tokens=3)
    for missing in (["layer.0", "layer.1"], ["layer.3"]):
        assert update(harness, 7, manifest={"names": missing}).content == "stale"
        harness.turn(5)
        assert harness.runner.num_steps == 0
    assert harness.state is not None
    assert "1 parameters not written" in harness.state.reason
    assert harness.state.ranks[0].tags[WEIGHTS].missing == ["layer.2"]
    refusal = harness.refuse(GetWeightsByNameReqInput(name="layer.2"))
    assert refusal.status == 409
    assert update(harness, 7, manifest={"names": ["layer.2"]}).content == "valid"
    harness.run_until_idle()
    assert harness.outputs[rid].finish is not None


def test_with_a_backup_the_weights_come_back_valid() -> None:
    harness = SchedulerHarness(keeps_weights=True)
    release(harness)
    assert harness.state is not None
    assert harness.state.ranks[0].tags[WEIGHTS].content == "valid"
    assert harness.state.ranks[0].tags[WEIGHTS].backup_bytes == 2000
    rid = harness.generate(PROMPT, max_new_tokens=3)
    assert resume(harness).weights.content == "valid"
    harness.run_until_idle()
    assert harness.outputs[rid].finish == FinishReason("length", length=3)


def test_one_release_may_ask_for_a_backup_or_do_without() -> None:
    harness = SchedulerHarness(keeps_weights=False)
    release(harness, backup=True)
    # What is released already is not released again: its backup stays.
    assert not release(harness, backup=False).changed
    assert resume(harness).weights.content == "valid"
    harness = SchedulerHarness(keeps_weights=True)
    release(harness, backup=False)
    assert resume(harness).weights.content == "stale"


def test_cuda_graphs_come_back_by_themselves(harness: SchedulerHarness) -> None:
    release(harness, CUDA_GRAPH)
    rid = harness.generate(PROMPT, max_new_tokens=3)
    harness.run_until_idle()
    assert harness.outputs[rid].finish is not None
    assert not resume(harness, CUDA_GRAPH).changed


def test_too_little_memory_refuses_the_resume_and_a_retry_works(harness: SchedulerHarness) -> None:
    release(harness)
    harness.device.take(4000)
    refusal = harness.refuse(ResumeMemoryOccupationReqInput())
    assert refusal.status == 409
    assert refusal.fields == {"needed_bytes": 7100, "free_bytes": 6000}
    assert harness.device.used_bytes == 4000, "what had been mapped is unmapped again"
    assert resume(harness, WEIGHTS).changed
    harness.device.used_bytes -= 4000
    assert resume(harness).mapped_bytes == {WEIGHTS: 0, KV_CACHE: 5000, CUDA_GRAPH: 100}


def test_two_engines_share_a_device_in_turns() -> None:
    device = NullDevice(8000)
    first = SchedulerHarness(device=device)
    release(first)
    second = SchedulerHarness(device=device)
    assert first.refuse(ResumeMemoryOccupationReqInput()).status == 409
    release(second)
    assert resume(first).changed


def test_continue_is_legal_while_memory_is_released(harness: SchedulerHarness) -> None:
    harness.apply(PauseGenerationReqInput(mode=PauseMode.RETRACT), PauseGenerationReqOutput)
    release(harness, KV_CACHE)
    rid = harness.generate(PROMPT, max_new_tokens=3)
    assert harness.apply(ContinueGenerationReqInput(), ContinueGenerationReqOutput).changed
    harness.turn(3)
    assert harness.runner.num_steps == 0
    resume(harness, KV_CACHE)
    harness.run_until_idle()
    assert harness.outputs[rid].finish is not None


def test_a_pause_outlives_a_release_and_a_resume(harness: SchedulerHarness) -> None:
    harness.apply(PauseGenerationReqInput(mode=PauseMode.IN_PLACE), PauseGenerationReqOutput)
    release(harness)
    resume(harness)
    update(harness, 1)
    assert harness.state is not None
    assert harness.state.paused is PauseMode.IN_PLACE
    harness.generate(PROMPT)
    harness.turn(3)
    assert harness.runner.num_steps == 0


def test_without_a_memory_saver_both_are_refused() -> None:
    harness = SchedulerHarness(has_memory_saver=False)
    for request in (ReleaseMemoryOccupationReqInput(), ResumeMemoryOccupationReqInput()):
        assert harness.refuse(request).status == 409
    assert harness.device.used_bytes == 7100


def park(harness: SchedulerHarness, preserve: Preserve) -> ReleaseMemoryOccupationReqOutput:
    request = ReleaseMemoryOccupationReqInput(tags=(KV_CACHE,), preserve=preserve)
    return harness.apply(request, ReleaseMemoryOccupationReqOutput)


def test_parked_requests_go_on_without_a_second_prefill(harness: SchedulerHarness) -> None:
    rid = harness.generate(PROMPT, max_new_tokens=8)
    harness.turn(3)
    reply = park(harness, Preserve.LIVE)
    assert (reply.num_parked, reply.num_retracted) == (1, 0)
    assert reply.parked_bytes > 0
    resume(harness, KV_CACHE)
    harness.run_until_idle()
    output = harness.outputs[rid]
    assert len(output.token_ids) == 8
    assert output.num_retractions == 0


def test_what_has_no_room_to_be_parked_is_retracted_the_youngest_first(harness: SchedulerHarness) -> None:
    # The store has room for 12 pages of 4 tokens: two requests of 5 pages and more, not three.
    rids = [harness.generate(range(first, first + 19), max_new_tokens=12) for first in (1, 30, 60)]
    harness.turn(5)
    reply = park(harness, Preserve.LIVE)
    assert (reply.num_parked, reply.num_retracted) == (2, 1)
    resume(harness, KV_CACHE)
    harness.run_until_idle()
    assert [harness.outputs[rid].num_retractions for rid in rids] == [0, 0, 1]
    assert all(len(harness.outputs[rid].token_ids) == 12 for rid in rids)


@pytest.mark.parametrize("preserve", [Preserve.LIVE, Preserve.ALL])
def test_the_prefix_cache_is_parked_if_it_is_asked_for(harness: SchedulerHarness, preserve: Preserve) -> None:
    harness.generate(PROMPT, max_new_tokens=1)
    harness.run_until_idle()
    park(harness, preserve)
    resume(harness, KV_CACHE)
    rid = harness.generate(PROMPT, max_new_tokens=1)
    harness.run_until_idle()
    assert (harness.outputs[rid].cached_tokens > 0) == (preserve is Preserve.ALL)


@pytest.mark.parametrize("by", ["a pause that retracts", "a commit that flushes"])
def test_parked_requests_become_retracted_ones(harness: SchedulerHarness, by: str) -> None:
    rid = harness.generate(PROMPT, max_new_tokens=8)
    harness.turn(3)
    park(harness, Preserve.LIVE)
    if by == "a commit that flushes":
        update(harness, 5, flush_cache=True)
    else:
        harness.apply(PauseGenerationReqInput(mode=PauseMode.RETRACT), PauseGenerationReqOutput)
        harness.apply(ContinueGenerationReqInput(), ContinueGenerationReqOutput)
    resume(harness, KV_CACHE)
    harness.run_until_idle()
    assert harness.outputs[rid].num_retractions == 1
    assert len(harness.outputs[rid].token_ids) == 8
