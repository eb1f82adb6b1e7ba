"""The order in which waiting requests are tried, alike on all ranks."""

import pytest

from ebbtide.srt.managers.scheduling.admission import WaitingRequests
from ebbtide.srt.managers.scheduling.request import Req
from ebbtide.srt.model_executor.batch_plan import SampleSpec
from ebbtide.srt.sampling_params import SamplingParams


def request(rid: str, max_new_tokens: int = 8, priority: int = 0, num_retractions: int = 0) -> Req:
    spec = SampleSpec(SamplingParams(), 0, frozenset(), [1, 2, 3], [])
    req = Req(rid, 0, spec, max_new_tokens, None, (), 0.0, priority=priority)
    req.num_retractions = num_retractions
    return req


def queued(policy: str, waiting: list[Req]) -> WaitingRequests:
    requests = WaitingRequests(policy)
    for req in waiting:
        requests.add(req)
    return requests


def order(policy: str, waiting: list[Req], pages: dict[str, list[int]]) -> str:
    requests = queued(policy, waiting)
    tried = requests.candidates(lambda req: pages.get(req.rid, []), lambda req: True)
    return "".join(req.rid for req in tried)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        *(("fcfs", "rabcd"), ("lof", "rbdac"), ("priority", "rcabd"), ("priority-lof", "rcbda")),
        *(("lpm", "rcbad"), ("dfs-weight", "rbcad")),
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


def test_requests_of_the_heavier_branch_run_together() -> None:
    pages = {"a": [1, 2], "b": [9], "c": [1, 3], "d": [9, 4], "e": [1, 3], "f": [], "g": [1]}
    waiting = [request(rid) for rid in pages]
    # Four go through page 1, two of them through page 3; "g" ends at page 1; two go through page 9.
    assert order("dfs-weight", waiting, pages) == "ceagdbf"


def test_chance_is_the_same_on_all_ranks_and_different_in_each_step() -> None:
    waiting = [request(f"{index:02} ") for index in range(50)]
    ranks = [queued("random", waiting) for _ in range(2)]
    steps = [[[*rank.candidates(lambda req: [], lambda req: True)] for rank in ranks] for _ in range(2)]
    assert steps[0][0] == steps[0][1] != waiting
    assert steps[1][0] == steps[1][1] != steps[0][0]
    assert sorted(req.rid for req in steps[0][0]) == [req.rid for req in waiting]
