"""Updates that senders bring piece by piece: wire_api section 4.5, on the real scheduler with null parts."""

from __future__ import annotations

from typing import Any

import pytest

from ebbtide.srt.errors import EngineError
from ebbtide.srt.managers.io_struct import (
    AbortWeightUpdateReqInput,
    AnyReply,
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    Expire,
    FinishReason,
    PauseMode,
    Refusal,
    ReleaseMemoryOccupationReqInput,
    ReleaseMemoryOccupationReqOutput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsReqOutput,
    WeightSessionReqOutput,
)
from ebbtide.srt.memory_saver.tags import MemoryTag
from ebbtide.testing import NullWeights, SchedulerHarness

FIRST = (7, ["layer.0", "layer.1"])
SECOND = (7, ["layer.2", "layer.3"])
UNFIT = (9, ["layer.0", "nope"])
MANY_TURNS = 200


@pytest.fixture(params=[1, 3], ids=["one rank", "three ranks"])
def harness(request: pytest.FixtureRequest) -> SchedulerHarness:
    return SchedulerHarness(num_ranks=request.param)


def request_of(**fields: Any) -> UpdateWeightsFromIPCReqInput:
    return UpdateWeightsFromIPCReqInput(**{"zmq_handles": {"GPU-0": "ipc:///sender"}, **fields})


def say(harness: SchedulerHarness, *said: Any) -> None:
    """What every rank's sender says, as it is answered."""
    for rank in harness.ranks:
        rank.weights.sender.says.extend(said)


def answered(harness: SchedulerHarness, call: str) -> AnyReply:
    """The reply to a request that waits for what sends the loop no message: here, every turn looks."""
    harness.turn(MANY_TURNS)
    return harness.replies[call]


def update(harness: SchedulerHarness, *said: Any, **fields: Any) -> UpdateWeightsReqOutput:
    say(harness, *said)
    reply = answered(harness, harness.call(request_of(**fields)))
    assert isinstance(reply, UpdateWeightsReqOutput), reply
    return reply


def refusal(harness: SchedulerHarness, *said: Any, **fields: Any) -> Refusal:
    say(harness, *said)
    reply = answered(harness, harness.call(request_of(**fields)))
    assert isinstance(reply, Refusal), reply
    return reply


def contents(harness: SchedulerHarness) -> list[int | None]:
    """The same on every rank."""
    [values] = {tuple(rank.weights.live.values()) for rank in harness.ranks}
    return list(values)


def answers(harness: SchedulerHarness) -> list[list[str]]:
    """Those that each rank's sender has got since the last look."""
    heard = [list(rank.weights.sender.answers) for rank in harness.ranks]
    for rank in harness.ranks:
        rank.weights.sender.answers.clear()
    return heard


def all_left(harness: SchedulerHarness) -> bool:
    return all(rank.weights.sender.is_left for rank in harness.ranks)


def test_all_pieces_serve_together_once_the_sender_has_said_that_it_is_done(
    harness: SchedulerHarness,
) -> None:
    call = harness.call(request_of(weight_version="7"))
    say(harness, FIRST, SECOND)
    harness.turn(MANY_TURNS)
    assert call not in harness.replies
    assert contents(harness) == [0] * 4
    assert answers(harness) == [["", ""]] * len(harness.ranks)
    say(harness, None)
    reply = answered(harness, call)
    assert isinstance(reply, UpdateWeightsReqOutput)
    assert (reply.weight_version, reply.committed, reply.staged, reply.num_tensors) == ("7", True, True, 4)
    assert reply.num_bytes == 4 * NullWeights.BYTES_PER_PARAMETER * len(harness.ranks)
    assert contents(harness) == [7] * 4
    assert answers(harness) == [[""]] * len(harness.ranks)
    assert all_left(harness)
    assert update(harness, (8, ["layer.3"]), None).message == "Updated 1 tensors."
    assert contents(harness) == [7, 7, 7, 8]


def test_a_sender_that_brings_nothing_changes_the_version_only(harness: SchedulerHarness) -> None:
    reply = update(harness, None, weight_version="n")
    assert (reply.num_tensors, reply.weight_version) == (0, "n")
    assert contents(harness) == [0] * 4


