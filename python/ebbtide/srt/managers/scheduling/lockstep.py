"""The scheduler's inbox: messages in, replies and state out, deadlines turned into messages.

If a replica has several ranks, messages alone keep them in lockstep. The leader (rank 0) receives from the
API process, and sends every follower the messages of each of its turns as one `Tick`. So no rank waits in a
collective for a rank that may never get there. Source: architecture, "Processes and messages".
"""

from __future__ import annotations

import enum
import heapq
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from ebbtide.srt.config import EngineConfig
from ebbtide.srt.managers.committee import Ballot
from ebbtide.srt.managers.control import OutOfStep
from ebbtide.srt.managers.control.pace import Ranks
from ebbtide.srt.managers.control.phases import ManyRanks
from ebbtide.srt.managers.io_struct import (
    AnyControlRequest,
    AnyReply,
    ControlCall,
    ControlReply,
    DetokenizerInput,
    Expire,
    ManagerInput,
    Prepared,
    RankMessage,
    RankReply,
    RankReport,
    RankUpdate,
    RankVote,
    Refusal,
    SchedulerInput,
    StateReport,
    Tick,
    TurnInput,
)
from ebbtide.srt.managers.wire.channel import ChannelAddresses, ReceiveEnd, Receiver, SendEnd, Sender
from ebbtide.srt.managers.wire.control_request import dealt, num_entries
from ebbtide.srt.managers.wire.merging import merge_ranks, merge_refusals
from ebbtide.srt.managers.wire.message import Decision

# How much longer than the request's own deadline the answers of all ranks may take.
ANSWER_GRACE_S: Final = 2.0
# The shortest time between two requests that the leader makes by itself.
PROPOSAL_INTERVAL_S: Final = 0.25
PROPOSAL: Final = "proposal-"


class Demand(enum.Enum):
    """What a loop would do if no message came."""

    TURN = enum.auto()  # another turn, all ranks together
    WORK = enum.auto()  # this rank's own part of a phase
    NOTHING = enum.auto()


class Alarms:
    """Points in time, each with the name of what it is for."""

    def __init__(self) -> None:
        self._at: list[tuple[float, str]] = []

    def set(self, what: str, after_s: float) -> None:
        heapq.heappush(self._at, (time.monotonic() + after_s, what))

    def is_set(self, what: str) -> bool:
        """Whether an alarm of this name is still to come."""
        return any(other == what for _, other in self._at)

    @property
    def left_s(self) -> float | None:
        """Seconds until the next one, at least 0; None if there is none."""
        return max(0.0, self._at[0][0] - time.monotonic()) if self._at else None

    def take_due(self) -> list[str]:
        """Remove the alarms whose time has come; returns their names."""
        due: list[str] = []
        now = time.monotonic() if self._at else 0.0
        while self._at and self._at[0][0] <= now:
            due.append(heapq.heappop(self._at)[1])
        return due


class RankInbox(ABC):
    """Where one rank's loop receives messages and sends its answers.

    Deadlines are kept here and not in the control plane: its state machines read no clock, and learn of time
    by an `Expire` message.

    Args:
        ranks: how this rank works together with the others of its replica.
        tp_rank, dp_rank: of the rank that reads this inbox.
    """

    def __init__(self, ranks: Ranks, tp_rank: int, dp_rank: int) -> None:
        self.ranks = ranks
        self.tp_rank = tp_rank
        self.dp_rank = dp_rank
        self._deadlines = Alarms()
        # When to end a sleep to look at something that sends the loop no message.
        self._looks = Alarms()

    @abstractmethod
    def receive(self, demand: Demand) -> Sequence[TurnInput] | None:
        """The messages of the next turn; None: no turn, the rank does its own work only.

        Sleeps until there is a message or a deadline, unless `demand` says that there is work.
        """

    @abstractmethod
    def reply(self, call_id: str, reply: AnyReply) -> None:
        """Reply to a control request. The next `answer` sends the reply."""

    @abstractmethod
    def answer(self, report: StateReport, num_aborts: int) -> None:
        """Send the state if it has changed, then the replies, so that a reply never comes before its effect.

        Args:
            num_aborts: see `ControlReply.aborts_before`.
        """

    @property
    def awaits_replies(self) -> bool:
        """Whether this rank is the leader, and waits for followers' replies to a call that it has replied to.

        A call that it answers in the turn that brings it does not count: there may be one in every turn.
        """
        return False

    def set_deadline(self, call_id: str, timeout_s: float) -> None:
        """Send this loop an `Expire` of this id after `timeout_s` seconds."""
        self._deadlines.set(call_id, timeout_s)

    def wake(self, waits_s: Iterator[float]) -> None:
        """End a sleep of this loop after `next(waits_s)` seconds, unless it ends sooner."""
        if self._looks.left_s is None:
            self._looks.set("look", next(waits_s))

    def _wait_s(self, demand: Demand, *others: Alarms) -> float | None:
        """How long to sleep at most; None: until there is a message."""
        if demand is not Demand.NOTHING:
            return 0.0
        left = [alarms.left_s for alarms in (self._looks, self._deadlines, *others)]
        return min((left_s for left_s in left if left_s is not None), default=None)

    def _expired(self) -> list[Expire]:
        """The deadlines that have come, at the end of a sleep."""
        self._looks.take_due()
        return [Expire(id=call_id) for call_id in self._deadlines.take_due()]


