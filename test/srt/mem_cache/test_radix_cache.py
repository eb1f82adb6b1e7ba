"""Every sequence of calls against a model that keeps one dictionary entry per page; and what is refused."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from fixtures.fuzz import fuzzed
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ebbtide.srt.mem_cache.page_allocator import PageAllocator, PageIds
from ebbtide.srt.mem_cache.radix_cache import Namespace, PrefixLease, RadixCache

NAMESPACE = ("salt",)
PAGE_SIZE = 4


@pytest.fixture
def allocator() -> PageAllocator:
    return PageAllocator(64)


@pytest.fixture
def cache(allocator: PageAllocator) -> RadixCache:
    return RadixCache(allocator, PAGE_SIZE)


def serve(
    cache: RadixCache,
    allocator: PageAllocator,
    token_ids: Sequence[int],
    namespace: Namespace = NAMESPACE,
    label: int = 0,
) -> PrefixLease:
    """What a request does: match, allocate the rest, compute, publish, free what stayed its own."""
    lease = cache.match(namespace, token_ids)
    fresh = allocator.allocate(-(-len(token_ids) // PAGE_SIZE) - len(lease))
    assert fresh is not None
    pages = lease.pages[0] + fresh
    lease = cache.publish(lease, token_ids, [pages], label=label)
    allocator.free(pages[len(lease) :])
    return lease


def matched(cache: RadixCache, token_ids: Sequence[int], namespace: Namespace = NAMESPACE) -> list[int]:
    lease = cache.match(namespace, token_ids)
    lease.release()
    return lease.pages[0]


def test_misuse_fails_loudly(cache: RadixCache, allocator: PageAllocator) -> None:
    lease = serve(cache, allocator, range(8))
    other = RadixCache(allocator, PAGE_SIZE)
    with pytest.raises(AssertionError):
        other.publish(lease, range(8), lease.pages)
    with pytest.raises(AssertionError):
        cache.publish(lease, range(8), [[5, 6]])  # does not start with the leased pages
    with pytest.raises(AssertionError):
        cache.publish(lease, range(12), lease.pages)  # a page short
    lease.release()
    with pytest.raises(AssertionError):
        cache.publish(lease, range(8), lease.pages)


def test_no_prefix_cache_leaves_the_request_its_pages() -> None:
    allocator = PageAllocator(8)
    cache: RadixCache = RadixCache(allocator, PAGE_SIZE, is_enabled=False)
    lease = serve(cache, allocator, range(12))
    assert len(lease) == 0
    assert allocator.num_free == 8
    assert matched(cache, range(12)) == []
    assert cache.num_evictable_pages == 0
    assert (cache.evict(3), cache.flush()) == (0, 0)


# A page of the cache, named by what it holds: its namespace and every token up to its end.
PageName = tuple[Namespace, tuple[int, ...]]


@dataclass
class ModelPage:
    page: int
    label: int
    num_leases: int = 0
    released_at: int = 0


@dataclass
class Request:
    namespace: Namespace
    tokens: list[int]
    lease: PrefixLease
    pages: list[int] = field(default_factory=list)


class RecordingAllocator(PageAllocator):
    """Remembers which pages the last calls freed."""

    def __init__(self, num_pages: int, ids: PageIds | None = None) -> None:
        super().__init__(num_pages, ids)
        self.freed: list[int] = []

    def free(self, pages: Sequence[int]) -> None:
        super().free(pages)
        self.freed += pages


IDS = PageIds(per_chunk=4, stride=5)


class CacheMachine(RuleBasedStateMachine):
    """Requests come, grow, publish and end in any order, under a pool that is too small for them."""

    PAGE_SIZE = 2
    NUM_PAGES = 14
    TOKENS = st.lists(st.integers(0, 1), max_size=6 * PAGE_SIZE)

    def __init__(self) -> None:
        super().__init__()
        self.allocator = RecordingAllocator(self.NUM_PAGES, IDS)
        self.cache = RadixCache(self.allocator, self.PAGE_SIZE)
        self.requests: list[Request] = []
        self.cached: dict[PageName, ModelPage] = {}
        self.contents: dict[int, PageName] = {}  # what was last computed into each page of the pool
        self.now = 0

    def names(self, namespace: Namespace, tokens: Sequence[int]) -> list[PageName]:
        ends = range(self.PAGE_SIZE, len(tokens) + 1, self.PAGE_SIZE)
        return [(namespace, tuple(tokens[:end])) for end in ends]

    def check_lease(self, lease: PrefixLease, names: list[PageName]) -> None:
        assert lease.pages[0] == [self.cached[name].page for name in names]
        assert [self.contents[page] for page in lease.pages[0]] == names
        assert lease.labels == sorted({self.cached[name].label for name in names})

    def leased_names(self, request: Request) -> list[PageName]:
        return self.names(request.namespace, request.tokens)[: len(request.lease)]

    def unpin(self, names: list[PageName]) -> None:
        self.now += 1
        for name in names:
            entry = self.cached[name]
            entry.num_leases -= 1
            entry.released_at = self.now

    def evictable(self) -> list[PageName]:
        """In the order of eviction: by last release; the ends of prefixes before their beginnings."""
        idle = [name for name, entry in self.cached.items() if entry.num_leases == 0]
        return sorted(idle, key=lambda name: (self.cached[name].released_at, -len(name[1])))

    def evict_and_check(self, num_pages: int) -> None:
        victims = self.evictable()[:num_pages]
        self.allocator.freed.clear()
        assert self.cache.evict(num_pages) == len(victims)
        assert sorted(self.allocator.freed) == sorted(self.cached[name].page for name in victims)
        for name in victims:
            del self.cached[name]

    def end(self, request: Request) -> None:
        names = self.leased_names(request)
        self.allocator.free(request.pages[len(request.lease) :])
        request.lease.release()
        request.lease.release()
        self.unpin(names)

    def provide_pages(self, request: Request) -> bool:
        """Allocate and compute what the request's tokens need, evicting if necessary."""
        needed = -(-len(request.tokens) // self.PAGE_SIZE) - len(request.pages)
        if needed > self.allocator.num_free:
            self.evict_and_check(needed - self.allocator.num_free)
        fresh = self.allocator.allocate(needed)
        if fresh is None:
            return False
        request.pages += fresh
        for page, name in zip(request.pages, self.names(request.namespace, request.tokens), strict=False):
            if page not in request.lease.pages[0]:
                self.contents[page] = name
        return True

    @rule(
        namespace=st.sampled_from([(), ("a",), ("a", "b")]),
        tokens=TOKENS,
        max_tokens=st.none() | st.integers(0, 6 * PAGE_SIZE),
    )
    def admit(self, namespace: Namespace, tokens: list[int], max_tokens: int | None) -> None:
        expected: list[PageName] = []
        for name in self.names(namespace, tokens[:max_tokens]):
            if name not in self.cached:
                break
            expected.append(name)
        lease = self.cache.match(namespace, tokens, max_tokens)
        self.check_lease(lease, expected)
        for name in expected:
            self.cached[name].num_leases += 1
        request = Request(namespace, tokens, lease, lease.pages[0].copy())
        if self.provide_pages(request):
            self.requests.append(request)
        else:
            self.end(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), max_size=2 * PAGE_SIZE))
    def extend(self, data: st.DataObject, tokens: list[int]) -> None:
        request = data.draw(st.sampled_from(self.requests))
        num_tokens = len(request.tokens)
        request.tokens = request.tokens + tokens
        if not self.provide_pages(request):
            request.tokens = request.tokens[:num_tokens]

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), label=st.integers(0, 3), fraction=st.floats(0, 1))
    def publish(self, data: st.DataObject, label: int, fraction: float) -> None:
        request = data.draw(st.sampled_from(self.requests))
        num_leased = len(request.lease)
        least = num_leased * self.PAGE_SIZE
        tokens = request.tokens[: least + round(fraction * (len(request.tokens) - least))]
        names = self.names(request.namespace, tokens)

        duplicates = []
        for name, page in list(zip(names, request.pages, strict=False))[num_leased:]:
            if name in self.cached:
                duplicates.append(page)
            else:
                self.cached[name] = ModelPage(page, label)
            self.cached[name].num_leases += 1

        self.allocator.freed.clear()
        released = request.lease
        request.lease = self.cache.publish(released, tokens, [request.pages], label=label)
        released.release()
        assert self.allocator.freed == duplicates
        self.check_lease(request.lease, names)
        request.pages = request.lease.pages[0] + request.pages[len(names) :]

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        self.requests.remove(request)
        self.end(request)

    @rule(num_pages=st.integers(0, NUM_PAGES))
    def evict(self, num_pages: int) -> None:
        self.evict_and_check(num_pages)

    @rule(chunks=st.sets(st.integers(0, 3), max_size=2))
    def empty(self, chunks: set[int]) -> None:
        """Move what lies in some chunks to others, as far as there is room."""
        leaving = [page for page in self.allocator.held if IDS.chunk_of(page) in chunks]
        room = self.NUM_PAGES - self.allocator.num_pages_of(chunks)
        if len(self.allocator.held) > room:
            return
        target_of = self.allocator.plan_move(chunks)
        assert target_of.keys() == set(leaving)
        self.allocator.move(target_of)
        self.cache.relocate(target_of)
        self.contents |= {target: self.contents.pop(source, ((), ())) for source, target in target_of.items()}
        for entry in self.cached.values():
            entry.page = target_of.get(entry.page, entry.page)
        for request in self.requests:
            request.pages = [target_of.get(page, page) for page in request.pages]
            request.lease.relocate(target_of)
            self.check_lease(request.lease, self.leased_names(request))

    @rule()
    def flush(self) -> None:
        victims = self.evictable()
        self.allocator.freed.clear()
        assert self.cache.flush() == len(victims)
        assert sorted(self.allocator.freed) == sorted(self.cached[name].page for name in victims)
        for name in victims:
            del self.cached[name]

    @invariant()
    def pages_add_up(self) -> None:
        own = [page for request in self.requests for page in request.pages[len(request.lease) :]]
        cached = [entry.page for entry in self.cached.values()]
        assert len(set(own + cached)) == len(own) + len(cached)
        assert self.allocator.num_free + len(cached) + len(own) == self.NUM_PAGES
        assert self.cache.num_evictable_pages == len(self.evictable())

    @invariant()
    def leased_pages_hold_the_tokens(self) -> None:
        for request in self.requests:
            names = self.names(request.namespace, request.tokens)
            held = [self.contents[page] for page in request.pages[: len(names)]]
            assert held == names

    def teardown(self) -> None:
        for request in self.requests:
            self.end(request)
        self.cache.flush()
        assert self.allocator.num_free == self.NUM_PAGES


