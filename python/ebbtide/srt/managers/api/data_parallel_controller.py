"""Several replicas as one engine: each generation goes to one of them, each control request to all.

It stands between the TokenizerManager and the channels, and has the methods of a sending and of a receiving
end. The replicas' replies to a control request are merged into one; their state reports are passed on as they
are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from ebbtide.srt.managers.committee import Closed, Committee
from ebbtide.srt.managers.io_struct import (
    AbortGeneration,
    AnyReply,
    ControlCall,
    ControlReply,
    Expire,
    LoadGrammar,
    ManagerInput,
    Prepared,
    SchedulerInput,
    StateReport,
    TokenizedGenerateReqInput,
    TokenOutput,
    Verdict,
)
from ebbtide.srt.managers.wire.channel import AsyncReceiveEnd, SendEnd
from ebbtide.srt.managers.wire.control_request import dealt, num_entries
from ebbtide.srt.managers.wire.merging import merge_replicas

SHORTEST_QUEUE: Final = "shortest_queue"
# A replica that has not carried a verdict out after so many seconds is given no more prompts.
LATE_S: Final = 10.0


class DataParallelController:
    """Distributes generations over the replicas, and carries control requests out on every one.

    The replicas are a `Committee`. `merge_replicas` merges their replies, and says which of them did what.

    Args:
        replicas, inbox: the channels, closed with this. A `Raw` is encoded already and sent as it is.
        load_balance_method: `round_robin`; or `shortest_queue`: the replica with the fewest tokens, counting
            each of its requests' prompts and the most that they may generate.
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
        self._replies: list[ManagerInput] = []
        self._committee = Committee(set(range(len(replicas))), self._broadcast, self._send, self._answer)
        self._can_run = [True] * len(replicas)
        self._encoder = msgspec.msgpack.Encoder()

    def place(self, outputs: Sequence[TokenizedGenerateReqInput]) -> list[TokenizedGenerateReqInput]:
        """The outputs of a request, each with the `dp_rank` that `send` will send it to.

        Consecutive outputs of the same prompt go to the same replica, because they share its KV.
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
                self._committee.call(message)
            case Verdict():
                self._committee.decide(message.id, message.refusal)
            case Expire():
                raise AssertionError("deadlines are the schedulers' own")

    async def receive_async(self) -> list[ManagerInput]:
        """Wait for messages for the manager. Cancelling this loses none."""
        messages: list[ManagerInput] = []
        while not messages:
            for message in await self._inbox.receive_async():
                match message:
                    case ControlReply():
                        self._committee.take(message.dp_rank, message.id, message.reply)
                    case StateReport():
                        self._committee.has_session[message.dp_rank] = message.session is not None
                        self._can_run[message.dp_rank] = message.can_run
                        messages.append(message)
                    case TokenOutput():
                        self._note_ended(message)
                        messages.append(message)
            messages += self._replies
            self._replies.clear()
        return messages

    def close(self) -> None:
        """Close the channels. Idempotent."""
        for replica in self._replicas:
            replica.close()
        self._inbox.close()

    def _choose(self, num_tokens: Sequence[int]) -> int:
        """The replica for the next prompt. Replicas with equally long queues take turns too.

        A replica that cannot run, or that is late with a verdict, is chosen only if all are.
        """
        num_replicas = len(self._replicas)
        in_turn = [(self._next + step) % num_replicas for step in range(num_replicas)]
        late = self._committee.late(LATE_S)
        in_turn = [rank for rank in in_turn if self._can_run[rank] and rank not in late] or in_turn
        chosen = min(in_turn, key=num_tokens.__getitem__) if self._by_queue else in_turn[0]
        self._next = (chosen + 1) % num_replicas
        return chosen

    def _note_ended(self, message: TokenOutput) -> None:
        for output in message.outputs:
            if output.finish is not None and output.rid in self._placed:
                dp_rank, num_tokens = self._placed.pop(output.rid)
                self._num_tokens[dp_rank] -= num_tokens

    # ------------------------------------------------------------------------------------ control requests

    def _broadcast(self, call: ControlCall) -> None:
        if num_entries(call.request) == len(self._replicas) * self._tp_size:
            # One entry for each rank of each replica: a replica gets the entries of its own ranks.
            for dp_rank, replica in enumerate(self._replicas):
                own = range(dp_rank * self._tp_size, (dp_rank + 1) * self._tp_size)
                replica.send(msgspec.structs.replace(call, request=dealt(call.request, own)))
            return
        # Encoded once for all replicas, because weights may be long. Calls that overtake are short.
        encoded = call if call.overtakes else msgspec.Raw(self._encoder.encode(call))
        for replica in self._replicas:
            replica.send(encoded)

    def _send(self, dp_rank: int, message: ControlCall | Verdict) -> None:
        self._replicas[dp_rank].send(message)

    def _answer(self, call_id: str, answer: Prepared | Closed) -> None:
        reply: AnyReply
        if isinstance(answer, Prepared):
            reply = answer
        elif answer.refusal is not None:
            reply = answer.refusal
        else:
            reply = merge_replicas([reply for _, reply in sorted(answer.replies.items())])
        self._replies.append(ControlReply(id=call_id, reply=reply))


def _max_tokens(output: TokenizedGenerateReqInput) -> int:
    return len(output.input_ids) + output.max_new_tokens


class OrderedInbox:
    """Holds a reply back until the outputs that its replica aborted before it have been handed out.

    Outputs come through the detokenizer and replies come directly, so a reply may arrive first. A client that
    is told that generation is paused, or that new weights serve, may take every later answer for one of the
    new weights. For the same reason, a reply comes in a batch of its own.
    """

    def __init__(self, inbox: AsyncReceiveEnd[ManagerInput]) -> None:
        self._inbox = inbox
        self._num_aborts: dict[int, int] = {}
        self._held: list[ControlReply] = []

    async def receive_async(self) -> Sequence[ManagerInput]:
        """Wait for messages that may be handed out. Cancelling this loses none."""
        due = [reply for reply in self._held if not self._is_early(reply)]
        if due:
            self._held = [reply for reply in self._held if self._is_early(reply)]
            return due
        arrived = await self._inbox.receive_async()
        given = []
        for message in arrived:
            if isinstance(message, ControlReply) and self._is_early(message):
                self._held.append(message)
            else:
                given.append(message)
        for message in given:
            if isinstance(message, TokenOutput) and message.abort_number is not None:
                self._num_aborts[message.dp_rank] = message.abort_number
        return given

    def close(self) -> None:
        """Close the wrapped inbox. Idempotent."""
        self._inbox.close()

    def _is_early(self, reply: ControlReply) -> bool:
        return reply.aborts_before > self._num_aborts.get(reply.dp_rank, 0)
