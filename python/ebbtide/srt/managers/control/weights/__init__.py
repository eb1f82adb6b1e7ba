"""What the control plane needs of the weights: where updates come from, and where they are written."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

from ebbtide.srt.managers.control import CopyStream
from ebbtide.srt.managers.io_struct import (
    ChecksumAlgorithm,
    InitWeightsUpdateGroupReqInput,
    PiecewiseRequest,
    RankChecksums,
    WeightPiece,
    WeightUpdateRequest,
)
from ebbtide.srt.slices import Slices


class How(enum.Enum):
    """How a plan writes."""

    # Whole tensors: copied, converted or quantised. What it has touched counts as not written if it fails.
    COPY = "whole"
    # Some elements of what is there, checked against the sums that its tensors are to have.
    PATCH = "changes"
    # Whatever a custom loader writes, to a copy that holds everything.
    LOAD = "for a custom loader"


class PatchSums(Protocol):
    """What the tensors of a patch are to come to, before it is written."""

    def sum_up(self, staging: Staging) -> Slices[None]:
        """Compute what the tensors of a patch are to come to, over a staging that holds what it changes."""

    def sums(self) -> Mapping[str, int]:
        """This rank's share of each tensor's checksum, after `sum_up`."""

    def check_sums(self, shares: Sequence[Mapping[str, int]]) -> None:
        """Refuse (400) a patch for which the shares of all ranks are not what its sender says."""


class WritePlan(Protocol):
    """What one update writes, held against the model, and how that is checked, done and undone.

    What `PATCH` and `LOAD` find in a copy is lost if they fail half-way.

    Attributes:
        names: the checkpoint names that are valid once it is written.
        touched: the names whose old values are gone once it has begun.
        sent: the names of what it holds; a name that the model does not know stands for itself.
        incomplete: why it cannot be committed alone, as a refusal; empty if it can.
        problems: what stands against writing it, as `{"name", "reason"}`; empty if nothing does.
        patch: of a patch, its sums; None: it is none.
        base_version: of the weights that a patch changes; None: it does not say.
        is_sent: it comes through a group, rather than out of memory of the sender.
        opens: `open` has something to do.
        near_bytes: how much is to be read (of a patch: moved), if all of it lies in memory that this device
            reads, in bytes of its own memory, which it reads soonest; None: it does not.
        cost: how many times as long as out of its own memory the device takes to read it.
    """

    how: How
    patch: PatchSums | None
    names: frozenset[str]
    touched: frozenset[str]
    sent: frozenset[str]
    incomplete: str
    problems: list[dict[str, str]]
    base_version: str | None
    is_sent: bool
    opens: bool
    near_bytes: int | None
    cost: int
    num_tensors: int
    num_ignored: int

    def receive_into(self, staging: Staging) -> bool:
        """Before the first `arrived`: have what others send received where it will serve.

        From there until `arrived`, or `abandon`, these parameters of the staging are a mixture. Returns
        whether it is done so, on all ranks or on none; otherwise it is kept aside.
        """

    def arrived(self) -> bool:
        """Whether everything that others have to send is here; the first call begins to receive it.

        RequestRejected: it will not come.
        """

    def abandon(self) -> None:
        """Leave the sender's group; returns when nothing writes to the staging, or raises OutOfStep."""

    def open(self, staging: Staging) -> Slices[None]:
        """Get hold of the sender's memory, for a write to this staging. Nothing is written before its end."""

    def begin(self, staging: Staging) -> None:
        """Mark what it touches as about to be overwritten, on all ranks."""

    def write(self, staging: Staging) -> Slices[None]:
        """Launch the copies of the tensors."""

    def end(self, staging: Staging) -> frozenset[str]:
        """The names, besides its own, that are whole once it was written on all ranks."""

    def finish(self) -> None:
        """Wait until the copies have run."""

    def nonfinite(self) -> list[str]:
        """The tensors that hold NaN or Inf on this rank, after `finish`."""

    def detach(self) -> Slices[None]:
        """Let the sender use its memory again, once every copy has run. Idempotent; only `close` may follow.

        Returns work that unmaps it from this device.
        """

    def close(self) -> None:
        """Give the sender's memory back, wherever the update has got to. Idempotent."""


class Conversation(Protocol):
    """An update that its sender brings piece by piece; it wants each piece answered."""

    def poll(self) -> bool:
        """Whether the next piece has come, or all have. RequestRejected: the sender gave up."""

    def piece(self) -> Slices[WritePlan | None]:
        """What has come, held against the model; None: everything has."""

    def answer(self, problem: str = "") -> None:
        """Answer the sender: a piece was taken, or what went wrong, which ends in a refusal of the whole."""

    def close(self) -> None: ...


