"""Finds rows of a decode step that begin with the same pages, and cuts attention so as to read these once.

In plain numpy, so that the result is the same on every machine.

Shapes: R rows, P pages, G runs of adjacent rows, I items; B rows with one new token each.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SharedRuns:
    """Runs of adjacent rows that begin with the same pages.

    Attributes:
        first_row_G, num_rows_G: the rows of each run.
        num_pages_G: how many first pages all rows of a run share; all of them are full.
    """

    first_row_G: Ints
    num_rows_G: Ints
    num_pages_G: Ints

    @property
    def num_saved(self) -> int:
        """How many page reads the runs save."""
        return int(((self.num_rows_G - 1) * self.num_pages_G).sum())

    def best(self, max_tiles: int, tile_rows: int) -> SharedRuns:
        """The runs that save most, with at most `max_tiles` tiles of `tile_rows` rows in all."""
        num_tiles_G = -(-self.num_rows_G // tile_rows)
        if num_tiles_G.sum() <= max_tiles:
            return self
        order_G = np.argsort(-(self.num_rows_G - 1) * self.num_pages_G, kind="stable")
        kept_G = np.sort(order_G[np.cumsum(num_tiles_G[order_G]) <= max_tiles])
        return SharedRuns(self.first_row_G[kept_G], self.num_rows_G[kept_G], self.num_pages_G[kept_G])


NO_RUNS = SharedRuns(*(np.zeros(0, dtype=np.int32) for _ in range(3)))


def runs_of_neighbours(table_RP: Ints, num_full_R: Ints) -> SharedRuns:
    """The runs of adjacent rows that save the most page reads.

    Args:
        table_RP: page ids of each row.
        num_full_R: how many of a row's first pages will not change any more; at most P.
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
class _OpenRun:
    """Adjacent requests that share `depth` pages, and the best choice of runs among them so far."""

    depth: int
    first: int
    saved: int = 0
    runs: list[tuple[int, int, int]] = field(default_factory=list)

    def close(self, end: int) -> None:
        """End the run before request `end`: keep it as one run if that saves more than its parts do."""
        count = end - self.first
        if (count - 1) * self.depth > self.saved:
            self.saved, self.runs = (count - 1) * self.depth, [(self.first, count, self.depth)]


def best_runs(num_common: list[int]) -> SharedRuns:
    """The runs of adjacent requests that save the most page reads.

    Args:
        num_common: for each request but the last, how many pages it shares with the next one.
    """
    # A stack of open runs, each inside the previous one and sharing more pages.
    open_nodes = [_OpenRun(0, 0)]
    for last, depth in enumerate([*num_common, 0]):
        if open_nodes[-1].depth < depth:
            open_nodes.append(_OpenRun(depth, last))
        while open_nodes[-1].depth > depth:
            closed = open_nodes.pop()
            closed.close(last + 1)
            if open_nodes[-1].depth < depth:
                open_nodes.append(_OpenRun(depth, closed.first))
            open_nodes[-1].saved += closed.saved
            open_nodes[-1].runs += closed.runs
    found = np.array(open_nodes[0].runs, dtype=np.int32).reshape(-1, 3)
    return SharedRuns(found[:, 0], found[:, 1], found[:, 2])


@dataclass(frozen=True, slots=True)
class WorkItems:
    """Pieces of work. In each, some adjacent rows attend to some pages that they all have.

    Attributes:
        first_row_I, num_rows_I: the rows.
        first_page_I, num_pages_I: the pages, as indices in `kv_indices`.
        last_page_len_I: tokens in the last of these pages.
        part_I: the number of this part among the parts of its rows.
        num_parts_B: how many parts each row has.
    """

    first_row_I: Ints
    num_rows_I: Ints
    first_page_I: Ints
    num_pages_I: Ints
    last_page_len_I: Ints
    part_I: Ints
    num_parts_B: Ints


# The fixed cost of a block, as the number of pages that could be read in that time, on an H200.
_BLOCK_PAGES = 8
# This many times the items that run at once keep a device busy enough.
_MANY_ROUNDS = 4
# Candidates for the size of pieces, in pages: four per doubling, and one that cuts nothing.
_PIECES = np.append(np.rint(8 * 2 ** (np.arange(40) / 4)).astype(np.int64), 1 << 20)


