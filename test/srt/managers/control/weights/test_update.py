"""Weight updates: control_semantics section 2, on the real scheduler with null parts."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from fixtures.control import IN_PLACE, PROMPT, Harness, updating

from ebbtide.srt.errors import EngineError, RequestRejected
from ebbtide.srt.managers.control import OutOfStep, pace
from ebbtide.srt.managers.io_struct import (
    AbortWeightUpdateReqInput,
    AnyControlRequest,
    Canary,
    FinishReason,
    GetWeightsByNameReqInput,
    PauseMode,
    ReleaseMemoryOccupationReqInput,
    UpdateWeightVersionReqInput,
)
from ebbtide.srt.memory_saver import MemoryTag
from ebbtide.testing import NullWeights, null_weights

WEIGHTS = MemoryTag.WEIGHTS


def test_an_update_changes_weights_and_version_together(harness: Harness) -> None:
    reply = harness.update(7, weight_version=12)
    assert harness.values == [7] * 4
    assert (reply.weight_version, reply.committed, reply.staged) == ("12", True, True)
    assert (reply.num_tensors, reply.num_bytes) == (4, 4 * NullWeights.BYTES_PER_PARAMETER)
    assert reply.message == "Updated 4 tensors. Weight version updated to 12."
    assert (harness.now.weight_version, harness.now.model_path) == ("12", "7")
    assert harness.do(GetWeightsByNameReqInput(name="layer.1")).values == [7.0]
    assert harness.update(8, 1).weight_version == "12", "no version given: the old one stays"
    assert harness.values == [7, 8, 7, 7], "what is not sent stays too"
    reply = harness.update(9, names=[], weight_version="n")
    assert (reply.num_tensors, reply.weight_version, reply.content) == (0, "n", "valid")
    assert harness.values == [7, 8, 7, 7]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (updating("abc"), "expected an integer"),
        (updating(1, names=["layer.1", "nope"]), "nope"),
        (updating(1, pause_mode=PauseMode.IN_PLACE), "flush_cache=false"),
        (GetWeightsByNameReqInput(name="nope"), "no parameter"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_fit_is_refused_and_nothing_changes(
    harness: Harness, request_: Any, message: str
) -> None:
    rid = harness.begin_request(max_new_tokens=30)
    before = harness.now
    harness.refused(request_, 400, message)
    assert (harness.values, harness.now) == ([0] * 4, before)
    harness.assert_end(rid, length=30)
    assert harness.versions(rid) == ["default"]


def test_offenders_are_listed_and_released_weights_say_what_to_do(harness: Harness) -> None:
    names = [f"bad.{index}" for index in range(30)]
    refusal = harness.refuse(updating(1, names=names))
    assert (refusal.fields["num_errors"], len(refusal.fields["errors"])) == (30, 20)
    assert refusal.fields["errors"][0]["name"] in names
    harness.release(WEIGHTS)
    harness.refused(updating(1), 400, "resume")


def test_without_room_for_a_copy_a_failure_leaves_no_mixture_serving(harness: Harness) -> None:
    harness.weights.num_staged = 0
    assert harness.update(5).staged is False
    rid = harness.begin_request(max_new_tokens=20)
    assert harness.refuse(updating(9, fail_after=2, **IN_PLACE)).status == 500
    assert not harness.now.can_run
    assert harness.now.ranks[0].tags[WEIGHTS].num_missing == 4
    harness.turn()  # What was launched before the failure, on the old weights, is committed.
    num_tokens = harness.num_tokens(rid)
    assert "hold KV" in harness.refuse(updating(3)).message, "nothing that waits for them would ever end"
    harness.turn(5)
    assert harness.num_tokens(rid) == num_tokens
    assert harness.update(3, flush_cache=False).content == "valid"
    harness.assert_end(rid, length=20)


@pytest.mark.parametrize(
    "request_", [ReleaseMemoryOccupationReqInput(tags=(WEIGHTS,)), AbortWeightUpdateReqInput()]
)
def test_a_client_that_ends_an_update_in_place_has_it_refused_and_the_engine_did_not_fail(
    request_: AnyControlRequest,
) -> None:
    harness = Harness(num_ranks=2)
    for rank in harness.ranks:
        rank.weights.num_staged = 0
    harness.begin()
    call = harness.call(updating(9))
    # The other rank has yet to say that it has written its part, too.
    harness.turn_until(lambda: not harness.scheduler.control.can_run)
    assert call not in harness.replies
    reply = harness.do(request_)
    assert harness.refusal(call).status == 400
    if isinstance(request_, AbortWeightUpdateReqInput):
        assert "4 parameters are stale" in reply.message
    harness.resume(WEIGHTS)
    assert harness.update(3).content == "valid"


class TestBurst:
    """What the device reads at its own bandwidth is written in place where nobody waits, or not for long."""

    def test_what_takes_long_beside_streams_sessions_and_custom_loaders_have_a_copy(
        self, harness: Harness
    ) -> None:
        reply = harness.update(7, weight_version="7", near_bytes=1)
        assert (reply.staged, reply.committed, reply.weight_version) == (False, True, "7")
        assert harness.values == [7] * 4
        assert harness.update(0, near_bytes=1, needs_copy=True).staged is True
        rid = harness.begin_request(max_new_tokens=40)
        assert harness.update(8, near_bytes=60 << 30, **IN_PLACE).staged is True
        assert harness.update(8, near_bytes=16 << 30, **IN_PLACE).staged is False
        harness.pause(PauseMode.IN_PLACE)
        assert harness.update(9, near_bytes=1, flush_cache=False).staged is False
        harness.proceed()
        harness.assert_end(rid, length=40)
        harness.begin()
        assert harness.update(7, near_bytes=1).staged is True

    def test_a_failure_ahead_of_the_first_byte_leaves_the_old_one_half_way_leaves_stale_weights(
        self, harness: Harness
    ) -> None:
        harness.weights.faults["map"] = RequestRejected("the sender has ended")
        assert harness.refuse(updating(7, near_bytes=1)).status == 400
        assert (harness.values, harness.now.can_run) == ([0] * 4, True)
        assert harness.refuse(updating(7, near_bytes=1, fail_after=2)).status == 500
        assert not harness.now.can_run
        assert harness.update(8, near_bytes=1).content == "valid"
        assert harness.now.can_run


def test_in_place_the_whole_time_from_the_first_write_to_the_commit_is_a_stall(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that ticks with every look of theirs at it: only a staged update lets forward passes in."""
    looks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: float(next(looks)), monotonic=lambda: float(next(looks)))
    monkeypatch.setattr(pace, "time", clock)
    staged = harness.update(3)
    harness.weights.num_staged = 0
    in_place = harness.update(4)
    # On such a clock every slice is a turn, and there are four between the first write and the commit.
    assert in_place.stall_ms > 3 * staged.stall_ms


