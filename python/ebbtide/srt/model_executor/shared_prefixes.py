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

from ebbtide.srt.layers.attention.shared_runs import SharedRuns, runs_of_neighbours
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


def shared_prefixes(
    plan: BatchPlan,
    page_table: NDArray[np.int32],
    page_size: int,
    is_worth_it: Callable[[int, int, int], bool],
) -> SharedPrefixes | None:
    """What the requests of a decode step share; None where it is too little.

    Args:
        page_table: int32 [rows, max_pages], `PageTable.array`.
        is_worth_it: of the number of requests, of the pages that sharing saves reading, and of all of theirs.
    """
    # Nothing is written any more to pages that are full without the new token.
    num_full_R = plan.starts_R // page_size
    # The longest request shares no more than the next has.
    width = int(np.partition(num_full_R, -2)[-2]) if len(num_full_R) > 1 else 0
    if width == 0:
        return None
    table_RP = page_table[plan.page_rows_R, :width]
    # Any order of page ids brings equal beginnings together.
    by_bytes = table_RP.view(f"V{table_RP.strides[0]}")[:, 0].tolist()
    order_R = np.array(sorted(range(len(num_full_R)), key=by_bytes.__getitem__))
    runs = runs_of_neighbours(table_RP[order_R], num_full_R[order_R])
    if not is_worth_it(len(order_R), runs.num_saved, int(num_full_R.sum())):
        return None
    return SharedPrefixes(order_R, order_R.argsort(), runs)