class SingleTokenPagesMachine(CacheMachine):
    PAGE_SIZE = 1


TestCacheFuzz = fuzzed(CacheMachine, 60, 50)
TestSingleTokenPagesFuzz = fuzzed(SingleTokenPagesMachine, 20, 50)


def test_pages_that_are_dropped_go_with_everything_behind_them_and_nothing_else() -> None:
    allocator = PageAllocator(16)
    cache = RadixCache(allocator, 1)

    def publish(tokens: list[int]) -> None:
        lease = cache.match((), tokens)
        pages = lease.pages[0] + (allocator.allocate(len(tokens) - len(lease)) or [])
        cache.publish(lease, tokens, [pages]).release()

    def num_matched(tokens: list[int]) -> int:
        lease = cache.match((), tokens)
        lease.release()
        return len(lease)

    publish([1, 2, 3, 4])  # pages 0 to 3
    publish([1, 2, 5, 6])  # pages 4 and 5 behind the first two
    publish([7, 8])  # pages 6 and 7
    held = cache.match((), [7, 8])
    assert sorted(cache.evictable_pages()) == [0, 1, 2, 3, 4, 5]
    assert cache.drop({3}) == 1
    assert [num_matched(tokens) for tokens in ([1, 2, 3, 4], [1, 2, 5, 6])] == [3, 4]
    assert cache.drop({1, 4}) == 4
    assert [num_matched(tokens) for tokens in ([1, 2, 3, 4], [1, 2, 5, 6], [7, 8])] == [1, 1, 2]
    assert (cache.num_evictable_pages, allocator.num_free) == (1, 13)
    held.release()
    assert cache.drop({6, 7, 0}) == 3
    assert allocator.num_free == 16
