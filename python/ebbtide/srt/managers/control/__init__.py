"""What the control plane needs of the rest of the engine: it decides, these act."""

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
Fact = TypeVar("Fact")


class Activity(enum.Enum):
    """What an operation that is not done yet is doing."""

    # It wants its next slice as soon as the forward pass in between is done.
    WORKING = enum.auto()
    # The same, but a forward pass may be under way then: it touches nothing of it.
    COPYING = enum.auto()
    # It waits for requests, other operations, what others send, or ranks that copy; forward passes
    # overlap meanwhile.
    WAITING = enum.auto()
    # It waits for ranks that work between forward passes: none is under way then.
    HOLDING = enum.auto()
    # It waits for other ranks, and nothing else of the control plane, no forward pass either, happens before
    # it has come to its end: on one rank it would be a single step.
    ALONE = enum.auto()
    # It is about to do what no forward pass under way may see: that pass is brought to its end, and the
    # operation goes on in the same turn.
    BOUNDARY = enum.auto()
    # It waits for requests to end, and need not if other replicas have refused.
    DRAINING = enum.auto()
    # The next slice is the commit, and will not be refused: of what several replicas commit together it comes
    # with their verdict, otherwise at once.
    PREPARED = enum.auto()


# What is done, or waited for, while no forward pass is under way.
BETWEEN_PASSES: Final = frozenset({Activity.WORKING, Activity.HOLDING, Activity.ALONE})

# A control request that takes more than one turn of the loop. It yields between two forward passes; what it
# returns is the reply, and `RequestRejected` the refusal. It is ended from outside by throwing into it.
Operation: TypeAlias = Generator[Activity, None, AnyReply]


# A state machine's share of the control requests, from the type of a request to its handler.
HandlerTable: TypeAlias = Mapping[type, "Callable[[Any], AnyReply | Operation]"]


# A part of an operation. It returns a T.
Work: TypeAlias = Generator[Activity, None, T]


class DeadlinePassed(Exception):
    """Thrown into an operation whose time is up."""


class Overruled(RequestRejected):
    """Thrown into an operation that is given up for other replicas. `left`: what it leaves changed."""

    def __init__(self, message: str, status: int = 400, left: str = "") -> None:
        super().__init__(message, status)
        self.left = left


class Superseded(RequestRejected):
    """Thrown into an operation that a later request has ended."""


class CopyStream(Protocol):
    """Where copies are launched that run beside forward passes."""

    def copying(self, *, beside: bool = False) -> AbstractContextManager[None]:
        """Launch copies within, behind all that was launched before, or `beside` the forward pass."""

    def copies_done(self) -> bool:
        """Whether they have all run. To be asked outside of `copying`."""


class OutOfStep(EngineError):
    """This rank is not what others take it for any more: the group goes down, with the reason."""


@dataclass(frozen=True)
class ParkingPlan:
    """Which KV outlives a release of the pool.

    Attributes:
        rids: the oldest running requests, as far as there is room for their pages.
        pages: what holds their KV, and the prefix cache if it is kept, ascending.
        keeps_cache: whether the prefix cache is kept.
    """

    rids: frozenset[str]
    pages: list[int]
    keeps_cache: bool


class Requests(Protocol):
    """The live generation requests, as one.

    Attributes:
        on_kv_given_up: called when requests have ended or lost their KV, or the prefix cache was emptied.
    """

    on_kv_given_up: Callable[[], None]

    def hold_admission(self, holds: bool) -> None:
        """Admit no request from here on but those that have begun, or admit all again."""

    @property
    def num_running(self) -> int:
        """Requests that hold KV."""

    @property
    def num_begun(self) -> int:
        """These, and requests that lost theirs to others, but for what a control request did."""

    @property
    def num_queued(self) -> int: ...

    @property
    def holds_pages(self) -> bool:
        """Whether requests or the prefix cache hold any page of the pool."""

    def retract_all(self, cause: RetractCause) -> int:
        """Running requests give up their KV and go back to the head of the queue; returns how many."""

    def plan_parking(self, max_pages: int, *, with_cache: bool) -> ParkingPlan:
        """Which KV is kept in up to `max_pages` of host memory; with the prefix cache if that fits."""

    def park(self, plan: ParkingPlan) -> int:
        """Let go of all KV but that of the plan; returns how many requests were retracted."""

    def abort_all(self, message: str) -> int:
        """Running and queued requests end with what they have; returns how many."""

    def abort(self, rids: Iterable[str], message: str) -> int: ...

    def flush_cache(self) -> int:
        """Empty the prefix cache but for what running requests hold; returns the tokens freed."""

    def serve(self, version: str, *, is_update: bool = True) -> None:
        """Have other weights, or this version of the same ones, serve from the next forward pass on.

        Requests that ask for a version, or for no other, begin to run or end here.
        """

    def moves_running(self, name: str, in_flight: InFlight) -> bool:
        """Whether a new version of this name changes anything for requests that have begun to run."""

    def move_to(self, version: AdapterVersion, in_flight: InFlight) -> int:
        """What was to run on another version of its name runs on this one, where it does not say otherwise.

        Requests that wait for their first step move in any case, unless they ask for a version. Returns the
        number of those that moved.
        """

    def end_on(self, version: AdapterVersion, message: str) -> None:
        """Those that run on it, or are to, end with an error of the engine."""