@dataclass(eq=False)
class _Tally:
    """The votes on the leader's phases. The leader is first to start a phase: no vote precedes `open`."""

    _num_ranks: int
    _num_opened: int = field(default=0, init=False)
    _ballots: dict[int, Ballot] = field(default_factory=dict, init=False)
    _decisions: list[Decision] = field(default_factory=list, init=False)

    def open(self, phase: int) -> None:
        self._num_opened = phase + 1
        self._ballots[phase] = Ballot(range(self._num_ranks))

    def cast(self, phase: int, failure: Refusal | None, fact: Any, *, ends: bool) -> None:
        """The leader's own vote."""
        self.count(RankVote(tp_rank=0, phase=phase, failure=failure, fact=fact, ends=ends))

    def close(self, phase: int) -> None:
        self._ballots.pop(phase, None)

    def count(self, vote: RankVote) -> None:
        """Count a vote, unless its phase has ended. Raises OutOfStep: the leader has no such phase."""
        if vote.phase >= self._num_opened:
            raise OutOfStep(f"rank 0 ends: rank {vote.tp_rank} does what rank 0 has given up: see its errors")
        ballot = self._ballots.get(vote.phase)
        if ballot is not None:
            ballot.cast(vote.tp_rank, vote.failure, vote.fact, ends=vote.ends)
            if ballot.is_settled:
                self._decide(vote.phase, ballot)

    @property
    def has_decided(self) -> bool:
        return bool(self._decisions)

    def take(self) -> list[Decision]:
        decisions, self._decisions = self._decisions, []
        return decisions

    def _decide(self, phase: int, ballot: Ballot) -> None:
        if ballot.failures:
            failures = dict(sorted(ballot.failures.items()))
            decision = Decision(phase=phase, failure=merge_refusals(failures, self._num_ranks))
        else:
            decision = Decision(phase=phase, facts=[ballot.facts[rank] for rank in range(self._num_ranks)])
        self._decisions.append(decision)
        self.close(phase)


