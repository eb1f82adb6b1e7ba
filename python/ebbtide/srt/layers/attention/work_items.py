"""A decode step's attention cut into pieces: what rows share is read once for several of them.

Plain numpy: what is decided here is the same on every machine.

Shapes: B rows with one new token each, G runs of adjacent rows, I items.
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class WorkItems:
    """Pieces of work: some adjacent rows attend to some pages that all of them have.

    Attributes:
        first_row_I, num_rows_I: the rows.
        first_page_I, num_pages_I: the pages, as places in `kv_indices`.
        last_page_len_I: tokens of the last of them.
        part_I: which of its rows' parts this is.
        num_parts_B: parts of each row.
    """

    first_row_I: Ints
    num_rows_I: Ints
    first_page_I: Ints
    num_pages_I: Ints
    last_page_len_I: Ints
    part_I: Ints
    num_parts_B: Ints


def cut(
    kv_indptr_B1: Ints,
    last_page_len_B: Ints,
    runs: SharedRuns,
    *,
    page_size: int,
    max_rows: int,
    max_pages: int,
) -> WorkItems:
    """Items of at most so many rows and pages, those of shared pages first.

    Args:
        kv_indptr_B1, last_page_len_B: as in `PagedBatch`.
    """
    num_rows = len(last_page_len_B)
    num_shared_B = np.zeros(num_rows, dtype=np.int32)
    run_rows = _ranges(runs.first_row_G, runs.num_rows_G)
    num_shared_B[run_rows] = np.repeat(runs.num_pages_G, runs.num_rows_G)

    # Shared pages: runs of at most `max_rows` rows, of which the first says which pages these are.
    num_tiles_G = -(-runs.num_rows_G // max_rows)
    tile_G = np.repeat(np.arange(len(num_tiles_G)), num_tiles_G)
    skipped = max_rows * _counted(num_tiles_G)
    first_row = runs.first_row_G[tile_G] + skipped
    tile_rows = np.minimum(runs.num_rows_G[tile_G] - skipped, max_rows)
    shared = _pieces(kv_indptr_B1[:-1][first_row], runs.num_pages_G[tile_G], max_pages)
    # What is a row's own.
    own_first = kv_indptr_B1[:-1] + num_shared_B
    own = _pieces(own_first, kv_indptr_B1[1:] - own_first, max_pages)
    shared_parts_B = -(-num_shared_B // max_pages)

    source, first_page, num_pages, part = shared
    own_row, own_first_page, own_num_pages, own_part = own
    is_last = own_first_page + own_num_pages == kv_indptr_B1[1:][own_row]
    return WorkItems(
        first_row_I=_joined(first_row[source], own_row),
        num_rows_I=_joined(tile_rows[source], np.ones(len(own_row), dtype=np.int32)),
        first_page_I=_joined(first_page, own_first_page),
        num_pages_I=_joined(num_pages, own_num_pages),
        last_page_len_I=_joined(
            np.full(len(source), page_size), np.where(is_last, last_page_len_B[own_row], page_size)
        ),
        part_I=_joined(part, own_part + shared_parts_B[own_row]),
        num_parts_B=shared_parts_B + -(-(kv_indptr_B1[1:] - own_first) // max_pages),
    )


def _pieces(first: Ints, count: Ints, size: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Ranges cut into equal pieces of at most `size`: of which range, first, count, and number in the range."""
    num_pieces = -(-count // size)
    source = np.repeat(np.arange(len(count), dtype=np.int32), num_pieces)
    number = _counted(num_pieces)
    length = -(-count // np.maximum(num_pieces, 1))[source]
    skipped = number * length
    return source, first[source] + skipped, np.minimum(length, count[source] - skipped), number


def _ranges(first: Ints, count: Ints) -> Ints:
    """first .. first + count - 1 of each, one after the other."""
    return np.repeat(first, count) + _counted(count)


def _counted(count: Ints) -> Ints:
    """0 .. count - 1 of each, one after the other."""
    ends = np.cumsum(count, dtype=np.int32)
    return np.arange(ends[-1] if len(ends) else 0, dtype=np.int32) - np.repeat(ends - count, count)


def _joined(first: Ints, second: Ints) -> Ints:
    return np.concatenate([first, second], dtype=np.int32)
