"""A committee whose members die and join while they vote: it waits for nobody who is gone."""

import pytest
from fixtures.scripted_engine import updated

from ebbtide.srt.managers.committee import Closed, Committee
from ebbtide.srt.managers.io_struct import (
    AnyControlRequest,
    BeginWeightUpdateReqInput,
    ControlCall,
    PingReqInput,
    PingReqOutput,
    Prepared,
    Refusal,
    UpdateWeightFromDiskReqInput,
    Verdict,
    WeightSessionReqOutput,
)

UPDATE = UpdateWeightFromDiskReqInput(model_path="folder")


class Scripted:
    """A committee of three, what it has proposed, the verdicts that each was sent, and what came of it."""

    def __init__(self) -> None:
        self.proposed: list[str] = []
        self.verdicts: dict[int, list[str | None]] = {0: [], 1: [], 2: []}
        self.closed: dict[str, Closed] = {}
        self.committee = Committee({0, 1, 2}, self._broadcast, self._send, self._answer)

    def call(self, call_id: str, request: AnyControlRequest = UPDATE) -> None:
        self.committee.call(ControlCall(id=call_id, request=request))

    def _broadcast(self, call: ControlCall) -> None:
        self.proposed.append(call.id)

    def _send(self, member: int, message: ControlCall | Verdict) -> None:
        assert isinstance(message, Verdict)
        self.verdicts[member].append(message.refusal)

    def _answer(self, call_id: str, answer: Prepared | Closed) -> None:
        assert isinstance(answer, Closed)
        self.closed[call_id] = answer


@pytest.fixture
def scripted() -> Scripted:
    return Scripted()


def test_one_that_dies_before_it_has_voted_holds_up_nobody(scripted: Scripted) -> None:
    committee = scripted.committee
    scripted.call("a")
    committee.take(0, "a", Prepared())
    committee.take(1, "a", Prepared())
    assert scripted.verdicts[0] == []
    committee.leave(2)
    assert scripted.verdicts == {0: [None], 1: [None], 2: []}
    committee.take(0, "a", updated("1"))
    committee.leave(1)
    assert list(scripted.closed["a"].replies) == [0]
    assert scripted.closed["a"].is_committed


def test_the_refusal_of_one_that_dies_then_has_been_counted(scripted: Scripted) -> None:
    committee = scripted.committee
    scripted.call("a")
    committee.take(0, "a", Prepared())
    committee.take(2, "a", Refusal(status=400, message="no"))
    committee.leave(2)
    assert scripted.verdicts == {0: ["other replicas have refused this"], 1: scripted.verdicts[0], 2: []}


def test_one_that_refuses_after_it_was_prepared_is_not_outvoted(scripted: Scripted) -> None:
    committee = scripted.committee
    scripted.call("a")
    committee.take(0, "a", Prepared())
    committee.take(0, "a", Refusal(status=409, message="its time was up"))
    committee.take(1, "a", Prepared())
    committee.take(2, "a", Prepared())
    assert scripted.verdicts[1] == scripted.verdicts[2] == ["other replicas have refused this"]


def test_whoever_joins_takes_part_from_the_next_call_on(scripted: Scripted) -> None:
    committee = scripted.committee
    committee.leave(2)
    scripted.call("a", PingReqInput())
    committee.join(2)
    scripted.call("b", PingReqInput())
    for call_id in ("a", "b"):
        for member in range(2):
            committee.take(member, call_id, PingReqOutput())
    assert list(scripted.closed) == ["a"]
    committee.take(2, "b", PingReqOutput())
    assert list(scripted.closed) == ["a", "b"]


def test_a_call_without_members_is_closed_at_once(scripted: Scripted) -> None:
    for member in range(3):
        scripted.committee.leave(member)
    scripted.call("a")
    assert scripted.closed["a"].replies == {}


def test_while_somebody_holds_a_subject_what_is_about_it_waits(scripted: Scripted) -> None:
    committee = scripted.committee
    begun: list[str] = []
    scripted.call("begin", BeginWeightUpdateReqInput())
    committee.hold("holder", "session", lambda: begun.append("holder"))
    scripted.call("update")
    scripted.call("ping", PingReqInput())
    assert (scripted.proposed, begun) == (["begin", "ping"], [])
    for member in range(3):
        committee.take(member, "begin", WeightSessionReqOutput(changed=True))
    assert (scripted.proposed, begun) == (["begin", "ping"], ["holder"])
    committee.release("holder")
    assert scripted.proposed == ["begin", "ping", "update"]
