"""Which waiting requests are tried first, what one adapter leaves to others, and how large a pass may be."""

import itertools
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
from fixtures.adapter_control import AdapterHarness, loading

from ebbtide.srt.managers.io_struct import TokenizedGenerateReqInput
from ebbtide.srt.managers.scheduling.admission import PassLimit, WaitingRequests
from ebbtide.srt.managers.scheduling.request import Req
from ebbtide.srt.model_executor.batch_plan import SampleSpec
from ebbtide.srt.sampling_params import SamplingParams
from ebbtide.testing import default_schedule

pytestmark = pytest.mark.unit

FLOOD = 40


class Fair(AdapterHarness):
    """Few rows, many requests, no two with the same prompt."""

    def __init__(self, *names: str, num_rows: int = 4, limit: int | None = None, **args: Any) -> None:
        schedule = default_schedule(
            max_running_requests=num_rows,
            max_running_per_adapter=limit,
            max_queued_requests=args.pop("queue", None),
        )
        super().__init__(schedule=schedule, num_pages=256, **args)
        self._prompts = itertools.count()
        for index, name in enumerate(names):
            self.load(name, index + 1)

    def flood(self, adapter: str | None, count: int = FLOOD, num_tokens: int = 8) -> list[str]:
        return [
            self.ask(adapter, prompt=[next(self._prompts) % 200, *range(9)], max_new_tokens=num_tokens)
            for _ in range(count)
        ]

    def num_ended(self, rids: list[str]) -> int:
        return sum(self.outputs[rid].finish is not None for rid in rids)

    def turn_to_end_of(self, *rids: str) -> None:
        self.turn_until(lambda: self.num_ended(list(rids)) == len(rids))

    def running(self) -> Counter[str | None]:
        return Counter(req.adapter_name for req in self.scheduler.policy.running)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_flood_keeps_out_neither_another_adapter_nor_the_base(num_ranks: int) -> None:
    harness = Fair("a", "b", num_rows=2, num_ranks=num_ranks)
    flood = harness.flood("a")
    harness.turn(3)
    late = [*harness.flood("b", 1), *harness.flood(None, 1)]
    harness.turn_to_end_of(*late)
    assert harness.num_ended(flood) <= 6
    harness.run_until_idle()
    assert harness.num_ended(flood) == FLOOD
    harness.assert_true()


def test_rows_are_shared_alike_whatever_requests_take() -> None:
    harness = Fair("long", "short", num_rows=6)
    harness.flood("long", num_tokens=40)
    harness.flood("short", 200, num_tokens=5)
    harness.flood(None, num_tokens=20)
    held: Counter[str | None] = Counter()
    harness.turn(60)
    for _ in range(60):
        harness.turn()
        held += harness.running()
    assert max(held.values()) <= 1.5 * min(held.values()), held


def test_one_row_goes_round_even_if_somebody_asks_again_at_once() -> None:
    harness = Fair("a", "b", num_rows=1)
    [last] = harness.flood("b", 1)
    a, base = harness.flood("a"), harness.flood(None)
    num_b = 0
    for _ in range(300):
        harness.turn()
        if harness.num_ended([last]):
            [last], num_b = harness.flood("b", 1), num_b + 1
    counts = [num_b, harness.num_ended(a), harness.num_ended(base)]
    assert min(counts) >= 5
    assert max(counts) - min(counts) <= 1, counts


def test_a_quota_leaves_rows_free_for_others() -> None:
    harness = Fair("a", "b", num_rows=4, limit=2)
    flood = harness.flood("a", 12)
    harness.turn(5)
    assert harness.running() == {"a": 2}, "the others wait"
    base = harness.flood(None, 6)
    most: Counter[str | None] = Counter()
    for _ in range(30):
        harness.turn()
        most |= harness.running()
    assert most == {"a": 2, None: 2}, "of the base there are as many as have room"
    harness.run_until_idle()
    assert harness.num_ended(flood + base) == 18
    harness.assert_true()


