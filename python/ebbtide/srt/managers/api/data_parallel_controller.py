"""Several replicas as one engine: each generation goes to one of them, each control request to all.

It stands between the TokenizerManager and the channels, with the methods of both of their ends. What comes
back of a control request is one reply; what a replica reports of its state is passed on.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from ebbtide.srt.managers.api.ordered_inbox import OrderedInbox
from ebbtide.srt.managers.io_struct import (
    AbortGeneration,
    AnyControlRequest,
    AnyReply,
    ControlCall,
    ControlReply,
    Expire,
    LoadGrammar,
    ManagerInput,
    Prepared,
    Refusal,
    SchedulerInput,
    StateReport,
    TextOutput,
    TokenizedGenerateReqInput,
    TokenOutput,
    Verdict,
)
from ebbtide.srt.managers.wire.channel import AsyncReceiveEnd, SendEnd
from ebbtide.srt.managers.wire.control_request import ControlRequest, Outcome, Turn, dealt, num_entries
from ebbtide.srt.managers.wire.reply_merging import merge_replica_refusals, merge_replicas

SHORTEST_QUEUE: Final = "shortest_queue"
# A replica that has not done so long after a verdict what it says is given no more prompts.
LATE_S: Final = 10.0


@dataclass(slots=True)
class _Call:
    """A control request that is being carried out.

    Attributes:
        subject: what it is about; see `ControlRow`.
        latest: the call that had changed that last when this one was sent; maybe this one.
        awaited: the replicas that have not answered.
        is_open: whether replicas wait for a verdict, or will.
        prepared: the replicas that can commit.
        decided_s: when the verdict was sent, by the monotonic clock.
        refusal: the answer once it is decided, while what some replicas did is taken back.
        votes_above: other engines commit it too: the verdict comes from there.
    """

    request: AnyControlRequest
    subject: str | None
    latest: str | None
    awaited: set[int]
    is_open: bool
    prepared: set[int] = field(default_factory=set)
    replies: dict[int, AnyReply] = field(default_factory=dict)
    decided_s: float = math.inf
    refusal: Refusal | None = None
    votes_above: bool = False


class DataParallelController:
    """Deals generations out, and carries control requests out on every replica.

    Every replica gets the control requests in the same order. Those about a weight update session take turns,
    as `Turn` says: how soon a replica opens or ends one is its own affair. An update is committed by all of
    them or by none: each says when it is prepared, and is then sent the verdict. Where some refuse a pause, a
    resume, a session, a part of one, or a group that others took, those take it back. For the rest,
    `merge_replicas` says who has done what.

    Args:
        replicas: by dp_rank; closed with this. What is encoded already is sent as it is.
        inbox: where all replicas and the detokenizer answer; closed with this.
        tp_size: ranks of each replica.
        load_balance_method: `round_robin`, or `shortest_queue`: the replica with the fewest tokens, those of
            its requests' prompts and those that they may still generate.
    """

    def __init__(
        self,
        replicas: Sequence[SendEnd[SchedulerInput | msgspec.Raw]],
        inbox: AsyncReceiveEnd[ManagerInput],
        tp_size: int,
        load_balance_method: str,
    ) -> None:
        self._replicas = replicas
        self._inbox = OrderedInbox(inbox)
        self._tp_size = tp_size
        self._by_queue = load_balance_method == SHORTEST_QUEUE
        self._next = 0
        self._num_tokens = [0] * len(replicas)
        # Every output that has not ended, by rid: its replica, and the tokens that it counts for.
        self._placed: dict[str, tuple[int, int]] = {}
        self._calls: dict[str, _Call] = {}
        # Calls that wait for others about the same subject, by that.
        self._held: defaultdict[str, deque[ControlCall]] = defaultdict(deque)
        # The last call that was to change each subject.
        self._latest: dict[str, str] = {}
        self._has_session = [False] * len(replicas)
        self._can_run = [True] * len(replicas)
        self._encoder = msgspec.msgpack.Encoder()

    def place(self, outputs: Sequence[TokenizedGenerateReqInput]) -> list[TokenizedGenerateReqInput]:
        """The outputs of a request, each with a `dp_rank` for `send` to go by.

        Samples of one prompt, which follow each other, stay together: they share its KV.
        """
        placed: list[TokenizedGenerateReqInput] = []
        num_tokens = self._num_tokens.copy()
        prompt: list[int] | None = None
        dp_rank = 0
        for output in outputs:
            if output.dp_rank is not None:
                dp_rank = output.dp_rank
            elif output.input_ids is not prompt:
                dp_rank = self._choose(num_tokens)
            prompt = output.input_ids
            num_tokens[dp_rank] += _max_tokens(output)
            placed.append(msgspec.structs.replace(output, dp_rank=dp_rank))
        return placed

    def send(self, message: SchedulerInput) -> None:
        """Send a message to the replica that it concerns, or to all."""
        match message:
            case TokenizedGenerateReqInput():
                assert message.dp_rank is not None, "it has not been placed"
                self._num_tokens[message.dp_rank] += _max_tokens(message)
                self._placed[message.rid] = message.dp_rank, _max_tokens(message)
                self._replicas[message.dp_rank].send(message)
            case AbortGeneration():
                if message.rid in self._placed:
                    self._replicas[self._placed[message.rid][0]].send(message)
            case LoadGrammar():
                for replica in self._replicas:
                    replica.send(message)
            case ControlCall():
                self._call_in_turn(message)
            case Verdict():
                known = self._calls.get(message.id)
                if known is not None and known.is_open:
                    self._decide(message.id, known, message.refusal)
            case Expire():
                raise AssertionError("deadlines are the schedulers' own")

    async def receive_async(self) -> list[ManagerInput]:
        """What there is for the manager, after waiting for it. Cancelling it loses nothing."""
        messages: list[ManagerInput] = []
        while not messages:
            for message in await self._inbox.receive_async():
                match message:
                    case ControlReply():
                        messages += self._collect(message)
                    case StateReport():
                        self._has_session[message.dp_rank] = message.session is not None
                        self._can_run[message.dp_rank] = message.can_run
                        messages.append(message)
                    case TextOutput() | TokenOutput():
                        self._note_ended(message)
                        messages.append(message)
        return messages

    def close(self) -> None:
        """Close the channels. Idempotent."""
        for replica in self._replicas:
            replica.close()
        self._inbox.close()

    def _choose(self, num_tokens: Sequence[int]) -> int:
        """The replica for the next prompt. Equal queues take turns too.

        As long as others serve, it is none that cannot run, or that has not done yet what all commit.
        """
        num_replicas = len(self._replicas)
        in_turn = [(self._next + step) % num_replicas for step in range(num_replicas)]
        limit_s = time.monotonic() - LATE_S
        late = {rank for call in self._calls.values() if call.decided_s < limit_s for rank in call.awaited}
        in_turn = [rank for rank in in_turn if self._can_run[rank] and rank not in late] or in_turn
        chosen = min(in_turn, key=num_tokens.__getitem__) if self._by_queue else in_turn[0]
        self._next = (chosen + 1) % num_replicas
        return chosen

    def _note_ended(self, message: TextOutput | TokenOutput) -> None:
        for output in message.outputs:
            if output.finish is not None and output.rid in self._placed:
                dp_rank, num_tokens = self._placed.pop(output.rid)
                self._num_tokens[dp_rank] -= num_tokens

    # ------------------------------------------------------------------------------------ control requests

    def _call_in_turn(self, call: ControlCall) -> None:
        subject = call.request.subject
        if subject is None or call.request.row.turn is Turn.AT_ONCE:
            self._call(call)
        else:
            self._held[subject].append(call)
            self._call_held(subject)

    def _call_held(self, subject: str) -> None:
        """Send on what need not wait any more, in order."""
        held = self._held[subject]
        while held:
            turns = {call.request.row.turn for call in self._calls.values() if call.subject == subject}
            barred = {Turn.ALONE} if held[0].request.row.turn is Turn.SHARED else {Turn.ALONE, Turn.SHARED}
            if turns & barred:
                return
            self._call(held.popleft())

    def _call(self, call: ControlCall) -> None:
        request, row = call.request, call.request.row
        subject = request.subject
        if subject is not None and row.settles:
            self._latest[subject] = call.id
        latest = None if subject is None else self._latest.get(subject)
        everyone = set(range(len(self._replicas)))
        self._calls[call.id] = _Call(
            request, subject, latest, everyone, is_open=row.is_joint, votes_above=call.is_joint
        )
        call = msgspec.structs.replace(call, is_joint=row.is_joint)
        if num_entries(request) == len(self._replicas) * self._tp_size:
            self._deal(call)
        else:
            # It is encoded once: payloads of weights may be long.
            encoded = msgspec.Raw(self._encoder.encode(call))
            for replica in self._replicas:
                replica.send(encoded)
        self._give_up_before(request)

    def _deal(self, call: ControlCall) -> None:
        """There is an entry for every rank of every replica: send each replica those of its own ranks."""
        for dp_rank, replica in enumerate(self._replicas):
            own = range(dp_rank * self._tp_size, (dp_rank + 1) * self._tp_size)
            replica.send(msgspec.structs.replace(call, request=dealt(call.request, own)))

    def _give_up_before(self, request: ControlRequest) -> None:
        """Commit no more what this request ends: it may do so on some replicas, and fail on others."""
        for call_id, call in self._calls.items():
            if call.is_open and request.ends(call.request):
                self._decide(call_id, call, "nothing was committed: a request that ends it came in between")

    def _collect(self, message: ControlReply) -> list[ManagerInput]:
        """Take a replica's reply; returns the one reply when all are there."""
        call = self._calls[message.id]
        is_overdue = False
        if isinstance(message.reply, Prepared):
            call.prepared.add(message.dp_rank)
            is_overdue = message.reply.is_overdue
        else:
            call.awaited.discard(message.dp_rank)
            if call.refusal is None:
                call.replies[message.dp_rank] = message.reply
        if call.is_open and self._weigh(message.id, call):
            return [ControlReply(id=message.id, reply=Prepared(is_overdue=is_overdue))]
        if call.is_open and is_overdue:
            own = f"replica {message.dp_rank} was ready, and was not told in time that all were"
            self._decide(message.id, call, f"nothing was committed: {own}")
        if call.awaited:
            return []
        if call.refusal is None and self._take_back(message.id, call):
            return []
        del self._calls[message.id]
        if call.subject is not None:
            self._call_held(call.subject)
        if call.refusal is not None:
            return [ControlReply(id=message.id, reply=call.refusal)]
        replies = [call.replies[dp_rank] for dp_rank in range(len(self._replicas))]
        return [ControlReply(id=message.id, reply=merge_replicas(replies))]

    def _weigh(self, call_id: str, call: _Call) -> bool:
        """Make the verdict as soon as it can only be this one; returns whether it is made elsewhere."""
        if any(isinstance(reply, Refusal) for reply in call.replies.values()):
            self._decide(call_id, call, "other replicas have refused this")
        elif call.prepared and call.replies:
            self._decide(call_id, call, "nothing was committed: a session was open on some replicas only")
        elif len(call.prepared) == len(self._replicas):
            if call.votes_above:
                return True
            self._decide(call_id, call, None)
        return False

    def _decide(self, call_id: str, call: _Call, refusal: str | None) -> None:
        call.is_open, call.decided_s = False, time.monotonic()
        for dp_rank in sorted(call.awaited):
            self._replicas[dp_rank].send(Verdict(id=call_id, refusal=refusal))

    def _take_back(self, call_id: str, call: _Call) -> bool:
        """Undo what only some replicas did, if that can be undone; returns whether the reply waits for it."""
        refused = {rank: reply for rank, reply in call.replies.items() if isinstance(reply, Refusal)}
        if not refused or call.subject is None or self._latest.get(call.subject) != call.latest:
            # All is well, or what came later about the same thing has the last word.
            return False
        undoing = call.request.undo(Outcome(call.replies, self._has_session))
        if not undoing:
            return False
        refusal = merge_replica_refusals(refused, len(self._replicas))
        if call.request.row.undone:
            message = f"{refusal.message}. {call.request.row.undone}"
            refusal = msgspec.structs.replace(refusal, message=message)
        call.refusal = refusal
        call.awaited = set(undoing)
        for dp_rank, request in undoing.items():
            self._replicas[dp_rank].send(ControlCall(id=call_id, request=request))
            self._give_up_before(request)
        return True


def _max_tokens(output: TokenizedGenerateReqInput) -> int:
    return len(output.input_ids) + output.max_new_tokens
