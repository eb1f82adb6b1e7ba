"""Forward passes that find too little device memory: nothing is lost, and smaller ones follow.

On null parts every pass of many fails in turn, one before it has done anything, the next when it has changed
all that it may. Pages, states and adapters are checked by the null runner itself.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from fixtures.adapter_control import AdapterHarness
from fixtures.control import IN_PLACE, CountingShelf, Harness, null_tokens
from fixtures.deadlines import HANG_S

from ebbtide.srt.managers import scheduler
from ebbtide.srt.managers.io_struct import (
    Expire,
    FinishReason,
    PauseGenerationReqInput,
    PauseMode,
    PingReqInput,
    Preserve,
)
from ebbtide.srt.memory_saver import MemoryTag
from ebbtide.srt.model_executor.batch_plan import BatchPlan, BeforeMasks, PassOutOfMemory
from ebbtide.testing import NullRunner, default_schedule

KV = (MemoryTag.KV_CACHE,)
# Whether a pass fails, by its number and its tokens.
Fails = Callable[[int, int], bool]


class Passes:
    """The forward passes of a harness, some of which fail, on all of its ranks.

    Args:
        is_late: they fail when they have changed all that they may; else before anything.

    Attributes:
        num_failed: how many have.
    """

    def __init__(self, harness: Harness, fails: Fails, *, is_late: bool = False) -> None:
        self.num_failed = 0
        self.fails, self._is_late = fails, is_late
        # Of each rank: what each pass computes.
        self._plans: list[list[list[int]]] = [[] for _ in harness.ranks]
        for rank, plans in zip(harness.ranks, self._plans, strict=True):
            launch = partial(self._launch_or_fail, rank.runner, plans, rank.runner.launch)
            rank.runner.launch = launch  # type: ignore[method-assign]

    @property
    def sizes(self) -> list[int]:
        """Tokens of each, those that failed among them; all ranks have made the same ones."""
        assert all(plans == self._plans[0] for plans in self._plans)
        return [len(input_ids) for input_ids in self._plans[0]]

    def _launch_or_fail(
        self,
        runner: NullRunner,
        plans: list[list[int]],
        launch: Callable[..., Any],
        plan: BatchPlan,
        before_masks: BeforeMasks = None,
    ) -> Any:
        number, num_tokens = len(plans), len(plan.input_ids_T)
        plans.append(plan.input_ids_T.tolist())
        if self.fails(number, num_tokens):
            self.num_failed += plans is self._plans[0]
            fault = PassOutOfMemory(f"Tried to allocate {num_tokens} pages; 7 bytes are free")
            if not self._is_late:
                raise fault
            runner.faults.append(fault)
        return launch(plan, before_masks)


def end_wait(harness: Harness) -> None:
    """The loop has waited for memory."""
    harness.turn_until(lambda: not harness.scheduler.is_runnable)
    harness.deliver(Expire(id=scheduler.MEMORY_WAIT))
    harness.turn()


def assert_nothing_is_held(harness: Harness) -> None:
    """All pages, rows and slots are free again, but for what the prefix cache has."""
    for rank in harness.ranks:
        policy = rank.scheduler.policy
        assert (policy.running, policy.queued, rank.runner.under_way) == ([], [], [])
        assert not policy.rows.in_flight[policy.rows.serial > 0].any()
        assert not (policy.rows.serial > 0).any()
        policy.flush_cache()
        assert policy.allocator.num_free == harness.num_pages
        if (states := policy.pages.states) is not None:
            slots = states.slots
            assert not states.attached
            assert all(states.take() is not None for _ in range(slots.num_checkpoints))
            assert states.take() is None


# ------------------------------------------------------------------------------ what is run, pass by pass


def mixed(harness: Harness, ask: Callable[..., Any] | None = None, **fields: Any) -> None:
    """Prompts in chunks beside requests that decode; a prefix that is found; samples of one prompt."""
    ask = ask or harness.generate
    ask(prompt=range(1, 40), seed=1, max_new_tokens=14, **fields)
    harness.turn(5)
    for seed in range(2, 5):
        ask(prompt=range(100, 121), seed=seed, max_new_tokens=6, **fields)
    ask(prompt=range(5), seed=5, max_new_tokens=0, **fields)
    harness.turn(4)
    ask(prompt=[*range(1, 30), 7, 7], seed=6, max_new_tokens=9, **fields)
    ask(prompt=range(300, 309), seed=7, frequency_penalty=0.5, stream_interval=3, **fields)
    ask(prompt=range(300, 309), seed=8, stream=False, stop_token_ids=[null_tokens(8, 4)[3]])


def masked(harness: Harness) -> None:
    """Tokens are awaited in the middle of the next pass."""
    for rank in harness.ranks:
        rank.scheduler.grammars = CountingShelf()  # type: ignore[assignment]
    mixed(harness, grammar="any")


def with_adapters(harness: Harness) -> None:
    """Other adapters beside the base; other weights come between two passes."""
    assert isinstance(harness, AdapterHarness)
    harness.load("a", 3)
    harness.load("b", 5)
    mixed(harness, partial(harness.ask, "a"))
    for adapter in ("b", None):
        harness.ask(adapter, seed=20)
    harness.turn()
    harness.update(3, weight_version="3", **IN_PLACE)


def parked(harness: Harness) -> None:
    mixed(harness)
    harness.turn(2)
    harness.release(*KV, preserve=Preserve.LIVE)
    harness.resume(*KV)


SCENARIOS: dict[str, tuple[Callable[[Harness], None], Callable[[], Harness]]] = {
    "chunks": (mixed, Harness),
    "chunks-of-one": (mixed, lambda: Harness(schedule=default_schedule(chunked_prefill_size=1))),
    "whole-prompts": (mixed, lambda: Harness(schedule=default_schedule(chunked_prefill_size=None))),
    "small-pool": (mixed, lambda: Harness(num_pages=16)),
    "pages-of-one": (mixed, lambda: Harness(num_pages=256, page_size=1)),
    "windows": (mixed, lambda: Harness(num_pages=256, page_size=1, windows=(None, 9))),
    "states": (mixed, lambda: Harness(num_checkpoints=5)),
    "states-in-small-pool": (mixed, lambda: Harness(num_pages=18, num_checkpoints=2)),
    "without-prefix-cache": (mixed, lambda: Harness(enable_prefix_cache=False)),
    "masks": (masked, Harness),
    "adapters": (with_adapters, AdapterHarness),
    "adapters-of-two-ranks": (with_adapters, lambda: AdapterHarness(num_ranks=2)),
    "parked": (parked, Harness),
    "parked-states": (parked, lambda: Harness(num_checkpoints=5)),
    "two-ranks": (masked, lambda: Harness(num_ranks=2)),
    "states-of-three-ranks": (parked, lambda: Harness(num_checkpoints=5, num_ranks=3)),
}


def run(name: str, fails: Fails, is_late: bool = True) -> tuple[Harness, Passes]:
    scenario, make = SCENARIOS[name]
    harness = make()
    passes = Passes(harness, fails, is_late=is_late)
    scenario(harness)
    harness.run_until_idle()
    return harness, passes


def ends(harness: Harness) -> dict[str, tuple[Any, ...]]:
    """What has come of each request. Where weights change, tokens are those of the weights named for them."""
    if isinstance(harness, AdapterHarness):
        harness.assert_true()
        return {rid: (output.finish, harness.labels(rid)) for rid, output in harness.outputs.items()}
    return {
        rid: (output.token_ids, output.finish, output.version_starts, output.kv_versions)
        for rid, output in harness.outputs.items()
    }


@pytest.mark.parametrize("name", SCENARIOS)
def test_whichever_pass_fails_all_requests_have_their_tokens(name: str) -> None:
    undisturbed, passes = run(name, lambda number, size: False)
    for failing in [number for number, size in enumerate(passes.sizes) if size > 1]:
        harness, failed = run(name, lambda number, size, failing=failing: number == failing, failing % 2 > 0)
        assert failed.num_failed == 1
        assert ends(harness) == ends(undisturbed), failing
        assert_nothing_is_held(harness)


@pytest.mark.parametrize("most", [1, 5])
@pytest.mark.parametrize("name", SCENARIOS)
def test_passes_become_as_small_as_what_fits(name: str, most: int) -> None:
    undisturbed, _ = run(name, lambda number, size: False)
    harness, passes = run(name, lambda number, size: size > most)
    assert ends(harness) == ends(undisturbed)
    assert_nothing_is_held(harness)
    assert passes.num_failed < len(passes.sizes) / 4, "few try more again"


class Waiting(Harness):
    """Requests that run, one that waits, and no memory for a single token of them."""

    def __init__(self, **args: Any) -> None:
        super().__init__(**args)
        self.rids = [self.generate(range(seed, seed + 30), seed=seed, max_new_tokens=20) for seed in range(3)]
        self.turn(9)
        self.passes = Passes(self, lambda number, size: True, is_late=True)
        self.rids.append(self.generate(range(50, 90), seed=3, max_new_tokens=20))
        self.turn_until(lambda: not self.scheduler.is_runnable)
        assert self.passes.sizes[-1] == 1

    def end(self) -> None:
        """There is memory again."""
        self.passes.fails = lambda number, size: False
        end_wait(self)
        self.run_until_idle()


@pytest.fixture(params=[(None, 1), (5, 1), (None, 3)], ids=["kv", "states", "three ranks"])
def waiting(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Waiting:
    # Waits end when the test says so, however slow it is.
    monkeypatch.setattr(scheduler, "MEMORY_WAITS_S", (HANG_S,) * len(scheduler.MEMORY_WAITS_S))
    num_checkpoints, num_ranks = request.param
    return Waiting(num_checkpoints=num_checkpoints, num_ranks=num_ranks)


def test_without_memory_for_one_token_the_loop_sleeps_and_tries_again(waiting: Waiting) -> None:
    before = {rid: waiting.num_tokens(rid) for rid in waiting.rids}
    for number in range(5):
        num_passes = len(waiting.passes.sizes)
        waiting.turn(7)
        assert len(waiting.passes.sizes) == num_passes, "the loop waits"
        end_wait(waiting)
        assert waiting.passes.sizes[num_passes:] == [1], number
    assert {rid: waiting.num_tokens(rid) for rid in waiting.rids} == before
    waiting.end()
    for seed, rid in enumerate(waiting.rids):
        assert waiting.outputs[rid].token_ids == null_tokens(seed, 20)
    assert max(waiting.passes.sizes[-20:]) > 1, "all of them run in one pass at once"
    assert_nothing_is_held(waiting)


def test_only_the_request_ends_that_has_no_memory_for_a_minute_and_it_has_its_tokens(
    waiting: Waiting, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in scheduler.MEMORY_WAITS_S[:-1]:
        end_wait(waiting)
    assert not any(waiting.outputs[rid].finish for rid in waiting.rids)
    caplog.clear()
    waiting.deliver(Expire(id=scheduler.MEMORY_WAIT))
    waiting.turn()
    refused, *others = waiting.rids
    finish = waiting.outputs[refused].finish
    assert finish is not None
    assert finish.kind == "abort"
    assert "for a minute one token of it found too little device memory" in finish.message
    assert "7 bytes are free" in finish.message
    assert "Give memory back" in caplog.text
    assert waiting.outputs[refused].token_ids == null_tokens(0, 20)[: waiting.num_tokens(refused)]
    waiting.turn_until(lambda: not waiting.scheduler.is_runnable)
    assert not any(waiting.outputs[rid].finish for rid in others), "they have a minute of their own"
    waiting.end()
    assert [waiting.outputs[rid].token_ids for rid in others] == [null_tokens(seed, 20) for seed in (1, 2, 3)]
    assert_nothing_is_held(waiting)


def test_who_comes_after_one_that_has_waited_and_went_has_a_whole_minute(waiting: Waiting) -> None:
    for _ in scheduler.MEMORY_WAITS_S[:-2]:
        end_wait(waiting)
    first, *others = waiting.rids
    waiting.abort(first)
    for _ in scheduler.MEMORY_WAITS_S:
        end_wait(waiting)
    assert not any(waiting.outputs[rid].finish for rid in others)
    end_wait(waiting)
    assert [bool(waiting.outputs[rid].finish) for rid in others] == [True, False, False]


CONTROL: dict[str, Callable[[Waiting], Any]] = {
    "pause-in-place": lambda harness: (harness.pause(PauseMode.IN_PLACE), harness.proceed()),
    "pause-retract": lambda harness: (harness.pause(PauseMode.RETRACT), harness.proceed()),
    "release": lambda harness: (harness.release(*KV), harness.resume(*KV)),
    "park": lambda harness: (harness.release(*KV, preserve=Preserve.LIVE), harness.resume(*KV)),
    "flush": lambda harness: harness.flush(retract_running=True),
    "update": lambda harness: harness.update(0, weight_version="b", **IN_PLACE),
}


@pytest.mark.parametrize("name", CONTROL)
def test_control_requests_are_carried_out_while_it_waits(waiting: Waiting, name: str) -> None:
    before = [waiting.num_tokens(rid) for rid in waiting.rids]
    CONTROL[name](waiting)
    assert [waiting.num_tokens(rid) for rid in waiting.rids] == before
    waiting.end()
    for seed, rid in enumerate(waiting.rids):
        assert waiting.outputs[rid].token_ids == null_tokens(seed, 20)
        own = {0: "default", before[seed]: "b" if name == "update" else "default"}
        assert waiting.versions(rid) == list(dict.fromkeys(own.values()))
    assert_nothing_is_held(waiting)


def test_requests_may_be_aborted_while_it_waits(waiting: Waiting) -> None:
    first, *others = waiting.rids
    waiting.abort(first)
    waiting.turn()
    assert waiting.outputs[first].finish == FinishReason("abort", message="Aborted: the client went away")
    waiting.pause(PauseMode.ABORT)
    assert all(waiting.outputs[rid].finish.kind == "abort" for rid in others)  # type: ignore[union-attr]
    assert_nothing_is_held(waiting)
    waiting.proceed()
    rid = waiting.generate(range(5), seed=9, max_new_tokens=20)
    waiting.end()
    assert waiting.outputs[rid].token_ids == null_tokens(9, 20)


def test_the_state_says_that_it_waits_as_long_as_it_does(waiting: Waiting) -> None:
    for asks in (False, True, False, True):
        assert (waiting.now.can_run, waiting.now.reason) == (False, scheduler.WAITS_FOR_MEMORY)
        waiting.deliver(Expire(id=scheduler.MEMORY_WAIT))
        if asks:  # It is answered behind the end of one wait, and ahead of the pass that begins another.
            waiting.call(PingReqInput())
        waiting.turn()
    for rid in waiting.rids[1:]:
        waiting.abort(rid)
    waiting.end()
    assert (waiting.now.can_run, waiting.now.reason) == (True, "")


def test_so_it_does_no_more_when_nobody_is_left_to_try_it(waiting: Waiting) -> None:
    waiting.pause(PauseMode.ABORT)
    assert waiting.now.reason == f"paused(abort); {scheduler.WAITS_FOR_MEMORY}"
    waiting.proceed()
    waiting.deliver(Expire(id=scheduler.MEMORY_WAIT))
    waiting.turn()
    assert (waiting.now.can_run, waiting.now.reason) == (True, "")


def test_a_pause_that_waits_for_requests_waits_for_memory_too() -> None:
    waiting = Waiting()
    call = waiting.call(PauseGenerationReqInput(mode=PauseMode.WAIT))
    waiting.turn(5)
    assert call not in waiting.replies
    waiting.end()
    assert waiting.reply(call).mode is PauseMode.WAIT
