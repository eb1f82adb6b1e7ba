"""Who may use which page of the KV pool: pages are plain ints, handed out and taken back."""

from __future__ import annotations

from collections.abc import Sequence


class PageAllocator:
    """Hands out the pages 0 .. num_pages-1; ascending and contiguous as long as the pool is fresh.

    Every tensor parallel rank makes the same calls, so which pages come next depends on the calls alone.
    """

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 0, f"num_pages is {num_pages}"
        self.num_pages = num_pages
        # A stack with the next page on top: pages that were just freed are still warm in the caches.
        self._free = list(range(num_pages - 1, -1, -1))
        self._held: set[int] = set()

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can still hand out."""
        return len(self._free)

    def allocate(self, n: int) -> list[int] | None:
        """Take `n` pages, or None (and nothing is taken) if fewer are free."""
        assert n >= 0, f"cannot allocate {n} pages"
        first = len(self._free) - n
        if first < 0:
            return None
        pages = self._free[first:]
        del self._free[first:]
        pages.reverse()
        self._held.update(pages)
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Give pages back. A page that is not held (freed twice, out of range) is a bug: AssertionError."""
        returned = set(pages)
        assert len(returned) == len(pages), f"a page is freed twice in one call: {sorted(pages)}"
        assert returned <= self._held, f"freed but not held: {sorted(returned - self._held)}"
        self._held -= returned
        self._free.extend(reversed(pages))
