"""Turns of work beside forward passes, on a clock that the test turns."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from ebbtide.srt.managers.control import Activity, pace as pace_module
from ebbtide.srt.managers.control.pace import COPY_BYTES_PER_S, LONGEST_TURN_S, SHARE, Pace, Stall
from ebbtide.srt.slices import Slices

STEP_S = 6e-3


@dataclass
class Clock:
    now_s: float = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    # In this module alone: others look at the clock meanwhile.
    monkeypatch.setattr(pace_module, "time", SimpleNamespace(perf_counter=lambda: clock.now_s))
    return clock


def work(clock: Clock, num_slices: int, num_bytes: int = 1, takes_s: float = 0.0) -> Slices[None]:
    for _ in range(num_slices):
        clock.now_s += takes_s
        yield num_bytes


def num_turns(pace: Pace, slices: Slices[None], stall: Stall | None = None, cost: int = 1) -> int:
    """How many turns of the loop it takes."""
    activities = list(pace.turns(slices, Activity.WORKING, stall, cost=cost))
    assert set(activities) <= {Activity.WORKING}
    return len(activities) + 1


def running(step_s: float = STEP_S) -> Pace:
    pace = Pace()
    pace.note_step(step_s)
    return pace


class TestWhilePassesRun:
    def test_a_turn_is_a_share_of_the_last_pass(self, clock: Clock) -> None:
        assert num_turns(running(), work(clock, 100, takes_s=STEP_S * SHARE / 9.5)) == 10 + 1
        assert num_turns(running(2 * STEP_S), work(clock, 100, takes_s=STEP_S * SHARE / 9.5)) == 5 + 1

    def test_or_what_the_device_copies_in_that_time(self, clock: Clock) -> None:
        num_bytes = int(STEP_S * SHARE * COPY_BYTES_PER_S / 10)
        assert num_turns(running(), work(clock, 100, num_bytes + 1)) == 10 + 1
        # Of another device's memory, which comes more slowly, it copies less.
        assert num_turns(running(), work(clock, 100, num_bytes + 1), cost=5) == 50 + 1

    def test_it_does_not_grow_with_the_passes_that_it_holds_up(self, clock: Clock) -> None:
        pace = running()
        turns = pace.turns(work(clock, 10_000, takes_s=STEP_S / 100), Activity.WORKING)
        lengths = []
        for _ in range(10):
            began_s = clock.now_s
            next(turns)
            lengths.append(clock.now_s - began_s)
            pace.note_step(max(STEP_S, lengths[-1] + STEP_S / 2), is_disturbed=True)
        assert lengths[-1] <= 1.2 * lengths[0]
        for _ in range(100):  # Passes that are longer for another reason do count.
            pace.note_step(3 * STEP_S, is_disturbed=True)
        began_s = clock.now_s
        next(turns)
        assert clock.now_s - began_s == pytest.approx(LONGEST_TURN_S, rel=0.05)


@pytest.mark.parametrize("pace", [running(), Pace()])
def test_a_slice_without_bytes_ends_the_turn(clock: Clock, pace: Pace) -> None:
    assert num_turns(pace, work(clock, 5, 0)) == 5 + 1


class TestWhileNoneRuns:
    def test_everything_is_one_turn(self, clock: Clock) -> None:
        idle = running()
        idle.note_idle()
        assert num_turns(idle, work(clock, 1000, 1 << 40)) == 1

    def test_so_it_is_while_passes_are_held_up_anyway(self, clock: Clock) -> None:
        stall = Stall()
        stall.begin()
        assert num_turns(running(), work(clock, 1000, 1 << 40), stall) == 1


class Copies:
    """Copies that run until they are asked for a third time."""

    def __init__(self, clock: Clock, each_s: float) -> None:
        self.is_launching = False
        self.num_asked = 0
        self._clock, self._each_s = clock, each_s

    @contextmanager
    def copying(self, *, beside: bool = False) -> Iterator[None]:
        self.is_launching = True
        yield
        self.is_launching = False

    def copies_done(self) -> bool:
        assert not self.is_launching
        self.num_asked += 1
        self._clock.now_s += self._each_s
        return self.num_asked == 3


@pytest.mark.parametrize(("each_s", "num_turns"), [(1e-6, 0), (1.0, 2)])
def test_it_ends_when_its_copies_have_run(clock: Clock, each_s: float, num_turns: int) -> None:
    """Those that are nearly there are waited for."""
    copies = Copies(clock, each_s)

    def launching() -> Slices[None]:
        assert copies.is_launching
        yield 7

    turns = running().turns(launching(), Activity.COPYING, copies=copies)
    assert list(turns) == [Activity.COPYING] * num_turns


def test_work_that_is_left_is_closed(clock: Clock) -> None:
    slices = work(clock, 100, takes_s=1.0)
    turns = running().turns(slices, Activity.WORKING)
    next(turns)
    turns.close()
    assert list(slices) == []