class LeaderInbox(RankInbox):
    """The inbox of rank 0, which answers for all ranks of the replica.

    Args:
        messages: from the API process and from the followers.
        manager: to the API process.
        ticks: to the followers, by tp_rank from 1 on; empty if there is one rank.
    """

    def __init__(
        self,
        messages: ReceiveEnd[SchedulerInput | RankMessage],
        manager: SendEnd[ManagerInput],
        ticks: Sequence[SendEnd[Tick]] = (),
        dp_rank: int = 0,
    ) -> None:
        self._num_ranks = len(ticks) + 1
        self._tally = _Tally(self._num_ranks)
        super().__init__(ManyRanks(self._tally, self._propose) if ticks else Ranks(), 0, dp_rank)
        self._messages = messages
        self._manager = manager
        self._followers = ticks
        self._answer_limits = Alarms()
        self._replies: dict[str, dict[int, AnyReply]] = {}
        # The calls of this turn; and the earlier calls that the leader has replied to and followers have not.
        self._new_calls: Collection[str] = ()
        self._awaited: set[str] = set()
        self._follower_reports: dict[int, RankReport] = {}
        self._report: StateReport | None = None
        self._num_aborts = 0
        self._reported: StateReport | None = None
        self._num_proposals = 0
        self._proposed: list[ControlCall] = []
        self._next_proposal_at = 0.0

    @property
    def is_due(self) -> bool:
        """Whether there is a request or a decision of the leader's own for the next turn."""
        return bool(self._proposed) or self._tally.has_decided

    @property
    def awaits_replies(self) -> bool:
        return bool(self._awaited)

    def receive(self, demand: Demand) -> list[TurnInput] | None:
        wait_s = self._wait_s(demand, self._answer_limits)
        if self.is_due:
            wait_s = 0.0
        turn: list[TurnInput] = [*self._proposed]
        self._proposed = []
        for message in self._messages.receive(wait_s):
            match message:
                case RankVote():
                    self._tally.count(message)
                case RankReply():
                    self._collect(message.id, message.tp_rank, message.reply)
                case RankUpdate():
                    self._follower_reports[message.report.tp_rank] = message.report
                case _:
                    turn.append(message)
        turn += self._expired()
        turn += self._tally.take()
        calls: dict[str, dict[int, AnyReply]] = {
            message.id: {} for message in turn if isinstance(message, ControlCall)
        }
        self._replies |= calls
        self._new_calls = calls.keys()
        if not self._followers:
            return turn
        self._send_answers()
        if not turn and demand is not Demand.TURN:
            return None
        for tp_rank, end in enumerate(self._followers, start=1):
            end.send(Tick(messages=[self._share(message, tp_rank) for message in turn]))
        return turn

    def reply(self, call_id: str, reply: AnyReply) -> None:
        self._collect(call_id, self.tp_rank, reply)

    def answer(self, report: StateReport, num_aborts: int) -> None:
        self._report = report
        self._num_aborts = num_aborts
        self._send_answers()

    def set_deadline(self, call_id: str, timeout_s: float) -> None:
        super().set_deadline(call_id, timeout_s)
        if self._followers:
            self._answer_limits.set(call_id, timeout_s + ANSWER_GRACE_S)

    def _share(self, message: TurnInput, tp_rank: int) -> TurnInput:
        """The message as a follower needs it: a payload with one entry per rank is cut to its own entry."""
        if not isinstance(message, ControlCall):
            return message
        count = num_entries(message.request)
        if count is None or count % self._num_ranks:
            return message  # One entry for all ranks, or a number of entries that every rank refuses.
        own = tp_rank if count == self._num_ranks else self.dp_rank * self._num_ranks + tp_rank
        return msgspec.structs.replace(message, request=dealt(message.request, (own,)))

    def _propose(self, request: AnyControlRequest) -> None:
        now = time.monotonic()
        if now >= self._next_proposal_at:
            self._next_proposal_at = now + PROPOSAL_INTERVAL_S
            self._num_proposals += 1
            self._proposed.append(ControlCall(id=f"{PROPOSAL}{self._num_proposals}", request=request))

    def _collect(self, call_id: str, tp_rank: int, reply: AnyReply) -> None:
        if isinstance(reply, Prepared):
            self._send(call_id, reply)
        # An unknown call was answered at its time limit already.
        elif (replies := self._replies.get(call_id)) is not None:
            if tp_rank != self.tp_rank and self.tp_rank not in replies:
                raise OutOfStep(f"rank 0 ends: rank {tp_rank} has given up what rank 0 does: {reply.message}")
            replies[tp_rank] = reply
            if tp_rank == self.tp_rank and call_id not in self._new_calls:
                self._awaited.add(call_id)

    def _send_answers(self) -> None:
        """Send the state once every rank has reported, and the merged replies that are complete."""
        if self._report is None or len(self._follower_reports) < self._num_ranks - 1:
            return
        followers = [self._follower_reports[rank] for rank in range(1, self._num_ranks)]
        report = msgspec.structs.replace(self._report, ranks=[*self._report.ranks, *followers])
        if report != self._reported:
            self._reported = report
            self._manager.send(report)
        whole = [call_id for call_id, replies in self._replies.items() if len(replies) == self._num_ranks]
        for call_id in whole:
            first, *others = (reply for _, reply in sorted(self._replies.pop(call_id).items()))
            reply = merge_ranks([first, *others]) if others else first
            if isinstance(reply, Refusal) and not all(isinstance(one, Refusal) for one in (first, *others)):
                raise OutOfStep(f"rank 0 ends: some ranks have given up what others did: {reply.message}")
            self._send(call_id, reply)
        for call_id in self._answer_limits.take_due():
            if call_id in self._replies and not self._answer_limits.is_set(call_id):
                self._send(call_id, self._unanswered(self._replies.pop(call_id)))

    def _send(self, call_id: str, reply: AnyReply) -> None:
        self._awaited.discard(call_id)
        if not call_id.startswith(PROPOSAL):
            self._manager.send(
                ControlReply(dp_rank=self.dp_rank, id=call_id, reply=reply, aborts_before=self._num_aborts)
            )

    def _unanswered(self, replies: dict[int, AnyReply]) -> Refusal:
        missing = ", ".join(f"rank {rank}" for rank in range(self._num_ranks) if rank not in replies)
        return Refusal(
            status=500,
            message=f"{missing}: no answer within {ANSWER_GRACE_S:g} s of the request's deadline; what has "
            "been done of it there will show when the rank turns again",
        )