def test_a_full_queue_is_full_for_its_adapter_alone() -> None:
    harness = Fair("a", "b", num_rows=1, queue=3)
    flood = harness.flood("a", 9)
    harness.turn(2)
    others = [*harness.flood("b", 2), *harness.flood(None, 2)]
    harness.turn(2)
    refused = [rid for rid in flood if harness.outputs[rid].finish is not None]
    reasons = {
        (harness.finish(rid).status_code, "adapter 'a'" in harness.finish(rid).message) for rid in refused
    }
    assert (len(refused), reasons) == (6, {(503, True)})
    harness.run_until_idle()
    assert {harness.finish(rid).kind for rid in others} == {"length"}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_adapters_share_too_few_slots(num_ranks: int) -> None:
    names = "abcd"
    harness = Fair(*names, num_slots=2, num_ranks=num_ranks)
    floods = {name: harness.flood(name, 60) for name in names}
    for _ in range(120):
        harness.turn()
    counts = [harness.num_ended(rids) for rids in floods.values()]
    assert min(counts) >= 4, counts
    harness.assert_true()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_slots_that_a_session_has_taken_are_missed_by_nobody_for_long(num_ranks: int) -> None:
    harness = Fair("a", "b", "c", num_slots=3, num_ranks=num_ranks)
    harness.flood("a", 100)
    harness.flood("b", 100)
    harness.turn(6)
    assert set(harness.running()) == {"a", "b"}
    fields: dict[str, Any] = {"lora_version": "1", "session_id": "step"}
    harness.begin(session_id="step")
    # The second one needs a slot that requests run in and never leave by themselves.
    calls = [harness.call(loading(name, 7, **fields)) for name in "de"]
    harness.turn_until(lambda: all(call in harness.replies for call in calls))
    [late] = harness.flood("c", 1)
    harness.turn_to_end_of(late)
    assert harness.scheduler.policy.adapters.staged, "the session is open still"
    harness.end(session_id="step")
    harness.contents.update({"d@1": 7, "e@1": 7})
    rids = [*harness.flood("d", 1), *harness.flood("e", 1)]
    harness.turn_to_end_of(*rids)
    harness.run_until_idle()
    harness.assert_true()


def request(rid: str, max_new_tokens: int = 8, priority: int = 0, num_retractions: int = 0) -> Req:
    spec = SampleSpec(SamplingParams(), 0, frozenset(), [1, 2, 3], [])
    given = TokenizedGenerateReqInput(
        rid=rid,
        input_ids=spec.prompt_ids,
        sampling_params=spec.params,
        max_new_tokens=max_new_tokens,
        seed=0,
        priority=priority,
    )
    req = Req(given, 0, spec, None)
    req.num_retractions = num_retractions
    return req


def order(policy: str, waiting: list[Req], pages: dict[str, list[int]]) -> str:
    requests = WaitingRequests(policy)
    for req in waiting:
        requests.add(req)
    tried = requests.candidates(lambda req: pages.get(req.rid, []), lambda req: True)
    return "".join(req.rid for req in tried)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        *(("fcfs", "rabcd"), ("lof", "rbdac"), ("priority", "rcabd"), ("priority-lof", "rcbda")),
        ("lpm", "rcbad"),
    ],
)
def test_each_policy_has_its_order_and_retracted_requests_come_first(policy: str, expected: str) -> None:
    waiting = [
        request("r", max_new_tokens=1, priority=-1, num_retractions=1),
        request("a", max_new_tokens=4),
        request("b", max_new_tokens=9),
        request("c", max_new_tokens=4, priority=2),
        request("d", max_new_tokens=9),
    ]
    pages = {"a": [7], "b": [4, 5], "c": [4, 6, 8]}
    assert order(policy, waiting, pages) == expected


def test_a_pass_that_finds_no_memory_is_halved_and_doubled_after_ever_more_that_fit() -> None:
    limit = PassLimit()

    def sizes(most: int, count: int) -> list[int]:
        """Of so many passes, where there is memory for `most` tokens and 16 want to run."""
        tried = []
        for _ in range(count):
            tried.append(min(16, limit.num_tokens))
            if tried[-1] > most:
                limit.note_failed(np.array([tried[-1]]), 1)
            else:
                limit.note_fitting()
        return tried

    assert sizes(16, 1000) == [16] * 1000
    assert sizes(4, 61) == [16, 8, *[4] * 8, 8, *[4] * 16, 8, *[4] * 32, 8]
    assert sizes(16, 150) == [*[4] * 64, *[8] * 64, *[16] * 22]
    assert sizes(4, 21) == [16, 8, *[4] * 16, 8, *[4] * 2]


def test_prompts_give_way_before_requests_that_decode() -> None:
    limit, sizes = PassLimit(), []
    num_decoding, num_prompt = 5, 9
    for _ in range(7):
        decoding = min(num_decoding, limit.num_tokens)
        rest = min(num_prompt, limit.num_tokens - decoding)
        sizes.append((decoding, rest))
        limit.note_failed(np.array([1] * decoding + [rest] * (rest > 0)), 1)
    assert sizes == [(5, 9), (5, 4), (5, 2), (5, 1), (3, 0), (1, 0), (1, 0)]


def test_after_waits_for_memory_passes_are_whole_at_once() -> None:
    limit = PassLimit()
    for size in (5, 2, 1, 1, 1):
        limit.note_failed(np.array([size]), 1)
    assert (limit.num_tokens, limit.num_waits) == (1, 3)
    limit.note_fitting()
    assert (limit.num_tokens, limit.num_waits) == (sys.maxsize, 0)
