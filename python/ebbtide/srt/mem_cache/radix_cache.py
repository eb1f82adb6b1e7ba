"""The prefix cache: a radix tree over pages of tokens, which shares the KV of common prefixes.

Whole pages are cached. A page belongs either to one request or to the cache. Requests use pages of the cache
by leases, which keep them from being evicted.

A node is a run of pages of tokens, with the ids of the pages that hold their KV in each group of layers. Its
children continue the run with different next pages. Runs are split where prefixes diverge or a lease ends.

**Windows.** In a group of layers with a sliding window, pages are cached and evicted one by one. So some
tokens may have a page in one group and none in another. A prefix of n tokens is usable if each group with a
window has the pages of all tokens that the next token attends to: the last `window - 1` of the n. The longest
usable prefix is matched. A lease keeps those pages, until `slide` gives some of them up.

**States.** If layers keep a recurrent state, a prefix is usable only up to a checkpoint of the state.

The order of eviction depends on the calls alone, so it is the same on every rank. `_idle` holds the nodes
that are not pinned, in the order in which they were unpinned. Pinning a node pins its ancestors, and
unpinning goes from the node upwards. So the first node in `_idle` is a leaf, and the least recently used one.
Pages of windows that no lease keeps have a queue of their own. Of both queues, the entry that was released
first is evicted first; a node before its pages.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import KW_ONLY, dataclass, field

import numpy as np

from ebbtide.srt.mem_cache import WHOLE, Windows, first_needed
from ebbtide.srt.mem_cache.page_allocator import MISSING, PageAllocator, WindowPages
from ebbtide.srt.mem_cache.state_slots import Checkpoints

# Prefixes are shared only within a namespace, such as (cache_salt, extra_key), maybe with the weight version.
Namespace = tuple[str, ...]
# (label, end page) for each run of pages, in order.
Runs = Sequence[tuple[int, int]]

# A child is found by its first page of tokens, and by the namespace: one tree serves all namespaces.
_Edge = tuple[Namespace, bytes]


@dataclass(slots=True, eq=False)
class _Node:
    """A run of cached pages.

    Attributes:
        tokens: as native ints, so that comparing runs is one memcmp.
        pages: page ids, by group.
        pins: how many leases end at this node, plus how many children have pins.
        checkpoints: number of pages → slot of the state after them.
    """

    parent: _Node | None
    edge: _Edge
    tokens: bytes
    pages: list[list[int]]
    label: int
    pins: int = 0
    idle_since: int = 0
    children: dict[_Edge, _Node] = field(default_factory=dict)
    checkpoints: dict[int, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.pages[0])


@dataclass(slots=True, eq=False)
class PrefixLease:
    """The cached pages that a request uses, kept in the cache until `release`.

    Attributes:
        pages: the page ids by group, in token order. Read-only, and invalid after `release`.
        firsts: by group, the index of the first page that is kept. Entries before it mean nothing.
        runs: (label, end page) per run of pages that were published under one label.
        checkpoint: slot of the state after the pages, valid until the next slot is taken; None: there is
            none.
        num_common: how many pages are cached, also beyond the checkpoint.
    """

    cache: RadixCache
    namespace: Namespace
    _node: _Node | None
    pages: list[list[int]]
    firsts: list[int]
    runs: Runs
    checkpoint: int | None = None
    num_common: int = 0

    def __len__(self) -> int:
        """The pages of tokens."""
        return len(self.pages[0])

    @property
    def labels(self) -> list[int]:
        """The distinct labels of the pages, ascending."""
        return sorted({label for label, _ in self.runs})

    def slide(self, firsts: Sequence[int]) -> None:
        """Give up the pages before these indices, by group."""
        for group in self.cache.windowed:
            first = min(firsts[group], len(self))
            passed = self.pages[group][self.firsts[group] : first]
            self.cache._window_pages.let_go(passed, self.cache._now)
            self.firsts[group] = max(first, self.firsts[group])

    def release(self) -> None:
        """Give the pages up. They may be evicted when no lease keeps them. Idempotent."""
        if self._node is not None:
            self.cache._unpin(self._node, self)
            self._node = None

    def relocate(self, target_of: Mapping[int, int]) -> None:
        """Note that pages have moved (old → new). `RadixCache.relocate` must be called too."""
        self.pages = [[target_of.get(page, page) for page in pages] for pages in self.pages]


@dataclass(eq=False)
class RadixCache:
    """Shares common prefixes in whole pages, and evicts in LRU order.

    After `publish`, a request has the pages of the lease, and then its own as before. When it ends, only its
    own must be freed.

    Args:
        page_size: tokens of a page; token ids must fit into 32 bits.
        windows: sliding window of each group of layers.
        checkpoints: of recurrent states; None: no layer has one.
        is_enabled: if False, nothing is cached: leases are empty, and requests keep all their pages.
    """

    _allocator: PageAllocator
    _page_size: int
    _windows: Windows = WHOLE
    _checkpoints: Checkpoints | None = None
    _: KW_ONLY
    is_enabled: bool = True

    def __post_init__(self) -> None:
        assert self._page_size >= 1, f"page_size is {self._page_size}"
        self.windowed = [group for group, window in enumerate(self._windows) if window is not None]
        self._whole = [group for group, window in enumerate(self._windows) if window is None]
        self._page_bytes = self._page_size * array("i").itemsize
        self._root = _Node(None, ((), b""), b"", [[] for _ in self._windows], label=0)
        self._idle: OrderedDict[_Node, None] = OrderedDict()
        self._num_evictable = 0
        self._now = 0
        self._window_pages: WindowPages[_Node] = WindowPages()

    @property
    def num_evictable_pages(self) -> int:
        """How many pages `evict` could free: cached pages that no lease keeps."""
        return self._num_evictable + len(self._window_pages.idle)

    def match(
        self, namespace: Namespace, token_ids: Sequence[int], max_tokens: int | None = None
    ) -> PrefixLease:
        """Lease the longest usable prefix of `token_ids`, in whole pages and at most `max_tokens` tokens."""
        num_tokens = len(token_ids) if max_tokens is None else min(len(token_ids), max_tokens)
        num_pages = num_tokens // self._page_size if self.is_enabled else 0
        if self.windowed:
            num_pages = self._num_usable(namespace, token_ids, num_pages)
        checkpoint, num_common = None, 0
        if self._checkpoints is not None:
            segments = self._segments(self._root, namespace, token_ids, 0, num_pages)
            num_pages, checkpoint, num_common = self._checkpoints.last(segments)
        pages: list[list[int]] = [[] for _ in self._windows]
        runs: list[tuple[int, int]] = []
        node = self._descend(self._root, namespace, token_ids, num_pages, pages, runs)
        num_tokens = len(pages[0]) * self._page_size
        firsts = [first_needed(num_tokens, window, self._page_size) for window in self._windows]
        lease = self._lease(namespace, node, pages, firsts, runs)
        lease.checkpoint, lease.num_common = checkpoint, num_common
        return lease

    def publish(
        self,
        lease: PrefixLease,
        token_ids: Sequence[int],
        pages: Sequence[Sequence[int]],
        firsts: Sequence[int] | None = None,
        label: int = 0,
    ) -> PrefixLease:
        """Hand the whole pages of a request to the cache, and lease them back.

        If the cache already has a page for the same prefix, the request's own page is freed, and the cached
        one replaces it. A trailing page that is not full stays with the request. So do pages of a window
        whose place in the cache is empty but has another label, and all pages after them.

        Args:
            lease: the request's lease so far; it is released.
            token_ids: all tokens whose KV the request has, from the first on; those of `lease` are unchanged.
            pages: the pages of that KV by group, beginning with those of `lease`. There may be more than the
                tokens fill.
            firsts: by group, the index of the first page that the request has; None: it has all.
            label: stored with pages that are new to the cache, such as the number of the weights.
        """
        assert lease.cache is self, "the lease is of another cache"
        assert lease._node is not None, "the lease has been released"
        num_leased, num_whole = len(lease), len(token_ids) // self._page_size
        firsts = [0] * len(pages) if firsts is None else firsts
        assert num_leased <= num_whole <= len(pages[0]), "pages and tokens do not fit together"
        for own, leased, first in zip(pages, lease.pages, firsts, strict=True):
            assert list(own[first:num_leased]) == leased[first:], "pages do not start with the leased ones"
        if not self.is_enabled:
            return lease
        if self.windowed:
            num_whole = self._fill(lease, token_ids, num_whole, pages, firsts, label)
        cached, runs = [leased.copy() for leased in lease.pages], list(lease.runs)
        node = self._descend(lease._node, lease.namespace, token_ids, num_whole, cached, runs)
        num_found = len(cached[0])
        for own, found, first in zip(pages, cached, firsts, strict=True):
            start = max(first, num_leased)
            pairs = zip(own[start:num_found], found[start:], strict=True)
            self._allocator.free([page for page, kept in pairs if page != kept])
        if num_found < num_whole:
            tokens = self._encode(token_ids, num_found, num_whole)
            starts = [min(max(first, num_found), num_whole) for first in firsts]
            new = [
                [MISSING] * (start - num_found) + list(own[start:num_whole])
                for own, start in zip(pages, starts, strict=True)
            ]
            node = self._append(node, lease.namespace, tokens, new, label)
            for found, own in zip(cached, new, strict=True):
                found += own
            _extend(runs, label, num_whole)
        # Pin before release, so that pages in use are never idle in between.
        kept = [min(first, num_whole) for first in firsts]
        published = self._lease(lease.namespace, node, cached, kept, runs)
        lease.release()
        return published

    def attach(self, lease: PrefixLease, num_pages: int, slot: int, label: int) -> bool:
        """Store a checkpoint after the first `num_pages` pages of a lease.

        False: there is one already, or the last page has another label, so it is of another request.
        """
        assert self._checkpoints is not None
        node, depth = lease._node, len(lease)
        assert node is not None, "the lease has been released"
        assert 0 < num_pages <= depth, "the lease has fewer pages"
        while depth - len(node) >= num_pages:
            depth -= len(node)
            assert node.parent is not None
            node = node.parent
        end = num_pages - (depth - len(node))
        if node.label != label or end in node.checkpoints:
            return False
        self._checkpoints.attach(node, end, slot)
        return True

    def evict(self, num_pages: int) -> int:
        """Free the least recently used pages that no lease keeps; returns how many.

        It frees at least `num_pages`, or all evictable pages if there are fewer; the excess is less than a
        page of every group. Of pages that were released together, the ends of prefixes are freed first.
        """
        freed: list[int] = []
        idle_pages = self._window_pages.idle
        while len(freed) < num_pages and (self._idle or idle_pages):
            node = next(iter(self._idle), None)
            page = next(iter(idle_pages), None)
            if node is not None and (page is None or node.idle_since <= idle_pages[page]):
                freed += self._trim(node, num_pages - len(freed))
            elif page is not None:
                freed.append(self._forget(page))
        self._allocator.free(freed)
        return len(freed)

    def flush(self) -> int:
        """Free all pages that no lease keeps; returns how many."""
        return self.evict(self.num_evictable_pages)

    def evictable_pages(self) -> Iterator[int]:
        """The pages that no lease keeps, the least recently used runs first."""
        for node in self._idle:
            for group in self._whole:
                yield from node.pages[group]
        yield from self._window_pages.idle

    def drop(self, pages: Set[int]) -> int:
        """Free these evictable pages, and those that follow them in their prefixes; returns how many.

        A page that only groups with a window have lost does not end its prefix.
        """
        freed: list[int] = []
        for node in list(self._idle):
            found = (
                next((index for index, page in enumerate(node.pages[group]) if page in pages), None)
                for group in self._whole
            )
            first = min((index for index in found if index is not None), default=None)
            if first is None:  # nothing to drop, or it was cut with the run before it
                continue
            for follower in reversed(self._followers(node)):
                freed += self._cut(follower, 0)
            freed += self._cut(node, first)
        freed += [self._forget(page) for page in list(self._window_pages.idle) if page in pages]
        self._allocator.free(freed)
        return len(freed)

    def relocate(self, target_of: Mapping[int, int]) -> None:
        """Note that pages have moved (old → new). `PrefixLease.relocate` must be called too."""
        for node in self._followers(self._root):
            node.pages = [[target_of.get(page, page) for page in pages] for pages in node.pages]
        if self.windowed:
            self._window_pages.relocate(target_of)

    def _followers(self, node: _Node) -> list[_Node]:
        """All nodes that continue a run, parents before children."""
        found = list(node.children.values())
        for follower in found:
            found.extend(follower.children.values())
        return found

    def _segments(
        self, node: _Node, namespace: Namespace, token_ids: Sequence[int], depth: int, num_pages: int
    ) -> Iterator[tuple[_Node, int]]:
        """Follow pages `depth` to `num_pages` of `token_ids` down from `node`, as far as they are cached.
        Yields
        each node, and how many of its pages match."""
        while depth < num_pages:
            child = node.children.get((namespace, self._encode(token_ids, depth, depth + 1)))
            if child is None:
                return
            tokens = self._encode(token_ids, depth, min(num_pages, depth + len(child)))
            num_common = self._count_common_pages(child.tokens, tokens)
            is_whole = num_common == len(child)  # before the yield, since the caller may split the node
            yield child, num_common
            if not is_whole:
                return
            node, depth = child, depth + num_common

    def _descend(
        self,
        node: _Node,
        namespace: Namespace,
        token_ids: Sequence[int],
        num_pages: int,
        pages: list[list[int]],
        runs: list[tuple[int, int]],
    ) -> _Node:
        """Follow the first `num_pages` pages of `token_ids` down from `node`, as far as they are cached.

        `pages` and `runs`, which hold the path down to `node`, are extended. Returns the node where the path
        ends. A run that matches only in its first pages is split.
        """
        for child, num_common in self._segments(node, namespace, token_ids, len(pages[0]), num_pages):
            node = child if num_common == len(child) else self._split(child, num_common)
            for found, own in zip(pages, node.pages, strict=True):
                found += own
            _extend(runs, node.label, len(pages[0]))
        return node

    def _num_usable(self, namespace: Namespace, token_ids: Sequence[int], num_pages: int) -> int:
        """The length of the longest usable prefix in pages."""
        pages: list[list[int]] = [[] for _ in self._windows]
        for node, num_common in self._segments(self._root, namespace, token_ids, 0, num_pages):
            for found, own in zip(pages, node.pages, strict=True):
                found += own[:num_common]
        num_usable = len(pages[0])
        while (gap := self._last_gap(pages, num_usable)) is not None:
            # Any prefix that ends between the gap and `num_usable` attends to the gap.
            num_usable = gap
        return num_usable

    def _last_gap(self, pages: list[list[int]], num_pages: int) -> int | None:
        """The page where a prefix of `num_pages` must end earlier: it is missing in some group, and needed.

        None: no needed page is missing.
        """
        gaps = []
        for group in self.windowed:
            first = first_needed(num_pages * self._page_size, self._windows[group], self._page_size)
            needed = range(num_pages - 1, first - 1, -1)
            gaps += [next((index for index in needed if pages[group][index] == MISSING), None)]
        return min((gap for gap in gaps if gap is not None), default=None)

    def _fill(
        self,
        lease: PrefixLease,
        token_ids: Sequence[int],
        num_whole: int,
        pages: Sequence[Sequence[int]],
        firsts: Sequence[int],
        label: int,
    ) -> int:
        """Put a request's own pages where the cache has lost pages of windows. Returns the page where it
        stopped,
        because the label differs; else `num_whole`."""
        assert lease._node is not None
        depth = len(lease)
        for node, num_common in self._segments(lease._node, lease.namespace, token_ids, depth, num_whole):
            for index in range(num_common):
                gaps = [
                    group
                    for group in self.windowed
                    if node.pages[group][index] == MISSING and depth + index >= firsts[group]
                ]
                if gaps and node.label != label:
                    return depth + index
                for group in gaps:
                    page = node.pages[group][index] = pages[group][depth + index]
                    self._window_pages.place([page], node, self._now)
            depth += num_common
        return num_whole

    def _encode(self, token_ids: Sequence[int], first_page: int, end_page: int) -> bytes:
        return array("i", token_ids[first_page * self._page_size : end_page * self._page_size]).tobytes()

    def _count_common_pages(self, run: bytes, tokens: bytes) -> int:
        """How many whole pages two runs share from the start. `tokens` is not longer than `run`."""
        wanted = np.frombuffer(tokens, dtype=np.int32)
        differs = np.frombuffer(run, dtype=np.int32, count=len(wanted)) != wanted
        return (int(differs.argmax()) if differs.any() else len(differs)) // self._page_size

    def _lease(
        self, namespace: Namespace, node: _Node, pages: list[list[int]], firsts: list[int], runs: Runs
    ) -> PrefixLease:
        self._pin(node)
        for group in self.windowed:
            self._window_pages.keep(pages[group][firsts[group] :])
        return PrefixLease(self, namespace, node, pages, firsts, runs)

    def _pin(self, node: _Node) -> None:
        while node.parent is not None:
            node.pins += 1
            if node.pins > 1:  # its ancestors are pinned already
                return
            del self._idle[node]
            self._num_evictable -= len(node) * len(self._whole)
            node = node.parent

    def _unpin(self, node: _Node, lease: PrefixLease) -> None:
        self._now += 1
        while node.parent is not None:
            node.pins -= 1
            if node.pins > 0:
                break
            self._idle[node] = None
            node.idle_since = self._now
            self._num_evictable += len(node) * len(self._whole)
            node = node.parent
        for group in self.windowed:
            self._window_pages.let_go(lease.pages[group][lease.firsts[group] :], self._now)

    def _append(
        self, parent: _Node, namespace: Namespace, tokens: bytes, pages: list[list[int]], label: int
    ) -> _Node:
        """Add a leaf with pages that are new to the cache. The caller pins it."""
        node = _Node(parent, (namespace, tokens[: self._page_bytes]), tokens, pages, label)
        parent.children[node.edge] = node
        self._idle[node] = None
        self._num_evictable += len(node) * len(self._whole)
        for group in self.windowed:
            self._window_pages.place(pages[group], node, self._now)
        return node

    def _split(self, node: _Node, num_pages: int) -> _Node:
        """Move the first `num_pages` pages of a run into a new parent, and return that. The caller pins it.

        `node` remains the end of the path, since leases refer to it.
        """
        assert node.parent is not None, "the root has no pages to split"
        cut = num_pages * self._page_bytes
        first = [pages[:num_pages] for pages in node.pages]
        upper = _Node(node.parent, node.edge, node.tokens[:cut], first, node.label)
        upper.pins = 1 if node.pins else 0
        if not upper.pins:
            self._idle[upper] = None
        node.parent.children[upper.edge] = upper
        node.parent, node.tokens = upper, node.tokens[cut:]
        node.pages = [pages[num_pages:] for pages in node.pages]
        node.edge = (upper.edge[0], node.tokens[: self._page_bytes])
        upper.children[node.edge] = node
        if self._checkpoints is not None:
            self._checkpoints.split(node, upper, num_pages)
        for group in self.windowed:
            self._window_pages.place(first[group], upper, self._now)
        return upper

    def _trim(self, leaf: _Node, num_pages: int) -> list[int]:
        """Cut pages off the end of an idle leaf until `num_pages` are freed, or all."""
        first = len(leaf)
        while first > 0 and num_pages > 0:
            first -= 1
            num_pages -= len(self._whole)
            num_pages -= sum(leaf.pages[group][first] != MISSING for group in self.windowed)
        return self._cut(leaf, first)

    def _cut(self, leaf: _Node, first: int) -> list[int]:
        """Cut an idle leaf from page `first` on. A leaf without pages is removed from the tree."""
        assert leaf.parent is not None, "the root has no pages to cut"
        assert not leaf.children, "only leaves can be cut"
        if self._checkpoints is not None:
            self._checkpoints.cut(leaf, first)
        self._num_evictable -= (len(leaf) - first) * len(self._whole)
        freed: list[int] = []
        for group, pages in enumerate(leaf.pages):
            gone = [page for page in pages[first:] if page != MISSING]
            del pages[first:]
            freed += gone
            for page in gone if group in self.windowed else ():
                self._window_pages.remove(page)
        leaf.tokens = leaf.tokens[: first * self._page_bytes]
        if not leaf.tokens and leaf in self._idle:
            del leaf.parent.children[leaf.edge]
            del self._idle[leaf]
        return freed

    def _forget(self, page: int) -> int:
        """Remove an idle page of a window from its run."""
        node = self._window_pages.remove(page)
        [run] = [node.pages[group] for group in self.windowed if page in node.pages[group]]
        run[run.index(page)] = MISSING
        return page


def _extend(runs: list[tuple[int, int]], label: int, end: int) -> None:
    """Add the pages up to `end` under this label."""
    if runs and runs[-1][0] == label:
        runs.pop()
    runs.append((label, end))