@dataclass(eq=False)
class _SentVotes:
    """Sends a follower's votes to the leader."""

    _leader: SendEnd[RankMessage]
    _tp_rank: int

    def open(self, phase: int) -> None: ...
    def close(self, phase: int) -> None: ...

    def cast(self, phase: int, failure: Refusal | None, fact: Any, *, ends: bool) -> None:
        vote = RankVote(tp_rank=self._tp_rank, phase=phase, failure=failure, fact=fact, ends=ends)
        self._leader.send(vote)


class FollowerInbox(RankInbox):
    """The inbox of every other rank: the leader alone sends to it, and gets its answers."""

    def __init__(
        self, ticks: ReceiveEnd[Tick], leader: SendEnd[RankMessage], tp_rank: int, dp_rank: int = 0
    ) -> None:
        # The leader proposes the same in the same turn, so a follower need not.
        votes = _SentVotes(leader, tp_rank)
        super().__init__(ManyRanks(votes, propose=lambda request: None), tp_rank, dp_rank)
        self._messages = ticks
        self._leader = leader
        self._ticks: deque[Tick] = deque()
        self._replies: list[RankReply] = []
        self._reported: RankReport | None = None

    def receive(self, demand: Demand) -> list[TurnInput] | None:
        if not self._ticks:
            # The leader has work too, so its tick is on the way.
            wait_s = None if demand is Demand.TURN else self._wait_s(demand)
            self._ticks.extend(self._messages.receive(wait_s))
            self._looks.take_due()
        return self._ticks.popleft().messages if self._ticks else None

    def reply(self, call_id: str, reply: AnyReply) -> None:
        # All ranks are prepared in the same turn, so the leader's word is enough.
        if not isinstance(reply, Prepared):
            self._replies.append(RankReply(tp_rank=self.tp_rank, id=call_id, reply=reply))

    def answer(self, report: StateReport, num_aborts: int) -> None:
        own = report.ranks[0]
        if own != self._reported:
            self._reported = own
            self._leader.send(RankUpdate(report=own))
        for reply in self._replies:
            self._leader.send(reply)
        self._replies.clear()

    def set_deadline(self, call_id: str, timeout_s: float) -> None:
        """Do nothing: the leader keeps the time."""


class NoOutputs:
    """Drops what followers generate: the leader sends the same."""

    def send(self, message: object) -> None: ...
    def close(self) -> None: ...


class LeaderReceiver(Receiver[SchedulerInput | RankMessage]):
    """One queue for the API process and the followers, so that a message of either ends a sleep."""

    def __init__(self, addresses: ChannelAddresses) -> None:
        super().__init__(addresses.scheduler, SchedulerInput | RankMessage)
        if addresses.ranks:
            self._socket.bind(addresses.ranks)


def open_rank_channels(
    config: EngineConfig, addresses: ChannelAddresses
) -> tuple[RankInbox, SendEnd[DetokenizerInput]]:
    """The inbox of the rank that `config.parallel` names, and where its outputs go."""
    parallel = config.parallel
    if parallel.tp_rank > 0:
        ticks: Receiver[Tick] = Receiver(addresses.ticks[parallel.tp_rank], Tick)
        leader: Sender[RankMessage] = Sender(addresses.ranks)
        return FollowerInbox(ticks, leader, parallel.tp_rank, parallel.dp_rank), NoOutputs()
    manager: Sender[ManagerInput] = Sender(addresses.manager)
    outputs: Sender[DetokenizerInput] = Sender(
        addresses.manager if config.server_args.skip_tokenizer_init else addresses.detokenizer
    )
    followers: list[Sender[Tick]] = [Sender(address) for address in addresses.ticks[1 : parallel.tp_size]]
    return LeaderInbox(LeaderReceiver(addresses), manager, followers, parallel.dp_rank), outputs
