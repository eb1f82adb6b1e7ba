"""Pages in host memory: what they held is there again after the pool was released."""

from collections.abc import Iterator

import pytest
import torch

from ebbtide.srt.mem_cache import CacheGroups, Paged, page_store
from ebbtide.srt.mem_cache.kv_pool import KVLayout, KVPool
from ebbtide.srt.mem_cache.page_allocator import PageAllocator
from ebbtide.srt.mem_cache.page_store import HostPageStore
from ebbtide.srt.memory_saver import MemoryTag
from ebbtide.srt.memory_saver.virtual_arena import VirtualArena
from ebbtide.srt.memory_saver.virtual_memory.host import HostVirtualMemory

# Chunks of three pages, so that the pages lie in three of them.
LAYOUT = KVLayout(num_layers=2, page_size=4, spec=Paged(2, 8), dtype=torch.float32, min_chunk_bytes=3 * 4096)
NUM_PAGES = 9


@pytest.fixture
def pool() -> Iterator[KVPool]:
    arena = VirtualArena(MemoryTag.KV_CACHE, LAYOUT.arena_bytes(NUM_PAGES), HostVirtualMemory())
    arena.resume()
    yield KVPool(arena, LAYOUT, NUM_PAGES, CacheGroups.of([LAYOUT.spec] * LAYOUT.num_layers))
    arena.close()


def ids(*numbers: int) -> list[int]:
    """The ids of the first, second, … page."""
    pages = PageAllocator(NUM_PAGES, LAYOUT.page_ids).allocate(NUM_PAGES)
    assert pages is not None
    return [pages[number] for number in numbers]


def planes(pool: KVPool) -> list[torch.Tensor]:
    return [plane for layer in range(LAYOUT.num_layers) for plane in (pool.k(layer), pool.v(layer))]


def fill(pool: KVPool) -> list[torch.Tensor]:
    for plane in planes(pool):
        plane[ids(*range(NUM_PAGES))] = torch.randn(NUM_PAGES, *plane.shape[1:])
    return [plane.clone() for plane in planes(pool)]


@pytest.mark.parametrize("pages_per_buffer", [1, 2, 100])
def test_saved_pages_come_back_to_any_pages_and_those_that_are_shared_are_kept_once(
    pool: KVPool, monkeypatch: pytest.MonkeyPatch, pages_per_buffer: int
) -> None:
    monkeypatch.setattr(page_store, "UNPINNED_PIECE_BYTES", pages_per_buffer * LAYOUT.page_bytes)
    store = HostPageStore(pool, 7 * LAYOUT.page_bytes)
    fill(pool)
    (dropped,) = store.save([ids(5, 6)])
    before = fill(pool)
    (kept,) = store.save([ids(8)])
    store.drop(dropped)
    # What is free now lies on both sides of what is kept.
    first, second = store.save([ids(7, 0, 3), ids(7, 4)])
    assert (store.num_bytes, store.num_free) == (5 * LAYOUT.page_bytes, 2)
    pool.arena.release()
    pool.arena.resume()
    for plane in planes(pool):
        plane.fill_(-1.0)
    store.restore(first, ids(1, 2, 5))
    store.drop(first)
    store.restore(second, ids(0, 3))
    store.restore(kept[:1], ids(6))
    for plane, old in zip(planes(pool), before, strict=True):
        assert torch.equal(plane[ids(1, 2, 5, 0, 3, 6)], old[ids(7, 0, 3, 7, 4, 8)])
        assert (plane[ids(4, 7, 8)] == -1.0).all()
    for slots in (second, kept):
        store.drop(slots)
    assert (store.num_bytes, store.num_free, store._buffers) == (0, 7, [])
    store.allocate()
    (kept,) = store.save([ids(0)])
    store.drop(kept)
    assert store._buffers, "what was taken ahead is kept"
    store.close()
