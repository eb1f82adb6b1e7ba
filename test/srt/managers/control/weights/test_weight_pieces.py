"""Updates that senders bring piece by piece: wire_api section 4.5, on the real scheduler with null parts."""

from typing import Any

import pytest
from fixtures.control import Harness, updating

from ebbtide.srt.errors import EngineError
from ebbtide.srt.managers.io_struct import (
    AbortWeightUpdateReqInput,
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    FinishReason,
    Refusal,
    ReleaseMemoryOccupationReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsReqOutput,
)
from ebbtide.srt.memory_saver import MemoryTag
from ebbtide.testing import NullWeights

FIRST = (7, ["layer.0", "layer.1"])
SECOND = (7, ["layer.2", "layer.3"])
UNFIT = (9, ["layer.0", "nope"])
RELEASE = ReleaseMemoryOccupationReqInput(tags=(MemoryTag.WEIGHTS,))


class Senders(Harness):
    """A harness whose ranks have a sender each."""

    def say(self, *said: Any, rank: int | None = None) -> None:
        """What every rank's sender says, or that of one, as it is answered."""
        for each in self.ranks if rank is None else [self.ranks[rank]]:
            each.weights.sender.says.extend(said)

    def bring(self, **fields: Any) -> str:
        """Ask for an update, and let the senders be heard."""
        call = self.call(UpdateWeightsFromIPCReqInput(**{"zmq_handles": {"GPU-0": "ipc:///s"}, **fields}))
        self.turn(self.MANY_TURNS)
        return call

    def brought(self, *said: Any, **fields: Any) -> UpdateWeightsReqOutput:
        self.say(*said)
        return self.reply(self.bring(**fields))

    def bring_refused(self, *said: Any, **fields: Any) -> Refusal:
        """It must be refused, and no rank may hold on to its sender."""
        self.say(*said)
        refusal = self.refusal(self.bring(**fields))
        assert self.all_left
        return refusal

    @property
    def answers(self) -> list[list[str]]:
        """Those that each rank's sender has got since the last look."""
        heard = [list(rank.weights.sender.answers) for rank in self.ranks]
        for rank in self.ranks:
            rank.weights.sender.answers.clear()
        return heard

    @property
    def all_left(self) -> bool:
        return all(rank.weights.sender.is_left for rank in self.ranks)


@pytest.fixture(params=[1, 3], ids=["one rank", "three ranks"])
def harness(request: pytest.FixtureRequest) -> Senders:
    return Senders(num_ranks=request.param)


def test_all_pieces_serve_together_once_the_sender_has_said_that_it_is_done(harness: Senders) -> None:
    harness.say(FIRST, SECOND)
    call = harness.bring(weight_version="7")
    assert call not in harness.replies
    assert harness.values == [0] * 4
    assert harness.answers == [["", ""]] * len(harness.ranks)
    harness.say(None)
    reply = harness.reply(harness.settle(call))
    assert (reply.weight_version, reply.committed, reply.staged, reply.num_tensors) == ("7", True, True, 4)
    assert reply.num_bytes == 4 * NullWeights.BYTES_PER_PARAMETER * len(harness.ranks)
    assert harness.values == [7] * 4
    assert harness.answers == [[""]] * len(harness.ranks)
    assert harness.all_left
    assert harness.brought((8, ["layer.3"]), None).message == "Updated 1 tensors."
    assert harness.values == [7, 7, 7, 8]
    reply = harness.brought(None, weight_version="n")
    assert (reply.num_tensors, reply.weight_version) == (0, "n")
    assert harness.values == [7, 7, 7, 8]


def test_requests_run_on_while_pieces_come_and_are_waited_for_before_the_commit(harness: Senders) -> None:
    running = harness.begin_request(max_new_tokens=30)
    harness.say(FIRST)
    call = harness.call(UpdateWeightsFromIPCReqInput(zmq_handles={"a": "b"}, weight_version="7"))
    harness.turn(6)
    late = harness.begin_request(max_new_tokens=4, num_turns=40)
    assert harness.outputs[late].finish == FinishReason("length", length=4), "nothing holds it up yet"
    harness.say(SECOND, None)
    assert harness.reply(harness.settle(call)).committed
    assert harness.versions(running) == harness.versions(late) == ["default"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"zmq_handles": {}}, "no address for this device"),
        ({"session_id": "mine"}, "'mine' is not open"),
    ],
)
def test_a_request_that_cannot_be_is_refused_before_anything_is_heard(
    harness: Senders, fields: dict[str, Any], message: str
) -> None:
    harness.say(FIRST)
    refusal = harness.refusal(harness.bring(**fields))
    assert (refusal.status, message in refusal.message) == (400, True)
    assert harness.answers == [[]] * len(harness.ranks)


