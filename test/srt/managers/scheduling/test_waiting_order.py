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