class Staging(Protocol):
    """Where an update is written: a copy, while the live weights serve, or the live ones themselves.

    Attributes:
        is_staged: False where writes go straight into the live weights.
    """

    is_staged: bool

    def require_complete(self) -> None:
        """Refuse (409) to commit parts of parameters whose other parts have not come."""

    def complete(self, written: frozenset[str]) -> Slices[None]:
        """Launch the copies that fill all but `written` with the live weights."""

    def commit(self) -> None:
        """Make what was written the live weights: all of it, between two forward passes.

        Copies into the live ones need only be launched: forward passes run behind them.
        """

    def roll_back(self) -> None:
        """After the commit of a copy, make the weights before it live again, bit for bit."""

    def repay(self) -> None:
        """After a commit, give up as much memory as was lent for the copy; `release` gives the rest back."""

    def release(self) -> Slices[None]: ...

    def close(self) -> None:
        """Give the copy's memory back. Before a commit, that is the rollback."""


class TrialPass(Protocol):
    """Runs a forward pass over up to `max_tokens` tokens of nobody's request, with ids below `vocab_size`."""

    max_tokens: int
    vocab_size: int

    def room(self, num_tokens: int) -> AbstractContextManager[None]:
        """Have room for the KV of so many tokens within. To be entered between the same two passes on all
        ranks, and left behind the same message. RequestRejected: there is none.
        """

    def logprobs(self, input_ids: Sequence[int], adapter_slot: int | None = None) -> list[float]:
        """The logprob of each token but the first, by the live weights and the adapter in a slot, if any; the
        lowest float32 if not finite.

        The same on all ranks, between two forward passes, within `room`.
        """


# The live parameters that are not bit for bit those of a copy, as `{"name", "reason"}`; without those that
# have any of the given words in their names.
Snapshot: TypeAlias = Callable[[Sequence[str]], Slices[list[dict[str, str]]]]


class Parameters(Protocol):
    """What this rank holds of the model, parameter by parameter.

    Parameters with any of `skipped` in their names are left out.
    """

    @property
    def generation(self) -> int:
        """Changes whenever they are written to."""

    def checksums(self, skipped: Sequence[str], algorithm: ChecksumAlgorithm) -> Slices[RankChecksums]: ...

    def snapshot(self) -> Slices[Snapshot]:
        """Copy all of them. RequestRejected (409): there is no room for a copy."""

    def sources(self, skipped: Sequence[str]) -> frozenset[str]:
        """Their checkpoint names."""

    def pieces(self, index: int, first_byte: int, num_bytes: int) -> list[WeightPiece]:
        """Up to `num_bytes` of one, then those behind it that fit whole. A later piece comes alone."""

    def fill(self, skipped: Sequence[str]) -> None:
        """Write random values, and wait until they are there."""


class Weights(Protocol):
    """The model's weights on this rank.

    Attributes:
        names: every checkpoint name that the model needs; tied parameters count once.
        requires_copy: where there is none, an update is refused: the server argument `update_staging`.
        refuses_nonfinite: the server argument `refuse_nonfinite`.
    """

    names: frozenset[str]
    requires_copy: bool
    refuses_nonfinite: bool

    @property
    def parameters(self) -> Parameters: ...

    @property
    def copies(self) -> CopyStream:
        """Where plans and stagings launch their copies."""

    def open(self, request: WeightUpdateRequest) -> Slices[WritePlan]:
        """Decode an update as far as its headers, and hold these against the model, or refuse (400)."""

    def converse(self, request: PiecewiseRequest) -> Conversation:
        """Meet the sender of this rank's device. RequestRejected (400): there is none."""

    def stage(self, *, in_place: bool, is_last: bool = True) -> Slices[Staging]:
        """Room for an update: a copy, or in place, as `update_staging` says. Ended early, it keeps nothing.

        Args:
            in_place: there is nothing to keep, another rank has no copy, or in place is sooner.
            is_last: False: without memory for a copy, it will be tried again with more.

        RequestRejected (409): there is no memory for a copy, and it must be one.
        """

    def group_names(self) -> list[str]: ...
    def join_group(self, request: InitWeightsUpdateGroupReqInput) -> Slices[None]:
        """Join, yielding while others are not there; refused (400) if they do not come in time.

        Also refused where a field is wrong (400), or one of its name is being joined (409). A live group of
        that name is left first.
        """

    def leave_group(self, name: str) -> Callable[[], bool] | None:
        """Begin to leave; returns what says whether it is left, or None where there is no such group."""

    def stored_as(self, name: str) -> str:
        """The name under which a tensor is kept; another where two are tied."""

    def precision_of(self, name: str) -> str:
        """How values from `read` differ from those kept; empty if they do not."""

    def read(self, name: str, max_rows: int) -> Callable[[], list[Any]]:
        """Read this rank's part of a tensor's first rows. RequestRejected (400): there is none of that name.

        Returns what gives all of them, which all ranks call in the same turn.
        """
