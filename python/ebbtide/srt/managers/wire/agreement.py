"""How ranks end a phase of a control request together, and how replicas commit an update together.

An update, or the end of a session, is prepared on every replica as far as its commit. Then the replica says
`Prepared`, and from there on refuses no more. When all have said so, each is sent a `Verdict` to commit; when
one has refused, a `Verdict` to give up. A replica that is not told in time serves nothing until it is: others
may have other weights already. Verdicts have the same place among the control requests on every replica, so
whatever else is asked for meanwhile finds the same state on all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ebbtide.srt.managers.wire.message import Message, Refusal, Reply


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


class Prepared(Reply, frozen=True, kw_only=True):
    """Not a replica's last word on a control call: it can commit, and waits for the `Verdict`.

    `is_overdue`: it has waited so long that it serves nothing now.
    """

    is_overdue: bool = False


class GivenUp(Refusal, frozen=True, kw_only=True):
    """What a replica replies that would have done what was asked for, but was told to give up.

    `left`: what it leaves behind that is not as it was; empty if nothing.
    """

    left: str = ""


class Verdict(Message, frozen=True, kw_only=True):
    """What becomes of the control call `id`, on all replicas alike.

    `refusal`: why it is given up; None: it is committed.
    """

    id: str
    refusal: str | None = None
