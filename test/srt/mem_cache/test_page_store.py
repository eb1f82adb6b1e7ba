"""Pages in host memory: what they held is there again after the pool was released."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ebbtide.srt.mem_cache import page_store
from ebbtide.srt.mem_cache.kv_layout import KVLayout
from ebbtide.srt.mem_cache.kv_pool import KVPool
from ebbtide.srt.mem_cache.page_allocator import PageAllocator
from ebbtide.srt.mem_cache.page_store import HostPageStore
from ebbtide.srt.memory_saver.tags import MemoryTag
from ebbtide.srt.memory_saver.virtual_arena import VirtualArena
from ebbtide.srt.memory_saver.virtual_memory.host import HostVirtualMemory

# Chunks of three pages, so that the pages lie in three of them.
LAYOUT = KVLayout(
    num_layers=2, page_size=4, num_kv_heads=2, head_dim=8, dtype=torch.float32, min_chunk_bytes=3 * 4096
)
NUM_PAGES = 9


@pytest.fixture
def pool() -> Iterator[KVPool]:
    arena = VirtualArena(MemoryTag.KV_CACHE, LAYOUT.arena_bytes(NUM_PAGES), HostVirtualMemory())
    arena.resume()
    yield KVPool(arena, LAYOUT, NUM_PAGES)
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
def test_saved_pages_come_back_and_no_others(
    pool: KVPool, monkeypatch: pytest.MonkeyPatch, pages_per_buffer: int
) -> None:
    monkeypatch.setattr(page_store, "PIECE_BYTES", pages_per_buffer * LAYOUT.page_bytes)
    before = fill(pool)
    store = HostPageStore(pool, 5 * LAYOUT.page_bytes)
    assert store.max_pages == 5
    saved = ids(7, 0, 3, 4)
    store.save(saved)
    assert store.num_bytes == 4 * LAYOUT.page_bytes
    pool.arena.release()
    pool.arena.resume()
    for plane in planes(pool):
        plane.fill_(-1.0)
    store.restore()
    for plane, old in zip(planes(pool), before, strict=True):
        assert torch.equal(plane[saved], old[saved])
        assert (plane[ids(1, 2, 5, 6, 8)] == -1.0).all()
    store.drop()
    assert store.num_bytes == 0
    store.close()


def test_what_is_saved_again_takes_the_place_of_what_was_held(pool: KVPool) -> None:
    store = HostPageStore(pool, 9 * LAYOUT.page_bytes)
    fill(pool)
    store.save(ids(1, 2, 3))
    before = fill(pool)
    store.save(ids(2))
    pool.k(0).zero_()
    store.restore()
    assert torch.equal(pool.k(0)[ids(2)], before[0][ids(2)])
    assert (pool.k(0)[ids(1)] == 0).all()
    store.close()
