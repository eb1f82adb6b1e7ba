"""Paces long work: how much of it is done between two forward passes, and how long passes wait for it.

Long work comes as `Slices`. Only this module makes turns of the loop of it. What several ranks do in step
is in `phases`.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, nullcontext
from typing import Final, Never, TypeAlias, TypeVar

from ebbtide.srt.errors import EngineError, RequestRejected
from ebbtide.srt.managers.control import (
    BETWEEN_PASSES,
    Activity,
    CopyStream,
    DeadlinePassed,
    OutOfStep,
    Work,
)
from ebbtide.srt.managers.io_struct import STALL_BOUNDS_S, AnyControlRequest, ControlRequest, StallCounts
from ebbtide.srt.managers.wire.message import Decision
from ebbtide.srt.slices import Slices

T = TypeVar("T")
Fact = TypeVar("Fact")

# The length of a turn, as a share of a forward pass. An update of 16 GB has some 40 ms of work that cannot
# overlap with a pass. Shorter turns mean more of them, and each one waits for a whole pass.
SHARE: Final = 0.8
SHORTEST_TURN_S: Final = 0.5e-3
LONGEST_TURN_S: Final = 10e-3
# How much a pass counts for the estimate of a pass's time if work went on beside it. Others replace it.
DISTURBED_WEIGHT: Final = 1 / 16
# How long a turn waits for copies in flight, as a share of a pass. The host has that much time to spare in a
# pass, while one more turn delays a small update by a whole pass. If no pass can run, a whole turn is waited.
WAIT_SHARE: Final = 0.2
# The length of a turn if no forward pass waits: it ends only for messages and deadlines.
IDLE_TURN_S: Final = 25e-3
# How fast a device copies beside a forward pass, and while none runs. Turns of copies are bounded by bytes,
# since launching copies takes less time than running them.
COPY_BYTES_PER_S: Final = 1.4e12
BURST_BYTES_PER_S: Final = 2e12

# The shortest and the longest time between two looks at a wait.
SHORTEST_LOOK_S: Final = 1e-3
LONGEST_LOOK_S: Final = 32e-3

# Wakes this rank's loop after the next of these seconds; does nothing if a wake-up is set already.
Wake: TypeAlias = Callable[[Iterator[float]], None]


class Stall:
    """The longest time for which one request, or one whole update, kept forward passes from running."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._began_s: float | None = None

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Within, forward passes are kept waiting."""
        started_s = time.perf_counter()
        try:
            yield
        finally:
            self._note(started_s)

    @property
    def lasts(self) -> bool:
        return self._began_s is not None

    def begin(self) -> None:
        """From here to `end` no forward pass can run, whatever the loop does meanwhile."""
        if self._began_s is None:
            self._began_s = time.perf_counter()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Within, do not count: a forward pass that was launched before still runs."""
        started_s = time.perf_counter()
        yield
        if self._began_s is not None:
            self._began_s += time.perf_counter() - started_s

    def end(self) -> None:
        if self._began_s is not None:
            self._note(self._began_s)
            self._began_s = None

    def _note(self, started_s: float) -> None:
        self.longest_s = max(self.longest_s, time.perf_counter() - started_s)


class StallTally:
    """The stalls of all requests that have ended, by kind."""

    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = {}
        self._sums_s: dict[str, float] = {}

    def note(self, request: ControlRequest, stall: Stall) -> None:
        path = request.row.path
        if path is None:
            return  # the engine's own request
        name = path.removeprefix("/")
        counts = self._counts.setdefault(name, [0] * (len(STALL_BOUNDS_S) + 1))
        counts[bisect_left(STALL_BOUNDS_S, stall.longest_s)] += 1
        self._sums_s[name] = self._sums_s.get(name, 0.0) + stall.longest_s

    def report(self) -> dict[str, StallCounts]:
        """The counts of each kind of request, by its path without the slash."""
        return {
            name: StallCounts(counts=counts, sum_s=self._sums_s[name])
            for name, counts in self._counts.items()
        }


