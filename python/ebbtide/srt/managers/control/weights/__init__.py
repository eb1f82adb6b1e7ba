"""The interfaces of weight updates: where new weights come from, and where they are written."""

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

    # Whole tensors, copied, converted or quantised. If it fails, the tensors it has touched count as missing.
    COPY = "whole"
    # Some elements of existing tensors, checked against the checksums that the tensors must have afterwards.
    PATCH = "changes"
    # Whatever a custom loader writes, to a complete copy of the weights.
    LOAD = "for a custom loader"


class PatchSums(Protocol):
    """The checksums of the tensors of a patch, known before it is written."""

    def sum_up(self, staging: Staging) -> Slices[None]:
        """Compute the checksums after the patch. The staging must hold the tensors that it changes."""

    def sums(self) -> Mapping[str, int]:
        """This rank's share of each tensor's checksum, after `sum_up`."""

    def check_sums(self, shares: Sequence[Mapping[str, int]]) -> None:
        """Refuse (400) the patch if the ranks' shares do not add up to the sender's checksums."""


class WritePlan(Protocol):
    """What one update writes: it is checked against the model, and can be written and abandoned.

    If `PATCH` or `LOAD` fails half-way, the contents of the copy are unknown.

    Attributes:
        names: the checkpoint names that are valid after the write.
        touched: the names whose old values are lost once the write has begun.
        sent: the names that it was sent with, also those that the model does not know.
        incomplete: why it cannot be committed alone, as a refusal; empty if it can.
        problems: why it cannot be written, as `{"name", "reason"}`; empty if it can.
        patch: the checksums, if it is a patch; else None.
        base_version: version of the weights that a patch changes; None: the sender does not say.
        is_sent: it is broadcast in a group, and not read from the sender's memory.
        opens: whether `open` has anything to do.
        near_bytes: how much there is to read (of a patch: to move) in memory that this device can read; bytes
            of slower memory count `cost` times. None: some of it is in memory that the device cannot read.
        cost: how many times as long the device takes to read it as from its own memory.
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
        """Before the first `arrived`, choose to receive broadcasts directly into the staging.

        Until `arrived` or `abandon`, these parameters of the staging are a mixture. Returns whether this is
        possible, the same on all ranks; otherwise tensors are received in buffers.
        """

    def arrived(self) -> bool:
        """Whether everything has been received. The first call begins to receive.

        RequestRejected: it will not come.
        """

    def abandon(self) -> None:
        """Leave the sender's group. Raises OutOfStep if broadcasts may still write to the staging."""

    def open(self, staging: Staging) -> Slices[None]:
        """Map the sender's memory for a write to this staging. Nothing is written yet."""

    def begin(self, staging: Staging) -> None:
        """Note that what the plan touches is about to be overwritten, on all ranks."""

    def write(self, staging: Staging) -> Slices[None]:
        """Launch the copies of the tensors."""

    def end(self, staging: Staging) -> frozenset[str]:
        """After the write on all ranks: names besides its own that are now complete."""

    def finish(self) -> None:
        """Wait until the copies have run."""

    def nonfinite(self) -> list[str]:
        """The tensors that hold NaN or Inf on this rank, after `finish`."""

    def detach(self) -> Slices[None]:
        """After every copy has run: let the sender use its memory again. Idempotent.

        Returns work that unmaps the memory from this device. Afterwards only `close` may be called.
        """

    def close(self) -> None:
        """Give the sender's memory back, at any point of the update. Idempotent."""


class Conversation(Protocol):
    """An update that comes piece by piece. The sender waits for an answer to each piece."""

    def poll(self) -> bool:
        """Whether the next piece, or the end, has come. RequestRejected: the sender gave up."""

    def piece(self) -> Slices[WritePlan | None]:
        """The plan of the piece that has come; None: the end has come."""

    def answer(self, problem: str = "") -> None:
        """Answer the sender: the piece was taken, or `problem`. A problem ends in a refusal of the whole."""

    def close(self) -> None: ...


class Staging(Protocol):
    """Where an update is written: a copy, while the live weights serve; or the live weights themselves.

    Attributes:
        is_staged: False where writes go straight into the live weights.
    """

    is_staged: bool

    def require_complete(self) -> None:
        """Refuse (409) if values of 8 bits came without their scales, or scales without their values."""

    def complete(self, written: frozenset[str]) -> Slices[None]:
        """Launch copies from the live weights that fill everything but `written` (checkpoint names)."""

    def commit(self) -> None:
        """Make everything that was written live, between two forward passes.

        Copies into the live weights need only be launched: forward passes are queued behind them.
        """

    def roll_back(self) -> None:
        """After the commit of a copy, make the former weights live again, bit for bit."""

    def repay(self) -> None:
        """After a commit, return as much memory as was lent for the copy; `release` returns the rest."""

    def release(self) -> Slices[None]: ...

    def close(self) -> None:
        """Give the copy's memory back. Before a commit, this is the rollback."""


