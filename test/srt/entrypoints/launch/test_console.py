"""What a start is at: what the parent makes of what its ranks report, and how often they report."""

import io
import signal
import time
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest

from ebbtide.srt.entrypoints.launch.console import StageLine, Stopped, raising_signals
from ebbtide.srt.managers import scheduler_process
from ebbtide.srt.managers.scheduler_process import StageReports

pytestmark = pytest.mark.unit


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def drawn(self) -> list[str]:
        """The lines drawn since the last call; "" where one was erased."""
        text = self.getvalue()
        self.seek(0)
        self.truncate()
        return [line.removeprefix("\x1b[2K") for line in text.split("\r")]


def test_a_line_replaces_the_last_one_and_nothing_is_left_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    with StageLine(terminal) as line:
        line.show("", "starting the processes")
        line.show("tp0", "loading weights", 1, 3)
        line.show("tp1", "loading weights", 0, 3)
        assert terminal.drawn() == ["", "starting the processes (0 s)", "", "loading weights 1/3 (0 s)", ""]
        line.show("tp0", "[bold]" + "x" * 500)
        assert [len(text) < 200 for text in terminal.drawn()] == [True] * 3
    assert "".join(terminal.drawn()) == ""


def test_without_a_terminal_nothing_is_written() -> None:
    stream = io.StringIO()
    with StageLine(stream) as line:
        line.show("tp0", "loading weights", 1, 3)
    assert stream.getvalue() == ""


def test_a_rank_reports_every_stage_but_not_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    monkeypatch.setattr(scheduler_process, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    ours, theirs = Pipe()
    stages = StageReports(theirs)
    for number in range(1000):
        stages("loading weights", number, 1000)
        now_s[0] += 0.001
    stages("warming up")
    received: list[dict[str, Any]] = []
    while ours.poll():
        received.append(ours.recv())
    ours.close()
    stages("a parent that has gone reads nothing")
    assert {report["status"] for report in received} == {"stage"}
    assert [report["number"] for report in received[:-1]] == pytest.approx([0, 200, 400, 600, 800], abs=2)
    assert received[-1]["what"] == "warming up"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_nothing_interrupts_the_way_out_that_a_second_stop_begins_after_a_lost_one() -> None:
    class Noisy:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    steps: list[str] = []

    @raising_signals()
    def start() -> None:
        Noisy()  # what its end raises goes no further, and comes again
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            time.sleep(0.1)
            steps.append("cleaned up")

    with pytest.raises(Stopped):
        start()
    assert steps == ["cleaned up"]
