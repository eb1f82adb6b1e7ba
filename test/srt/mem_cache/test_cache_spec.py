"""Layers in groups by what they keep, and how far a window reaches."""

from collections import Counter

import pytest

from ebbtide.srt.mem_cache import CacheGroups, Latent, Paged, first_needed

FULL, SLIDING = Paged(2, 8), Paged(2, 8, window=512)


def test_layers_are_grouped_by_what_they_keep_in_groups_as_large_as_the_rarest_fills() -> None:
    gemma = [FULL if layer % 6 == 5 else SLIDING for layer in range(26)]
    groups = CacheGroups.of(gemma)
    assert groups.layers_per_group == 4
    assert groups.windows == (None, *[512] * 6)
    assert Counter(group for group, _ in groups.places) == {0: 4, 1: 4, 2: 4, 3: 4, 4: 4, 5: 4, 6: 2}
    assert {groups.places[layer] for layer in (5, 11, 17, 23)} == {(0, 0), (0, 1), (0, 2), (0, 3)}
    assert len(set(groups.places)) == 26

    assert CacheGroups.of([FULL] * 3) == CacheGroups(3, (None,), ((0, 0), (0, 1), (0, 2)))
    assert CacheGroups.of([SLIDING] * 2).windows == (512,)
    with pytest.raises(ValueError, match="KV heads"):
        CacheGroups.of([FULL, Paged(4, 8)])
    with pytest.raises(ValueError, match="KV heads"):
        CacheGroups.of([FULL, Latent(24, 8)])
    assert CacheGroups.of([Latent(24, 8)] * 3).windows == (None,)


@pytest.mark.parametrize(
    ("num_tokens", "window", "first"), [(0, 4, 0), (3, 4, 0), (4, 4, 0), (5, 4, 1), (6, 4, 1), (8, 1, 4)]
)
def test_a_token_attends_to_its_window_which_it_is_part_of(num_tokens: int, window: int, first: int) -> None:
    attended = range(max(0, num_tokens + 1 - window), num_tokens)
    assert first_needed(num_tokens, window, page_size=2) == first
    assert all(token // 2 >= first for token in attended)
    assert first_needed(num_tokens, None, page_size=2) == 0
