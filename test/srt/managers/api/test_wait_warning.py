"""Requests that wait for the engine's owner: one warning an episode, by a clock of the test's own."""

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from fixtures.scripted_engine import STATE

from ebbtide.srt.managers.api.log import SILENT_S, PauseWatch
from ebbtide.srt.managers.io_struct import PauseMode, RankReport, TagReport
from ebbtide.srt.memory_saver import MemoryTag


class Clock:
    """Stands in for an event loop's `call_later`."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._calls: list[tuple[float, Callable[[], None]]] = []

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Any:
        entry = (self.now_s + delay_s, call)
        self._calls.append(entry)
        return type("Timer", (), {"cancel": lambda timer: self._calls.remove(entry)})()

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
        for entry in [entry for entry in self._calls if entry[0] <= self.now_s]:
            self._calls.remove(entry)
            entry[1]()


class Engine:
    """The watched engine."""

    def __init__(self) -> None:
        self.clock = clock = Clock()
        self.state = STATE
        self.num_live = 0
        self.watch = PauseWatch(
            1000, lambda: self.state, lambda: self.num_live, clock.call_later, lambda: clock.now_s
        )

    def turn(self, **changes: Any) -> None:
        self.state = msgspec.structs.replace(STATE, **changes)
        self.watch.note()

    def send(self) -> None:
        self.num_live += 1
        self.watch.note()


PAUSED: dict[str, Any] = {"can_run": False, "reason": "paused(in_place)", "paused": PauseMode.IN_PLACE}


@pytest.fixture
def engine(caplog: pytest.LogCaptureFixture) -> Engine:
    caplog.set_level(logging.WARNING)
    return Engine()


def test_one_warning_an_episode_with_the_reason_and_the_remedy(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        engine.send()
        engine.turn(**PAUSED)
        engine.send()
        engine.clock.advance(SILENT_S - 0.1)
        assert caplog.messages == []
        engine.clock.advance(0.1)
        [message] = caplog.messages
        assert message.endswith(
            "requests have waited for 5 s or longer: paused(in_place). To go on: /continue_generation"
        )
        engine.send()
        engine.clock.advance(10 * SILENT_S)
        assert len(caplog.messages) == 1
        # Another reason is worth another line: the first remedy would not help now.
        engine.turn(can_run=False, reason="released(kv_cache)")
        engine.clock.advance(SILENT_S)
        assert [": released(kv_cache)." in message for message in caplog.messages] == [False, True]
        engine.turn()
        caplog.clear()


def test_a_pause_that_ends_in_time_or_that_nobody_waits_in_is_not_mentioned(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.turn(**PAUSED)
    engine.clock.advance(100)
    engine.send()
    engine.clock.advance(SILENT_S - 1)
    engine.turn()
    engine.clock.advance(100)
    engine.turn(**PAUSED)
    # Its client has left.
    engine.num_live = 0
    engine.clock.advance(100)
    assert caplog.messages == []


def test_a_pause_that_lasts_is_told_of_again_and_again_though_nobody_waits(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    for changes, is_long in ((PAUSED, False), (PAUSED, True), ({}, False), (PAUSED, False)):
        engine.turn(**changes)
        engine.clock.advance(600)
        assert (engine.watch.is_forgotten, len(caplog.messages)) == (is_long, int(is_long))
        if is_long:
            engine.clock.advance(1000)
            assert engine.watch.blocked_s == 2200
            assert caplog.messages[-1].endswith(
                "paused(in_place). If that was forgotten: /continue_generation"
            )
            assert len(caplog.messages) == 2
            caplog.clear()


def report(state: Any, content: Any = None) -> TagReport:
    return TagReport(state=state, virtual_bytes=1, resident_bytes=0, backup_bytes=0, content=content)


def test_everything_that_is_missing_is_named(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    tags = {tag: report("released") for tag in MemoryTag} | {MemoryTag.WEIGHTS: report("resident", "stale")}
    rank = cast(RankReport, SimpleNamespace(tags=tags))
    engine.send()
    engine.turn(can_run=False, reason="asleep", paused=PauseMode.ABORT, ranks=[rank])
    engine.clock.advance(SILENT_S)
    assert caplog.messages[0].endswith(
        "asleep. To go on: /resume_memory_occupation, an update of all weights, /continue_generation"
    )
