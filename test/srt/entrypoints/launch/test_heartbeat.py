"""Signs of life as the parent counts them, by hand."""

import os
from types import SimpleNamespace
from typing import Any

import pytest

from ebbtide.srt.entrypoints.launch import child_process
from ebbtide.srt.entrypoints.launch.child_process import PulseWatch
from ebbtide.srt.entrypoints.launch.process import Pulse


class Beating:
    """Two processes and the watch over them, with a limit of 10 s, over a clock that is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(child_process, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        self.children: list[Any] = [
            SimpleNamespace(name=name, pid=pid, pulse=Pulse(), has_ended=False)
            for pid, name in enumerate(("a", "b"))
        ]
        self.states = ["S", "S"]
        monkeypatch.setattr(child_process, "_state_of", self.states.__getitem__)
        self.watch = PulseWatch(self.children, 10.0, "--limit")

    def after(self, seconds: float, *silent: str) -> None:
        """Let so much time pass, in which all but these beat."""
        end_s = self.now_s + seconds
        while self.now_s < end_s - 1e-6:
            self.now_s += 0.5
            for child in self.children:
                if child.name not in silent:
                    os.eventfd_write(child.pulse.descriptor, 1)
            self.watch.look()


@pytest.fixture
def beating(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Beating(monkeypatch)
    yield made
    for child in made.children:
        child.pulse.close()


def test_who_is_silent_is_suspect_and_then_lost_a_little_before_the_limit(beating: Beating) -> None:
    beating.after(100)
    assert (beating.watch.suspect, beating.watch.lost) == (None, None)
    beating.after(3, "b")
    assert "the b process" in (beating.watch.suspect or "")
    beating.after(4, "b")
    assert beating.watch.lost is None
    beating.after(2, "b")
    lost = beating.watch.lost
    assert lost == "the b process has not answered for 9 s (--limit 10)"


def test_one_that_is_stopped_is_named_rather_than_those_that_are_silent_as_well(beating: Beating) -> None:
    beating.after(2, "a")
    beating.after(3, "a", "b")
    assert "the a process" in (beating.watch.suspect or "")
    beating.states[1] = "T"
    assert "the b process" in (beating.watch.suspect or "")
    beating.after(4, "a", "b")
    lost = beating.watch.lost
    assert lost == "the b process has not answered for 7 s (--limit 10): it is stopped (SIGSTOP)"


def test_who_beats_again_in_time_is_forgiven(beating: Beating) -> None:
    beating.after(7, "a")
    beating.after(1)
    beating.after(7, "a")
    assert beating.watch.lost is None


def test_nobody_is_at_fault_where_all_stood_still_with_the_parent(beating: Beating) -> None:
    beating.now_s += 3600
    beating.watch.look()
    assert (beating.watch.suspect, beating.watch.lost) == (None, None)


def test_who_has_ended_is_left_to_those_who_see_its_end(beating: Beating) -> None:
    beating.children[0].has_ended = True
    beating.after(20, "a")
    assert (beating.watch.suspect, beating.watch.lost) == (None, None)