def test_requests_run_on_while_pieces_come_and_are_waited_for_before_the_commit(
    harness: SchedulerHarness,
) -> None:
    running = harness.generate(range(1, 9), max_new_tokens=30)
    harness.turn(3)
    call = harness.call(request_of(weight_version="7"))
    say(harness, FIRST)
    harness.turn(6)
    late = harness.generate(range(1, 9), max_new_tokens=4)
    harness.turn(40)
    assert harness.outputs[late].finish == FinishReason("length", length=4), "nothing holds it up yet"
    say(harness, SECOND, None)
    assert isinstance(answered(harness, call), UpdateWeightsReqOutput)
    assert harness.outputs[running].version_starts == [("default", 0)]
    assert harness.outputs[late].version_starts == [("default", 0)]


def test_under_live_requests_tokens_split_into_versions(harness: SchedulerHarness) -> None:
    rid = harness.generate(range(1, 9), max_new_tokens=100)
    harness.turn(3)
    say(harness, FIRST, SECOND, None)
    call = harness.call(request_of(weight_version="7", pause_mode=PauseMode.IN_PLACE, flush_cache=False))
    harness.turn(MANY_TURNS)
    assert isinstance(harness.replies[call], UpdateWeightsReqOutput)
    assert [version for version, _ in harness.outputs[rid].version_starts] == ["default", "7"]
    assert harness.outputs[rid].finish == FinishReason("length", length=100)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"zmq_handles": {}}, "no address for this device"),
        ({"selector": "draft"}, "one model"),
        ({"timeout_s": -1.0}, "timeout_s"),
        ({"session_id": "mine"}, "'mine' is not open"),
    ],
)
def test_a_request_that_cannot_be_is_refused_before_anything_is_heard(
    harness: SchedulerHarness, fields: dict[str, Any], message: str
) -> None:
    say(harness, FIRST)
    refused = refusal(harness, **fields)
    assert refused.status == 400
    assert message in refused.message
    assert answers(harness) == [[]] * len(harness.ranks)


def test_without_an_address_on_one_rank_all_are_refused() -> None:
    harness = SchedulerHarness(num_ranks=3)
    harness.ranks[1].weights.faults["open"] = EngineError("no device")
    assert "no device" in refusal(harness).message
    assert [rank.weights.sender.is_left for rank in harness.ranks] == [True, False, True]


def test_released_weights_take_none(harness: SchedulerHarness) -> None:
    tags = (MemoryTag.WEIGHTS,)
    call = harness.call(ReleaseMemoryOccupationReqInput(tags=tags))
    assert isinstance(answered(harness, call), ReleaseMemoryOccupationReqOutput)
    assert "resume" in refusal(harness).message


def test_a_piece_that_does_not_fit_is_answered_and_the_sender_may_say_why_it_ends(
    harness: SchedulerHarness,
) -> None:
    say(harness, FIRST, UNFIT)
    call = harness.call(request_of(weight_version="9"))
    harness.turn(MANY_TURNS)
    assert call not in harness.replies, "the sender is heard to its end"
    for first, second in answers(harness):
        assert first == ""
        assert "nope" in second
    say(harness, "told by the engine")
    reply = answered(harness, call)
    assert isinstance(reply, Refusal)
    assert (reply.status, reply.fields["num_errors"]) == (400, 1)
    assert reply.fields["errors"][0]["name"] == "nope"
    assert contents(harness) == [0] * 4
    assert harness.state is not None
    assert (harness.state.weight_version, harness.state.can_run) == ("default", True)
    answers(harness)
    assert update(harness, FIRST, SECOND, None).committed


@pytest.mark.parametrize("last_words", [("gone",), (SECOND, None, None), (None,)])
def test_a_piece_that_cannot_be_written_ends_the_same_way(
    harness: SchedulerHarness, last_words: tuple[Any, ...]
) -> None:
    harness.ranks[-1].weights.faults["write"] = EngineError("the copy failed")
    refused = refusal(harness, FIRST, *last_words)
    assert refused.status == 400
    assert "the old weights serve" in refused.message
    assert "the copy failed" in refused.message
    assert contents(harness) == [0] * 4
    for heard in answers(harness):
        assert "the copy failed" in heard[0]
    assert all_left(harness)


def test_a_sender_that_gives_up_ends_the_update(harness: SchedulerHarness) -> None:
    refused = refusal(harness, FIRST, "out of memory")
    assert refused.status == 400
    assert refused.message == "nothing of the update is served: the sender gave up: out of memory"
    assert contents(harness) == [0] * 4
    assert all_left(harness)
    assert update(harness, FIRST, None).num_tensors == 2


