"""Rows of a decode step that begin with the same pages: who is best read together.

Shapes: R rows, P pages, G runs of adjacent rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SharedRuns:
    """Adjacent rows that begin with the same pages.

    Attributes:
        first_row_G, num_rows_G: the rows of each run.
        num_pages_G: pages that all rows of a run begin with, all of them full.
    """

    first_row_G: Ints
    num_rows_G: Ints
    num_pages_G: Ints

    @property
    def num_saved(self) -> int:
        """Pages that need not be read again."""
        return int(((self.num_rows_G - 1) * self.num_pages_G).sum())

    def best(self, max_tiles: int, tile_rows: int) -> SharedRuns:
        """Those that save most, of at most `max_tiles` tiles of rows together."""
        num_tiles_G = -(-self.num_rows_G // tile_rows)
        if num_tiles_G.sum() <= max_tiles:
            return self
        order_G = np.argsort(-(self.num_rows_G - 1) * self.num_pages_G, kind="stable")
        kept_G = np.sort(order_G[np.cumsum(num_tiles_G[order_G]) <= max_tiles])
        return SharedRuns(self.first_row_G[kept_G], self.num_rows_G[kept_G], self.num_pages_G[kept_G])


NO_RUNS = SharedRuns(*(np.zeros(0, dtype=np.int32) for _ in range(3)))


def runs_of_neighbours(table_RP: Ints, num_full_R: Ints) -> SharedRuns:
    """The runs, each of adjacent rows, that save most reading.

    Args:
        table_RP: page ids of each row.
        num_full_R: how many of them hold nothing that may still change; P or fewer.
    """
    if len(table_RP) < 2:
        return NO_RUNS
    most_common = np.minimum(num_full_R[1:], num_full_R[:-1])
    width = int(most_common.max())
    differs = np.ones((len(table_RP) - 1, width + 1), dtype=np.bool_)
    np.not_equal(table_RP[1:, :width], table_RP[:-1, :width], out=differs[:, :width])
    num_common = np.minimum(differs.argmax(axis=1), most_common)
    return best_runs(num_common.tolist())


@dataclass(slots=True)
class _Node:
    """Adjacent requests that share `depth` pages, and the best that can be made of parts of them."""

    depth: int
    first: int
    saved: int = 0
    runs: list[tuple[int, int, int]] = field(default_factory=list)

    def close(self, end: int) -> None:
        """All of its requests up to `end` are known: are they better as one run than as its parts?"""
        count = end - self.first
        if (count - 1) * self.depth > self.saved:
            self.saved, self.runs = (count - 1) * self.depth, [(self.first, count, self.depth)]


def best_runs(num_common: list[int]) -> SharedRuns:
    """The runs, each of adjacent requests, that save most reading.

    Args:
        num_common: how many pages each request but the last has in common with the next one.
    """
    # The nodes that are open, each inside the one before it.
    open_nodes = [_Node(0, 0)]
    for last, depth in enumerate([*num_common, 0]):
        if open_nodes[-1].depth < depth:
            open_nodes.append(_Node(depth, last))
        while open_nodes[-1].depth > depth:
            closed = open_nodes.pop()
            closed.close(last + 1)
            if open_nodes[-1].depth < depth:
                open_nodes.append(_Node(depth, closed.first))
            open_nodes[-1].saved += closed.saved
            open_nodes[-1].runs += closed.runs
    found = np.array(open_nodes[0].runs, dtype=np.int32).reshape(-1, 3)
    return SharedRuns(found[:, 0], found[:, 1], found[:, 2])
