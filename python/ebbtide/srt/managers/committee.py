"""Lets several members carry out one control request, all of them or none, whatever the timing.

The ranks of a replica vote on each phase of a request (`Ballot`). The replicas of an engine, and the engines
of a fleet, form a `Committee`: it proposes a request to its members, collects their votes, decides, and
undoes what only some of them have done.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from ebbtide.srt.managers.io_struct import (
    AnyControlRequest,
    AnyReply,
    ControlCall,
    ControlRequest,
    Outcome,
    Prepared,
    Refusal,
    Verdict,
)
from ebbtide.srt.managers.wire.control_request import Turn
from ebbtide.srt.managers.wire.merging import merge_replica_refusals


class Ballot:
    """The votes on one proposal.

    Attributes:
        awaited: voters that have not voted.
        facts, failures: the votes, by voter.
    """

    def __init__(self, voters: Iterable[int]) -> None:
        self.awaited = set(voters)
        self.facts: dict[int, Any] = {}
        self.failures: dict[int, Refusal] = {}
        self._is_ended = False

    def cast(self, voter: int, failure: Refusal | None, fact: Any = None, *, ends: bool = False) -> None:
        """Count a vote. `ends`: this failure settles the ballot without the other votes."""
        self.awaited.discard(voter)
        self._is_ended = self._is_ended or ends
        if failure is None:
            self.facts[voter] = fact
        else:
            self.failures[voter] = failure

    def leave(self, voter: int) -> None:
        """Leave this voter out, even if it has voted."""
        self.awaited.discard(voter)
        self.facts.pop(voter, None)

    @property
    def is_settled(self) -> bool:
        """Whether the outcome is certain."""
        return self._is_ended or not self.awaited


@dataclass(frozen=True)
class Closed:
    """The outcome of a proposal.

    Attributes:
        replies: of the members, except those that have left.
        refusal: the reply, if what some members did was undone; else None.
        is_committed: whether the verdict was to commit.
    """

    replies: Mapping[int, AnyReply]
    refusal: Refusal | None
    is_committed: bool


@dataclass(slots=True)
class _Proposal:
    """A control request that is being carried out; or a hold on a subject.

    Attributes:
        request: None: it is a hold.
        latest: the last call that settled the subject when this one was sent, which may be this one.
        awaited: members that have not answered.
        ballot: the votes on whether to commit; None: there is nothing to decide, or it is decided.
        votes_above: whether other engines commit it too, so that the verdict comes from outside.
        decided_s: when the verdict was sent, on the monotonic clock.
        refusal: the reply, while what some members did is being undone; else None.
    """

    request: AnyControlRequest | None
    subject: str | None
    turn: Turn
    latest: str | None = None
    awaited: set[int] = field(default_factory=set)
    ballot: Ballot | None = None
    votes_above: bool = False
    replies: dict[int, AnyReply] = field(default_factory=dict)
    decided_s: float = math.inf
    is_committed: bool = False
    refusal: Refusal | None = None


@dataclass(eq=False)
class Committee:
    """Lets all members carry out control requests, in the same order.

    Requests about a weight update session take turns, as `Turn` says, since members need different times to
    open or end one. A joint request is committed by all members or none: each says when it is prepared, and
    then gets the verdict. If some members refuse a pause, a resume, a session, a part of one, or a group, the
    others undo it.

    Args:
        broadcast: sends a call to all members.
        send: sends a verdict, or a call that undoes something, to one member.
        answer: called with the outcome of a call. If the verdict comes from outside, it is first called with
            `Prepared`, when all members are prepared.

    Attributes:
        members: their numbers.
        has_session: whether a weight update session is open, by member.
    """

    members: set[int]
    _broadcast: Callable[[ControlCall], None]
    _send: Callable[[int, ControlCall | Verdict], None]
    _answer: Callable[[str, Prepared | Closed], None]

    def __post_init__(self) -> None:
        self.has_session = dict.fromkeys(self.members, False)
        self._proposals: dict[str, _Proposal] = {}
        # By subject: calls that wait for their turn, and the last call that settles it.
        self._held: defaultdict[str, deque[tuple[Turn, Callable[[], None]]]] = defaultdict(deque)
        self._latest: dict[str, str] = {}

    # ------------------------------------------------------------------------------------------- membership

    def join(self, member: int) -> None:
        """Let a member take part in all calls from now on."""
        self.members.add(member)
        self.has_session[member] = False

    def leave(self, member: int) -> None:
        """Leave out a member that has died."""
        self.members.discard(member)
        self.has_session.pop(member, None)
        for call_id, call in list(self._proposals.items()):
            call.awaited.discard(member)
            call.replies.pop(member, None)
            if call.ballot is not None:
                call.ballot.leave(member)
                self._weigh(call_id, call)
            self._close_if_answered(call_id, call)

    def late(self, after_s: float) -> set[int]:
        """The members that have not answered within `after_s` seconds of a verdict."""
        limit_s = time.monotonic() - after_s
        return {one for call in self._proposals.values() if call.decided_s < limit_s for one in call.awaited}

    # ---------------------------------------------------------------------------------------------- propose

    def call(self, call: ControlCall) -> None:
        """Carry out a request when its turn comes."""
        subject, turn = call.request.subject, call.request.row.turn
        if subject is None or turn is Turn.AT_ONCE:
            self._propose(call)
        else:
            self._held[subject].append((turn, lambda: self._propose(call)))
            self._propose_held(subject)

    def hold(self, name: str, subject: str, begin: Callable[[], None]) -> None:
        """Call `begin` when no request about the subject is under way. None begins until `release`."""

        def take() -> None:
            self._proposals[name] = _Proposal(None, subject, Turn.ALONE)
            begin()

        self._held[subject].append((Turn.ALONE, take))
        self._propose_held(subject)

    def release(self, name: str) -> None:
        """End a hold."""
        held = self._proposals.pop(name)
        assert held.subject is not None
        self._propose_held(held.subject)

    def _propose_held(self, subject: str) -> None:
        """Begin the calls that need no longer wait, in order."""
        held = self._held[subject]
        while held:
            turns = {call.turn for call in self._proposals.values() if call.subject == subject}
            barred = {Turn.ALONE} if held[0][0] is Turn.SHARED else {Turn.ALONE, Turn.SHARED}
            if turns & barred:
                return
            _, begin = held.popleft()
            begin()

    def _propose(self, call: ControlCall) -> None:
        request, row, subject = call.request, call.request.row, call.request.subject
        if subject is not None and row.settles:
            self._latest[subject] = call.id
        proposal = self._proposals[call.id] = _Proposal(
            request,
            subject,
            row.turn,
            None if subject is None else self._latest.get(subject),
            set(self.members),
            Ballot(self.members) if row.is_joint else None,
            call.is_joint,
        )
        self._broadcast(msgspec.structs.replace(call, is_joint=row.is_joint))
        self._give_up_before(request)
        self._close_if_answered(call.id, proposal)

    def _give_up_before(self, request: ControlRequest) -> None:
        """Refuse to commit updates that this request ends: it might end them on some members only."""
        for call_id, call in self._proposals.items():
            if call.ballot is not None and call.request is not None and request.ends(call.request):
                self._decide(call_id, call, "nothing was committed: a request that ends it came in between")

    # ----------------------------------------------------------------------------------------- vote, decide

    def take(self, member: int, call_id: str, reply: AnyReply) -> None:
        """Take a member's reply: that it is prepared, or the final one."""
        call = self._proposals.get(call_id)
        if call is None or member not in call.awaited:
            return
        overdue = member if isinstance(reply, Prepared) and reply.is_overdue else None
        if not isinstance(reply, Prepared):
            call.awaited.discard(member)
            if call.refusal is None:
                call.replies[member] = reply
        if call.ballot is not None:
            failure = reply if isinstance(reply, Refusal) else None
            call.ballot.cast(member, failure, isinstance(reply, Prepared), ends=failure is not None)
            self._weigh(call_id, call, overdue)
        self._close_if_answered(call_id, call)

    def decide(self, call_id: str, refusal: str | None) -> None:
        """Take the verdict from outside, unless one was made already."""
        call = self._proposals.get(call_id)
        if call is not None and call.ballot is not None:
            self._decide(call_id, call, refusal)

    def _weigh(self, call_id: str, call: _Proposal, overdue: int | None = None) -> None:
        """Make the verdict when it is certain, or when the member `overdue` has waited too long for it."""
        ballot = call.ballot
        assert ballot is not None
        can_commit = set(ballot.facts.values())
        if ballot.failures:
            self._decide(call_id, call, "other replicas have refused this")
        elif len(can_commit) > 1:
            self._decide(call_id, call, "nothing was committed: a session was open on some replicas only")
        elif can_commit == {True} and ballot.is_settled:
            if call.votes_above:
                self._answer(call_id, Prepared(is_overdue=overdue is not None))
            else:
                self._decide(call_id, call, None)
        elif overdue is not None:
            late = f"replica {overdue} was ready, and was not told in time that all were"
            self._decide(call_id, call, f"nothing was committed: {late}")

    def _decide(self, call_id: str, call: _Proposal, refusal: str | None) -> None:
        call.ballot, call.decided_s, call.is_committed = None, time.monotonic(), refusal is None
        for member in sorted(call.awaited):
            self._send(member, Verdict(id=call_id, refusal=refusal))

    # ------------------------------------------------------------------------------------------------- undo

    def _close_if_answered(self, call_id: str, call: _Proposal) -> None:
        if call.awaited or call.request is None or call_id not in self._proposals:
            return
        if call.refusal is None and self._undo(call_id, call):
            return
        del self._proposals[call_id]
        self._answer(call_id, Closed(call.replies, call.refusal, call.is_committed))
        if call.subject is not None:
            self._propose_held(call.subject)

    def _undo(self, call_id: str, call: _Proposal) -> bool:
        """Undo what only some members did, if possible; returns whether the answer must wait for that."""
        refused = {member: reply for member, reply in call.replies.items() if isinstance(reply, Refusal)}
        if not refused or call.subject is None or self._latest.get(call.subject) != call.latest:
            # Nobody refused, or a later request about the same subject counts.
            return False
        assert call.request is not None
        undoing = call.request.undo(Outcome(call.replies, self.has_session))
        if not undoing:
            return False
        call.refusal = merge_replica_refusals(refused, len(call.replies))
        if call.request.row.undone:
            message = f"{call.refusal.message}. {call.request.row.undone}"
            call.refusal = msgspec.structs.replace(call.refusal, message=message)
        call.awaited = set(undoing)
        for member, request in undoing.items():
            self._send(member, ControlCall(id=call_id, request=cast("AnyControlRequest", request)))
            self._give_up_before(request)
        return True