class TrialPass(Protocol):
    """Runs a forward pass for no request, over up to `max_tokens` ids below `vocab_size`."""

    max_tokens: int
    vocab_size: int

    def room(self, num_tokens: int) -> AbstractContextManager[None]:
        """Within, have pages for the KV of this many tokens. RequestRejected: there are too few.

        All ranks must enter it between the same two passes, and leave it after the same message.
        """

    def logprobs(self, input_ids: Sequence[int], adapter_slot: int | None = None) -> list[float]:
        """The logprobs of all tokens but the first, by the live weights and the adapter in a slot, if any.

        Logprobs that are not finite are the lowest float32. All ranks call it between two forward passes,
        within `room`, and get the same.
        """


# Compares the live parameters with a copy; returns those that differ in any bit, as `{"name", "reason"}`.
# Its argument: parts of names; parameters whose names contain one are left out.
Snapshot: TypeAlias = Callable[[Sequence[str]], Slices[list[dict[str, str]]]]


class Parameters(Protocol):
    """This rank's parameters, one by one.

    `skipped`: parameters whose names contain any of these are left out.
    """

    @property
    def generation(self) -> int:
        """A number that changes with every write to the parameters."""

    def checksums(self, skipped: Sequence[str], algorithm: ChecksumAlgorithm) -> Slices[RankChecksums]: ...

    def snapshot(self) -> Slices[Snapshot]:
        """Copy all of them. RequestRejected (409): there is no room for a copy."""

    def sources(self, skipped: Sequence[str]) -> frozenset[str]:
        """Their checkpoint names."""

    def pieces(self, index: int, first_byte: int, num_bytes: int) -> list[WeightPiece]:
        """Up to `num_bytes` of a parameter; from byte 0 on, the next ones that fit whole come too."""

    def fill(self, skipped: Sequence[str]) -> None:
        """Write random values, and wait until they are written."""


class Weights(Protocol):
    """The model's weights on this rank.

    Attributes:
        names: every checkpoint name that the model needs; tied parameters count once.
        requires_copy: whether an update is refused if there is no memory for a copy (`update_staging`).
        refuses_nonfinite: the server argument `refuse_nonfinite`.
    """

    names: frozenset[str]
    requires_copy: bool
    refuses_nonfinite: bool

    @property
    def parameters(self) -> Parameters: ...

    @property
    def copies(self) -> CopyStream:
        """The stream on which plans and stagings launch their copies."""

    def open(self, request: WeightUpdateRequest) -> Slices[WritePlan]:
        """Decode the headers of an update and check them against the model, or refuse (400)."""

    def converse(self, request: PiecewiseRequest) -> Conversation:
        """Connect to this rank's sender. RequestRejected (400): there is none."""

    def stage(self, *, in_place: bool, is_last: bool = True) -> Slices[Staging]:
        """Make the staging of an update: a copy if possible, else in place. Ended early, it keeps nothing.

        Args:
            in_place: make no copy: the live weights are not valid, another rank has no copy, or in place is
                quicker.
            is_last: False: if there is no memory for a copy, the caller tries again with more.

        RequestRejected (409): there is no memory for a copy, and `update_staging` demands one.
        """

    def group_names(self) -> list[str]: ...
    def join_group(self, request: InitWeightsUpdateGroupReqInput) -> Slices[None]:
        """Join a group, yielding until all members are there. A live group of that name is left first.

        RequestRejected: 400, a field is wrong, or the others do not come in time; 409, a group of that name
        is being joined.
        """

    def leave_group(self, name: str) -> Callable[[], bool] | None:
        """Begin to leave a group; returns a function: whether it is left. None: there is no such group."""

    def stored_as(self, name: str) -> str:
        """The name under which a tensor is kept; for a tied tensor, that of the other one."""

    def precision_of(self, name: str) -> str:
        """How values from `read` differ from the stored ones; empty if they do not."""

    def read(self, name: str, max_rows: int) -> Callable[[], list[Any]]:
        """Read this rank's part of a tensor's first rows. RequestRejected (400): there is no such tensor.

        Returns a function that gives the whole rows; all ranks call it in the same turn.
        """
