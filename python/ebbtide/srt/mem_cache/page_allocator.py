"""The free pages of the KV pool, and the page table of running requests. Pages are plain ints.

The pool consists of chunks of pages. An unused chunk can be withdrawn, so that its memory can be used for
something else, and restored later. Cached pages of sliding windows are kept and evicted one by one, unlike
other pages.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Run = TypeVar("Run")

# Stands for a page that the cache does not have.
MISSING = -1


@dataclass(frozen=True, slots=True)
class PageIds:
    """The ids of a pool's pages: page i of chunk c has the id c * stride + i.

    Attributes:
        per_chunk: pages of a chunk, at most `stride`.
        stride: distance between the first ids of two chunks.
    """

    per_chunk: int
    stride: int

    def chunk_of(self, page: int) -> int:
        return page // self.stride

    def of_chunk(self, chunk: int, num_pages: int) -> range:
        """The ids of a chunk in a pool of `num_pages`; the last chunk may have fewer."""
        count = min(self.per_chunk, num_pages - chunk * self.per_chunk)
        return range(chunk * self.stride, chunk * self.stride + count)


class PageAllocator:
    """Hands out the pages of a pool, lowest chunk first; in ascending order as long as the pool is fresh.

    Which pages come next depends on the calls alone, so it is the same on every tensor-parallel rank.

    Args:
        num_pages: of the whole pool.
        ids: the ids of the pages; None: 0 .. num_pages-1, in one chunk.
    """

    def __init__(self, num_pages: int, ids: PageIds | None = None) -> None:
        assert num_pages >= 0, f"num_pages is {num_pages}"
        self._ids = ids if ids is not None else PageIds(max(1, num_pages), max(1, num_pages))
        self._total = num_pages
        num_chunks = -(-num_pages // self._ids.per_chunk)
        # One stack per chunk, the next page on top: a page that was just freed may still be in the device's
        # cache.
        self._free = [list(reversed(self._ids.of_chunk(chunk, num_pages))) for chunk in range(num_chunks)]
        self._num_free = num_pages
        self._lowest = 0  # no chunk below it has a free page
        self._withdrawn: set[int] = set()
        self._held: set[int] = set()

    @property
    def num_pages(self) -> int:
        """Pages in the pool now, free or held."""
        return self._num_free + len(self._held)

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can still hand out."""
        return self._num_free

    @property
    def num_withdrawn(self) -> int:
        """Pages of withdrawn chunks."""
        return self._total - self.num_pages

    def num_pages_of(self, chunks: Iterable[int]) -> int:
        """How many pages these chunks have."""
        return sum(map(self._size, chunks))

    @property
    def pages_per_chunk(self) -> int:
        return self._ids.per_chunk

    @property
    def held(self) -> frozenset[int]:
        """Pages that are handed out."""
        return frozenset(self._held)

    def allocate(self, n: int) -> list[int] | None:
        """Take `n` pages, or None (and nothing is taken) if fewer are free."""
        assert n >= 0, f"cannot allocate {n} pages"
        if n > self._num_free:
            return None
        pages: list[int] = []
        while len(pages) < n:
            stack = self._free[self._lowest]
            first = max(0, len(stack) - (n - len(pages)))
            pages.extend(reversed(stack[first:]))
            del stack[first:]
            if not stack:
                self._lowest += 1
        self._num_free -= n
        self._held.update(pages)
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Give pages back. A page that is not held (freed twice, out of range) is a bug: AssertionError."""
        returned = set(pages)
        assert len(returned) == len(pages), f"a page is freed twice in one call: {sorted(pages)}"
        assert returned <= self._held, f"freed but not held: {sorted(returned - self._held)}"
        self._held -= returned
        self._num_free += len(pages)
        for page in reversed(pages):
            chunk = self._ids.chunk_of(page)
            self._free[chunk].append(page)
            self._lowest = min(self._lowest, chunk)

    def plan_move(self, chunks: Iterable[int]) -> dict[int, int]:
        """Choose free pages of other chunks, lowest first, for the held pages of these chunks: old → new.

        Nothing changes yet. AssertionError: there are too few.
        """
        left = set(chunks)
        sources = sorted(page for page in self._held if self.chunk_of(page) in left)
        free = (
            page for chunk, stack in enumerate(self._free) if chunk not in left for page in reversed(stack)
        )
        targets = list(islice(free, len(sources)))
        assert len(targets) == len(sources), f"{len(sources)} pages are to move to {len(targets)}"
        return dict(zip(sources, targets, strict=True))

    def move(self, target_of: Mapping[int, int]) -> None:
        """Take the free pages that `plan_move` chose, and free the old ones."""
        targets = set(target_of.values())
        assert targets.isdisjoint(self._held), "a page is held already that another moves to"
        for chunk in {self.chunk_of(page) for page in targets}:
            self._free[chunk] = [page for page in self._free[chunk] if page not in targets]
        self._held |= targets
        self._num_free -= len(targets)
        self.free(list(target_of))

    @property
    def num_chunks(self) -> int:
        """Chunks of the whole pool."""
        return len(self._free)

    def held_by_chunk(self) -> dict[int, int]:
        """How many pages of each chunk are held; withdrawn chunks are left out."""
        return {
            chunk: self._size(chunk) - len(stack)
            for chunk, stack in enumerate(self._free)
            if chunk not in self._withdrawn
        }

    def chunk_of(self, page: int) -> int:
        return self._ids.chunk_of(page)

    def withdrawable(self) -> list[int]:
        """The chunks without a held page, the highest first.

        The lowest chunk stays: steps that are padded to the size of a CUDA graph read its first page.
        """
        return [chunk for chunk, held in reversed(self.held_by_chunk().items()) if chunk > 0 and not held]

    def withdraw(self, chunk: int) -> None:
        """Take a chunk out of the pool: one of `withdrawable`, else AssertionError."""
        assert chunk > 0, "the lowest chunk stays"
        assert chunk not in self._withdrawn, f"chunk {chunk} is withdrawn already"
        assert len(self._free[chunk]) == self._size(chunk), f"chunk {chunk} is in use"
        self._withdrawn.add(chunk)
        self._num_free -= len(self._free[chunk])
        self._free[chunk] = []

    def restore(self, chunk: int) -> None:
        """Put a withdrawn chunk back."""
        assert chunk in self._withdrawn, f"chunk {chunk} is not withdrawn"
        self._withdrawn.remove(chunk)
        self._free[chunk] = list(reversed(self._ids.of_chunk(chunk, self._total)))
        self._num_free += len(self._free[chunk])
        self._lowest = min(self._lowest, chunk)

    def _size(self, chunk: int) -> int:
        return len(self._ids.of_chunk(chunk, self._total))


class PageTable:
    """A row of page ids per running request and group of layers.

    Attributes:
        arrays: int32 [groups, num_rows + 1, max_pages]. `arrays[group, row, i]` is the page with the KV of
            the request's tokens i*page_size .. (i+1)*page_size-1 in that group. Entries that were not written
            are stale or zero, but always valid indices into the pool, so that padded gathers may read them.
        array: of the first group.
        spare_row: the last row, which no request ever has.
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
        # numpy clips slices, and would silently drop a page past the end.
        assert 0 <= first_index <= end <= self.array.shape[1], f"[{first_index}, {end}) is outside the row"
        self.arrays[group, row, first_index:end] = pages


