"""A decode step's attention cut into pieces: what rows share is read once for several of them.

Plain numpy: what is decided here is the same on every machine.

Shapes: B rows with one new token each, G runs of adjacent rows, I items.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ebbtide.srt.layers.attention.shared_runs import Ints, SharedRuns


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


# What a block costs on top of reading its pages, in pages, on an H200.
_BLOCK_PAGES = 8
# A device is busy enough with this many times the items that it runs at once.
_MANY_ROUNDS = 4
# Sizes of pieces that are tried, in pages: four to each doubling, and one that cuts nothing.
_PIECES = np.append(np.rint(8 * 2 ** (np.arange(40) / 4)).astype(np.int64), 1 << 20)


def piece_pages(
    kv_indptr_B1: Ints, runs: SharedRuns, *, max_rows: int, max_items: int, max_parts: int, num_resident: int
) -> int:
    """How many pages an item should have at most, so that all of a step ends soon.

    Few long requests are cut so that every multiprocessor has something to do. With more items than the
    device holds at a time, the time is that of the whole divided evenly, and at the end some of a last item.
    Where there are many items anyway only the longest are cut: the tiles of a run read the same pages at the
    same time, and then only once from memory.

    Args:
        max_rows: of an item.
        max_items, max_parts: of the step, and of a row; pieces so long that nothing is cut keep to both.
        num_resident: items that the device works on at a time.
    """
    num_shared_B = shared_pages(runs, len(kv_indptr_B1) - 1)
    own_B = np.diff(kv_indptr_B1) - num_shared_B
    tiles = np.repeat(runs.num_pages_G, -(-runs.num_rows_G // max_rows))
    whole = np.concatenate([own_B, tiles])
    # C candidates; pieces of one range are equally long.
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
    """Items of at most `max_rows` rows and `max_pages` pages, those of shared pages first.

    Args:
        kv_indptr_B1, last_page_len_B: as in `PagedBatch`.
    """
    num_shared_B = shared_pages(runs, len(last_page_len_B))

    # Shared pages: runs of at most `max_rows` rows. The first row says which pages these are.
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

    def listed(shared_I: Ints, own_I: Ints) -> Ints:
        # Not the longest first: blocks of one length begin and end together, and nobody reads meanwhile.
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
    """How many pages each row shares."""
    num_shared_B = np.zeros(num_rows, dtype=np.int32)
    num_shared_B[ranges(runs.first_row_G, runs.num_rows_G)] = np.repeat(runs.num_pages_G, runs.num_rows_G)
    return num_shared_B


def _pieces(first: Ints, count: Ints, size: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Ranges cut into equal pieces of at most `size`: source range, first, count, number in the range."""
    num_pieces = -(-count // size)
    source = np.repeat(np.arange(len(count), dtype=np.int32), num_pieces)
    number = _counted(num_pieces)
    length = -(-count // np.maximum(num_pieces, 1))[source]
    skipped = number * length
    return source, first[source] + skipped, np.minimum(length, count[source] - skipped), number


def ranges(first: Ints, count: Ints) -> Ints:
    """first .. first + count - 1 of each, one after the other."""
    return np.repeat(first, count) + _counted(count)


def _counted(count: Ints) -> Ints:
    """0 .. count - 1 of each, one after the other."""
    ends = np.cumsum(count, dtype=np.int32)
    return np.arange(ends[-1] if len(ends) else 0, dtype=np.int32) - np.repeat(ends - count, count)
