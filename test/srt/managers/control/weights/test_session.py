"""Sessions of weight updates: begin, updates, end; all of it takes effect at once, or nothing does."""

from typing import Any

import pytest
from fixtures.control import Harness, updating

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    PauseMode,
    UpdateWeightVersionReqInput,
)
from ebbtide.srt.memory_saver import MemoryTag
from ebbtide.testing.harness import default_schedule

WEIGHTS = MemoryTag.WEIGHTS


def test_buckets_serve_together_at_the_end(harness: Harness) -> None:
    rid = harness.begin_request()
    harness.begin()
    for layers in ((0, 1), (2,), (3,)):
        reply = harness.update(7, *layers, flush_cache=False, weight_version="7")
        assert (reply.committed, reply.staged, reply.weight_version) == (False, True, "default")
        assert harness.values == [0] * 4
    assert harness.now.session.num_tensors_staged == 4
    reply = harness.end(pause_mode=PauseMode.IN_PLACE)
    assert (reply.committed, reply.weight_version, reply.num_tensors) == (True, "7", 4)
    assert (harness.values, harness.now.session) == ([7] * 4, None)
    harness.assert_end(rid, length=60)
    assert harness.versions(rid) == ["default", "7"]


def test_a_token_comes_between_the_taking_of_memory_and_what_is_done_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = Harness(schedule=default_schedule(overlap=True))
    rid = harness.begin_request()
    harness.begin()
    num_tokens: dict[str, int] = {}
    monkeypatch.setattr(
        harness.weights, "fail_at", lambda place: num_tokens.setdefault(place, harness.num_tokens(rid))
    )
    harness.update(7, flush_cache=False)
    assert num_tokens["stage"] < num_tokens["map"]


@pytest.mark.parametrize(
    ("bad", "left"),
    [
        ({"names": ["layer.1", "layer.2"], "fail_after": 1}, ["layer.2"]),
        ({"names": ["layer.1", "layer.2", "layer.9"]}, ["layer.2", "layer.9"]),
    ],
)
def test_with_a_refused_bucket_it_is_incomplete_until_all_of_that_is_written(
    harness: Harness, bad: dict[str, Any], left: list[str]
) -> None:
    harness.begin()
    harness.update(7, 0, 1)
    reason = harness.refuse(updating(9, **bad)).message
    harness.update(7, 1)
    refusal = harness.refused(EndWeightUpdateReqInput(), 409, reason)
    assert refusal.fields == {"refusals": [{"message": reason, "names": left}], "num_refusals": 1}
    assert harness.values == [0] * 4
    harness.update(7, 2)
    if "layer.9" in left:
        assert harness.refuse(EndWeightUpdateReqInput()).status == 409, "the model has no layer.9"
    harness.end(allow_incomplete="layer.9" in left)
    assert harness.values == [7, 7, 7, 0]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_with_what_could_not_be_read_it_is_incomplete_for_good(num_ranks: int) -> None:
    harness = Harness(num_ranks=num_ranks)
    harness.begin()
    harness.ranks[-1].weights.faults["open"] = RequestRejected("the payload is cut short")
    assert "cut short" in harness.refuse(updating(7)).message
    harness.update(7)
    refusal = harness.refuse(EndWeightUpdateReqInput())
    assert (refusal.status, refusal.fields["refusals"][0]["names"]) == (409, None)
    assert "Send it" not in refusal.message, "nobody knows what would make up for it"
    assert harness.end(allow_incomplete=True).committed
    assert harness.values == [7] * 4


@pytest.mark.parametrize("slowness", [0, 2])
def test_what_is_refused_on_one_rank_is_missing_on_all(slowness: int) -> None:
    harness = Harness(num_ranks=3)
    harness.weights.slowness = slowness  # the leader is done first, or last
    harness.begin()
    harness.ranks[1].weights.faults["write"] = RequestRejected("no")
    harness.refuse(updating(9, 1))
    refusal = harness.refuse(EndWeightUpdateReqInput())
    assert refusal.fields["refusals"] == [{"message": "rank 1: no", "names": ["layer.1"]}]
    harness.update(7, 1)
    assert harness.end().committed


