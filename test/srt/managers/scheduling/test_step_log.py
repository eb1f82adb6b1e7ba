"""Lines about the forward passes, by a clock of the test's own."""

import logging

import pytest
from fixtures.control import Harness
from fixtures.deadlines import Clock

from ebbtide.srt.managers.io_struct import PauseMode
from ebbtide.srt.managers.scheduling import load_meter
from ebbtide.testing import default_schedule


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Clock:
    caplog.set_level(logging.INFO, load_meter.__name__)
    clock = Clock()
    monkeypatch.setattr(load_meter, "time", clock)
    return clock


def harness(interval: int, num_ranks: int = 1) -> Harness:
    schedule = default_schedule(decode_log_interval=interval, max_running_requests=2)
    return Harness(num_pages=64, context_len=1024, schedule=schedule, num_ranks=num_ranks)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_line_every_so_many_passes_tells_of_what_happened_since(
    clock: Clock, caplog: pytest.LogCaptureFixture, num_ranks: int
) -> None:
    engine = harness(4, num_ranks)
    for start in (1, 101, 201):
        engine.generate(range(start, start + 4), max_new_tokens=100)
    policy = engine.scheduler.policy
    for num_lines, elapsed_s, tokens_per_s in ((1, 2.0, 4.0), (2, 0.5, 16.0)):
        clock.now_s += elapsed_s
        while len(caplog.messages) < num_lines:
            engine.turn()
        held = {page for req in policy.running if req.kv is not None for page in req.kv.pages[0]}
        assert caplog.messages[-1] == (
            f"steps: passes=4 elapsed_s={elapsed_s:.2f} running=2 queued=1 tokens_per_s={tokens_per_s} "
            f"kv_pages={len(held)}/{policy.allocator.num_pages} weight_version=default"
        )


def test_requests_that_have_to_wait_are_told_of_once(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    engine = harness(1000)
    engine.pause(PauseMode.IN_PLACE)
    engine.turn(2)
    assert caplog.messages == []
    engine.generate(range(1, 5))
    engine.turn(4)
    assert caplog.messages == ["nothing runs: paused(in_place): running=0 queued=1 weight_version=default"]


def test_without_an_interval_nothing_is_written(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    engine = harness(0)
    engine.generate(range(1, 5), max_new_tokens=100)
    engine.turn(50)
    engine.pause(PauseMode.IN_PLACE)
    engine.turn(2)
    assert caplog.messages == []
