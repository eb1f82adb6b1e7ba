"""Weight updates: control_semantics section 2, on the real scheduler with null parts."""

import itertools

import pytest

from ebbtide.srt.errors import EngineError, RequestRejected
from ebbtide.srt.managers.control import pace
from ebbtide.srt.managers.io_struct import (
    AbortWeightUpdateReqInput,
    BeginWeightUpdateReqInput,
    ContinueGenerationReqInput,
    ContinueGenerationReqOutput,
    EndWeightUpdateReqInput,
    Expire,
    FinishReason,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    GetWeightsByNameReqInput,
    GetWeightsByNameReqOutput,
    PauseGenerationReqInput,
    PauseGenerationReqOutput,
    PauseMode,
    Refusal,
    ReleaseMemoryOccupationReqInput,
    ReleaseMemoryOccupationReqOutput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsReqOutput,
    UpdateWeightVersionReqInput,
    UpdateWeightVersionReqOutput,
    WeightSessionReqOutput,
)
from ebbtide.srt.memory_saver.tags import MemoryTag
from ebbtide.testing import NullWeights, SchedulerHarness

PROMPT = range(1, 20)
NEAR = {"is_near": True}


def request_of(value: int | str, **fields: object) -> UpdateWeightFromDiskReqInput:
    return UpdateWeightFromDiskReqInput(model_path=str(value), **fields)  # type: ignore[arg-type]


def update(harness: SchedulerHarness, value: int, **fields: object) -> UpdateWeightsReqOutput:
    return harness.apply(request_of(value, **fields), UpdateWeightsReqOutput)


def pause(harness: SchedulerHarness, mode: PauseMode) -> None:
    harness.apply(PauseGenerationReqInput(mode=mode), PauseGenerationReqOutput)


def proceed(harness: SchedulerHarness) -> None:
    harness.apply(ContinueGenerationReqInput(), ContinueGenerationReqOutput)


def values(harness: SchedulerHarness) -> list[int | None]:
    return list(harness.weights.live.values())


@pytest.fixture
def harness() -> SchedulerHarness:
    return SchedulerHarness()


def test_an_update_changes_weights_and_version_together(harness: SchedulerHarness) -> None:
    reply = update(harness, 7, weight_version=12)
    assert values(harness) == [7] * 4
    assert (reply.weight_version, reply.committed, reply.staged) == ("12", True, True)
    assert (reply.num_tensors, reply.num_bytes) == (4, 4 * NullWeights.BYTES_PER_PARAMETER)
    assert reply.message == "Updated 4 tensors. Weight version updated to 12."
    assert harness.state is not None
    assert (harness.state.weight_version, harness.state.model_path) == ("12", "7")
    assert update(harness, 8).weight_version == "12", "no version given: the old one stays"


def test_a_partial_update_leaves_the_rest(harness: SchedulerHarness) -> None:
    update(harness, 7, manifest={"names": ["layer.1"]})
    assert values(harness) == [0, 7, 0, 0]