def test_without_an_address_on_one_rank_all_are_refused() -> None:
    harness = Senders(num_ranks=3)
    harness.ranks[1].weights.faults["open"] = EngineError("no device")
    assert "no device" in harness.refusal(harness.bring()).message
    assert [rank.weights.sender.is_left for rank in harness.ranks] == [True, False, True]


def test_a_piece_that_does_not_fit_is_answered_and_the_sender_may_say_why_it_ends(harness: Senders) -> None:
    harness.say(FIRST, UNFIT)
    call = harness.bring(weight_version="9")
    assert call not in harness.replies, "the sender is heard to its end"
    for first, second in harness.answers:
        assert (first, "nope" in second) == ("", True)
    harness.say("told by the engine")
    refusal = harness.refusal(harness.settle(call))
    assert (refusal.status, refusal.fields["num_errors"]) == (400, 1)
    assert refusal.fields["errors"][0]["name"] == "nope"
    assert (harness.values, harness.now.weight_version, harness.now.can_run) == ([0] * 4, "default", True)
    assert harness.brought(FIRST, SECOND, None).committed


@pytest.mark.parametrize("last_words", [("gone",), (SECOND, None, None)])
def test_a_piece_that_cannot_be_written_ends_the_same_way(
    harness: Senders, last_words: tuple[Any, ...]
) -> None:
    harness.ranks[-1].weights.faults["write"] = EngineError("the copy failed")
    refusal = harness.bring_refused(FIRST, *last_words)
    assert refusal.status == 400
    assert "the old weights serve" in refusal.message
    assert "the copy failed" in refusal.message
    assert harness.values == [0] * 4
    assert all("the copy failed" in heard[0] for heard in harness.answers)


def test_a_sender_that_gives_up_ends_the_update(harness: Senders) -> None:
    refusal = harness.bring_refused(FIRST, "out of memory")
    assert refusal.status == 400
    assert refusal.message == "nothing of the update is served: the sender gave up: out of memory"
    assert harness.values == [0] * 4
    assert harness.brought(FIRST, None).num_tensors == 2


@pytest.mark.parametrize(
    ("said", "reason"), [(FIRST, "at its deadline, nothing of it is served"), (UNFIT, "nope")]
)
def test_a_sender_that_falls_silent_is_left_at_the_deadline_with_the_first_reason(
    harness: Senders, said: Any, reason: str
) -> None:
    harness.say(said)
    call = harness.bring(timeout_s=5.0)
    behind, late = harness.call(updating(3)), harness.call(updating(4))
    harness.turn(harness.MANY_TURNS)
    assert not harness.replies.keys() & {call, behind}, "the sender of the first is waited for"
    harness.expire(late)
    assert harness.refusal(harness.settle(late)).message.endswith(
        "given up at its deadline: give a longer timeout_s"
    )
    harness.expire(call)
    refusal = harness.refusal(harness.settle(call))
    assert (refusal.status, reason in refusal.message) == (400, True)
    assert harness.all_left
    assert harness.reply(behind).committed, "it holds the next one up no more"
    assert harness.values == [3] * 4


@pytest.mark.parametrize("in_session", [False, True])
def test_a_release_or_the_end_of_its_session_leaves_the_sender(harness: Senders, in_session: bool) -> None:
    if in_session:
        harness.settle(harness.call(BeginWeightUpdateReqInput()))
    harness.say(FIRST)
    call = harness.bring()
    ended = harness.settle(harness.call(AbortWeightUpdateReqInput() if in_session else RELEASE))
    assert harness.reply(ended).changed
    reason = "aborted by abort_weight_update" if in_session else "released"
    assert reason in harness.refusal(call).message
    assert harness.all_left
    if in_session:
        assert harness.values == [0] * 4
    else:
        assert "resume" in harness.refusal(harness.bring()).message