def test_a_sender_that_falls_silent_is_left_at_the_deadline(harness: SchedulerHarness) -> None:
    say(harness, FIRST)
    call = harness.call(request_of(timeout_s=5.0))
    behind = harness.call(UpdateWeightFromDiskReqInput(model_path="3"))
    harness.turn(MANY_TURNS)
    assert not harness.replies.keys() & {call, behind}
    harness.deliver(Expire(id=call))
    reply = answered(harness, call)
    assert isinstance(reply, Refusal)
    assert reply.status == 400
    assert "at its deadline, nothing of it is served" in reply.message
    assert all_left(harness)
    assert isinstance(harness.replies[behind], UpdateWeightsReqOutput), "it holds the next one up no more"
    assert contents(harness) == [3] * 4


def test_a_refused_sender_that_falls_silent_is_left_at_the_deadline_with_the_first_reason(
    harness: SchedulerHarness,
) -> None:
    say(harness, UNFIT)
    call = harness.call(request_of())
    harness.turn(MANY_TURNS)
    harness.deliver(Expire(id=call))
    reply = answered(harness, call)
    assert isinstance(reply, Refusal)
    assert "nope" in reply.message
    assert all_left(harness)


def test_one_at_a_time_and_the_sender_waits_for_its_turn(harness: SchedulerHarness) -> None:
    first = harness.call(request_of())
    harness.turn(3)
    second = harness.call(UpdateWeightFromDiskReqInput(model_path="3", manifest={"names": ["layer.0"]}))
    harness.turn(20)
    assert not harness.replies.keys() & {first, second}
    say(harness, FIRST, None)
    harness.turn(MANY_TURNS)
    assert list(harness.replies)[-2:] == [first, second]
    assert contents(harness) == [3, 7, 0, 0]


def test_releasing_the_weights_ends_it(harness: SchedulerHarness) -> None:
    say(harness, FIRST)
    call = harness.call(request_of())
    harness.turn(20)
    release = harness.call(ReleaseMemoryOccupationReqInput(tags=(MemoryTag.WEIGHTS,)))
    reply = answered(harness, call)
    assert isinstance(harness.replies[release], ReleaseMemoryOccupationReqOutput)
    assert isinstance(reply, Refusal)
    assert "released" in reply.message
    assert all_left(harness)


class TestSession:
    def begin(self, harness: SchedulerHarness) -> None:
        reply = answered(harness, harness.call(BeginWeightUpdateReqInput(session_id="mine")))
        assert isinstance(reply, WeightSessionReqOutput)

    def test_pieces_are_staged_until_the_end(self, harness: SchedulerHarness) -> None:
        self.begin(harness)
        reply = update(harness, FIRST, None, weight_version="7", session_id="mine")
        assert (reply.committed, reply.weight_version) == (False, "default")
        assert (reply.num_tensors, reply.message) == (2, "Staged 2 tensors.")
        reply = update(harness, (8, ["layer.2"]), None)
        assert (reply.num_tensors, reply.staged) == (1, True)
        assert reply.num_bytes == NullWeights.BYTES_PER_PARAMETER * len(harness.ranks)
        assert answers(harness) == [[""] * 4] * len(harness.ranks)
        assert contents(harness) == [0] * 4
        end = answered(harness, harness.call(EndWeightUpdateReqInput()))
        assert isinstance(end, UpdateWeightsReqOutput)
        assert (end.weight_version, end.num_tensors) == ("7", 3)
        assert contents(harness) == [7, 7, 8, 0]

    def test_one_that_was_given_up_can_be_brought_again(self, harness: SchedulerHarness) -> None:
        self.begin(harness)
        refusal(harness, FIRST, "gone")
        assert update(harness, FIRST, SECOND, None).num_tensors == 4
        # What it did not bring is not known by name.
        assert isinstance(answered(harness, harness.call(EndWeightUpdateReqInput())), Refusal)
        answered(harness, harness.call(EndWeightUpdateReqInput(allow_incomplete=True)))
        assert contents(harness) == [7] * 4

    def test_its_end_leaves_the_sender(self, harness: SchedulerHarness) -> None:
        self.begin(harness)
        say(harness, FIRST)
        call = harness.call(request_of())
        harness.turn(20)
        abort = harness.call(AbortWeightUpdateReqInput())
        reply = answered(harness, call)
        assert isinstance(harness.replies[abort], WeightSessionReqOutput)
        assert isinstance(reply, Refusal)
        assert "aborted by abort_weight_update" in reply.message
        assert all_left(harness)
        assert contents(harness) == [0] * 4


