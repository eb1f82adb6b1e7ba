"""The watchdog of a rank's loop, driven by hand."""

import time
from typing import Any

import pytest

from ebbtide.srt.managers import scheduler_process as module
from ebbtide.srt.managers.scheduler_process import Watchdog


class Watched:
    """A watchdog with limits of 2 s (soft) and 10 s, over a clock that is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog
        self.now_s = 100.0
        self.ends: list[str] = []
        self.num_dumps = 0
        clock: Any = type("Clock", (), {"monotonic": lambda: self.now_s, "sleep": time.sleep})
        monkeypatch.setattr(module, "time", clock)
        self.activity: tuple[str, float] | None = None
        monkeypatch.setattr(module, "dump_stacks", self._dump)
        self._watchdog = Watchdog(lambda: self.activity, 10.0, 2.0, self.ends.append)

    def begin(self, what: str) -> None:
        self.activity = (what, self.now_s)

    def _dump(self) -> None:
        assert self._caplog.messages[-1].endswith("where every thread stands:"), (
            "stacks come behind what names the rank"
        )
        self.num_dumps += 1

    def after(self, seconds: float) -> None:
        """Let so much time pass, with looks as often as the thread has them, until it ends the process."""
        end_s = self.now_s + seconds
        while self.now_s < end_s - 1e-6 and not self.ends:
            self.now_s = min(end_s, self.now_s + 0.2)
            self._watchdog.look()

    def frozen_for(self, seconds: float) -> None:
        """Let so much time pass without a look."""
        self.now_s += seconds
        self._watchdog.look()


def test_long_work_is_told_once_and_then_ended_and_waiting_is_no_work(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watched = Watched(monkeypatch, caplog)
    watched.begin("a forward pass")
    watched.after(1.9)
    watched.begin("a forward pass")
    watched.after(1.9)
    watched.activity = None
    watched.after(1000)
    assert (watched.num_dumps, caplog.messages, watched.ends) == (0, [], [])

    watched.begin("PauseGenerationReqInput 7")
    watched.after(3)
    watched.after(3)
    [told] = caplog.messages
    assert told.startswith("PauseGenerationReqInput 7 takes longer than 2 s (--soft-watchdog-timeout)")
    assert (watched.num_dumps, watched.ends) == (1, [])
    watched.after(5)
    assert watched.ends == ["PauseGenerationReqInput 7 has not ended within 10 s (--watchdog-timeout)"]
    assert watched.num_dumps == 2


def test_time_in_which_the_whole_process_stood_still_is_not_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watched = Watched(monkeypatch, caplog)
    watched.begin("a forward pass")
    watched.after(1)
    watched.frozen_for(3600)
    watched.after(0.6)
    assert (caplog.messages, watched.ends) == ([], [])
    watched.after(9)
    assert watched.ends == ["a forward pass has not ended within 10 s (--watchdog-timeout)"]