class TagMemory(Protocol):
    """The memory of one tag on this rank."""

    @property
    def is_needed(self) -> bool:
        """Whether no forward pass may run without it. What is not needed comes back before one that may."""

    @property
    def virtual_bytes(self) -> int: ...

    @property
    def resident_bytes(self) -> int: ...

    @property
    def backup_bytes(self) -> int: ...

    @property
    def keeps_contents(self) -> bool:
        """Whether a release and a resume keep the contents, unless a request says otherwise."""

    def prepare_release(self, keep: bool) -> None:
        """Save the contents for the next resume, or drop them. OutOfDeviceMemory: there is no room."""

    def release(self) -> int:
        """Give the physical memory back; returns the bytes."""

    def resume(self) -> int:
        """Take memory at the same addresses; returns the bytes. OutOfDeviceMemory: nothing was kept."""


class PageStore(Protocol):
    """What pages hold: in the pool, and in host memory while that has no room or no memory for them."""

    @property
    def num_free(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    def save(self, owners: Sequence[Sequence[int]]) -> list[list[int]]:
        """Copy the pages of several owners; returns each owner's slots, page for page.

        OutOfDeviceMemory: the host has no room; nothing more is held than before.
        """

    def restore(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        """Copy what these slots hold to these pages; the slots stay in use until `drop`."""

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy pages to others of the pool, none of which is among them."""

    def drop(self, slots: Sequence[int]) -> None: ...


@dataclass(frozen=True)
class ShrinkingPlan:
    """How the KV cache gets smaller.

    Attributes:
        num_chunks: that go.
        parked: rids of the requests whose KV is kept in host memory, oldest first.
        retracted: rids of those whose KV is lost.
    """

    num_chunks: int
    parked: list[str]
    retracted: list[str]


class KVMemory(Protocol):
    """The chunks of the KV cache as they change hands: at a resize, at a resume, for a copy of the weights.

    All but `save`, `add` and `map` comes out alike on all ranks.
    """

    @property
    def chunk_bytes(self) -> int: ...
    @property
    def chunk_tokens(self) -> int:
        """What a chunk holds; the last one may hold fewer."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    def choose(self, num_tokens: int | None, num_bytes: int | None) -> int:
        """How many chunks to add (below 0: remove) for one of these sizes, or a refusal."""

    def plan(self, num_chunks: int, preserve: Preserve) -> ShrinkingPlan:
        """Whose KV goes so that this many chunks become empty, or a refusal. Nothing changes yet."""

    def save(self, plan: ShrinkingPlan) -> int:
        """Copy what is parked to the host; returns the bytes. OutOfDeviceMemory: no room; nothing is kept."""

    def discard(self) -> None:
        """Drop what was saved: not every rank had room."""

    def withdraw(self, plan: ShrinkingPlan) -> None:
        """Take those requests' KV away, and the chunks out of use. No forward pass may be under way."""

    def remove(self, num_chunks: int) -> int:
        """Give this many of the withdrawn chunks to the system; returns the bytes."""

    def add(self, num_chunks: int) -> int:
        """Take memory, unused before `restore`; returns the bytes. OutOfDeviceMemory: nothing was kept."""

    def unadd(self) -> None:
        """Undo every `add` since the last `restore`."""

    def restore(self) -> None:
        """Put the added chunks to use."""

    def hold_back(self, pages: Sequence[int]) -> None:
        """Before a resume: hold back all chunks but those that get memory at once, with these pages."""

    def next_part(self) -> list[int]:
        """The chunks to be mapped next; none: nothing is held back any more."""

    def map(self, chunks: Sequence[int] | None = None) -> Slices[None]:
        """Take memory for these chunks, or for all held back. OutOfDeviceMemory: earlier ones are kept."""

    def put_back(self, chunks: Sequence[int]) -> None:
        """Put chunks that are mapped on all ranks back into the pool."""

    def give_up(self) -> None:
        """Hold nothing back any more: the memory is released, or about to be."""

    def set_aside(self, *, hard: bool = False) -> bool:
        """Choose what is lent next, alike on all ranks; returns whether it is all that a copy takes.

        Args:
            hard: also what is only kept in case it is wanted again; all that a copy takes, or nothing.
        """

    def hand_over(self) -> None:
        """Lend what was set aside; each rank at its own speed."""

    def take_back(self) -> None:
        """Have everything again once the copy is gone. Idempotent."""
