"""The properties of each kind of control request, in one row that doors, ranks and replicas read."""

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
    """When a request that is still pending is refused.

    NEVER: it is carried out at once, or ends by itself. OWN: at its own `timeout_s`, if it has one. UPDATE:
        the same, or at the engine's time limit of updates.
    """

    NEVER = auto()
    OWN = auto()
    UPDATE = auto()


class Turn(Enum):
    """When a request about a subject is sent to the replicas.

    AT_ONCE: when it comes. SHARED: after all earlier ALONE requests are answered. ALONE: after all earlier
        SHARED and ALONE requests are answered. So whenever a request arrives, a session is open on all
        replicas or on none.
    """

    AT_ONCE = auto()
    SHARED = auto()
    ALONE = auto()


@dataclass(frozen=True)
class ControlRow:
    """The properties of one kind of control request.

    Attributes:
        reply: type of the reply, whose fields say how replies of ranks and replicas are merged.
        path, methods: over HTTP; path None: it has no endpoint of its own.
        query_aliases: further names of fields in the query.
        body_if: name of a flag of the request; without it the answer has an empty body.
        body_field: name of the reply's field that is the whole body; None: the body is the reply.
        op: its name as a step of a transition; None: it cannot be a step.
        deadline: when it is refused if it is still pending.
        grace_s: how much later than its own time limit that is, for requests that end by themselves at the
            limit, with a better message.
        per_rank: name of a field with one entry per rank, of which each rank gets only its own.
        subject: what it changes. A request can only be undone until a later one about the same subject was
            sent.
        turn: how it waits for earlier requests about the same subject.
        settles: whether nothing earlier about the same subject is undone once it was sent. False if it is
            refused while something earlier is in force.
        is_beside: it starts while a forward pass may be in flight: it only reads what has been counted, or
            waits for a boundary itself. Before any other request, the pass in flight is committed.
        is_joint: whether replicas commit it together: each prepares it, and waits for a `Verdict`.
        undone: what the refusal says if it was undone on the replicas that did not refuse.
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
        """The row's subject, or a more specific one."""
        return self.row.subject

    def ends(self, update: ControlRequest) -> bool:
        """Whether this request makes an update fail that is not committed yet."""
        return False

    def undo(self, outcome: Outcome) -> Mapping[int, ControlRequest]:
        """Requests that undo this on replicas that did it while others refused; empty: none is needed."""
        return {}


R = TypeVar("R", bound=ControlRequest)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a control request that some replicas refused.

    Attributes:
        replies: by dp_rank.
        has_session: whether a session is open, by dp_rank.
    """

    replies: Mapping[int, Reply]
    has_session: Mapping[int, bool]

    @property
    def changed(self) -> list[int]:
        """The replicas on which it changed something."""
        return [rank for rank, reply in sorted(self.replies.items()) if getattr(reply, "changed", False)]


def num_entries(request: ControlRequest) -> int | None:
    """The length of the list with one entry per rank; None: the request has no such list."""
    name = request.row.per_rank
    return None if name is None else len(getattr(request, name))


def dealt(request: R, own: Container[int]) -> R:
    """The request with the entries of these ranks only; other entries are empty.

    Sending all entries to all ranks would take a number of bytes quadratic in the ranks.
    """
    name = request.row.per_rank
    assert name is not None, "this request has no entries per rank"
    entries = getattr(request, name)
    share = [entry if index in own else b"" for index, entry in enumerate(entries)]
    return msgspec.structs.replace(request, **{name: share})