class Pace:
    """Cuts work into turns: each a share of a forward pass while passes run, and long ones while none do.

    Each rank measures its own passes, so ranks may need different numbers of turns. Therefore work is paced
    inside of a phase, which ends on all ranks in the same turn.

    Attributes:
        copied_at_s: monotonic time at which the last copies ended that passes were queued behind.
    """

    def __init__(self) -> None:
        self._step_s: float | None = None
        self.copied_at_s = 0.0

    def note_step(self, step_s: float, *, is_disturbed: bool = False) -> None:
        """Note the time from one forward pass to the next.

        Args:
            is_disturbed: work went on beside it. Such passes hardly count: turns make passes longer, and
                longer passes would make turns longer.
        """
        known_s = self._step_s if is_disturbed and self._step_s is not None else step_s
        self._step_s = known_s + DISTURBED_WEIGHT * (step_s - known_s)

    def note_idle(self) -> None:
        self._step_s = None

    def turns(
        self,
        slices: Slices[T],
        activity: Activity,
        stall: Stall | None = None,
        copies: CopyStream | None = None,
        *,
        waits: bool = True,
        cost: int = 1,
    ) -> Work[tuple[int, T]]:
        """Do the work, and let a forward pass run after every turn; returns the bytes and the result.

        Args:
            slices: the work; a slice of 0 bytes ends the turn.
            activity: what is yielded between turns. COPYING is for work that only launches copies. Taking and
                giving back memory is WORKING: a pass in flight may still use that memory, and closing a
                mapping of a sender's memory makes the driver wait for the pass.
            stall: measures the turns. While it lasts no pass can run, so turns need not be short.
            copies: the stream on which the work launches its copies.
            waits: whether the work ends when its copies have run. False: it ends when they are launched,
                queued behind the forward pass in flight.
            cost: how many times as long copies take as from the device's own memory.
        """
        num_bytes = 0
        with closing(slices):
            while True:
                is_beside = waits and activity is Activity.COPYING
                with (
                    stall.measure() if stall else nullcontext(),
                    copies.copying(beside=is_beside) if copies else nullcontext(),
                ):
                    turn_s, left_bytes = self._budget(stall is not None and stall.lasts)
                    until_s = time.perf_counter() + turn_s
                    try:
                        while True:
                            slice_bytes = next(slices)
                            num_bytes += slice_bytes
                            left_bytes -= slice_bytes * cost
                            if slice_bytes == 0 or left_bytes <= 0 or time.perf_counter() >= until_s:
                                break
                    except StopIteration as end:
                        result: T = end.value
                        break
                yield activity
        if copies is not None and waits:
            # Outside of `copying`, as `copies_done` requires.
            yield from self._copied(copies, activity, is_held_up=stall is not None and stall.lasts)
        return num_bytes, result

    def behind(self, copies: CopyStream) -> Work[None]:
        """Wait for copies that forward passes are queued behind."""
        yield from self._copied(copies, Activity.COPYING, is_held_up=True)
        self.copied_at_s = time.monotonic()

    def _copied(self, copies: CopyStream, activity: Activity, *, is_held_up: bool) -> Work[None]:
        wait_s = LONGEST_TURN_S if is_held_up else WAIT_SHARE * min(self._step_s or 0.0, LONGEST_TURN_S)
        wait_until_s = time.perf_counter() + wait_s
        while not copies.copies_done():
            if time.perf_counter() >= wait_until_s:
                yield activity

    def _budget(self, is_held_up: bool) -> tuple[float, float]:
        """How long a turn may take, in seconds, and how many bytes it may launch."""
        if self._step_s is None or is_held_up:
            return IDLE_TURN_S, math.inf
        turn_s = min(max(SHARE * self._step_s, SHORTEST_TURN_S), LONGEST_TURN_S)
        return turn_s, turn_s * COPY_BYTES_PER_S


@contextmanager
def ending_rank(why: str) -> Iterator[None]:
    """Within, a failure becomes OutOfStep: the work can neither stay half-done nor be undone."""
    try:
        yield
    except OutOfStep:
        raise
    except Exception as error:
        raise OutOfStep(f"{why}: {type(error).__name__}: {error}") from error


class Ranks:
    """How the state machines of one rank act together with the other ranks. Here there is only one.

    Attributes:
        is_one: whether this is the only rank.
        is_working: whether this rank still has work to do in a phase.
    """

    is_one = True

    @property
    def is_working(self) -> bool:
        return False

    def phase(self, kind: Activity, work: Work[T]) -> Work[T]:
        """Do this rank's part, and wait until every rank has done its own. All go on in the same turn.

        If this raises, the caller must undo what the part has done: it may be finished, or ended early.

        Args:
            kind: WORKING, COPYING or ALONE, see `Activity`; the same on all ranks. WAITING: the part waits
                for senders, and the first failure ends it on all ranks.
            work: yields WAITING to be resumed later, anything else to be resumed at once.

        Raises:
            RequestRejected, EngineError: a rank failed. The same error is raised on every rank; it names the
                ranks that failed, unless all failed alike.
        """
        if kind in BETWEEN_PASSES:
            yield Activity.BOUNDARY
        try:
            return (yield from work)
        except (DeadlinePassed, RequestRejected, EngineError):
            raise
        except Exception as error:
            raise EngineError(f"{type(error).__name__}: {error}") from error

    def survey(self, kind: Activity, work: Work[T], fact: Callable[[T], Fact]) -> Work[tuple[T, list[Fact]]]:
        """As `phase`; returns this rank's result, and `fact` (a plain value) of every rank's result."""
        result = yield from self.phase(kind, work)
        return result, [fact(result)]

    def certainly(self, act: Callable[[], T]) -> T:
        """Do what all ranks have decided to do. With several ranks, a failure is OutOfStep."""
        return act()

    def propose(self, request: AnyControlRequest) -> None:
        """Let all ranks carry out this request soon; there is no reply."""
        raise AssertionError("one rank does at once what it would propose")

    def work(self) -> None:
        """Do the next slice of this rank's parts. With a single rank, operations do that themselves."""

    def decide(self, decision: Decision) -> bool:
        """End a phase. Returns whether its parts may have taken memory that forward passes need."""
        raise AssertionError("one rank casts no votes")


def at_once(act: Callable[[], T]) -> Generator[Never, None, T]:
    """This act as work, or slices, of a single step."""
    return act()
    yield


def guarded(slices: Slices[T], require: Callable[[], None]) -> Slices[T]:
    """The same work; `require` is called before each slice, and may refuse."""
    with closing(slices):
        while True:
            require()
            try:
                yield next(slices)
            except StopIteration as end:
                result: T = end.value
                return result


def is_burst(num_bytes: int) -> bool:
    """Whether a device copies this much within the longest turn."""
    return num_bytes <= LONGEST_TURN_S * BURST_BYTES_PER_S


def look_until(is_done: Callable[[], bool], wake: Wake) -> Work[None]:
    """Poll for something that sends the loop no message. It is seen at most 1/32 of the wait too late."""
    waits_s = _growing()
    while not is_done():
        wake(waits_s)
        yield Activity.WAITING


def _growing() -> Iterator[float]:
    waited_s = 0.0
    while True:
        wait_s = min(max(SHORTEST_LOOK_S, waited_s / 32), LONGEST_LOOK_S)
        waited_s += wait_s
        yield wait_s
