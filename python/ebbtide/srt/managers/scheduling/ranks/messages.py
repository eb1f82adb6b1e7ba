"""What the ranks of one replica say to each other: the leader (rank 0) to its followers, and they to it.

Source: architecture, "Processes and messages".
"""

from __future__ import annotations

from typing import Any

from ebbtide.srt.managers.io_struct import AnyReply, Message, RankReport, Refusal, SchedulerInput
from ebbtide.srt.managers.wire.message import Decision

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
