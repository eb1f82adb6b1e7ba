"""What every message between the processes is made of, every reply to a control request, and every decision.

How ranks end a phase together, and replicas commit an update together: see `managers.committee`. A replica
that is not sent its `Verdict` in time serves nothing until it is: others may have other weights already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, Struct, UnsetType


class Message(Struct, frozen=True, kw_only=True, tag=True):
    """A message on a channel: its type travels as a tag, and a bad field fails at decode with its path."""

    @property
    def overtakes(self) -> bool:
        """Whether it is read before what was sent earlier."""
        return False


class Reply(Message, frozen=True, kw_only=True):
    """The body of a reply. The defaults are those of a request that had nothing to do."""

    success: bool = True
    message: str = ""

    @property
    def served_version(self) -> str | None:
        """The version of the weights that serve, where this reply tells."""
        return None

    @property
    def has_changed_weights(self) -> bool:
        """Whether other weights serve than before, or the same under another version."""
        return False


class TotalsReply(Reply, frozen=True, kw_only=True):
    """A reply with totals. `ranks`: of several ranks, what each adds, with its `dp_rank` and `tp_rank`."""

    ranks: list[dict[str, Any]] | UnsetType = UNSET


class Refusal(Reply, frozen=True, kw_only=True):
    """A request that was refused or failed: becomes `RequestRejected`, or `EngineError` for 500."""

    success: bool = False
    status: int
    fields: dict[str, Any] = {}


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
    """What becomes of the control call `id`, on all replicas alike: at the same place among their requests.

    `refusal`: why it is given up; None: it is committed.
    """

    id: str
    refusal: str | None = None
