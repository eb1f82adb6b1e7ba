"""The prefix cache as a radix tree over pages of tokens.

A node is a run of pages; its children continue the run, each with a different next page. Runs are split, at
page boundaries, where prefixes diverge or a lease ends.

Eviction order needs no clock and no search. `_idle` holds the nodes that nothing pins, in the order in which
they were let go. Pinning a node pins its ancestors, and letting go runs from the node upwards, so a parent
always stands behind its children: the first node in line is a leaf, and the least recently used one. The
order depends on the calls alone, hence is the same on every rank.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from ebbtide.srt.mem_cache.page_allocator import PageAllocator
from ebbtide.srt.mem_cache.prefix_cache import Namespace, PrefixLease, Runs

_BYTES_PER_TOKEN = array("i").itemsize

# A child is found by its first page of tokens, and by the namespace: one tree serves all namespaces.
_Edge = tuple[Namespace, bytes]


@dataclass(slots=True, eq=False)
class _Node:
    """A run of cached pages.

    Attributes:
        tokens: the run's token ids as native ints, so that comparing runs is one memcmp.
        pins: leases that end at this node, plus children with pins.
    """

    parent: _Node | None
    edge: _Edge
    tokens: bytes
    pages: list[int]
    label: int
    pins: int = 0
    children: dict[_Edge, _Node] = field(default_factory=dict)


class _RadixLease(PrefixLease):
    """Pins the path down to `node`, and with it every page of the lease."""

    __slots__ = ("cache", "node")

    def __init__(
        self, cache: RadixCache, namespace: Namespace, node: _Node, pages: list[int], runs: Runs
    ) -> None:
        super().__init__(namespace, pages, runs)
        self.cache = cache
        self.node: _Node | None = node

    def release(self) -> None:
        if self.node is not None:
            self.cache._unpin(self.node)
            self.node = None


class RadixCache:
    """A `PrefixCache` that shares every common prefix, down to `page_size` tokens, and evicts in LRU order.

    Token ids must fit into 32 bits.
    """

    def __init__(self, allocator: PageAllocator, page_size: int) -> None:
        assert page_size >= 1, f"page_size is {page_size}"
        self._allocator = allocator
        self._page_size = page_size
        self._page_bytes = page_size * _BYTES_PER_TOKEN
        self._root = _Node(parent=None, edge=((), b""), tokens=b"", pages=[], label=0)
        self._idle: OrderedDict[_Node, None] = OrderedDict()
        self._num_evictable = 0

    @property
    def num_evictable_pages(self) -> int:
        """Cached pages that no lease keeps."""
        return self._num_evictable

    def match(
        self, namespace: Namespace, token_ids: Sequence[int], max_tokens: int | None = None
    ) -> PrefixLease:
        """Lease the longest cached prefix of `token_ids` in whole pages, of at most `max_tokens` tokens."""
        num_tokens = len(token_ids) if max_tokens is None else min(len(token_ids), max_tokens)
        pages: list[int] = []
        runs: list[tuple[int, int]] = []
        node = self._descend(self._root, namespace, token_ids, num_tokens // self._page_size, pages, runs)
        return self._lease(namespace, node, pages, runs)

    def publish(
        self, lease: PrefixLease, token_ids: Sequence[int], pages: Sequence[int], label: int = 0
    ) -> PrefixLease:
        """Hand the whole pages of a request to the cache, and lease them back; see `PrefixCache.publish`."""
        assert isinstance(lease, _RadixLease), "the lease is of another cache"
        assert lease.cache is self, "the lease is of another cache"
        assert lease.node is not None, "the lease has been released"
        num_leased, num_whole = len(lease.pages), len(token_ids) // self._page_size
        assert num_leased <= num_whole <= len(pages), "pages and tokens do not fit together"
        assert list(pages[:num_leased]) == lease.pages, "pages do not start with the leased ones"

        cached, runs = lease.pages.copy(), list(lease.runs)
        node = self._descend(lease.node, lease.namespace, token_ids, num_whole, cached, runs)
        num_found = len(cached)
        self._allocator.free(pages[num_leased:num_found])
        if num_found < num_whole:
            tokens = self._encode(token_ids, num_found, num_whole)
            own = list(pages[num_found:num_whole])
            node = self._append(node, lease.namespace, tokens, own, label)
            cached += own
            _extend(runs, label, num_whole)
        # Pin before release: the pages in use must not pass for idle in between.
        published = self._lease(lease.namespace, node, cached, runs)
        lease.release()
        return published

    def evict(self, num_pages: int) -> int:
        """Give the `num_pages` least recently used idle pages back to the allocator, or all if fewer."""
        freed: list[int] = []
        while self._idle and len(freed) < num_pages:
            freed += self._trim(next(iter(self._idle)), num_pages - len(freed))
        self._allocator.free(freed)
        return len(freed)

    def flush(self) -> int:
        """Give everything that no lease keeps back to the allocator; returns the number of pages."""
        return self.evict(self._num_evictable)

    def evictable_pages(self) -> Iterator[int]:
        """The pages that no lease keeps, the least recently used runs first."""
        for node in self._idle:
            yield from node.pages

    def drop(self, pages: Set[int]) -> int:
        """Give these evictable pages back to the allocator, and those behind them; see `PrefixCache.drop`."""
        freed: list[int] = []
        for node in list(self._idle):
            first = next((index for index, page in enumerate(node.pages) if page in pages), None)
            if first is None:  # also where it went with the run before it: it has no pages any more
                continue
            for follower in reversed(self._followers(node)):
                freed += self._trim(follower, len(follower.pages))
            freed += self._trim(node, len(node.pages) - first)
        self._allocator.free(freed)
        return len(freed)

    def relocate(self, target_of: Mapping[int, int]) -> None:
        """Some pages have moved to others; see `PrefixCache.relocate`."""
        for node in self._followers(self._root):
            node.pages = [target_of.get(page, page) for page in node.pages]

    def _followers(self, node: _Node) -> list[_Node]:
        """Everything that continues a run, parents before their children."""
        found = list(node.children.values())
        for follower in found:
            found.extend(follower.children.values())
        return found

    def _descend(
        self,
        node: _Node,
        namespace: Namespace,
        token_ids: Sequence[int],
        num_pages: int,
        pages: list[int],
        runs: list[tuple[int, int]],
    ) -> _Node:
        """Follow the first `num_pages` pages of `token_ids` down from `node`, as far as they are cached.

        `pages` holds the pages down to `node` and is extended, as `runs` is. Returns the node where the
        path ends; a run that only begins with the same pages is split there.
        """
        while (depth := len(pages)) < num_pages:
            child = node.children.get((namespace, self._encode(token_ids, depth, depth + 1)))
            if child is None:
                break
            tokens = self._encode(token_ids, depth, min(num_pages, depth + len(child.pages)))
            num_common = self._count_common_pages(child.tokens, tokens)
            node = child if num_common == len(child.pages) else self._split(child, num_common)
            pages += node.pages
            _extend(runs, node.label, len(pages))
        return node

    def _encode(self, token_ids: Sequence[int], first_page: int, end_page: int) -> bytes:
        return array("i", token_ids[first_page * self._page_size : end_page * self._page_size]).tobytes()

    def _count_common_pages(self, run: bytes, tokens: bytes) -> int:
        """How many whole pages two runs have in common from the start; `tokens` is no longer than `run`."""
        if run.startswith(tokens):
            return len(tokens) // self._page_bytes
        # The first `low` pages agree; the first page that does not is within the first `high + 1`.
        low, high = 0, len(tokens) // self._page_bytes - 1
        while low < high:
            middle = (low + high + 1) // 2
            part = slice(low * self._page_bytes, middle * self._page_bytes)
            if run[part] == tokens[part]:
                low = middle
            else:
                high = middle - 1
        return low

    def _lease(self, namespace: Namespace, node: _Node, pages: list[int], runs: Runs) -> PrefixLease:
        self._pin(node)
        return _RadixLease(self, namespace, node, pages, runs)

    def _pin(self, node: _Node) -> None:
        while node.parent is not None:
            node.pins += 1
            if node.pins > 1:  # its ancestors are pinned on its behalf already
                return
            del self._idle[node]
            self._num_evictable -= len(node.pages)
            node = node.parent

    def _unpin(self, node: _Node) -> None:
        while node.parent is not None:
            node.pins -= 1
            if node.pins > 0:
                return
            self._idle[node] = None
            self._num_evictable += len(node.pages)
            node = node.parent

    def _append(
        self, parent: _Node, namespace: Namespace, tokens: bytes, pages: list[int], label: int
    ) -> _Node:
        """Add a leaf with pages that are new to the cache. The caller pins it."""
        edge = (namespace, tokens[: self._page_bytes])
        node = _Node(parent, edge, tokens, pages, label)
        parent.children[edge] = node
        self._idle[node] = None
        self._num_evictable += len(pages)
        return node

    def _split(self, node: _Node, num_pages: int) -> _Node:
        """Move the first `num_pages` pages of a run into a new parent, and return that. The caller pins it.

        `node` stays the end of the path, where the leases that pin it expect it.
        """
        assert node.parent is not None, "the root has no pages to split"
        cut = num_pages * self._page_bytes
        upper = _Node(node.parent, node.edge, node.tokens[:cut], node.pages[:num_pages], node.label)
        upper.pins = 1 if node.pins else 0
        if not upper.pins:
            self._idle[upper] = None
        node.parent.children[upper.edge] = upper
        node.parent, node.tokens, node.pages = upper, node.tokens[cut:], node.pages[num_pages:]
        node.edge = (upper.edge[0], node.tokens[: self._page_bytes])
        upper.children[node.edge] = node
        return upper

    def _trim(self, leaf: _Node, num_pages: int) -> list[int]:
        """Take up to `num_pages` pages off the end of an idle leaf; a leaf without pages leaves the tree."""
        assert leaf.parent is not None, "the root has no pages to trim"
        assert not leaf.children, "only leaves can be trimmed"
        first = max(0, len(leaf.pages) - num_pages)
        freed = leaf.pages[first:]
        del leaf.pages[first:]
        leaf.tokens = leaf.tokens[: first * self._page_bytes]
        if not leaf.pages:
            del leaf.parent.children[leaf.edge]
            del self._idle[leaf]
        self._num_evictable -= len(freed)
        return freed


def _extend(runs: list[tuple[int, int]], label: int, end: int) -> None:
    """More pages, up to `end`, of this label."""
    if runs and runs[-1][0] == label:
        runs.pop()
    runs.append((label, end))
