"""Pages of chunks: any order of calls, and what is refused."""

import pytest
from fixtures.fuzz import fuzzed
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ebbtide.srt.mem_cache.page_allocator import PageAllocator, PageIds

CHUNKS = PageIds(per_chunk=4, stride=10)


def test_ids_leave_room_between_chunks_and_the_lowest_chunk_comes_first() -> None:
    allocator = PageAllocator(10, CHUNKS)
    assert allocator.allocate(6) == [0, 1, 2, 3, 10, 11]
    assert allocator.allocate(3) == [12, 13, 20]
    allocator.free([20, 13, 2])
    assert allocator.allocate(3) == [2, 13, 20]


class AllocatorMachine(RuleBasedStateMachine):
    """Any order of calls: no page is ever handed out twice, and none is lost."""

    NUM_PAGES = 14

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(self.NUM_PAGES, CHUNKS)
        self.held: list[int] = []
        self.withdrawn: dict[int, range] = {}

    @property
    def num_there(self) -> int:
        return self.NUM_PAGES - sum(map(len, self.withdrawn.values()))

    @rule(n=st.integers(0, NUM_PAGES + 1))
    def allocate(self, n: int) -> None:
        free_before = self.num_there - len(self.held)
        pages = self.allocator.allocate(n)
        if n > free_before:
            assert pages is None
        else:
            assert pages is not None
            assert len(pages) == n
            self.held += pages

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(self.held), unique=True)) if self.held else []
        self.allocator.free(pages)
        self.held = [page for page in self.held if page not in pages]

    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        chunks = self.allocator.withdrawable()
        used = {CHUNKS.chunk_of(page) for page in self.held} | {0} | self.withdrawn.keys()
        assert chunks == sorted(set(range(4)) - used, reverse=True)
        if chunks:
            chunk = data.draw(st.sampled_from(chunks))
            self.allocator.withdraw(chunk)
            self.withdrawn[chunk] = CHUNKS.of_chunk(chunk, self.NUM_PAGES)

    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        if self.withdrawn:
            chunk = data.draw(st.sampled_from(sorted(self.withdrawn)))
            self.allocator.restore(chunk)
            del self.withdrawn[chunk]

    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        """Empty some chunks into the others."""
        there = sorted(set(range(4)) - self.withdrawn.keys())
        chunks = data.draw(st.sets(st.sampled_from(there)))
        leaving = [page for page in self.held if CHUNKS.chunk_of(page) in chunks]
        room = sum(len(CHUNKS.of_chunk(chunk, self.NUM_PAGES)) for chunk in set(there) - chunks)
        if len(self.held) > room:
            with pytest.raises(AssertionError):
                self.allocator.plan_move(chunks)
            return
        target_of = self.allocator.plan_move(chunks)
        assert sorted(target_of) == sorted(leaving)
        self.allocator.move(target_of)
        self.held = [target_of.get(page, page) for page in self.held]
        assert set(self.held) == self.allocator.held
        assert all(not self.allocator.held_by_chunk()[chunk] for chunk in chunks)

    @invariant()
    def pages_add_up(self) -> None:
        assert self.allocator.num_pages == self.num_there
        assert self.allocator.num_free + len(self.held) == self.num_there
        assert len(set(self.held)) == len(self.held)
        assert all(page not in gone for page in self.held for gone in self.withdrawn.values())
        assert set(self.held) <= {page for c in range(4) for page in CHUNKS.of_chunk(c, self.NUM_PAGES)}


TestAllocatorFuzz = fuzzed(AllocatorMachine, 40, 30)