def test_a_second_copy_that_cannot_be_given_back_piece_by_piece_is_told_of(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    harness.begin_request()
    harness.weights.faults["give_back"] = EngineError("the driver said no")
    assert harness.update(3, **IN_PLACE).success
    assert "the driver said no" in caplog.text


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("step", ["retract_all", "serve", "flush_cache"])
def test_a_rank_that_cannot_say_what_serves_ends(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int, step: str
) -> None:
    """Tokens by the new weights would go by the old version, or with the KV of others."""
    harness = Harness(num_ranks=num_ranks)
    harness.begin_request()
    monkeypatch.setattr(harness.ranks[-1].scheduler.policy, step, lambda *_, **__: 1 / 0)
    harness.call(updating(7, weight_version="7", pause_mode=PauseMode.RETRACT))
    with pytest.raises(OutOfStep, match="division by zero"):
        harness.turn(harness.MANY_TURNS)


def test_ranks_make_sure_of_each_others_memory_once_in_an_update() -> None:
    """A pass waits for it on the host. What is done beside passes takes no memory of theirs."""
    harness = Harness(num_ranks=2)
    harness.begin_request()
    asked: list[str] = []
    harness.ranks[0].runner.forget_room = lambda: asked.append("again")  # type: ignore[method-assign]
    harness.do(updating(7))
    assert asked == ["again"]


def test_a_rank_whose_old_weights_do_not_come_back_from_a_trial_ends(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(null_weights._NullStaging, "roll_back", lambda _: 1 / 0)
    harness.call(updating(7, canary=Canary(input_ids=[5, 6])))
    with pytest.raises(OutOfStep, match="division by zero"):
        harness.turn(harness.MANY_TURNS)


def test_what_fails_behind_the_commit_does_not_say_that_the_old_weights_serve(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(null_weights._NullStaging, "close", lambda _: 1 / 0)
    refusal = harness.refuse(updating(7, weight_version="7"))
    assert (refusal.status, harness.values, harness.now.weight_version) == (500, [7] * 4, "7")
    assert "the new weights serve; what was left to be done failed: ZeroDivisionError" in refusal.message


class TestWhileRunning:
    """What `pause_mode` does when nobody has paused the engine."""

    @pytest.mark.parametrize("mode", [None, PauseMode.WAIT])
    def test_by_default_running_requests_finish_first_and_new_ones_wait(
        self, harness: Harness, mode: PauseMode | None
    ) -> None:
        running = harness.begin_request(max_new_tokens=20)
        call = harness.call(updating(3, weight_version="3", pause_mode=mode))
        late = harness.generate(PROMPT, max_new_tokens=4)
        harness.turn()
        # What asks or flushes goes on.
        assert harness.flush().fully_flushed is False
        assert harness.do(GetWeightsByNameReqInput(name="layer.0")).values == [0.0]
        assert call not in harness.replies
        harness.turn_until(lambda: call in harness.replies)
        assert harness.outputs[running].finish is not None
        harness.assert_end(late, length=4)
        assert (harness.versions(running), harness.versions(late)) == (["default"], ["3"])
        assert harness.outputs[late].cached_tokens == 0, "the prefix cache was emptied"

    def test_decoding_goes_on_while_tensors_arrive(self, harness: Harness) -> None:
        rid = harness.begin_request(max_new_tokens=40)
        before = harness.num_tokens(rid)
        assert harness.update(3, weight_version="3", **IN_PLACE).num_paused_requests == 1
        assert harness.num_tokens(rid) > before + 1, "tokens came between the first slice and the commit"
        harness.assert_end(rid, length=40)
        assert harness.versions(rid) == ["default", "3"]
        assert harness.outputs[rid].num_retractions == 0

    @pytest.mark.parametrize("flush_cache", [True, False])
    def test_retract_recomputes_with_the_new_weights(self, harness: Harness, flush_cache: bool) -> None:
        rids = [harness.generate(PROMPT, seed=seed, max_new_tokens=30) for seed in range(4)]
        harness.turn(8)
        terms = {"pause_mode": PauseMode.RETRACT, "flush_cache": flush_cache}
        assert harness.update(3, weight_version="3", **terms).num_paused_requests == 4
        harness.assert_end(*rids, length=30)
        assert [harness.versions(rid) for rid in rids] == [["default", "3"]] * 4
        assert [harness.outputs[rid].num_retractions for rid in rids] == [1] * 4

    @pytest.mark.parametrize("fields", [{"pause_mode": PauseMode.ABORT}, {"abort_all_requests": True}])
    def test_abort_ends_them(self, harness: Harness, fields: dict[str, Any]) -> None:
        rid = harness.begin_request()
        harness.update(3, **fields)
        assert harness.outputs[rid].finish.kind == "abort"
        assert harness.now.paused is None

    @pytest.mark.parametrize("is_sent", [False, True])
    @pytest.mark.parametrize("by", ["its deadline", "a release"])
    def test_what_ends_an_update_that_waits_refuses_it(
        self, harness: Harness, by: str, is_sent: bool
    ) -> None:
        """For requests to end, or for what is sent."""
        harness.weights.lateness = 10_000
        rid = harness.begin_request()
        call = harness.call(updating(3, is_sent=is_sent))
        harness.turn(8)
        if by == "a release":
            harness.release(WEIGHTS)
            assert "released" in harness.refusal(call).message
        else:
            harness.expire(call)
            late = harness.generate(PROMPT, max_new_tokens=2)
            harness.assert_end(late, length=2)
            assert harness.values == [0] * 4
            assert harness.outputs[rid].finish == FinishReason("length", length=60)
        assert harness.refusal(call).status == 400

    def test_a_pause_lets_a_draining_update_apply_at_once(self, harness: Harness) -> None:
        harness.begin_request()
        call = harness.call(updating(3))
        harness.turn(8)
        assert call not in harness.replies
        harness.pause(PauseMode.RETRACT)
        assert harness.reply(call).committed
        assert harness.values == [3] * 4

    def test_of_several_the_oldest_goes_first(self, harness: Harness) -> None:
        harness.begin_request(max_new_tokens=20)
        calls = [harness.call(updating(value, weight_version=value)) for value in (1, 2, 3)]
        harness.turn_until(lambda: all(call in harness.replies for call in calls))
        assert list(harness.replies)[-3:] == calls
        assert harness.values == [3] * 4


class TestWhilePaused:
    def test_in_place_keeps_old_kv_only_if_told_so(self, harness: Harness) -> None:
        rid = harness.begin_request(max_new_tokens=20, num_turns=6)
        harness.pause(PauseMode.IN_PLACE)
        refusal = harness.refuse(updating(3, weight_version="3"))
        assert "retract or abort, or pass flush_cache=false" in refusal.message
        assert harness.values == [0] * 4
        harness.update(3, weight_version="3", flush_cache=False)
        harness.proceed()
        harness.assert_end(rid, length=20)
        assert harness.versions(rid) == harness.outputs[rid].kv_versions == ["default", "3"]
        assert harness.outputs[rid].num_retractions == 0


class TestVersions:
    def test_spans_are_contiguous_and_name_the_weights_that_sampled(self, harness: Harness) -> None:
        rid = harness.begin_request(max_new_tokens=100)
        served: dict[str, int] = {"default": 0}
        for value in (1, 2, 3):
            harness.turn(7)
            harness.update(value, weight_version=value, **IN_PLACE)
            served[str(value)] = harness.runner.value
        harness.run_until_idle()
        output = harness.outputs[rid]
        assert harness.versions(rid) == ["default", "1", "2", "3"]
        starts = [start for _, start in output.version_starts]
        assert starts == sorted(set(starts))
        assert starts[0] == 0
        for (version, start), end in zip(output.version_starts, [*starts[1:], 100], strict=True):
            expected = [harness.runner.token(0, position, served[version]) for position in range(start, end)]
            assert output.token_ids[start:end] == expected

    def test_cached_kv_tells_which_version_computed_it(self, harness: Harness) -> None:
        harness.generate(PROMPT)
        harness.run_until_idle()
        harness.update(1, weight_version="1", flush_cache=False)
        rid = harness.generate(PROMPT)
        harness.run_until_idle()
        assert harness.outputs[rid].cached_tokens == 16
        assert harness.outputs[rid].kv_versions == ["default", "1"]

    @pytest.mark.parametrize("version", ["1", "default", None])
    def test_scope_version_shares_prefixes_within_one_commit_only(self, version: str | None) -> None:
        harness = Harness(cache_by_version=True)
        harness.generate(PROMPT)
        harness.run_until_idle()
        harness.update(1, weight_version=version, flush_cache=False)
        rids = []
        for _ in range(2):
            rids.append(harness.generate(PROMPT))
            harness.run_until_idle()
        assert [harness.outputs[rid].cached_tokens for rid in rids] == [0, 16]
        assert harness.outputs[rids[1]].kv_versions == [version or "default"]

    def test_scope_version_keeps_mixed_kv_out_of_the_cache(self) -> None:
        harness = Harness(cache_by_version=True)
        first = harness.begin_request(max_new_tokens=30, num_turns=8)
        harness.update(1, weight_version="1", **IN_PLACE)
        harness.run_until_idle()
        again = harness.generate([*PROMPT, *harness.outputs[first].token_ids], max_new_tokens=3)
        harness.run_until_idle()
        assert harness.outputs[again].kv_versions == ["1"]

    @pytest.mark.parametrize("aborts", [False, True])
    def test_a_version_alone_changes_at_once(self, harness: Harness, aborts: bool) -> None:
        rid = harness.begin_request(max_new_tokens=20)
        reply = harness.do(UpdateWeightVersionReqInput(new_version="v", abort_all_requests=aborts))
        assert reply.new_version == harness.now.weight_version == "v"
        if aborts:
            assert harness.outputs[rid].finish.kind == "abort"
        else:
            harness.assert_end(rid, length=20)
            assert harness.versions(rid) == ["default", "v"]
