"""Limits on how long requests wait and run: kept by the leader's clock, the same on all ranks."""

from collections.abc import Callable, Sequence
from typing import Self

import numpy as np
import pytest
from fixtures.control import Harness
from fixtures.deadlines import Clock
from numpy.typing import NDArray

from ebbtide.srt.managers.io_struct import PauseMode
from ebbtide.srt.managers.scheduling import lockstep
from ebbtide.srt.managers.text.grammar import TOO_SLOW
from ebbtide.testing import default_schedule


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(lockstep, "time", clock)
    return clock


@pytest.fixture(params=[1, 2])
def harness(request: pytest.FixtureRequest, clock: Clock) -> Harness:
    schedule = default_schedule(waiting_timeout_s=5.0, running_timeout_s=60.0)
    return Harness(num_pages=256, context_len=1024, schedule=schedule, num_ranks=request.param)


def test_a_request_that_waits_too_long_is_aborted(harness: Harness, clock: Clock) -> None:
    harness.pause(PauseMode.IN_PLACE)
    rid = harness.generate(range(1, 5))
    harness.turn(4)
    clock.now_s += 4.9
    harness.turn(4)
    assert harness.outputs[rid].finish is None
    clock.now_s += 0.2
    harness.turn(4)
    finish = harness.outputs[rid].finish
    assert finish is not None
    assert (finish.kind, finish.message) == (
        "abort",
        "Aborted: it has waited 5 s (SGLANG_REQ_WAITING_TIMEOUT)",
    )


def test_a_request_that_runs_too_long_ends_with_what_it_has(harness: Harness, clock: Clock) -> None:
    rid = harness.generate(range(1, 5), max_new_tokens=900)
    harness.turn(4)
    clock.now_s += 59
    harness.turn(4)
    assert harness.outputs[rid].finish is None
    clock.now_s += 2
    harness.turn(4)
    output = harness.outputs[rid]
    assert output.finish is not None
    assert output.finish.message == "Aborted: it has run 60 s (SGLANG_REQ_RUNNING_TIMEOUT)"
    assert output.token_ids


def test_a_limit_is_for_one_request_whatever_its_name(harness: Harness, clock: Clock) -> None:
    harness.generate(range(1, 5), rid="name", max_new_tokens=2)
    harness.run_until_idle()
    clock.now_s += 50
    second = harness.generate(range(1, 5), rid="name", max_new_tokens=900)
    harness.turn(4)
    clock.now_s += 30
    harness.turn(4)
    assert harness.outputs[second].finish is None


class AnyToken:
    """Allows all tokens. Implements `batch_plan.TokenMask`."""

    has_ended = False

    def fill(self, others: Sequence[Self], words_MW: NDArray[np.int32]) -> None:
        words_MW.fill(-1)

    def accept(self, token_id: int) -> bool:
        return True


class Shelf:
    def __init__(self) -> None:
        self.slow: list[Callable[[], None]] = []

    def mask(self, key: str, note_slow: Callable[[], None]) -> AnyToken:
        self.slow.append(note_slow)
        return AnyToken()


def test_a_request_whose_masks_take_too_long_ends_by_name_on_all_ranks_when_the_leader_says_so(
    harness: Harness,
) -> None:
    shelves = [Shelf() for _ in harness.ranks]
    for rank, shelf in zip(harness.ranks, shelves, strict=True):
        rank.scheduler.grammars = shelf  # type: ignore[assignment]
    rid, other = (
        harness.generate(range(1, 5), max_new_tokens=40, grammar="any", ebnf='root ::= "a" | root root')
        for _ in range(2)
    )
    harness.turn(4)
    for shelf in shelves[1:]:
        shelf.slow[1]()
    shelves[0].slow[0]()
    harness.run_until_idle()
    finish = harness.outputs[rid].finish
    assert finish is not None
    assert (finish.kind, finish.message) == ("abort", f"Aborted: sampling_params.ebnf: {TOO_SLOW}")
    assert len(harness.outputs[other].token_ids) == 40
