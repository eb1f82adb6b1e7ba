"""The interfaces through which the control plane acts on the engine, and the words that its rooms share."""

from __future__ import annotations

import enum
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from ebbtide.srt.errors import EngineError, RequestRejected
from ebbtide.srt.managers.control.adapters import AdapterVersion
from ebbtide.srt.managers.io_struct import (
    AnyReply,
    InFlight,
    Preserve,
    RetractCause,
)
from ebbtide.srt.slices import Slices

T = TypeVar("T")


class Activity(enum.Enum):
    """What an operation does next: it yields this, and the loop acts on it."""

    # It wants its next slice after one more forward pass, and no pass may be in flight during the slice.
    WORKING = enum.auto()
    # It wants its next slice after one more forward pass. A pass may be in flight: the slice does not touch
    # what the pass uses.
    COPYING = enum.auto()
    # It waits for requests, other operations, senders, or ranks that copy. Forward passes go on.
    WAITING = enum.auto()
    # It waits for ranks that work between forward passes. No pass is in flight when it is resumed.
    HOLDING = enum.auto()
    # It waits for other ranks, and until it ends nothing else happens: no forward pass, and no other work of
    # the control plane. With a single rank it would be one step.
    ALONE = enum.auto()
    # Its next step must not overlap with a forward pass: the pass in flight is committed, and the operation
    # goes on in the same turn.
    BOUNDARY = enum.auto()
    # It waits for requests to end. If other replicas refuse meanwhile, it may be given up.
    DRAINING = enum.auto()
    # Its next slice is the commit, which cannot be refused. A joint operation of several replicas gets it
    # with their verdict, any other at once.
    PREPARED = enum.auto()


# The activities that are resumed only while no forward pass is in flight.
BETWEEN_PASSES: Final = frozenset({Activity.WORKING, Activity.HOLDING, Activity.ALONE})

# A control request that takes more than one turn of the loop. It returns the reply, or raises
# RequestRejected. To end it from outside, the loop throws an exception into it.
Operation: TypeAlias = Generator[Activity, None, AnyReply]


# The control requests that a state machine handles: type of request → handler.
HandlerTable: TypeAlias = Mapping[type, "Callable[[Any], AnyReply | Operation]"]


# A part of an operation. It returns a T.
Work: TypeAlias = Generator[Activity, None, T]


class DeadlinePassed(Exception):
    """Thrown into an operation whose deadline has passed."""


class Overruled(RequestRejected):
    """Thrown into an operation because other replicas refused. `left`: what it leaves changed."""

    def __init__(self, message: str, status: int = 400, left: str = "") -> None:
        super().__init__(message, status)
        self.left = left


class Superseded(RequestRejected):
    """Thrown into an operation that a later request has ended."""


class CopyStream(Protocol):
    """The stream for copies that run beside forward passes."""

    def copying(self, *, beside: bool = False) -> AbstractContextManager[None]:
        """Within, launch copies on this stream: after all earlier work, or `beside` the forward pass."""

    def copies_done(self) -> bool:
        """Whether all of them have run. Call it outside of `copying`."""


class OutOfStep(EngineError):
    """This rank no longer does what the others rely on. The whole group ends, and says why."""


@dataclass(frozen=True)
class ParkingPlan:
    """Which KV is kept when the pool is released.

    Attributes:
        rids: the oldest running requests, as many as fit.
        pages: the pages of their KV, and of the prefix cache if it is kept; ascending.
        keeps_cache: whether the prefix cache is kept.
    """

    rids: frozenset[str]
    pages: list[int]
    keeps_cache: bool


class Requests(Protocol):
    """The live generation requests.

    Attributes:
        on_kv_given_up: called after requests have ended or lost their KV, or the prefix cache was emptied.
    """

    on_kv_given_up: Callable[[], None]

    def hold_admission(self, holds: bool) -> None:
        """Admit only requests that ran before (True), or all requests (False), from now on."""

    @property
    def num_running(self) -> int:
        """Requests that hold KV."""

    @property
    def num_begun(self) -> int:
        """The same, and requests that were retracted for other requests (not by a control request)."""

    @property
    def num_queued(self) -> int: ...

    @property
    def holds_pages(self) -> bool:
        """Whether requests or the prefix cache hold any page of the pool."""

    def retract_all(self, cause: RetractCause) -> int:
        """Retract all running requests to the head of the queue, dropping their KV; returns how many."""

    def plan_parking(self, max_pages: int, *, with_cache: bool) -> ParkingPlan:
        """Choose the KV to keep in up to `max_pages` of host memory; with the prefix cache if that fits."""

    def park(self, plan: ParkingPlan) -> int:
        """Drop all KV but that of the plan; returns how many requests were retracted."""

    def abort_all(self, message: str) -> int:
        """Abort running and queued requests, which keep the output they have; returns how many."""

    def abort(self, rids: Iterable[str], message: str) -> int: ...

    def flush_cache(self) -> int:
        """Empty the prefix cache, except for what running requests use; returns the tokens freed."""

    def serve(self, version: str, *, is_update: bool = True) -> None:
        """Note the version that serves from the next forward pass on.

        Requests that wait for this version begin to run; requests that cannot run under it end.

        Args:
            is_update: the weights are others, not the same ones under another version.
        """

    def moves_running(self, name: str, in_flight: InFlight) -> bool:
        """Whether a new version of this adapter changes anything for requests that have begun to run."""

    def move_to(self, version: AdapterVersion, in_flight: InFlight) -> int:
        """Move requests from other versions of this adapter to this one, as they or `in_flight` say.

        Requests that wait for their first step always move, unless they name a version. Returns how many
        moved.
        """

    def end_on(self, version: AdapterVersion, message: str) -> None:
        """Abort the requests of this version with status 500."""


