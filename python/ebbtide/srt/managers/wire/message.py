"""What every message between the processes is made of, and every reply to a control request."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct, UnsetType


class Message(Struct, frozen=True, kw_only=True, tag=True):
    """A message on a channel: its type travels as a tag, and a bad field fails at decode with its path."""


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
