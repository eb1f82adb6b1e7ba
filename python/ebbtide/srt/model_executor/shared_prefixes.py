"""Which requests of a decode step begin with the same pages: samples of one prompt, other cached prefixes.

A page with the same id at the same place in two requests is a page of the prefix cache, and a page of the
cache has one path to it: all pages before it are the same ones too.

Shapes: R requests, P pages, G runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ebbtide.srt.layers.attention.shared_runs import SharedRuns, ranges, runs_of_neighbours
from ebbtide.srt.model_executor.batch_plan import BatchPlan


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """What requests of a step share.

    Attributes:
        order_R: the requests of the plan in an order in which those that share stand side by side.
        places_R: where each request of the plan stands in that order.
        runs: who shares, as places in that order.
    """

    order_R: NDArray[np.int64]
    places_R: NDArray[np.int64]
    runs: SharedRuns


class PrefixFinder:
    """Finds shared prefixes, anew only where it is not the requests of the step before that go on.

    Args:
        page_table: int32 [rows, max_pages], `PageTable.array`.
        is_worth_it: of the number of requests, of the pages that sharing saves reading, and of all of theirs.
    """

    def __init__(
        self, page_table: NDArray[np.int32], page_size: int, is_worth_it: Callable[[int, int, int], bool]
    ) -> None:
        self._page_table, self._page_size = page_table, page_size
        self._is_worth_it = is_worth_it
        none = np.zeros(0, dtype=np.int32)
        self._page_rows_R, self._starts_R = none, none
        self._found: tuple[SharedPrefixes, _Sharers] | None = None

    def find(self, plan: BatchPlan) -> SharedPrefixes | None:
        """What the requests of a decode step share; None where it is too little."""
        # Nothing is written any more to pages that are full without the new token.
        num_full_R = plan.starts_R // self._page_size
        if not (self._goes_on(plan) and self._still_holds(plan.page_rows_R, num_full_R)):
            self._found = self._search(plan.page_rows_R, num_full_R)
        self._page_rows_R, self._starts_R = plan.page_rows_R, plan.starts_R
        return None if self._found is None else self._found[0]

    def _goes_on(self, plan: BatchPlan) -> bool:
        """Whether all of these requests, and no others, got one token in the step before."""
        return np.array_equal(self._page_rows_R, plan.page_rows_R) and np.array_equal(
            self._starts_R + 1, plan.starts_R
        )

    def _search(
        self, page_rows_R: NDArray[np.int32], num_full_R: NDArray[np.int32]
    ) -> tuple[SharedPrefixes, _Sharers] | None:
        if len(page_rows_R) < 2:
            return None
        # The longest request shares no more than the next has.
        width = int(np.partition(num_full_R, -2)[-2])
        if width == 0:
            return None
        table_RP = self._page_table[page_rows_R, :width]
        # Any order of page ids brings equal beginnings together.
        by_bytes = table_RP.view(f"V{table_RP.strides[0]}")[:, 0].tolist()
        order_R = np.array(sorted(range(len(page_rows_R)), key=by_bytes.__getitem__))
        table_RP = table_RP[order_R]
        runs = runs_of_neighbours(table_RP, num_full_R[order_R])
        if not self._is_worth_it(len(order_R), runs.num_saved, int(num_full_R.sum())):
            return None
        places = ranges(runs.first_row_G, runs.num_rows_G)
        num_pages = np.repeat(runs.num_pages_G, runs.num_rows_G)
        sharers = _Sharers(order_R[places], num_pages, table_RP[places, num_pages - 1])
        return SharedPrefixes(order_R, order_R.argsort(), runs), sharers

    def _still_holds(self, page_rows_R: NDArray[np.int32], num_full_R: NDArray[np.int32]) -> bool:
        """Whether the pages are still shared: a row may have gone over to a request of just that length."""
        if self._found is None:
            return True
        sharers = self._found[1]
        rows, last = sharers.requests, sharers.num_pages - 1
        return bool((num_full_R[rows] > last).all()) and np.array_equal(
            self._page_table[page_rows_R[rows], last], sharers.last_pages
        )


@dataclass(frozen=True, slots=True)
class _Sharers:
    """The requests that share, how many pages each, and the last page of these."""

    requests: NDArray[np.int64]
    num_pages: NDArray[np.int32]
    last_pages: NDArray[np.int32]