class TagMemory(Protocol):
    """The memory of one tag on this rank."""

    @property
    def is_needed(self) -> bool:
        """Whether a forward pass needs it. Memory that none needs is resumed before the next pass."""

    @property
    def virtual_bytes(self) -> int: ...

    @property
    def resident_bytes(self) -> int: ...

    @property
    def backup_bytes(self) -> int: ...

    @property
    def keeps_contents(self) -> bool:
        """Whether contents survive a release and a resume, unless the request says otherwise."""

    def prepare_release(self, keep: bool) -> None:
        """Save the contents for the next resume (`keep`), or drop them. OutOfDeviceMemory: no room."""

    def release(self) -> int:
        """Give the physical memory back to the system; returns the bytes."""

    def resume(self) -> int:
        """Take memory at the same addresses; returns the bytes. OutOfDeviceMemory: nothing was taken."""


class PageStore(Protocol):
    """Copies pages between the pool and host memory, and within the pool."""

    @property
    def num_free(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    def save(self, owners: Sequence[Sequence[int]]) -> list[list[int]]:
        """Copy the pages of several owners to the host; returns each owner's slots, one per page.

        OutOfDeviceMemory: the host has no room; nothing is kept.
        """

    def restore(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        """Copy slots back to pages of the pool. The slots stay in use until `drop`."""

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy pages to other pages of the pool. No page may be both source and target."""

    def drop(self, slots: Sequence[int]) -> None: ...


@dataclass(frozen=True)
class ShrinkingPlan:
    """How the KV cache gets smaller.

    Attributes:
        num_chunks: how many chunks go.
        parked: rids of the requests whose KV is kept in host memory, oldest first.
        retracted: rids of the requests whose KV is lost.
    """

    num_chunks: int
    parked: list[str]
    retracted: list[str]


class KVMemory(Protocol):
    """Moves chunks of the KV cache: for a resize, for a resume in parts, and for a copy of the weights.

    Everything but `save`, `add` and `map` has the same result on all ranks.
    """

    @property
    def chunk_bytes(self) -> int: ...
    @property
    def chunk_tokens(self) -> int:
        """Tokens per chunk; the last one may hold fewer."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    def choose(self, num_tokens: int | None, num_bytes: int | None) -> int:
        """How many chunks to add (negative: remove) for one of these sizes. Refuses a size that cannot be."""

    def plan(self, num_chunks: int, preserve: Preserve) -> ShrinkingPlan:
        """Choose whose KV goes, so that this many chunks become empty; or refuse. Nothing changes yet."""

    def save(self, plan: ShrinkingPlan) -> int:
        """Copy the parked KV to the host; returns the bytes. OutOfDeviceMemory: no room; nothing is kept."""

    def discard(self) -> None:
        """Drop what was saved, because another rank had no room."""

    def withdraw(self, plan: ShrinkingPlan) -> None:
        """Take these requests' KV away, and the chunks out of the pool. No forward pass may be in flight."""

    def remove(self, num_chunks: int) -> int:
        """Give this many of the withdrawn chunks to the system; returns the bytes."""

    def add(self, num_chunks: int) -> int:
        """Take memory, unused before `restore`; returns the bytes. OutOfDeviceMemory: none was taken."""

    def unadd(self) -> None:
        """Undo every `add` since the last `restore`."""

    def restore(self) -> None:
        """Put the added chunks to use."""

    def hold_back(self, pages: Sequence[int]) -> None:
        """Before a resume, keep all chunks out of the pool but a first part and those with these pages."""

    def next_part(self) -> list[int]:
        """The chunks to map next; empty: none is held back any more."""

    def map(self, chunks: Sequence[int] | None = None) -> Slices[None]:
        """Take memory for these chunks, or for all held back. OutOfDeviceMemory: earlier slices stay."""

    def put_back(self, chunks: Sequence[int]) -> None:
        """Put chunks, which are mapped on all ranks, into the pool."""

    def give_up(self) -> None:
        """Hold nothing back any more, because the memory is released or about to be."""

    def set_aside(self, *, hard: bool = False) -> bool:
        """Choose the chunks to lend, the same on all ranks; returns whether they are enough for a copy.

        Args:
            hard: also empty chunks for it, of cached pages and, where allowed, of requests. Then it chooses
                enough for a copy or none.
        """

    def hand_over(self) -> None:
        """Lend the chunks that were set aside; each rank at its own speed."""

    def take_back(self) -> None:
        """Take all lent chunks back after the copy is gone. Idempotent."""
