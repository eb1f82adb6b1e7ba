"""What a control request is, besides its fields: one row that every door, rank and replica reads."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import ClassVar, Final, Literal, TypeVar

import msgspec

from ebbtide.srt.managers.wire.merging import merge_rules
from ebbtide.srt.managers.wire.message import Message, Reply

Methods = tuple[Literal["POST", "GET"], ...]
POST: Final[Methods] = ("POST",)
POST_OR_GET: Final[Methods] = ("POST", "GET")


class Deadline(Enum):
    """When a request is refused that is still pending.

    NEVER: it is carried out at once, or ends by itself. OWN: at its own `timeout_s`, if it has one. UPDATE:
    at that, or at the engine's time limit of updates.
    """

    NEVER = auto()
    OWN = auto()
    UPDATE = auto()


class Turn(Enum):
    """When replicas are sent a request about a subject.

    AT_ONCE: when it comes. SHARED: once those that are ALONE are answered by all replicas. ALONE: once those
    of either kind are. So a session is open on all replicas, or on none, when a request arrives that asks.
    """

    AT_ONCE = auto()
    SHARED = auto()
    ALONE = auto()


@dataclass(frozen=True)
class ControlRow:
    """What there is to know of one kind of control request.

    Attributes:
        reply: what it is answered with; its fields say how the replies of ranks and replicas become one.
        path, methods: over HTTP; None: it has no endpoint of its own.
        query_aliases: further names of fields in the query.
        body_if: the flag of the request without which the answer is an empty body.
        body_field: the one field of the reply that is the whole body.
        op: its name as a step of a transition; None: it is none.
        deadline: when it is refused if it is still pending.
        grace_s: how much later than its own time limit that is: it ends by itself then, with a better reason.
        per_rank: a list with an entry for each rank, of which each rank gets its own alone.
        subject: what it is about, where later requests about the same decide whether it can be undone.
        turn: how it waits for earlier requests about the same subject.
        settles: nothing earlier about the same subject is undone once this has been sent. False for what is
            refused where something earlier holds.
        is_beside: it starts while a forward pass may be in flight: it only reads what has been counted, or
            waits for a boundary itself. Before any other request, the pass in flight is committed.
        is_joint: replicas commit it together: each prepares it, and waits for a `Verdict`.
        undone: said in the refusal when it was undone on those that did not refuse.
    """

    reply: type[Reply]
    path: str | None = None
    methods: Methods = POST
    query_aliases: Mapping[str, str] = field(default_factory=dict)
    body_if: str | None = None
    body_field: str | None = None
    op: str | None = None
    deadline: Deadline = Deadline.NEVER
    grace_s: float = 0.0
    per_rank: str | None = None
    subject: str | None = None
    turn: Turn = Turn.AT_ONCE
    settles: bool = True
    is_beside: bool = False
    is_joint: bool = False
    undone: str = ""

    def __post_init__(self) -> None:
        merge_rules(self.reply)


class ControlRequest(Message, frozen=True, kw_only=True):
    """A request to the control plane. Carried out between forward passes, answered when its effect holds."""

    row: ClassVar[ControlRow]

    @property
    def subject(self) -> str | None:
        """The row's, or one of several of that kind."""
        return self.row.subject

    def ends(self, update: ControlRequest) -> bool:
        """Whether this refuses an update that is not committed."""
        return False

    def undo(self, outcome: Outcome) -> Mapping[int, ControlRequest]:
        """What takes this back on the replicas that did it, as others refused. Empty: nothing needs to be."""
        return {}


R = TypeVar("R", bound=ControlRequest)


@dataclass(frozen=True)
class Outcome:
    """What the replicas made of a control request that some of them refused.

    Attributes:
        replies: by dp_rank.
        has_session: of every replica, whether a session is open there.
    """

    replies: Mapping[int, Reply]
    has_session: Mapping[int, bool]

    @property
    def changed(self) -> list[int]:
        """The replicas on which it changed something."""
        return [rank for rank, reply in sorted(self.replies.items()) if getattr(reply, "changed", False)]


def num_entries(request: ControlRequest) -> int | None:
    """The length of the list with an entry per rank; None: the request has none."""
    name = request.row.per_rank
    return None if name is None else len(getattr(request, name))


def dealt(request: R, own: Container[int]) -> R:
    """The request with the entries of these ranks alone: all of them to all would be quadratic in bytes.

    The places of the others are kept, and empty.
    """
    name = request.row.per_rank
    assert name is not None, "this request has no entries per rank"
    entries = getattr(request, name)
    share = [entry if index in own else b"" for index, entry in enumerate(entries)]
    return msgspec.structs.replace(request, **{name: share})