class WindowPages(Generic[Run]):
    """Counts the leases of cached window pages, and queues those without a lease for eviction.

    Attributes:
        idle: page → when its last lease was released, oldest first.
    """

    def __init__(self) -> None:
        self.idle: OrderedDict[int, int] = OrderedDict()
        self._runs: dict[int, Run] = {}
        self._num_leases: dict[int, int] = {}

    def place(self, pages: Iterable[int], run: Run, now: int) -> None:
        """Note the run that pages belong to, which may be another one than before."""
        for page in pages:
            if page == MISSING:
                continue
            if page not in self._runs:
                self.idle[page] = now
            self._runs[page] = run

    def keep(self, pages: Sequence[int]) -> None:
        """Count one more lease of these pages."""
        for page in pages:
            self._num_leases[page] = self._num_leases.get(page, 0) + 1
            self.idle.pop(page, None)

    def let_go(self, pages: Sequence[int], now: int) -> None:
        """Count one lease less of these pages. The last page will be the first to be evicted."""
        for page in reversed(pages):
            self._num_leases[page] -= 1
            if not self._num_leases[page]:
                del self._num_leases[page]
                self.idle[page] = now

    def remove(self, page: int) -> Run:
        """Remove an idle page; returns the run that it belonged to."""
        del self.idle[page]
        return self._runs.pop(page)

    def relocate(self, target_of: Mapping[int, int]) -> None:
        """Note that pages have moved (old → new)."""
        self.idle = OrderedDict((target_of.get(page, page), since) for page, since in self.idle.items())
        self._runs = {target_of.get(page, page): run for page, run in self._runs.items()}
        self._num_leases = {target_of.get(page, page): count for page, count in self._num_leases.items()}