def test_who_names_another_session_leaves_it_as_it_is(harness: Harness) -> None:
    harness.begin(session_id="a")
    harness.refuse(updating(9, session_id="b"))
    harness.refused(EndWeightUpdateReqInput(session_id="b"), 409, "another session is open")
    assert harness.end(session_id="a").committed


@pytest.mark.parametrize("is_broadcast", [False, True])
def test_what_a_failed_bucket_touched_keeps_its_old_value(harness: Harness, is_broadcast: bool) -> None:
    harness.begin()
    harness.update(7, 0, 1)
    if is_broadcast:
        harness.weights.faults["arrive"] = RequestRejected("its sender has gone")
    harness.refuse(updating(9, 1, 2, is_sent=is_broadcast, fail_after=1))
    harness.end(allow_incomplete=True)
    assert harness.values == [7, 0, 0, 0]


def test_stale_weights_into_which_a_broadcast_came_by_half_are_stale_as_before(harness: Harness) -> None:
    harness.release(WEIGHTS)
    harness.resume(WEIGHTS)
    assert harness.update(7, 0).num_missing == 3
    harness.weights.faults["arrive"] = RequestRejected("its sender has gone")
    harness.refuse(updating(9, is_sent=True))
    assert len(harness.scheduler.control.memory.content.missing) == 4


def test_it_begins_behind_the_update_that_came_before(harness: Harness) -> None:
    rid = harness.begin_request()
    before, begun = harness.call(updating(7)), harness.call(BeginWeightUpdateReqInput())
    harness.turn(3)
    assert begun not in harness.replies, "requests drain for the update before it"
    harness.turn_until(lambda: begun in harness.replies)
    assert harness.reply(before).committed
    harness.abort_session()
    assert harness.values == [7] * 4
    harness.assert_end(rid, length=60)


