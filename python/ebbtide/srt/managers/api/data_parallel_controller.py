"""Several replicas as one engine: each generation goes to one of them, each control request to all.

It stands between the TokenizerManager and the channels, with the methods of both of their ends. What comes
back of a control request is one reply; what a replica reports of its state is passed on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from ebbtide.srt.managers.io_struct import (
    AbortGeneration,
    AbortWeightUpdateReqInput,
    AnyControlRequest,
    AnyReply,
    BeginWeightUpdateReqInput,
    ContinueGenerationReqInput,
    ControlCall,
    ControlReply,
    DestroyWeightsUpdateGroupReqInput,
    EndWeightUpdateReqInput,
    Expire,
    InitWeightsUpdateGroupReqInput,
    ManagerInput,
    PauseGenerationReqInput,
    PauseMode,
    Prepared,
    Refusal,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    ResumeMemoryOccupationReqOutput,
    SchedulerInput,
    StateReport,
    TextOutput,
    TokenizedGenerateReqInput,
    TokenOutput,
    UpdateWeightsFromTensorReqInput,
    UpdateWeightsReqOutput,
    Verdict,
    WeightUpdateRequest,
)
from ebbtide.srt.managers.wire.rank_messages import dealt
from ebbtide.srt.managers.wire.reply_merging import merge_replica_refusals, merge_replicas
from ebbtide.srt.memory_saver.tags import MemoryTag

SHORTEST_QUEUE = "shortest_queue"


class ReplicaEnd(Protocol):
    """The channel to one replica. What is encoded already is sent as it is."""

    def send(self, message: SchedulerInput | msgspec.Raw) -> None: ...

    def close(self) -> None: ...


class ManagerEnd(Protocol):
    """The channel on which all replicas and the detokenizer answer."""

    async def receive_async(self) -> list[ManagerInput]: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Call:
    """A control request that is being carried out.

    Attributes:
        subject: what it is about, if it can be taken back, or is about the same as one that can.
        latest: the call that had changed that last when this one was sent; maybe this one.
        awaited: the replicas that have not answered.
        is_open: whether replicas wait for a verdict, or will.
        prepared: the replicas that can commit.
        refusal: the answer once it is decided, while what some replicas did is taken back.
    """

    request: AnyControlRequest
    subject: str | None
    latest: str | None
    awaited: set[int]
    is_open: bool
    prepared: set[int] = field(default_factory=set)
    replies: dict[int, AnyReply] = field(default_factory=dict)
    refusal: Refusal | None = None


class DataParallelController:
    """Deals generations out, and carries control requests out on every replica.

    Every replica gets the control requests in the same order. An update is committed by all of them or by
    none: each says when it is prepared, and is then sent the verdict. Where some refuse a pause, a resume, a
    session, a part of one, or a group that others took, those take it back. For the rest, `merge_replicas`
    says who has done what.

    Args:
        replicas: by dp_rank; closed with this.
        inbox: closed with this.
        tp_size: ranks of each replica.
        load_balance_method: `round_robin`, or `shortest_queue`: the replica with the fewest tokens, those of
            its requests' prompts and those that they may still generate.
    """

    def __init__(
        self, replicas: Sequence[ReplicaEnd], inbox: ManagerEnd, tp_size: int, load_balance_method: str
    ) -> None:
        self._replicas = replicas
        self._inbox = inbox
        self._tp_size = tp_size
        self._by_queue = load_balance_method == SHORTEST_QUEUE
        self._next = 0
        self._num_tokens = [0] * len(replicas)
        # Of every output that has not ended: where it is, and the tokens that it counts for.
        self._placed: dict[str, tuple[int, int]] = {}
        self._calls: dict[str, _Call] = {}
        # By subject: the last call that was to change it.
        self._latest: dict[str, str] = {}
        self._has_session = [False] * len(replicas)
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
            case ControlCall():
                self._call(message)
            case Expire() | Verdict():
                raise AssertionError("deadlines are the schedulers' own, and verdicts are made here")

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
        """The replica for the next prompt. Equal queues take turns too."""
        num_replicas = len(self._replicas)
        in_turn = [(self._next + step) % num_replicas for step in range(num_replicas)]
        chosen = min(in_turn, key=num_tokens.__getitem__) if self._by_queue else in_turn[0]
        self._next = (chosen + 1) % num_replicas
        return chosen

    def _note_ended(self, message: TextOutput | TokenOutput) -> None:
        for output in message.outputs:
            if output.finish is not None and output.rid in self._placed:
                dp_rank, num_tokens = self._placed.pop(output.rid)
                self._num_tokens[dp_rank] -= num_tokens

    # ------------------------------------------------------------------------------------ control requests

    def _call(self, call: ControlCall) -> None:
        subject = _subject(call.request)
        is_joint = isinstance(call.request, WeightUpdateRequest | EndWeightUpdateReqInput)
        # A second session is refused while one is open: only what discards one makes way for another.
        if subject is not None and not is_joint and not isinstance(call.request, BeginWeightUpdateReqInput):
            self._latest[subject] = call.id
        latest = None if subject is None else self._latest.get(subject)
        everyone = set(range(len(self._replicas)))
        self._calls[call.id] = _Call(call.request, subject, latest, everyone, is_open=is_joint)
        call = msgspec.structs.replace(call, is_joint=is_joint)
        if isinstance(call.request, UpdateWeightsFromTensorReqInput) and self._is_per_rank(call.request):
            self._deal(call, call.request)
        else:
            # Encoded once: payloads of weights may be long.
            encoded = msgspec.Raw(self._encoder.encode(call))
            for replica in self._replicas:
                replica.send(encoded)
        self._give_up_before(call.request)

    def _is_per_rank(self, request: UpdateWeightsFromTensorReqInput) -> bool:
        """Whether there is an entry for every rank of every replica."""
        return len(request.serialized_named_tensors) == len(self._replicas) * self._tp_size

    def _deal(self, call: ControlCall, request: UpdateWeightsFromTensorReqInput) -> None:
        """Send each replica the entries of its own ranks."""
        for dp_rank, replica in enumerate(self._replicas):
            own = range(dp_rank * self._tp_size, (dp_rank + 1) * self._tp_size)
            replica.send(msgspec.structs.replace(call, request=dealt(request, own)))

    def _give_up_before(self, request: AnyControlRequest) -> None:
        """Commit no more what this request ends: it may do so on some replicas, and fail on others."""
        for call_id, call in self._calls.items():
            if call.is_open and _ends(request, call.request):
                self._decide(call_id, call, "nothing was committed: a request that ends it came in between")

    def _collect(self, message: ControlReply) -> list[ManagerInput]:
        """Take a replica's reply; returns the one reply when all are there."""
        call = self._calls[message.id]
        if isinstance(message.reply, Prepared):
            call.prepared.add(message.dp_rank)
        else:
            call.awaited.discard(message.dp_rank)
            if call.refusal is None:
                call.replies[message.dp_rank] = message.reply
        if call.is_open:
            self._weigh(message.id, call)
        if call.awaited:
            return []
        if call.refusal is None and self._take_back(message.id, call):
            return []
        del self._calls[message.id]
        if call.refusal is not None:
            return [ControlReply(id=message.id, reply=call.refusal)]
        replies = [call.replies[dp_rank] for dp_rank in range(len(self._replicas))]
        return [ControlReply(id=message.id, reply=merge_replicas(replies))]

    def _weigh(self, call_id: str, call: _Call) -> None:
        """Make the verdict as soon as it can only be this one."""
        if any(isinstance(reply, Refusal) for reply in call.replies.values()):
            self._decide(call_id, call, "other replicas have refused this")
        elif call.prepared and call.replies:
            self._decide(call_id, call, "nothing was committed: a session was open on some replicas only")
        elif len(call.prepared) == len(self._replicas):
            self._decide(call_id, call, None)

    def _decide(self, call_id: str, call: _Call, refusal: str | None) -> None:
        call.is_open = False
        for dp_rank in sorted(call.awaited):
            self._replicas[dp_rank].send(Verdict(id=call_id, refusal=refusal))

    def _take_back(self, call_id: str, call: _Call) -> bool:
        """Undo what only some replicas did, if that can be undone; returns whether the reply waits for it."""
        refused = {rank: reply for rank, reply in call.replies.items() if isinstance(reply, Refusal)}
        if not refused or call.subject is None or self._latest.get(call.subject) != call.latest:
            # All is well, or what came later about the same thing has the last word.
            return False
        undoing = _undoing(call, self._has_session)
        if not undoing:
            return False
        refusal = merge_replica_refusals(refused, len(self._replicas))
        if isinstance(call.request, WeightUpdateRequest | EndWeightUpdateReqInput):
            others = "had staged this update" if isinstance(call.request, WeightUpdateRequest) else "have it"
            message = f"{refusal.message}. The session was discarded, as others {others}"
            refusal = msgspec.structs.replace(refusal, message=message)
        call.refusal = refusal
        call.awaited = set(undoing)
        for dp_rank, request in undoing.items():
            self._replicas[dp_rank].send(ControlCall(id=call_id, request=request))
            self._give_up_before(request)
        return True