def test_an_update_of_nothing_succeeds(harness: SchedulerHarness) -> None:
    reply = update(harness, 7, manifest={"names": []}, weight_version="n")
    assert (reply.num_tensors, reply.weight_version, reply.content) == (0, "n", "valid")
    assert values(harness) == [0] * 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_path": "abc"}, "expected an integer"),
        ({"model_path": "1", "manifest": {"names": ["layer.1", "nope"]}}, "nope"),
        ({"model_path": "1", "selector": "draft"}, "one model"),
        ({"model_path": "1", "timeout_s": -1.0}, "timeout_s"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_changes(
    harness: SchedulerHarness, fields: dict[str, object], message: str
) -> None:
    rid = harness.generate(PROMPT)
    harness.turn(3)
    before = harness.state
    refusal = harness.refuse(UpdateWeightFromDiskReqInput(**fields))  # type: ignore[arg-type]
    assert refusal.status == 400
    assert message in refusal.message
    assert values(harness) == [0] * 4
    assert harness.state == before
    harness.run_until_idle()
    assert harness.outputs[rid].version_starts == [("default", 0)]


def test_offenders_are_listed(harness: SchedulerHarness) -> None:
    names = [f"bad.{index}" for index in range(30)]
    refusal = harness.refuse(request_of(1, manifest={"names": names}))
    assert refusal.fields["num_errors"] == 30
    assert len(refusal.fields["errors"]) == 20
    assert refusal.fields["errors"][0]["name"] in names


def test_released_weights_take_no_update(harness: SchedulerHarness) -> None:
    harness.apply(
        ReleaseMemoryOccupationReqInput(tags=(MemoryTag.WEIGHTS,)), ReleaseMemoryOccupationReqOutput
    )
    refusal = harness.refuse(request_of(1))
    assert refusal.status == 400
    assert "resume" in refusal.message


@pytest.mark.parametrize("fail_after", [0, 1, 3])
def test_a_failure_half_way_leaves_the_old_weights_and_the_next_update_works(
    harness: SchedulerHarness, fail_after: int
) -> None:
    update(harness, 5, weight_version="5")
    refusal = harness.refuse(request_of(9, weight_version="9", manifest={"fail_after": fail_after}))
    assert refusal.status == 400
    assert "the old weights serve" in refusal.message
    assert values(harness) == [5] * 4
    assert harness.state is not None
    assert (harness.state.weight_version, harness.state.can_run) == ("5", True)
    assert update(harness, 9, weight_version="9").success


def test_without_room_for_a_copy_the_reply_says_so_and_a_failure_leaves_no_mixture_serving(
    harness: SchedulerHarness,
) -> None:
    harness.weights.num_staged = 0
    assert update(harness, 5).staged is False
    refusal = harness.refuse(request_of(9, manifest={"fail_after": 2}))
    assert refusal.status == 500
    assert harness.state is not None
    assert not harness.state.can_run
    assert harness.state.ranks[0].tags[MemoryTag.WEIGHTS].num_missing == 4
    rid = harness.generate(PROMPT, max_new_tokens=3)
    harness.turn(5)
    assert harness.outputs[rid].token_ids == []
    assert update(harness, 9).content == "valid"
    harness.run_until_idle()
    assert harness.outputs[rid].finish == FinishReason("length", length=3)


class TestBurst:
    """What the device reads at its own bandwidth is written in place where nobody waits."""

    def test_while_nothing_runs(self, harness: SchedulerHarness) -> None:
        reply = update(harness, 7, weight_version="7", manifest=NEAR)
        assert (reply.staged, reply.committed, reply.weight_version) == (False, True, "7")
        assert values(harness) == [7] * 4

    def test_while_generation_is_paused(self, harness: SchedulerHarness) -> None:
        rid = harness.generate(PROMPT, max_new_tokens=20)
        harness.turn(4)
        pause(harness, PauseMode.IN_PLACE)
        assert update(harness, 7, flush_cache=False, manifest=NEAR).staged is False
        proceed(harness)
        harness.run_until_idle()
        assert harness.outputs[rid].finish == FinishReason("length", length=20)

    def test_beside_streams_there_is_a_copy(self, harness: SchedulerHarness) -> None:
        harness.generate(PROMPT, max_new_tokens=60)
        harness.turn(4)
        terms: dict[str, object] = {"pause_mode": PauseMode.IN_PLACE, "flush_cache": False}
        assert update(harness, 7, manifest=NEAR, **terms).staged is True

    def test_neither_a_session_nor_a_custom_loader_bursts(self, harness: SchedulerHarness) -> None:
        assert update(harness, 7, manifest={"needs_copy": True, **NEAR}).staged is True
        harness.apply(BeginWeightUpdateReqInput(), WeightSessionReqOutput)
        assert update(harness, 7, manifest=NEAR).staged is True

    def test_a_failure_ahead_of_the_first_byte_leaves_the_old(self, harness: SchedulerHarness) -> None:
        harness.weights.faults["map"] = RequestRejected("the sender has ended")
        assert harness.refuse(request_of(7, manifest=NEAR)).status == 400
        assert values(harness) == [0] * 4
        assert harness.state is not None
        assert harness.state.can_run

    def test_a_failure_half_way_leaves_stale_weights_until_the_next_update(
        self, harness: SchedulerHarness
    ) -> None:
        assert harness.refuse(request_of(7, manifest={"fail_after": 2, **NEAR})).status == 500
        assert harness.state is not None
        assert not harness.state.can_run
        assert update(harness, 8, manifest=NEAR).content == "valid"
        assert harness.state.can_run


def test_in_place_the_whole_time_from_the_first_write_to_the_commit_is_a_stall(
    harness: SchedulerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that ticks with every look at it: only a staged update lets forward passes in."""
    clock = itertools.count()
    monkeypatch.setattr(pace.time, "perf_counter", lambda: float(next(clock)))
    staged = update(harness, 3)
    harness.weights.num_staged = 0
    in_place = update(harness, 4)
    # On such a clock every slice is a turn, and there are four between the first write and the commit.
    assert in_place.stall_ms > 3 * staged.stall_ms


def test_a_second_copy_that_cannot_be_given_back_piece_by_piece_is_told_of(
    harness: SchedulerHarness, caplog: pytest.LogCaptureFixture
) -> None:
    harness.generate(PROMPT, max_new_tokens=60)
    harness.turn(4)
    harness.weights.faults["give_back"] = EngineError("the driver said no")
    assert update(harness, 3, pause_mode=PauseMode.IN_PLACE, flush_cache=False).success
    assert "the driver said no" in caplog.text


class TestWhileRunning:
    """What `pause_mode` does when nobody has paused the engine."""

    @pytest.mark.parametrize("mode", [None, PauseMode.WAIT])
    def test_by_default_running_requests_finish_first_and_new_ones_wait(
        self, harness: SchedulerHarness, mode: PauseMode | None
    ) -> None:
        running = harness.generate(PROMPT, max_new_tokens=20)
        harness.turn(4)
        call = harness.call(request_of(3, weight_version="3", pause_mode=mode))
        late = harness.generate(PROMPT, max_new_tokens=4)
        harness.turn_until(lambda: call in harness.replies)
        assert harness.outputs[running].finish is not None
        harness.run_until_idle()
        assert harness.outputs[running].version_starts == [("default", 0)]
        assert harness.outputs[late].version_starts == [("3", 0)]
        assert harness.outputs[late].cached_tokens == 0, "the prefix cache was emptied"

    def test_decoding_goes_on_while_tensors_arrive(self, harness: SchedulerHarness) -> None:
        rid = harness.generate(PROMPT, max_new_tokens=40)
        harness.turn(4)
        before = len(harness.outputs[rid].token_ids)
        reply = update(harness, 3, weight_version="3", pause_mode=PauseMode.IN_PLACE, flush_cache=False)
        assert reply.num_paused_requests == 1
        during = len(harness.outputs[rid].token_ids)
        assert during > before + 1, "tokens came between the first slice and the commit"
        harness.run_until_idle()
        assert harness.outputs[rid].finish == FinishReason("length", length=40)
        assert [version for version, _ in harness.outputs[rid].version_starts] == ["default", "3"]
        assert harness.outputs[rid].num_retractions == 0

    @pytest.mark.parametrize("flush_cache", [True, False])
    def test_retract_recomputes_with_the_new_weights(
        self, harness: SchedulerHarness, flush_cache: bool
    ) -> None:
        rids = [harness.generate(PROMPT, seed=seed, max_new_tokens=30) for seed in range(4)]
        harness.turn(8)
        reply = update(harness, 3, weight_version="3", pause_mode=PauseMode.RETRACT, flush_cache=flush_cache)
        assert reply.num_paused_requests == 4
        harness.run_until_idle()
        for rid in rids:
            output = harness.outputs[rid]
            assert output.finish == FinishReason("length", length=30)
            assert output.num_retractions == 1
            assert [version for version, _ in output.version_starts] == ["default", "3"]

    @pytest.mark.parametrize("fields", [{"pause_mode": PauseMode.ABORT}, {"abort_all_requests": True}])
    def test_abort_ends_them(self, harness: SchedulerHarness, fields: dict[str, object]) -> None:
        rid = harness.generate(PROMPT, max_new_tokens=60)
        harness.turn(4)
        update(harness, 3, **fields)
        finish = harness.outputs[rid].finish
        assert finish is not None
        assert finish.kind == "abort"
        assert harness.state is not None
        assert harness.state.paused is None

    def test_in_place_with_a_flush_is_refused_before_anything_is_written(
        self, harness: SchedulerHarness
    ) -> None:
        rid = harness.generate(PROMPT, max_new_tokens=30)
        harness.turn(4)
        refusal = harness.refuse(request_of(3, pause_mode=PauseMode.IN_PLACE))
        assert refusal.status == 400
        assert "flush_cache=false" in refusal.message
        assert values(harness) == [0] * 4
        harness.run_until_idle()
        assert harness.outputs[rid].version_starts == [("default", 0)]

    def test_its_deadline_ends_a_draining_update(self, harness: SchedulerHarness) -> None:
        rid = harness.generate(PROMPT, max_new_tokens=60)
        harness.turn(4)
        call = harness.call(request_of(3))
        harness.turn(8)
        harness.deliver(Expire(id=call))
        harness.turn()
        reply = harness.replies[call]
        assert isinstance(reply, Refusal)
        assert reply.status == 400
        late = harness.generate(PROMPT, max_new_tokens=2)
        harness.run_until_idle()
        assert values(harness) == [0] * 4
        assert harness.outputs[rid].finish == FinishReason("length", length=60)
        assert harness.outputs[late].finish is not None

    def test_a_pause_lets_a_draining_update_apply_at_once(self, harness: SchedulerHarness) -> None:
        harness.generate(PROMPT, max_new_tokens=60)
        harness.turn(4)
        call = harness.call(request_of(3))
        harness.turn(8)
        assert call not in harness.replies
        pause(harness, PauseMode.RETRACT)
        assert isinstance(harness.replies[call], UpdateWeightsReqOutput)
        assert values(harness) == [3] * 4

    def test_releasing_the_weights_ends_it_with_a_refusal(self, harness: SchedulerHarness) -> None:
        harness.generate(PROMPT, max_new_tokens=60)
        harness.turn(4)
        call = harness.call(request_of(3))
        harness.turn(8)
        harness.apply(
            ReleaseMemoryOccupationReqInput(tags=(MemoryTag.WEIGHTS,)), ReleaseMemoryOccupationReqOutput
        )
        reply = harness.replies[call]
        assert isinstance(reply, Refusal)
        assert reply.status == 400
        assert "released" in reply.message

    def test_of_several_the_oldest_goes_first(self, harness: SchedulerHarness) -> None:
        harness.generate(PROMPT, max_new_tokens=20)
        harness.turn(4)
        calls = [harness.call(request_of(value, weight_version=value)) for value in (1, 2, 3)]
        harness.turn_until(lambda: all(call in harness.replies for call in calls))
        assert list(harness.replies)[-3:] == calls
        assert values(harness) == [3] * 4

    def test_control_goes_on_while_an_update_waits(self, harness: SchedulerHarness) -> None:
        harness.generate(PROMPT, max_new_tokens=40)
        harness.turn(4)
        call = harness.call(request_of(3))
        harness.turn()
        assert harness.apply(FlushCacheReqInput(), FlushCacheReqOutput).fully_flushed is False
        reply = harness.apply(GetWeightsByNameReqInput(name="layer.0"), GetWeightsByNameReqOutput)
        assert reply.values == [0.0]
        assert call not in harness.replies


class TestWhilePaused:
    @pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.ABORT])
    def test_it_is_applied_at_once_and_the_pause_stays(
        self, harness: SchedulerHarness, mode: PauseMode
    ) -> None:
        rid = harness.generate(PROMPT, max_new_tokens=20)
        harness.turn(4)
        pause(harness, mode)
        assert update(harness, 3).success
        assert harness.state is not None
        assert harness.state.paused is mode
        proceed(harness)
        harness.run_until_idle()
        assert harness.outputs[rid].finish is not None

    def test_in_place_keeps_old_kv_only_if_told_so(self, harness: SchedulerHarness) -> None:
        rid = harness.generate(PROMPT, max_new_tokens=20)
        harness.turn(6)
        pause(harness, PauseMode.IN_PLACE)
        refusal = harness.refuse(request_of(3, weight_version="3"))
        assert "retract or abort, or pass flush_cache=false" in refusal.message
        assert values(harness) == [0] * 4
        update(harness, 3, weight_version="3", flush_cache=False)
        proceed(harness)
        harness.run_until_idle()
        output = harness.outputs[rid]
        assert [version for version, _ in output.version_starts] == ["default", "3"]
        assert output.kv_versions == ["default", "3"]
        assert output.num_retractions == 0

    def test_stale_weights_with_requests_that_hold_kv_do_not_hang_an_update(
        self, harness: SchedulerHarness
    ) -> None:
        harness.weights.num_staged = 0
        rid = harness.generate(PROMPT, max_new_tokens=20)
        harness.turn(4)
        harness.refuse(
            request_of(9, pause_mode=PauseMode.IN_PLACE, flush_cache=False, manifest={"fail_after": 2})
        )
        refusal = harness.refuse(request_of(3))
        assert "hold KV" in refusal.message
        assert update(harness, 3, flush_cache=False).content == "valid"
        harness.run_until_idle()
        assert harness.outputs[rid].finish == FinishReason("length", length=20)


class TestVersions:
    def test_spans_are_contiguous_and_name_the_weights_that_sampled(self, harness: SchedulerHarness) -> None:
        rid = harness.generate(PROMPT, max_new_tokens=100)
        served: dict[str, int] = {"default": 0}
        for value in (1, 2, 3):
            harness.turn(7)
            update(harness, value, weight_version=value, pause_mode=PauseMode.IN_PLACE, flush_cache=False)
            assert harness.runner.value is not None
            served[str(value)] = harness.runner.value
        harness.run_until_idle()
        output = harness.outputs[rid]
        assert [version for version, _ in output.version_starts] == ["default", "1", "2", "3"]
        starts = [start for _, start in output.version_starts]
        assert starts == sorted(set(starts))
        assert starts[0] == 0
        for (version, start), end in zip(output.version_starts, [*starts[1:], 100], strict=True):
            expected = [harness.runner.token(0, position, served[version]) for position in range(start, end)]
            assert output.token_ids[start:end] == expected

    def test_cached_kv_tells_which_version_computed_it(self, harness: SchedulerHarness) -> None:
        harness.generate(PROMPT)
        harness.run_until_idle()
        update(harness, 1, weight_version="1", flush_cache=False)
        rid = harness.generate(PROMPT)
        harness.run_until_idle()
        assert harness.outputs[rid].cached_tokens == 16
        assert harness.outputs[rid].kv_versions == ["default", "1"]

    @pytest.mark.parametrize("version", ["1", "default", None])
    def test_scope_version_shares_prefixes_within_one_commit_only(self, version: str | None) -> None:
        harness = SchedulerHarness(cache_by_version=True)
        harness.generate(PROMPT)
        harness.run_until_idle()
        update(harness, 1, weight_version=version, flush_cache=False)
        rids = []
        for _ in range(2):
            rids.append(harness.generate(PROMPT))
            harness.run_until_idle()
        assert [harness.outputs[rid].cached_tokens for rid in rids] == [0, 16]
        assert harness.outputs[rids[1]].kv_versions == [version or "default"]

    def test_scope_version_keeps_mixed_kv_out_of_the_cache(self) -> None:
        harness = SchedulerHarness(cache_by_version=True)
        first = harness.generate(PROMPT, max_new_tokens=30)
        harness.turn(8)
        update(harness, 1, weight_version="1", pause_mode=PauseMode.IN_PLACE, flush_cache=False)
        harness.run_until_idle()
        tokens = [*PROMPT, *harness.outputs[first].token_ids]
        again = harness.generate(tokens, max_new_tokens=3)
        harness.run_until_idle()
        assert harness.outputs[again].kv_versions == ["1"]


class TestSession:
    """begin, updates, end: all of it takes effect at once, or nothing does."""

    def begin(self, harness: SchedulerHarness, **fields: object) -> None:
        request = BeginWeightUpdateReqInput(**fields)  # type: ignore[arg-type]
        assert harness.apply(request, WeightSessionReqOutput).changed

    def end(self, harness: SchedulerHarness, **fields: object) -> UpdateWeightsReqOutput:
        request = EndWeightUpdateReqInput(**fields)  # type: ignore[arg-type]
        return harness.apply(request, UpdateWeightsReqOutput)

    def bucket(
        self, harness: SchedulerHarness, value: int, *layers: int, **fields: object
    ) -> UpdateWeightsReqOutput:
        return update(harness, value, manifest={"names": [f"layer.{i}" for i in layers]}, **fields)

    def test_buckets_serve_together_at_the_end(self, harness: SchedulerHarness) -> None:
        rid = harness.generate(PROMPT, max_new_tokens=60)
        harness.turn(4)
        self.begin(harness)
        for layers in ((0, 1), (2,), (3,)):
            reply = self.bucket(harness, 7, *layers, flush_cache=False, weight_version="7")
            assert (reply.committed, reply.staged, reply.weight_version) == (False, True, "default")
            assert values(harness) == [0] * 4
        assert harness.state is not None
        assert harness.state.session is not None
        assert harness.state.session.num_tensors_staged == 4
        reply = self.end(harness, pause_mode=PauseMode.IN_PLACE)
        assert (reply.committed, reply.weight_version, reply.num_tensors) == (True, "7", 4)
        assert values(harness) == [7] * 4
        assert harness.state.session is None
        harness.run_until_idle()
        assert [version for version, _ in harness.outputs[rid].version_starts] == ["default", "7"]

    def test_requests_in_flight_survive_the_order_of_miles(self, harness: SchedulerHarness) -> None:
        rids = [harness.generate(PROMPT, seed=seed, max_new_tokens=30) for seed in range(6)]
        harness.turn(6)
        pause(harness, PauseMode.RETRACT)
        assert harness.apply(FlushCacheReqInput(), FlushCacheReqOutput).fully_flushed
        self.begin(harness)
        late = harness.generate(PROMPT, max_new_tokens=3)
        self.bucket(harness, 7, 0, 1)
        self.bucket(harness, 7, 2, 3)
        assert self.end(harness, weight_version=7).weight_version == "7"
        proceed(harness)
        harness.run_until_idle()
        assert {harness.outputs[rid].finish for rid in rids} == {FinishReason("length", length=30)}
        assert harness.outputs[late].version_starts == [("7", 0)]

    @pytest.mark.parametrize(
        "names",
        [
            {"names": ["layer.1", "layer.2"], "fail_after": 1},
            {"names": ["layer.1", "layer.2", "layer.9"]},
        ],
    )
    def test_with_a_refused_bucket_it_is_incomplete_until_all_of_that_is_written(
        self, harness: SchedulerHarness, names: dict[str, object]
    ) -> None:
        self.begin(harness)
        self.bucket(harness, 7, 0, 1)
        reason = harness.refuse(request_of(9, manifest=names)).message
        self.bucket(harness, 7, 1)
        refusal = harness.refuse(EndWeightUpdateReqInput())
        assert (refusal.status, reason in refusal.message) == (409, True)
        left = ["layer.2"] if "fail_after" in names else ["layer.2", "layer.9"]
        assert refusal.fields == {"refusals": [{"message": reason, "names": left}], "num_refusals": 1}
        assert values(harness) == [0] * 4
        self.bucket(harness, 7, 2)
        if len(left) == 1:
            self.end(harness)
        else:
            assert harness.refuse(EndWeightUpdateReqInput()).status == 409, "the model has no layer.9"
            self.end(harness, allow_incomplete=True)
        assert values(harness) == [7, 7, 7, 0]

    @pytest.mark.parametrize("num_ranks", [1, 3])
    def test_with_what_could_not_be_read_it_is_incomplete_for_good(self, num_ranks: int) -> None:
        harness = SchedulerHarness(num_ranks=num_ranks)
        self.begin(harness)
        harness.ranks[-1].weights.faults["open"] = RequestRejected("the payload is cut short")
        assert "cut short" in harness.refuse(request_of(7)).message
        self.bucket(harness, 7, 0, 1, 2, 3)
        refusal = harness.refuse(EndWeightUpdateReqInput())
        assert refusal.status == 409
        assert refusal.fields["refusals"][0]["names"] is None
        assert self.end(harness, allow_incomplete=True).committed
        assert values(harness) == [7] * 4

    def test_what_is_refused_on_one_rank_is_missing_on_all(self) -> None:
        harness = SchedulerHarness(num_ranks=3)
        self.begin(harness)
        harness.ranks[1].weights.faults["write"] = RequestRejected("no")
        harness.refuse(request_of(9, manifest={"names": ["layer.1"]}))
        refusal = harness.refuse(EndWeightUpdateReqInput())
        assert refusal.fields["refusals"] == [{"message": "rank 1: no", "names": ["layer.1"]}]
        self.bucket(harness, 7, 1)
        assert self.end(harness).committed

    def test_an_update_for_another_session_leaves_it_as_it_is(self, harness: SchedulerHarness) -> None:
        self.begin(harness, session_id="a")
        harness.refuse(request_of(9, session_id="b"))
        assert self.end(harness).committed

    def test_what_a_failed_bucket_touched_keeps_its_old_value(self, harness: SchedulerHarness) -> None:
        self.begin(harness)
        self.bucket(harness, 7, 0, 1)
        harness.refuse(request_of(9, manifest={"names": ["layer.1", "layer.2"], "fail_after": 1}))
        self.end(harness, allow_incomplete=True)
        assert values(harness) == [7, 0, 0, 0]

    def test_tensors_with_nan_or_inf_are_told_of_until_they_are_written_again(
        self, harness: SchedulerHarness, caplog: pytest.LogCaptureFixture
    ) -> None:
        self.begin(harness)
        reply = update(harness, 7, manifest={"nonfinite": ["layer.1", "layer.2"]})
        assert (reply.num_nonfinite, "layer.1, layer.2" in reply.message) == (2, True)
        assert "2 tensors hold NaN or Inf: layer.1, layer.2." in caplog.text
        self.bucket(harness, 7, 1)
        reply = self.end(harness)
        assert (reply.num_nonfinite, "layer.2" in reply.message) == (1, True)
        assert update(harness, 8).num_nonfinite == 0

    def test_so_are_those_that_hold_it_on_some_ranks_only(self) -> None:
        harness = SchedulerHarness(num_ranks=3)
        for rank in harness.ranks[1:]:
            rank.weights.nonfinite = ["layer.2"]
        assert update(harness, 7).num_nonfinite == 1

    def test_abort_discards_it(self, harness: SchedulerHarness) -> None:
        self.begin(harness)
        self.bucket(harness, 7, 0, 1, 2, 3, weight_version="7")
        assert harness.apply(AbortWeightUpdateReqInput(), WeightSessionReqOutput).changed
        assert values(harness) == [0] * 4
        assert not harness.apply(AbortWeightUpdateReqInput(), WeightSessionReqOutput).changed
        refusal = harness.refuse(EndWeightUpdateReqInput())
        assert refusal.status == 409
        assert "abort_weight_update" in refusal.message
        assert update(harness, 8).weight_version == "default"

    def test_one_at_a_time(self, harness: SchedulerHarness) -> None:
        assert harness.refuse(EndWeightUpdateReqInput()).status == 409
        self.begin(harness)
        assert harness.refuse(BeginWeightUpdateReqInput()).status == 409
        calls = [
            harness.call(AbortWeightUpdateReqInput()),
            *(harness.call(BeginWeightUpdateReqInput()) for _ in "ab"),
        ]
        harness.turn()
        assert [type(harness.replies[call]) for call in calls] == [WeightSessionReqOutput] * 2 + [Refusal]

    def test_two_that_begin_behind_a_draining_update_do_not_both_open(
        self, harness: SchedulerHarness
    ) -> None:
        harness.generate(PROMPT, max_new_tokens=20)
        harness.turn(4)
        calls = [harness.call(request_of(3)), *(harness.call(BeginWeightUpdateReqInput()) for _ in "ab")]
        harness.turn_until(lambda: all(call in harness.replies for call in calls))
        assert values(harness) == [3] * 4
        last = harness.replies[calls[2]]
        assert isinstance(last, Refusal)
        assert last.status == 409

    def test_its_deadline_discards_it(self, harness: SchedulerHarness) -> None:
        self.begin(harness, timeout_s=1000.0)
        self.bucket(harness, 7, 0)
        harness.deliver(Expire(id="weight-session-0"))
        harness.turn()
        assert harness.state is not None
        assert harness.state.session is None
        assert "weight_update_timeout_s" in harness.refuse(EndWeightUpdateReqInput()).message
        assert values(harness) == [0] * 4

    def test_releasing_the_weights_discards_it(self, harness: SchedulerHarness) -> None:
        self.begin(harness)
        self.bucket(harness, 7, 0)
        harness.apply(
            ReleaseMemoryOccupationReqInput(tags=(MemoryTag.WEIGHTS,)), ReleaseMemoryOccupationReqOutput
        )
        refusal = harness.refuse(EndWeightUpdateReqInput())
        assert (refusal.status, "released" in refusal.message) == (409, True)

    def test_the_end_flushes_if_any_bucket_asked_and_is_refused_while_kv_is_held(
        self, harness: SchedulerHarness
    ) -> None:
        harness.generate(PROMPT, max_new_tokens=60)
        harness.turn(4)
        self.begin(harness)
        self.bucket(harness, 7, 0, flush_cache=False)
        self.bucket(harness, 7, 1, flush_cache=True)
        refusal = harness.refuse(EndWeightUpdateReqInput(pause_mode=PauseMode.IN_PLACE))
        assert refusal.status == 400
        assert values(harness) == [0] * 4
        assert self.end(harness, pause_mode=PauseMode.RETRACT).num_paused_requests == 1
        assert values(harness) == [7, 7, 0, 0]

    def test_a_version_given_inside_takes_effect_at_the_end(self, harness: SchedulerHarness) -> None:
        self.begin(harness)
        harness.apply(UpdateWeightVersionReqInput(new_version="9"), UpdateWeightVersionReqOutput)
        assert harness.state is not None
        assert harness.state.weight_version == "default"
        assert self.end(harness).weight_version == "9"

    def test_in_place_nothing_runs_between_the_first_bucket_and_the_end(
        self, harness: SchedulerHarness
    ) -> None:
        harness.weights.num_staged = 0
        rid = harness.generate(PROMPT, max_new_tokens=40)
        harness.turn(4)
        self.begin(harness)
        assert self.bucket(harness, 7, 0, 1, flush_cache=False).staged is False
        steps = harness.runner.num_steps
        harness.turn(5)
        assert harness.runner.num_steps == steps
        self.bucket(harness, 7, 2, 3, flush_cache=False)
        assert self.end(harness).content == "valid"
        harness.run_until_idle()
        assert harness.outputs[rid].finish == FinishReason("length", length=40)


class TestVersionAlone:
    def test_it_changes_at_once(self, harness: SchedulerHarness) -> None:
        rid = harness.generate(PROMPT, max_new_tokens=20)
        harness.turn(5)
        reply = harness.apply(UpdateWeightVersionReqInput(new_version="v"), UpdateWeightVersionReqOutput)
        assert reply.new_version == "v"
        harness.run_until_idle()
        assert [version for version, _ in harness.outputs[rid].version_starts] == ["default", "v"]

    def test_it_can_abort_everything(self, harness: SchedulerHarness) -> None:
        rid = harness.generate(PROMPT, max_new_tokens=20)
        harness.turn(5)
        harness.apply(
            UpdateWeightVersionReqInput(new_version="v", abort_all_requests=True),
            UpdateWeightVersionReqOutput,
        )
        finish = harness.outputs[rid].finish
        assert finish is not None
        assert finish.kind == "abort"


class TestRead:
    def test_it_returns_the_live_value(self, harness: SchedulerHarness) -> None:
        update(harness, 5)
        reply = harness.apply(GetWeightsByNameReqInput(name="layer.1"), GetWeightsByNameReqOutput)
        assert reply.values == [5.0]

    def test_unknown_names_and_bad_sizes_are_refused(self, harness: SchedulerHarness) -> None:
        assert harness.refuse(GetWeightsByNameReqInput(name="nope")).status == 400
        assert harness.refuse(GetWeightsByNameReqInput(name="layer.1", truncate_size=-1)).status == 400
