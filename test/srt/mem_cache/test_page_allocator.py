import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ebbtide.srt.mem_cache.page_allocator import PageAllocator


def test_fresh_pages_are_ascending_and_contiguous() -> None:
    allocator = PageAllocator(8)
    assert allocator.allocate(3) == [0, 1, 2]
    assert allocator.allocate(1) == [3]
    assert allocator.num_free == 4


def test_freed_pages_come_back_in_order() -> None:
    allocator = PageAllocator(8)
    pages = allocator.allocate(5)
    assert pages is not None
    allocator.free(pages)
    assert allocator.allocate(8) == list(range(8))


@pytest.mark.parametrize("pages", [[0, 0], [2], [-1], [4], [0, 3]])
def test_freeing_what_is_not_held_fails_and_frees_nothing(pages: list[int]) -> None:
    allocator = PageAllocator(4)
    allocator.allocate(2)
    with pytest.raises(AssertionError):
        allocator.free(pages)
    assert allocator.num_free == 2
    allocator.free([0, 1])
    assert allocator.num_free == 4


class AllocatorMachine(RuleBasedStateMachine):
    """Any order of calls: no page is ever handed out twice, and none is lost."""

    NUM_PAGES = 12

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(self.NUM_PAGES)
        self.held: list[int] = []

    @rule(n=st.integers(0, NUM_PAGES + 1))
    def allocate(self, n: int) -> None:
        free_before = self.NUM_PAGES - len(self.held)
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

    @invariant()
    def pages_add_up(self) -> None:
        assert self.allocator.num_free + len(self.held) == self.NUM_PAGES
        assert len(set(self.held)) == len(self.held)
        assert set(self.held) <= set(range(self.NUM_PAGES))


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
