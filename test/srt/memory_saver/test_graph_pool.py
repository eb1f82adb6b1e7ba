"""The graph pool's allocator: blocks that do not overlap, through the C functions that torch would call."""

import ctypes

import pytest
from hypothesis import given, strategies as st

from ebbtide.srt.errors import EngineError
from ebbtide.srt.memory_saver import MemoryTag
from ebbtide.srt.memory_saver.graph_pool import ALIGNMENT_BYTES, BlockCutter, GraphPool
from ebbtide.srt.memory_saver.virtual_arena import VirtualArena
from ebbtide.srt.memory_saver.virtual_memory.host import HostVirtualMemory

MIB = 1 << 20
CAPACITY = 32 * MIB

steps = st.lists(st.one_of(st.integers(1, 20_000), st.integers(-8, -1)), max_size=60)


@given(steps)
def test_blocks_never_overlap_and_all_room_comes_back(steps):
    capacity = 64 * 1024
    blocks, taken = BlockCutter(capacity), []
    for step in steps:
        if step > 0:
            start = blocks.take(step)
            if start is not None:
                assert start % ALIGNMENT_BYTES == 0
                assert start + step <= capacity
                assert all(start + step <= other or start >= other + size for other, size in taken)
                taken.append((start, step))
        elif taken:
            blocks.give(taken.pop(step % len(taken))[0])
    for start, _ in taken:
        blocks.give(start)
    assert blocks.taken_bytes == 0
    assert blocks.take(capacity) == 0
    assert blocks.take(1) is None


class FakePool:
    """What a torch.cuda.MemPool does with its two functions."""

    id = (0, 7)

    def __init__(self, allocate, free):
        pointer, size, integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self.allocate = ctypes.CFUNCTYPE(pointer, size, integer, pointer)(allocate)
        self.free = ctypes.CFUNCTYPE(None, pointer, size, integer, pointer)(free)


@pytest.fixture
def arena():
    arena = VirtualArena(MemoryTag.CUDA_GRAPH, CAPACITY, HostVirtualMemory(), 4 * MIB)
    arena.resume()
    yield arena
    arena.close()


@pytest.fixture
def pools():
    return []


@pytest.fixture
def pool(arena, pools):
    def make(allocate, free):
        pools.append(FakePool(allocate, free))
        return pools[0], None

    return GraphPool(arena, make)


def test_segments_lie_in_the_arena_and_may_be_written(arena, pool, pools):
    [torchs] = pools
    assert pool.id == (0, 7)
    first, second = torchs.allocate(20 * MIB, 0, None), torchs.allocate(2 * MIB, 0, None)
    assert first > arena.address, "torch may know this address as the arena's own"
    assert first % ALIGNMENT_BYTES == 0
    assert first + 20 * MIB <= second <= arena.address + CAPACITY - 2 * MIB
    ctypes.memset(second, 5, 2 * MIB)
    torchs.free(first, 20 * MIB, 0, None)
    assert torchs.allocate(20 * MIB, 0, None) == first
    assert torchs.allocate(CAPACITY, 0, None) is None


def test_what_no_capture_used_is_given_up(arena, pool, pools):
    [torchs] = pools
    address = torchs.allocate(5 * MIB, 0, None)
    assert pool.peak_bytes == 5 * MIB + ALIGNMENT_BYTES
    assert pool.trim() == CAPACITY - 8 * MIB
    assert arena.resident_bytes == 8 * MIB
    assert torchs.allocate(4 * MIB, 0, None) is None
    assert torchs.allocate(2 * MIB, 0, None) == address + 5 * MIB


def test_closing_says_so_when_segments_are_still_in_use(pool, pools):
    [torchs] = pools
    address = torchs.allocate(2 * MIB, 0, None)
    with pytest.raises(EngineError, match="still in use"):
        pool.close()
    torchs.free(address, 2 * MIB, 0, None)
    pool.close()