def test_tensors_with_nan_or_inf_are_told_of_until_they_are_written_again(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    harness.begin()
    reply = harness.update(7, nonfinite=["layer.1", "layer.2"])
    assert (reply.num_nonfinite, "layer.1, layer.2" in reply.message) == (2, True)
    assert "2 tensors hold NaN or Inf: layer.1, layer.2." in caplog.text
    harness.update(7, 1)
    reply = harness.end()
    assert (reply.num_nonfinite, "layer.2" in reply.message) == (1, True)
    assert harness.update(8).num_nonfinite == 0


def test_so_are_those_that_hold_it_on_some_ranks_only() -> None:
    harness = Harness(num_ranks=3)
    for rank in harness.ranks[1:]:
        rank.weights.nonfinite = ["layer.2"]
    assert harness.update(7).num_nonfinite == 1


@pytest.mark.parametrize("by", ["request", "server"])
def test_where_they_are_refused_the_session_waits_for_what_is_finite(harness: Harness, by: str) -> None:
    harness.weights.refuses_nonfinite = by == "server"
    fields = {"refuse_nonfinite": True} if by == "request" else {}
    refusal = harness.refuse(updating(7, nonfinite=["layer.1"], **fields))
    assert (refusal.status, refusal.fields["num_nonfinite"], harness.values) == (400, 1, [0] * 4)
    assert "1 tensors hold NaN or Inf: layer.1." in refusal.message
    assert harness.update(8, nonfinite=["layer.1"], refuse_nonfinite=False).committed
    harness.begin()
    harness.update(9, 0, 1, **fields)
    harness.refuse(updating(6, 1, 2, nonfinite=["layer.1"], **fields))
    assert harness.refuse(EndWeightUpdateReqInput()).status == 409
    harness.update(9, 1, 2, **fields)
    reply = harness.end()
    assert (reply.committed, reply.num_nonfinite, harness.values) == (True, 0, [9, 9, 9, 8])


def test_what_serves_is_not_overwritten_to_find_out(harness: Harness) -> None:
    harness.weights.num_staged = 0
    rid = harness.begin_request()
    refusal = harness.refuse(updating(7, refuse_nonfinite=True, pause_mode=PauseMode.RETRACT))
    assert "refuse_nonfinite: there is no second copy" in refusal.message
    assert (harness.now.can_run, harness.values) == (True, [0] * 4)
    harness.assert_end(rid, length=60)
    # Stale weights hold nothing that could serve.
    harness.release(WEIGHTS)
    harness.resume(WEIGHTS)
    assert "hold NaN" in harness.refuse(updating(7, nonfinite=["layer.1"], refuse_nonfinite=True)).message
    assert not harness.now.can_run
    assert harness.update(7, refuse_nonfinite=True).committed
    assert (harness.now.can_run, harness.values) == (True, [7] * 4)


@pytest.mark.parametrize(
    ("by", "reason"),
    [
        ("an abort", "abort_weight_update"),
        ("its deadline", "weight_update_timeout_s"),
        ("a release", "released"),
    ],
)
def test_what_ends_it_discards_it(harness: Harness, by: str, reason: str) -> None:
    harness.begin(timeout_s=1000.0)
    harness.update(7, weight_version="7")
    if by == "an abort":
        assert harness.abort_session().changed
        assert not harness.abort_session().changed
    elif by == "its deadline":
        harness.expire("weight-session-0")
    else:
        harness.release(WEIGHTS)
    assert harness.now.session is None
    harness.refused(EndWeightUpdateReqInput(), 409, reason)
    if by != "a release":
        assert harness.values == [0] * 4
        assert harness.update(8).weight_version == "default"


def test_one_at_a_time(harness: Harness) -> None:
    assert harness.refuse(EndWeightUpdateReqInput()).status == 409
    harness.begin()
    assert harness.refuse(BeginWeightUpdateReqInput()).status == 409
    harness.abort_session()
    # Behind a draining update both wait for their turn, and the second finds the first.
    harness.begin_request(max_new_tokens=20)
    calls = [harness.call(updating(3)), *(harness.call(BeginWeightUpdateReqInput()) for _ in "ab")]
    harness.turn_until(lambda: all(call in harness.replies for call in calls))
    assert harness.values == [3] * 4
    assert harness.reply(calls[1]).changed
    assert harness.refusal(calls[2]).status == 409


def test_the_end_flushes_if_any_bucket_asked_and_is_refused_while_kv_is_held(harness: Harness) -> None:
    harness.begin_request()
    harness.begin()
    harness.update(7, 0, flush_cache=False)
    harness.update(7, 1, flush_cache=True)
    assert harness.refuse(EndWeightUpdateReqInput(pause_mode=PauseMode.IN_PLACE)).status == 400
    assert harness.values == [0] * 4
    assert harness.end(pause_mode=PauseMode.RETRACT).num_paused_requests == 1
    assert harness.values == [7, 7, 0, 0]


def test_a_version_given_inside_takes_effect_at_the_end(harness: Harness) -> None:
    harness.begin()
    harness.do(UpdateWeightVersionReqInput(new_version="9"))
    assert harness.now.weight_version == "default"
    assert harness.end().weight_version == "9"


@pytest.mark.parametrize("waits", [True, False])
def test_a_version_given_while_the_end_waits_comes_after_it(harness: Harness, waits: bool) -> None:
    harness.begin()
    harness.begin_request(max_new_tokens=20)
    ended = harness.call(EndWeightUpdateReqInput(weight_version="8"))
    named = harness.call(UpdateWeightVersionReqInput(new_version="9"))
    harness.turn()
    if not waits:
        harness.expire(named)
        assert harness.refusal(named).status == 400
    harness.run_until_idle()
    assert harness.reply(ended).weight_version == "8"
    assert harness.now.weight_version == ("9" if waits else "8")


def test_a_refusal_half_way_through_weights_that_served_is_a_failure(harness: Harness) -> None:
    harness.weights.num_staged = 0
    for status in (500, 400):
        harness.weights.faults["write"] = RequestRejected("the file was cut short")
        assert harness.refuse(updating(7)).status == status
        assert not harness.now.can_run


def test_in_place_nothing_runs_between_the_first_bucket_and_the_end(harness: Harness) -> None:
    harness.weights.num_staged = 0
    rid = harness.begin_request(max_new_tokens=40)
    harness.begin()
    reply = harness.update(7, 0, 1, flush_cache=False)
    assert (reply.staged, reply.message) == (
        False,
        "Wrote 2 tensors in place: nothing runs before end_weight_update.",
    )
    steps = harness.runner.num_steps
    harness.turn(5)
    assert harness.runner.num_steps == steps
    harness.update(7, 2, 3, flush_cache=False)
    assert harness.end().content == "valid"
    harness.assert_end(rid, length=40)