def piece_pages(
    kv_indptr_B1: Ints, runs: SharedRuns, *, max_rows: int, max_items: int, max_parts: int, num_resident: int
) -> int:
    """How many pages an item should have at most, for the step to end soon.

    If there are few long requests, they are cut so that every multiprocessor has work. With more items than
    run at once, the time is that of all work divided evenly, plus about half of the longest item at the end.
    If there are many items anyway, only the longest are cut: the tiles of a run then read the same pages at
    the same time, so that these come from memory only once.

    Args:
        max_rows: of an item.
        max_items, max_parts: of the step, and of a row. Uncut items must be within both.
        num_resident: how many items the device runs at once.
    """
    num_shared_B = shared_pages(runs, len(kv_indptr_B1) - 1)
    own_B = np.diff(kv_indptr_B1) - num_shared_B
    tiles = np.repeat(runs.num_pages_G, -(-runs.num_rows_G // max_rows))
    whole = np.concatenate([own_B, tiles])
    # C candidates, W whole ranges of pages. The pieces of one range have equal lengths.
    num_pieces_CW = -(-whole // _PIECES[:, None])
    longest_C = (-(-whole // np.maximum(num_pieces_CW, 1))).max(axis=1) + _BLOCK_PAGES
    num_items_C = num_pieces_CW.sum(axis=1)
    even_C = (whole.sum() + _BLOCK_PAGES * num_items_C) / num_resident
    pages_C = np.where(num_items_C <= num_resident, longest_C, even_C + longest_C / 2)
    num_parts_C = (-(-own_B // _PIECES[:, None]) - (-num_shared_B // _PIECES[:, None])).max(axis=1)
    most_items = min(max_items, max(_MANY_ROUNDS * num_resident, len(whole) + len(whole) // 16))
    pages_C[(num_items_C > most_items) | (num_parts_C > max_parts)] = np.inf
    pages_C[-1] = min(pages_C[-1], np.finfo(np.float64).max)
    return int(_PIECES[pages_C.argmin()])


def cut(
    kv_indptr_B1: Ints,
    last_page_len_B: Ints,
    runs: SharedRuns,
    *,
    page_size: int,
    max_rows: int,
    max_pages: int,
) -> WorkItems:
    """Cut a step into items of at most `max_rows` rows and `max_pages` pages, those of shared pages first.

    Args:
        kv_indptr_B1, last_page_len_B: as in `PagedBatch`.
    """
    num_shared_B = shared_pages(runs, len(last_page_len_B))

    # Shared pages, in tiles of at most `max_rows` rows. A tile's first row says which pages they are.
    num_tiles_G = -(-runs.num_rows_G // max_rows)
    tile_G = np.repeat(np.arange(len(num_tiles_G)), num_tiles_G)
    skipped = max_rows * _counted(num_tiles_G)
    first_row = runs.first_row_G[tile_G] + skipped
    tile_rows = np.minimum(runs.num_rows_G[tile_G] - skipped, max_rows)
    shared = _pieces(kv_indptr_B1[:-1][first_row], runs.num_pages_G[tile_G], max_pages)
    # The pages of one row alone.
    own_first = kv_indptr_B1[:-1] + num_shared_B
    own = _pieces(own_first, kv_indptr_B1[1:] - own_first, max_pages)
    shared_parts_B = -(-num_shared_B // max_pages)

    source, first_page, num_pages, part = shared
    own_row, own_first_page, own_num_pages, own_part = own
    is_last = own_first_page + own_num_pages == kv_indptr_B1[1:][own_row]

    def listed(shared_I: Ints, own_I: Ints) -> Ints:
        # Not sorted by length: blocks of equal length would end together, and memory would be idle then.
        return np.concatenate([shared_I, own_I], dtype=np.int32)

    return WorkItems(
        first_row_I=listed(first_row[source], own_row),
        num_rows_I=listed(tile_rows[source], np.ones_like(own_row)),
        first_page_I=listed(first_page, own_first_page),
        num_pages_I=listed(num_pages, own_num_pages),
        last_page_len_I=listed(
            np.full_like(source, page_size), np.where(is_last, last_page_len_B[own_row], page_size)
        ),
        part_I=listed(part, own_part + shared_parts_B[own_row]),
        num_parts_B=shared_parts_B + -(-(kv_indptr_B1[1:] - own_first) // max_pages),
    )


def shared_pages(runs: SharedRuns, num_rows: int) -> Ints:
    """How many pages each row shares with others."""
    num_shared_B = np.zeros(num_rows, dtype=np.int32)
    num_shared_B[ranges(runs.first_row_G, runs.num_rows_G)] = np.repeat(runs.num_pages_G, runs.num_rows_G)
    return num_shared_B


def _pieces(first: Ints, count: Ints, size: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Cut ranges into equal pieces of at most `size`: range number, first, count, number in the range."""
    num_pieces = -(-count // size)
    source = np.repeat(np.arange(len(count), dtype=np.int32), num_pieces)
    number = _counted(num_pieces)
    length = -(-count // np.maximum(num_pieces, 1))[source]
    skipped = number * length
    return source, first[source] + skipped, np.minimum(length, count[source] - skipped), number


def ranges(first: Ints, count: Ints) -> Ints:
    """Concatenate first .. first + count - 1 of all."""
    return np.repeat(first, count) + _counted(count)


def _counted(count: Ints) -> Ints:
    """Concatenate 0 .. count - 1 of all."""
    ends = np.cumsum(count, dtype=np.int32)
    return np.arange(ends[-1] if len(ends) else 0, dtype=np.int32) - np.repeat(ends - count, count)