def _max_tokens(output: TokenizedGenerateReqInput) -> int:
    return len(output.input_ids) + output.max_new_tokens


def _subject(request: AnyControlRequest) -> str | None:
    """What a request is about, where later ones about the same decide whether it can be taken back."""
    match request:
        case PauseGenerationReqInput() | ContinueGenerationReqInput():
            return "generation"
        case ReleaseMemoryOccupationReqInput() | ResumeMemoryOccupationReqInput():
            return "memory"
        case BeginWeightUpdateReqInput() | EndWeightUpdateReqInput() | AbortWeightUpdateReqInput():
            return "session"
        case WeightUpdateRequest():
            return "session"
        case InitWeightsUpdateGroupReqInput() | DestroyWeightsUpdateGroupReqInput():
            return f"group {request.group_name}"
        case _:
            return None


def _ends(request: AnyControlRequest, update: AnyControlRequest) -> bool:
    """Whether a request refuses an update that is not committed."""
    match request:
        case ReleaseMemoryOccupationReqInput():
            return not request.tags or MemoryTag.WEIGHTS in request.tags
        case AbortWeightUpdateReqInput():
            return isinstance(update, EndWeightUpdateReqInput)
        case _:
            return False


def _undoing(call: _Call, has_session: Sequence[bool]) -> dict[int, AnyControlRequest]:
    """What takes a call back, by replica: empty where there is nothing to take back.

    Args:
        has_session: of every replica, whether a session is open there.
    """
    request = call.request
    changed = [rank for rank, reply in sorted(call.replies.items()) if getattr(reply, "changed", False)]
    match request:
        # The other modes are never refused for the state of one replica.
        case PauseGenerationReqInput(mode=PauseMode.WAIT):
            return dict.fromkeys(changed, ContinueGenerationReqInput())
        case ResumeMemoryOccupationReqInput():
            resumed = {rank: _resumed_tags(call.replies[rank]) for rank in changed}
            return {
                rank: ReleaseMemoryOccupationReqInput(tags=tags) for rank, tags in resumed.items() if tags
            }
        case BeginWeightUpdateReqInput():
            return dict.fromkeys(changed, AbortWeightUpdateReqInput())
        case InitWeightsUpdateGroupReqInput():
            return dict.fromkeys(changed, DestroyWeightsUpdateGroupReqInput(group_name=request.group_name))
        case WeightUpdateRequest() if any(_is_staged(reply) for reply in call.replies.values()):
            # A part of a session cannot be unstaged, and a commit would bring it to some replicas only.
            return dict.fromkeys(sorted(call.replies), AbortWeightUpdateReqInput())
        case EndWeightUpdateReqInput() if not all(has_session):
            # What is gone on one replica can never be committed on all.
            return {rank: AbortWeightUpdateReqInput() for rank, is_open in enumerate(has_session) if is_open}
        case _:
            return {}


def _resumed_tags(reply: AnyReply) -> tuple[MemoryTag, ...]:
    """The tags that a resume found released; not those that were resident before it."""
    assert isinstance(reply, ResumeMemoryOccupationReqOutput)
    return tuple(tag for tag, num_bytes in reply.mapped_bytes.items() if num_bytes)


def _is_staged(reply: AnyReply) -> bool:
    """Whether an update waits for its session's commit."""
    return isinstance(reply, UpdateWeightsReqOutput) and not reply.committed
