"""Which bundle each rank takes: what fits, what does not, and how that is told."""

import subprocess
import sys

import pytest

from ebbtide.ray.launch import RankShare, Seating, default_bundles, group_by_node, seat_ranks
from ebbtide.srt.errors import ConfigurationError

WHOLE, HALF, CPU = RankShare(1, 0), RankShare(0.5, 0), RankShare(0, 1)


@pytest.mark.parametrize(
    ("bundles", "num_ranks", "share", "per_node", "expected"),
    [
        ([{"GPU": 8}, {"GPU": 8}], 16, WHOLE, None, [(0, 8), (1, 8)]),
        ([{"GPU": 8}, {"GPU": 8}], 8, WHOLE, 4, [(0, 4), (1, 4)]),
        ([{"GPU": 1, "CPU": 1}] * 4, 2, WHOLE, None, [(0, 1), (1, 1)]),
        # Two halves in one bundle might be of the same GPU.
        ([{"GPU": 1}] * 2, 2, HALF, None, [(0, 1), (1, 1)]),
        ([{"CPU": 3}, {"GPU": 1}, {"CPU": 1}], 4, CPU, None, [(0, 3), (2, 1)]),
    ],
)
def test_bundles_are_filled_in_order(bundles, num_ranks, share, per_node, expected) -> None:
    seatings = seat_ranks(bundles, None, num_ranks, share, per_node)
    assert seatings == [Seating(*pair) for pair in expected]


@pytest.mark.parametrize(
    ("bundles", "indices", "share", "told"),
    [
        ([{"GPU": 1}], None, WHOLE, "2 ranks need 1 GPU and 0 CPU each.*0: 1 GPU.*have room for 1"),
        ([{"GPU": 2}], None, HALF, "room for 1: a fraction of a GPU takes a bundle of its own"),
        ([{"GPU": 2}, {"CPU": 1}], [1], WHOLE, "1: 1 CPU.*room for 0"),
        ([{"GPU": 2}], [3], WHOLE, r"bundles 0 to 0, got \[3\]"),
    ],
)
def test_a_group_that_is_too_small_is_told_with_what_is_needed(bundles, indices, share, told) -> None:
    with pytest.raises(ConfigurationError, match=told):
        seat_ranks(bundles, indices, 2, share)


def test_ranks_of_a_machine_stand_together() -> None:
    seatings = [Seating(index, 1) for index in range(4)]
    assert group_by_node(seatings, ["a", "b", "a", "b"], None) == [[0, 2], [1, 3]]
    assert group_by_node(seatings, ["a"] * 4, 2) == [[0, 1], [2, 3]]
    for node_ids, nnodes in ((["a", "a", "a", "b"], None), (["a", "a", "a", "b"], 2)):
        with pytest.raises(ConfigurationError, match="3 on a, 1 on b"):
            group_by_node(seatings, node_ids, nnodes)


def test_bundles_of_its_own() -> None:
    assert default_bundles(4, 2, WHOLE) == [{"GPU": 2}] * 2
    assert default_bundles(2, 1, HALF) == [{"GPU": 0.5}] * 2
    with pytest.raises(ConfigurationError, match=r"expected 0 .* to 1, got 2"):
        RankShare(2, 0)


def test_without_ray_the_message_names_the_extra() -> None:
    blocked = "import sys; sys.modules['ray'] = None; import ebbtide.ray"
    done = subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True, check=False)
    assert "ebbtide.ray needs Ray, which is not installed: pip install 'ebbtide[ray]'" in done.stderr
