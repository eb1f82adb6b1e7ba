"""What the ranks of one replica say to each other: the leader (rank 0) to its followers, and they to it.

Source: architecture, "Processes and messages".
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import msgspec

from ebbtide.srt.managers.io_struct import (
    AnyReply,
    Message,
    RankReport,
    Refusal,
    SchedulerInput,
    UpdateWeightsFromTensorReqInput,
)


class Decision(Message, frozen=True, kw_only=True):
    """How a phase of a control request has ended, for all ranks at the same place among their messages.

    Attributes:
        phase: its number; every rank counts alike.
        failure: of all who failed, as one; None if all ranks have done their part.
        facts: what each rank said of its part, by tp_rank; empty after a failure.
    """

    phase: int
    failure: Refusal | None = None
    facts: Sequence[Any] = ()


# What a turn of the loop begins with.
TurnInput = SchedulerInput | Decision


class Tick(Message, frozen=True, kw_only=True):
    """One turn of the leader's loop: each follower turns once, with the same messages."""

    messages: list[TurnInput]


class RankVote(Message, frozen=True, kw_only=True):
    """A rank has done its part of a phase, or failed at it.

    Attributes:
        ends: this failure ends the phase, whatever the others are doing: they wait for what will not come.
    """

    tp_rank: int
    phase: int
    failure: Refusal | None = None
    fact: Any = None
    ends: bool = False


class RankReply(Message, frozen=True, kw_only=True):
    """A follower's reply to the control request `id`."""

    tp_rank: int
    id: str
    reply: AnyReply


class RankUpdate(Message, frozen=True, kw_only=True):
    """A follower's memory as it stands. Sent when it changes, ahead of the reply to what changed it."""

    report: RankReport


RankMessage = RankVote | RankReply | RankUpdate


def dealt(request: UpdateWeightsFromTensorReqInput, own: Container[int]) -> UpdateWeightsFromTensorReqInput:
    """The request with the entries of these ranks alone: all of them to all would be quadratic in bytes.

    The places of the others are kept, and empty.
    """
    entries = request.serialized_named_tensors
    share = [entry if index in own else b"" for index, entry in enumerate(entries)]
    return msgspec.structs.replace(request, serialized_named_tensors=share)
