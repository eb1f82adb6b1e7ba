"""The prefix cache, with windows and without, against a model that looks at every page; and what is refused.

The model knows what was computed into each page, and of the cache no more than which pages it has not freed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fixtures.fuzz import fuzzed
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ebbtide.srt.mem_cache import Windows, first_needed
from ebbtide.srt.mem_cache.page_allocator import PageAllocator, PageIds
from ebbtide.srt.mem_cache.radix_cache import Namespace, PrefixLease, RadixCache

IDS = PageIds(per_chunk=5, stride=6)

# What is in a page: the KV of a group's layers, of the last tokens of these.
Content = tuple[int, Namespace, tuple[int, ...]]


@dataclass
class Request:
    namespace: Namespace
    tokens: list[int]
    lease: PrefixLease
    pages: list[list[int]]
    firsts: list[int]

    @property
    def own(self) -> list[int]:
        num_leased = len(self.lease)
        kept = zip(self.pages, self.firsts, strict=True)
        return [page for pages, first in kept for page in pages[max(first, num_leased) :]]

    @property
    def leased(self) -> set[int]:
        kept = zip(self.lease.pages, self.lease.firsts, strict=True)
        return {page for pages, first in kept for page in pages[first:]}


class WindowsMachine(RuleBasedStateMachine):
    """Requests come, grow, slide, publish and end in any order, under a pool that is too small for them."""

    PAGE_SIZE = 2
    NUM_PAGES = 30
    WINDOWS: Windows = (None, 5)
    # Most begin alike.
    TOKENS = st.tuples(st.integers(0, 1), st.integers(0, 8), st.integers(0, 6)).map(
        lambda drawn: [drawn[0]] * drawn[1] + [1] * drawn[2]
    )

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(self.NUM_PAGES, IDS)
        self.cache = RadixCache(self.allocator, self.PAGE_SIZE, self.WINDOWS)
        self.requests: list[Request] = []
        self.contents: dict[int, Content] = {}
        self.labels: dict[int, int] = {}

    # ---------------------------------------------------------------------------------------- the model

    def content(self, group: int, namespace: Namespace, tokens: Sequence[int], index: int) -> Content:
        return group, namespace, tuple(tokens[: (index + 1) * self.PAGE_SIZE])

    @property
    def cached(self) -> set[int]:
        return set(self.allocator.held) - {page for request in self.requests for page in request.own}

    @property
    def evictable(self) -> set[int]:
        return self.cached - {page for request in self.requests for page in request.leased}

    def num_usable(self, namespace: Namespace, tokens: Sequence[int]) -> int:
        """The longest prefix of which all pages are there that the next token attends to."""
        there = {self.contents[page] for page in self.cached}
        for num_pages in range(len(tokens) // self.PAGE_SIZE, 0, -1):
            needed = [
                self.content(group, namespace, tokens, index)
                for group, window in enumerate(self.WINDOWS)
                for index in range(
                    first_needed(num_pages * self.PAGE_SIZE, window, self.PAGE_SIZE), num_pages
                )
            ]
            if there.issuperset(needed):
                return num_pages
        return 0

    def compute(self, request: Request) -> bool:
        """Take pages for all tokens in every group, evicting if necessary."""
        num_new = -(-len(request.tokens) // self.PAGE_SIZE) - len(request.pages[0])
        shortage = num_new * len(self.WINDOWS) - self.allocator.num_free
        if shortage > 0:
            self.evict(shortage)
        fresh = self.allocator.allocate(num_new * len(self.WINDOWS))
        if fresh is None:
            return False
        for group, pages in enumerate(request.pages):
            pages += fresh[group * num_new : (group + 1) * num_new]
            for index in range(max(request.firsts[group], len(request.lease)), len(pages)):
                self.contents[pages[index]] = self.content(group, request.namespace, request.tokens, index)
        return True

    def end(self, request: Request) -> None:
        self.allocator.free(request.own)
        request.lease.release()
        request.lease.release()

    # ----------------------------------------------------------------------------------------- the rules

    @rule(
        namespace=st.sampled_from([(), ("a",)]),
        tokens=TOKENS,
        max_tokens=st.none() | st.integers(0, 14),
    )
    def admit(self, namespace: Namespace, tokens: list[int], max_tokens: int | None) -> None:
        expected = self.num_usable(namespace, tokens[:max_tokens])
        lease = self.cache.match(namespace, tokens, max_tokens)
        assert len(lease) == expected
        pages = [list(leased) for leased in lease.pages]
        request = Request(namespace, tokens, lease, pages, lease.firsts.copy())
        self.requests.append(request)
        if not self.compute(request):
            self.requests.remove(request)
            self.end(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), max_size=4))
    def extend(self, data: st.DataObject, tokens: list[int]) -> None:
        request = data.draw(st.sampled_from(self.requests))
        num_tokens = len(request.tokens)
        request.tokens = request.tokens + tokens
        if not self.compute(request):
            request.tokens = request.tokens[:num_tokens]

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), fraction=st.floats(0, 1))
    def slide(self, data: st.DataObject, fraction: float) -> None:
        """A request has got so far on its way through its tokens, and needs what is in its windows alone."""
        request = data.draw(st.sampled_from(self.requests))
        num_tokens = round(fraction * len(request.tokens))
        for group, window in enumerate(self.WINDOWS):
            first = max(request.firsts[group], first_needed(num_tokens, window, self.PAGE_SIZE))
            first = min(first, len(request.pages[group]))
            start = max(request.firsts[group], len(request.lease))
            self.allocator.free(request.pages[group][start:first])
            request.firsts[group] = first
        request.lease.slide(request.firsts)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), label=st.integers(0, 2), fraction=st.floats(0, 1))
    def publish(self, data: st.DataObject, label: int, fraction: float) -> None:
        request = data.draw(st.sampled_from(self.requests))
        least = len(request.lease) * self.PAGE_SIZE
        tokens = request.tokens[: least + round(fraction * (len(request.tokens) - least))]
        before, released = self.cached, request.lease
        request.lease = self.cache.publish(released, tokens, request.pages, request.firsts, label)
        released.release()
        assert least <= len(request.lease) * self.PAGE_SIZE <= len(tokens)
        for pages, leased in zip(request.pages, request.lease.pages, strict=True):
            pages[: len(leased)] = leased
        self.labels |= dict.fromkeys(self.cached - before, label)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        self.requests.remove(request)
        self.end(request)

    @rule(num_pages=st.integers(0, NUM_PAGES))
    def evict(self, num_pages: int) -> None:
        num_evictable = len(self.evictable)
        num_evicted = self.cache.evict(num_pages)
        assert min(num_pages, num_evictable) <= num_evicted < num_pages + len(self.WINDOWS)
        assert len(self.evictable) == num_evictable - num_evicted

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        pages = data.draw(st.sets(st.sampled_from(sorted(self.evictable)))) if self.evictable else set()
        num_dropped = self.cache.drop(pages)
        assert not pages & self.cached
        assert num_dropped >= len(pages)

    @rule()
    def flush(self) -> None:
        num_evictable = len(self.evictable)
        assert self.cache.flush() == num_evictable
        assert not self.evictable

    @rule(chunks=st.sets(st.integers(0, 5), max_size=2))
    def empty(self, chunks: set[int]) -> None:
        """Move what lies in some chunks to others, as far as there is room."""
        if len(self.allocator.held) > self.NUM_PAGES - self.allocator.num_pages_of(chunks):
            return
        target_of = self.allocator.plan_move(chunks)
        self.allocator.move(target_of)
        self.cache.relocate(target_of)
        for known in (self.contents, self.labels):
            known |= {target: known.pop(page) for page, target in target_of.items() if page in known}  # type: ignore[operator]
        for request in self.requests:
            request.pages = [[target_of.get(page, page) for page in pages] for pages in request.pages]
            request.lease.relocate(target_of)

    # ------------------------------------------------------------------------------------- what holds always

    @invariant()
    def no_page_is_anybodys_twice_or_nobodys(self) -> None:
        own = [page for request in self.requests for page in request.own]
        assert len(set(own)) == len(own)
        cached = [self.contents[page] for page in self.cached]
        assert len(set(cached)) == len(cached)
        assert set(self.cache.evictable_pages()) == self.evictable
        assert self.cache.num_evictable_pages == len(self.evictable)

    @invariant()
    def what_requests_have_holds_their_tokens(self) -> None:
        for request in self.requests:
            starts = [0, *(end for _, end in request.lease.runs)]
            labels = [
                label
                for (label, end), start in zip(request.lease.runs, starts, strict=False)
                for _ in range(start, end)
            ]
            assert request.lease.labels == sorted(set(labels))
            for group, (pages, first) in enumerate(zip(request.pages, request.firsts, strict=True)):
                for index in range(first, len(request.tokens) // self.PAGE_SIZE):
                    expected = self.content(group, request.namespace, request.tokens, index)
                    assert self.contents[pages[index]] == expected
                    if index < len(labels):
                        assert self.labels[pages[index]] == labels[index]

    def teardown(self) -> None:
        for request in self.requests:
            self.end(request)
        self.cache.flush()
        assert self.allocator.num_free == self.NUM_PAGES


class WholeMachine(WindowsMachine):
    """Without windows, what was used longest ago goes first, the end of a prefix before its beginning."""

    WINDOWS = (None,)
    NUM_PAGES = 14

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.used_at: dict[Content, int] = {}

    def end(self, request: Request) -> None:
        self.now += 1
        self.used_at |= {self.contents[page]: self.now for page in request.leased}
        super().end(request)

    @rule(num_pages=st.integers(0, NUM_PAGES))
    def evict(self, num_pages: int) -> None:
        def turn(page: int) -> tuple[int, int]:
            content = self.contents[page]
            return self.used_at[content], -len(content[2])

        staying = set(sorted(self.evictable, key=turn)[num_pages:])
        super().evict(num_pages)
        assert self.evictable == staying


class AllWindowsMachine(WindowsMachine):
    WINDOWS = (4,)


class ManyGroupsMachine(WindowsMachine):
    PAGE_SIZE, NUM_PAGES = 1, 60
    WINDOWS = (None, None, 3, 1, 6)


TestWholeFuzz = fuzzed(WholeMachine, 40, 50)
TestWindowsFuzz = fuzzed(WindowsMachine, 75, 60)
TestAllWindowsFuzz = fuzzed(AllWindowsMachine, 40, 60)
TestManyGroupsFuzz = fuzzed(ManyGroupsMachine, 30, 50)


def test_pages_of_a_window_that_the_cache_has_lost_are_filled_by_who_computes_them_again() -> None:
    allocator = PageAllocator(20)
    cache = RadixCache(allocator, 1, (None, 3))
    tokens = list(range(6))
    pages = [allocator.allocate(6) or [], allocator.allocate(6) or []]
    cache.publish(cache.match((), tokens), tokens, pages, label=1).release()
    assert cache.drop({pages[1][3], pages[1][4]}) == 2
    for label, num_published in ((2, 3), (1, 6)):
        lease = cache.match((), tokens)
        assert len(lease) == 3, "the tokens behind it attend to what is missing"
        own = [allocator.allocate(3) or [], allocator.allocate(3) or []]
        pages = [leased + new for leased, new in zip(lease.pages, own, strict=True)]
        lease = cache.publish(lease, tokens, pages, lease.firsts, label)
        assert len(lease) == num_published, "under another label it stays the request's"
        for of_group in pages:
            allocator.free(of_group[num_published:])
        lease.release()
        assert cache.num_evictable_pages == len(allocator.held) == (10 if label == 2 else 12)
    lease = cache.match((), tokens)
    assert (len(lease), lease.firsts, lease.labels) == (6, [0, 4], [1])
    lease.slide([0, 5])
    assert set(cache.evictable_pages()) == {*lease.pages[1][:5]}


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