class TestSession:
    @pytest.fixture
    def harness(self, harness: Senders) -> Senders:
        harness.settle(harness.call(BeginWeightUpdateReqInput(session_id="mine")))
        return harness

    def end(self, harness: Senders, **fields: Any) -> Any:
        return harness.replies[harness.settle(harness.call(EndWeightUpdateReqInput(**fields)))]

    def test_pieces_are_staged_until_the_end(self, harness: Senders) -> None:
        reply = harness.brought(FIRST, None, weight_version="7", session_id="mine")
        assert (reply.committed, reply.weight_version) == (False, "default")
        assert (reply.num_tensors, reply.message) == (2, "Staged 2 tensors.")
        reply = harness.brought((8, ["layer.2"]), None)
        assert (reply.num_tensors, reply.staged) == (1, True)
        assert reply.num_bytes == NullWeights.BYTES_PER_PARAMETER * len(harness.ranks)
        assert harness.answers == [[""] * 4] * len(harness.ranks)
        assert harness.values == [0] * 4
        end = self.end(harness)
        assert (end.weight_version, end.num_tensors) == ("7", 3)
        assert harness.values == [7, 7, 8, 0]


class TestWithoutRoomForACopy:
    @pytest.fixture
    def harness(self, harness: Senders) -> Senders:
        for rank in harness.ranks:
            rank.weights.num_staged = 0
        return harness

    def test_running_requests_end_before_the_first_piece_and_new_ones_wait(self, harness: Senders) -> None:
        running = harness.begin_request(max_new_tokens=30)
        harness.say(FIRST)
        call = harness.bring(weight_version="7")
        assert harness.outputs[running].finish == FinishReason("length", length=30)
        late = harness.begin_request(max_new_tokens=4, num_turns=20)
        assert harness.outputs[late].token_ids == []
        harness.say(SECOND, None)
        assert harness.reply(harness.settle(call)).staged is False
        assert harness.versions(late) == ["7"]

    def test_a_sender_that_gives_up_half_way_leaves_no_mixture_serving(self, harness: Senders) -> None:
        assert harness.bring_refused("gone").status == 400
        assert harness.now.can_run, "it had brought nothing yet"
        refusal = harness.bring_refused(FIRST, "gone")
        assert (refusal.status, "half-way" in refusal.message) == (500, True)
        assert not harness.now.can_run
        assert harness.brought(FIRST, SECOND, None).content == "valid"
        assert harness.values == [7] * 4


class TestRanksThatDiffer:
    """Senders wait for each other: what is wrong on one rank must be answered on all."""

    @pytest.fixture
    def harness(self) -> Senders:
        return Senders(num_ranks=3)

    @pytest.mark.parametrize(
        ("second", "answer", "reason"),
        [
            (UNFIT, "rank 1: ", "nope"),
            (SECOND, "", "every rank must be given the same tensors"),
            (None, "the end", ""),
        ],
        ids=["unfit", "other tensors", "done early"],
    )
    def test_what_one_brings_that_others_do_not_is_answered_on_all(
        self, harness: Senders, second: Any, answer: str, reason: str
    ) -> None:
        for rank, said in enumerate((FIRST, second, FIRST)):
            harness.say(said, rank=rank)
        call = harness.bring()
        assert all(answer in heard and reason in heard for [heard] in harness.answers)
        for rank in (0, 1, 2) if second is not None else (0, 2):
            harness.say("some of us failed", rank=rank)
        refusal = harness.refusal(harness.settle(call))
        assert answer in refusal.message
        assert reason in refusal.message
        assert harness.values == [0] * 4

    def test_a_slow_sender_is_waited_for(self, harness: Senders) -> None:
        for rank in (0, 1):
            harness.say(FIRST, None, rank=rank)
        call = harness.bring()
        assert harness.answers == [[]] * 3
        harness.say(FIRST, None, rank=2)
        assert harness.reply(harness.settle(call)).committed
        assert harness.values == [7, 7, 0, 0]
