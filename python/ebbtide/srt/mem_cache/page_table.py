"""Which pages hold the KV of each running request, as one array that the attention backends read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class PageTable:
    """A row of page ids per running request and group of layers.

    Attributes:
        arrays: int32 [groups, num_rows, max_pages]. `arrays[group, row, i]` is the page with the KV of the
            request's tokens i*page_size .. (i+1)*page_size-1 in that group. Past what was written it holds
            stale or zero ids: always valid as an index into the pool, so that padded gathers may read them.
        array: of the first group.
        spare_row: behind the `num_rows`; no request ever has it.
    """

    def __init__(self, num_rows: int, max_pages: int, num_groups: int = 1) -> None:
        self.arrays: NDArray[np.int32] = np.zeros((num_groups, num_rows + 1, max_pages), dtype=np.int32)
        self.array = self.arrays[0]
        self.spare_row = num_rows
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._held_rows: set[int] = set()

    def allocate_row(self) -> int:
        """Take a row. The scheduler admits no more requests than there are rows, so one must be free."""
        assert self._free_rows, f"all {self.spare_row} rows are taken"
        row = self._free_rows.pop()
        self._held_rows.add(row)
        return row

    def free_row(self, row: int) -> None:
        """Give a row back; AssertionError if it is not held."""
        assert row in self._held_rows, f"row {row} is not held"
        self._held_rows.remove(row)
        self._free_rows.append(row)

    def write(self, row: int, first_index: int, pages: Sequence[int], group: int = 0) -> None:
        """Set `arrays[group, row, first_index :][: len(pages)]`; AssertionError if it is out of bounds."""
        end = first_index + len(pages)
        assert row in self._held_rows, f"row {row} is not held"
        # numpy clips slices, and would drop a single page past the end without a word.
        assert 0 <= first_index <= end <= self.array.shape[1], f"[{first_index}, {end}) is outside the row"
        self.arrays[group, row, first_index:end] = pages