class TestWithoutRoomForACopy:
    @pytest.fixture
    def harness(self, harness: SchedulerHarness) -> SchedulerHarness:
        for rank in harness.ranks:
            rank.weights.num_staged = 0
        return harness

    def test_running_requests_end_before_the_first_piece_and_new_ones_wait(
        self, harness: SchedulerHarness
    ) -> None:
        running = harness.generate(range(1, 9), max_new_tokens=30)
        harness.turn(3)
        say(harness, FIRST)
        call = harness.call(request_of(weight_version="7"))
        harness.turn(MANY_TURNS)
        assert harness.outputs[running].finish == FinishReason("length", length=30)
        late = harness.generate(range(1, 9), max_new_tokens=4)
        harness.turn(20)
        assert harness.outputs[late].token_ids == []
        say(harness, SECOND, None)
        reply = answered(harness, call)
        assert isinstance(reply, UpdateWeightsReqOutput)
        assert reply.staged is False
        assert harness.outputs[late].version_starts == [("7", 0)]

    def test_a_sender_that_gives_up_half_way_leaves_no_mixture_serving(
        self, harness: SchedulerHarness
    ) -> None:
        refused = refusal(harness, FIRST, "gone")
        assert refused.status == 500
        assert "half-way" in refused.message
        assert harness.state is not None
        assert not harness.state.can_run
        assert update(harness, FIRST, SECOND, None).content == "valid"
        assert contents(harness) == [7] * 4

    def test_one_that_gives_up_at_once_changes_nothing(self, harness: SchedulerHarness) -> None:
        assert refusal(harness, "gone").status == 400
        assert harness.state is not None
        assert harness.state.can_run


class TestRanksThatDiffer:
    """Senders wait for each other: what is wrong on one rank must be answered on all."""

    @pytest.fixture
    def harness(self) -> SchedulerHarness:
        return SchedulerHarness(num_ranks=3)

    def test_one_unfit_piece_is_answered_on_all(self, harness: SchedulerHarness) -> None:
        for rank, said in zip(harness.ranks, (FIRST, UNFIT, FIRST), strict=True):
            rank.weights.sender.says.append(said)
        call = harness.call(request_of())
        harness.turn(MANY_TURNS)
        for [answer] in answers(harness):
            assert "rank 1: " in answer
            assert "nope" in answer
        say(harness, "some of us failed")
        reply = answered(harness, call)
        assert isinstance(reply, Refusal)
        assert "rank 1: " in reply.message
        assert contents(harness) == [0] * 4

    def test_other_tensors_on_one_rank_are_refused_on_all(self, harness: SchedulerHarness) -> None:
        for rank, said in zip(harness.ranks, (FIRST, SECOND, FIRST), strict=True):
            rank.weights.sender.says.append(said)
        refused = refusal(harness, "some of us failed")
        assert "every rank must be given the same tensors" in refused.message
        assert contents(harness) == [0] * 4

    def test_one_sender_that_is_done_early_is_told(self, harness: SchedulerHarness) -> None:
        for rank, said in zip(harness.ranks, (FIRST, None, FIRST), strict=True):
            rank.weights.sender.says.append(said)
        call = harness.call(request_of())
        harness.turn(MANY_TURNS)
        assert all("the end" in answer for [answer] in answers(harness))
        for rank in (harness.ranks[0], harness.ranks[2]):
            rank.weights.sender.says.append("some of us failed")
        reply = answered(harness, call)
        assert isinstance(reply, Refusal)
        assert contents(harness) == [0] * 4

    def test_a_slow_sender_is_waited_for(self, harness: SchedulerHarness) -> None:
        say(harness, FIRST, None)
        harness.ranks[2].weights.sender.says.clear()
        call = harness.call(request_of())
        harness.turn(MANY_TURNS)
        assert answers(harness) == [[]] * 3
        harness.ranks[2].weights.sender.says.extend([FIRST, None])
        assert isinstance(answered(harness, call), UpdateWeightsReqOutput)
        assert contents(harness) == [7, 7, 0, 0]
