"""How much of what takes long is done between two forward passes, and how long these are kept waiting.

Whatever takes long is an iterator that yields the bytes of each slice that it has just done. Here slices
become turns of the loop, and nowhere else. What several ranks do in step is in `phases`.
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

# A turn's part of the time that a forward pass takes. An update of 16 GB has some 40 ms of work that no
# pass runs beside: in shorter turns it takes more of them, and a pass goes by with each.
SHARE: Final = 0.8
SHORTEST_TURN_S: Final = 0.5e-3
LONGEST_TURN_S: Final = 10e-3
# How much a pass counts that work went on beside, where others came before it.
DISTURBED_WEIGHT: Final = 1 / 16
# The part of a pass for which a turn waits for copies under way. It is less than a pass has to spare on the
# host, while each further turn costs a small update a whole pass. If no pass can run, it waits a whole turn.
WAIT_SHARE: Final = 0.2
# Where no forward pass waits, a turn ends only so that the loop hears of messages and deadlines.
IDLE_TURN_S: Final = 25e-3
# What a device copies beside a forward pass, and while none runs. Copies are bounded by their bytes, since
# launching them takes less time than they do.
COPY_BYTES_PER_S: Final = 1.4e12
BURST_BYTES_PER_S: Final = 2e12

# A wait is looked at after at least this, and after at most this.
SHORTEST_LOOK_S: Final = 1e-3
LONGEST_LOOK_S: Final = 32e-3

# Turns this rank's loop once more, after the next of these waits; does nothing if that is to happen anyway.
Wake: TypeAlias = Callable[[Iterator[float]], None]


class Stall:
    """The longest time for which one request, or all of one update, kept the loop from a forward pass."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._began_s: float | None = None

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Count the time within."""
        started_s = time.perf_counter()
        try:
            yield
        finally:
            self._note(started_s)

    @property
    def lasts(self) -> bool:
        return self._began_s is not None

    def begin(self) -> None:
        """Count from here to `end`: no forward pass can run, whatever the loop does meanwhile."""
        if self._began_s is None:
            self._began_s = time.perf_counter()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Leave the time within out: a forward pass comes to its end that was launched before."""
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
            return  # asked by the engine itself, at every look
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
    """Makes turns of work: a share of a forward pass each while passes run, all of it at once while none do.

    Ranks measure their own passes, so they may need different numbers of turns: work is paced inside a phase.

    Attributes:
        copied_at_s: of the monotonic clock: when the last copies had run that passes were launched behind.
    """

    def __init__(self) -> None:
        self._step_s: float | None = None
        self.copied_at_s = 0.0

    def note_step(self, step_s: float, *, is_disturbed: bool = False) -> None:
        """Take note of the time from one forward pass to the next.

        `is_disturbed`: work went on beside it. Its turns make passes longer, which would make turns longer.
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
        """Do the work, letting a forward pass in after every turn; returns its bytes and its result.

        Args:
            slices: yields the bytes of each; 0 ends the turn: nothing more can be done before the next.
            activity: what is yielded in between. COPYING where the work only launches copies. Taking and
                giving back memory is not that: a forward pass under way may still use what changes hands, and
                the driver waits for it where a mapping of a sender's memory is closed.
            stall: notes the turns; while it lasts no pass can run, so there is nothing to be kept short for.
            copies: where the work launches its copies. The end is when they have run.
            waits: False: it is when they are launched, behind the forward pass under way.
            cost: how many times as long as within the device they take.
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
            # Asked outside, where nothing more is being launched.
            yield from self._copied(copies, activity, is_held_up=stall is not None and stall.lasts)
        return num_bytes, result

    def behind(self, copies: CopyStream) -> Work[None]:
        """Wait for copies that forward passes were launched behind."""
        yield from self._copied(copies, Activity.COPYING, is_held_up=True)
        self.copied_at_s = time.monotonic()

    def _copied(self, copies: CopyStream, activity: Activity, *, is_held_up: bool) -> Work[None]:
        wait_s = LONGEST_TURN_S if is_held_up else WAIT_SHARE * min(self._step_s or 0.0, LONGEST_TURN_S)
        wait_until_s = time.perf_counter() + wait_s
        while not copies.copies_done():
            if time.perf_counter() >= wait_until_s:
                yield activity

    def _budget(self, is_held_up: bool) -> tuple[float, float]:
        """The seconds of a turn, and the bytes that it may launch."""
        if self._step_s is None or is_held_up:
            return IDLE_TURN_S, math.inf
        turn_s = min(max(SHARE * self._step_s, SHORTEST_TURN_S), LONGEST_TURN_S)
        return turn_s, turn_s * COPY_BYTES_PER_S


@contextmanager
def ending_rank(why: str) -> Iterator[None]:
    """What is done within can neither be left half done nor taken back: a failure is OutOfStep."""
    try:
        yield
    except OutOfStep:
        raise
    except Exception as error:
        raise OutOfStep(f"{why}: {type(error).__name__}: {error}") from error


class Ranks:
    """The ranks of a replica, as the state machines of one of them see it. Here it is the only one.

    Attributes:
        is_working: whether this rank has more to do for a phase, rather than waits.
    """

    is_one = True

    @property
    def is_working(self) -> bool:
        return False

    def phase(self, kind: Activity, work: Work[T]) -> Work[T]:
        """Do this rank's part; goes on when every rank has done its part, on all of them in the same turn.

        Whatever a part leaves behind is the caller's to undo when this raises: the part itself may have
        been done, or ended early.

        Args:
            kind: WORKING, COPYING or ALONE as `Activity` says, the same for all ranks. WAITING where the
                part waits for what others send: then the first failure ends it for all.
            work: yields WAITING where it wants to be asked again later, anything else to go on at once.

        Raises:
            RequestRejected, EngineError: a rank failed; the same on every rank. It names who failed, unless
                all did alike.
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
        """As `phase`; returns this rank's result, and the facts (plain values) of all ranks' results."""
        result = yield from self.phase(kind, work)
        return result, [fact(result)]

    def certainly(self, act: Callable[[], T]) -> T:
        """Do what has been decided; on one of several ranks a failure is OutOfStep."""
        return act()

    def propose(self, request: AnyControlRequest) -> None:
        """Have all ranks carry this request out soon. Nobody waits for the reply."""
        raise AssertionError("one rank does at once what it would propose")

    def work(self) -> None:
        """Do the next slice of this rank's parts: of a single rank, operations do their own work."""

    def decide(self, decision: Decision) -> bool:
        """A phase has ended. Whether its parts may have taken memory that passes had on some ranks."""
        raise AssertionError("one rank casts no votes")


def at_once(act: Callable[[], T]) -> Generator[Never, None, T]:
    """Work, or slices, of a single one."""
    return act()
    yield


def guarded(slices: Slices[T], require: Callable[[], None]) -> Slices[T]:
    """The same work; before each slice `require` may refuse to go on."""
    with closing(slices):
        while True:
            require()
            try:
                yield next(slices)
            except StopIteration as end:
                result: T = end.value
                return result


def is_burst(num_bytes: int) -> bool:
    """Whether a device copies so much within the longest turn."""
    return num_bytes <= LONGEST_TURN_S * BURST_BYTES_PER_S


def look_until(is_done: Callable[[], bool], wake: Wake) -> Work[None]:
    """Wait for what sends the loop no message, by looking again and again, at most 1/32 too late."""
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
