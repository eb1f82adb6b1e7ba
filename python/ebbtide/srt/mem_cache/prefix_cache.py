"""Sharing the KV of common prefixes: what the scheduler asks of a prefix cache, and one that keeps nothing.

Caching is by whole pages. A page belongs either to one request or to the cache; requests reach the cache's
pages through leases, which keep them from being evicted. The rule for callers, whichever cache is in use:
after `publish` the request's pages are `lease.pages + pages[len(lease.pages):]`, and only those from
`len(lease.pages)` on are its own, to be freed when it ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Protocol

from ebbtide.srt.mem_cache.page_allocator import PageAllocator

# Prefixes are shared within one namespace only, e.g. (cache_salt, extra_key) or with the weight version.
Namespace = tuple[str, ...]
# Pages in order: the label of each run of them, and where it ends.
Runs = Sequence[tuple[int, int]]


class PrefixLease:
    """The cached pages that a request uses, kept in the cache until `release`.

    Attributes:
        namespace: where the pages were found.
        pages: the cached pages, in token order. Read only; not to be used after `release`.
        runs: (label, end page) per run of pages that were published under one label.
    """

    __slots__ = ("namespace", "pages", "runs")

    def __init__(self, namespace: Namespace, pages: list[int], runs: Runs) -> None:
        self.namespace = namespace
        self.pages = pages
        self.runs = runs

    @property
    def labels(self) -> list[int]:
        """The distinct labels of the pages, ascending."""
        return sorted({label for label, _ in self.runs})

    def release(self) -> None:
        """Let go of the pages, which may be evicted once no lease holds them. Doing it again does nothing."""

    def relocate(self, target_of: Mapping[int, int]) -> None:
        """Some of the pages have moved to others; the cache is told by itself."""
        self.pages = [target_of.get(page, page) for page in self.pages]


class PrefixCache(Protocol):
    """KV pages by the tokens they hold."""

    @property
    def num_evictable_pages(self) -> int:
        """Cached pages that no lease keeps: what `evict` could free."""
        ...

    def match(
        self, namespace: Namespace, token_ids: Sequence[int], max_tokens: int | None = None
    ) -> PrefixLease:
        """Lease the longest cached prefix of `token_ids` in whole pages, of at most `max_tokens` tokens."""
        ...

    def publish(
        self, lease: PrefixLease, token_ids: Sequence[int], pages: Sequence[int], label: int = 0
    ) -> PrefixLease:
        """Hand the whole pages of a request to the cache, and lease them back.

        Where the cache already has a page for the same prefix, the request's own page goes back to the
        allocator and the cached one takes its place. A trailing page that is not full stays the request's.

        Args:
            lease: what the request holds so far; it is released.
            token_ids: every token whose KV the request has, from the first on; those under `lease` unchanged.
            pages: where that KV is, starting with `lease.pages`. There may be more pages than tokens fill.
            label: kept with the pages that are new to the cache, e.g. the number of the weights that computed
                them. Pages that are in the cache already keep theirs.
        """
        ...

    def evict(self, num_pages: int) -> int:
        """Give the least recently used pages that no lease keeps back to the allocator; returns how many.

        Exactly `num_pages`, or all that are evictable if those are fewer. A page counts as used until its
        last lease is released; of pages released together, the ends of prefixes go before their beginnings.
        """
        ...

    def flush(self) -> int:
        """Give everything that no lease keeps back to the allocator; returns the number of pages."""
        ...

    def evictable_pages(self) -> Iterator[int]:
        """The pages that no lease keeps."""
        ...

    def drop(self, pages: Set[int]) -> int:
        """Give these evictable pages back to the allocator, and those behind them; returns how many.

        A prefix ends before the first page that is dropped of it.
        """
        ...

    def relocate(self, target_of: Mapping[int, int]) -> None:
        """Some pages have moved to others, and their contents with them. Leases are told by themselves."""
        ...


class NoPrefixCache:
    """The cache that keeps nothing: leases are empty, and requests keep all their pages.

    Built like `RadixCache`, so that one line of configuration chooses between the two.
    """

    num_evictable_pages = 0

    def __init__(self, allocator: PageAllocator, page_size: int) -> None:
        pass

    def match(
        self, namespace: Namespace, token_ids: Sequence[int], max_tokens: int | None = None
    ) -> PrefixLease:
        """An empty lease."""
        return PrefixLease(namespace, [], ())

    def publish(
        self, lease: PrefixLease, token_ids: Sequence[int], pages: Sequence[int], label: int = 0
    ) -> PrefixLease:
        """An empty lease: nothing is taken, every page stays the request's own."""
        return PrefixLease(lease.namespace, [], ())

    def evict(self, num_pages: int) -> int:
        """Nothing to free."""
        return 0

    def flush(self) -> int:
        """Nothing to free."""
        return 0

    def evictable_pages(self) -> Iterator[int]:
        """There are none."""
        return iter(())

    def drop(self, pages: Set[int]) -> int:
        """Nothing to free."""
        return 0

    def relocate(self, target_of: Mapping[int, int]) -> None:
        """No page is the cache's."""
