"""The KV pool: every page of every layer's keys and values is its own bytes of one arena, chunk by chunk."""

import pytest
import torch

from ebbtide.srt.mem_cache import CacheGroups, Latent, Paged, kv_pool
from ebbtide.srt.mem_cache.kv_pool import KVLayout, KVPool, cuda_chunk_bytes
from ebbtide.srt.mem_cache.page_allocator import PageAllocator
from ebbtide.srt.memory_saver import MemoryTag
from ebbtide.srt.memory_saver.virtual_arena import VirtualArena
from ebbtide.srt.memory_saver.virtual_memory.host import HostVirtualMemory

GRANULE = HostVirtualMemory.granularity
# Blocks of 12 KiB: a chunk of three granules has room for 512 of them, of which 6 planes fill 510.
SHAPE = {"num_layers": 3, "page_size": 4, "spec": Paged(3, 256)}
NUM_PAGES = 2 * 85 + 30


def layout(dtype=torch.float32, **changes):
    return KVLayout(**SHAPE | {"granularity": GRANULE, "dtype": dtype} | changes)


LATENT = Latent(rank=704, rope=64)


@pytest.fixture(params=[{}, {"dtype": torch.float8_e4m3fn}, {"spec": LATENT}], ids=str)
def pool(request):
    made = layout(**request.param)
    arena = VirtualArena(
        MemoryTag.KV_CACHE, made.arena_bytes(NUM_PAGES), HostVirtualMemory(), made.chunk_bytes
    )
    arena.resume()
    yield KVPool(arena, made, NUM_PAGES, CacheGroups.of([made.spec] * made.num_layers))
    arena.close()


def planes(pool):
    sides = (pool.k, pool.v)[: pool.layout.spec.num_planes]
    return [tensor(layer) for layer in range(3) for tensor in sides]


def pages_of(pool):
    return PageAllocator(pool.num_pages, pool.layout.page_ids).allocate(pool.num_pages)


def test_all_planes_have_the_shape_and_the_strides_that_kernels_read(pool):
    tensors = planes(pool)
    assert {tuple(tensor.shape[1:]) for tensor in tensors} == {(4, *pool.layout.spec.token_shape)}
    assert len({tensor.shape[0] for tensor in tensors}) == 1
    assert all(tensor.is_contiguous() for tensor in tensors)
    assert max(pages_of(pool)) < tensors[0].shape[0]


def test_the_values_of_latents_lie_behind_what_is_rotated():
    made = layout(spec=LATENT)
    arena = VirtualArena(MemoryTag.KV_CACHE, made.arena_bytes(2), HostVirtualMemory(), made.chunk_bytes)
    arena.resume()
    pool = KVPool(arena, made, 2, CacheGroups.of([made.spec] * made.num_layers))
    pool.k(1)[1, 2] = torch.arange(768.0)
    assert pool.v(1)[1, 2].tolist() == [list(range(64, 768))]
    arena.close()


def test_every_page_of_every_plane_has_bytes_of_its_own(pool):
    pages = torch.tensor(pages_of(pool))
    assert len(pages.unique()) == NUM_PAGES
    values = torch.arange(NUM_PAGES, dtype=torch.float32)
    for number, plane in enumerate(planes(pool)):
        plane[pages, :, 0, :2] = torch.stack([values, torch.full_like(values, number)], 1)[:, None].to(
            plane.dtype
        )
    for number, plane in enumerate(planes(pool)):
        assert plane[pages, 3, 0, 0].tolist() == values.to(plane.dtype).tolist()
        assert plane[pages, 0, 0, 1].tolist() == [number] * NUM_PAGES


def test_a_page_lies_in_one_chunk_with_all_its_layers(pool):
    chunk_bytes, block_bytes = pool.layout.chunk_bytes, pool.layout.block_bytes
    for page in pages_of(pool):
        starts = [plane.data_ptr() - pool.arena.address + page * block_bytes for plane in planes(pool)]
        ends = [start + block_bytes - 1 for start in starts]
        assert {place // chunk_bytes for place in starts + ends} == {pool.layout.page_ids.chunk_of(page)}


@pytest.mark.parametrize(
    ("changes", "chunk_pages", "chunk_bytes"),
    [
        ({}, 85 * 2, 3 * GRANULE),
        ({"dtype": torch.float32}, 85, 3 * GRANULE),
        ({"dtype": torch.float8_e4m3fn}, 341, 3 * GRANULE),
        ({"spec": Paged(2, 128)}, 1024 // 6, GRANULE),
        ({"spec": LATENT}, 341, 3 * GRANULE),
        ({"min_chunk_bytes": 4 * GRANULE}, 341, 6 * GRANULE),
        # 2 MiB of each of 64 planes of an 8B model make 128 MiB, which the least size of a chunk doubles.
        (
            {"num_layers": 32, "spec": Paged(8, 128), "page_size": 16}
            | {"min_run_bytes": 2 << 20, "min_chunk_bytes": 256 << 20},
            128,
            256 << 20,
        ),
    ],
    ids=str,
)
def test_chunks_end_on_the_granularity_and_hold_at_least_what_is_asked(changes, chunk_pages, chunk_bytes):
    made = layout(**{"dtype": torch.bfloat16} | changes)
    assert (made.chunk_pages, made.chunk_bytes) == (chunk_pages, chunk_bytes)
    assert made.chunk_pages * made.page_bytes <= made.chunk_bytes
    assert made.arena_bytes(chunk_pages + 1) == 2 * chunk_bytes


@pytest.mark.parametrize("with_kernel", [False, True])
def test_pages_move_with_all_their_layers_and_nothing_else_changes(pool, monkeypatch, with_kernel):
    pages = pages_of(pool)
    pool._blocks.random_()
    before = [plane.view(torch.uint8).clone() for plane in planes(pool)]
    random = torch.Generator().manual_seed(0)
    chosen = [pages[index] for index in torch.randperm(NUM_PAGES, generator=random)[:20].tolist()]
    sources, targets = chosen[:10], chosen[10:]
    monkeypatch.setattr(kv_pool, "MOVED_AT_ONCE_BYTES", 3 * pool.layout.page_bytes)
    if with_kernel:
        pytest.importorskip("triton")
        from ebbtide.srt.mem_cache.page_copy import copy_blocks

        # Triton's interpreter reads the host's memory; where there is a GPU, the compiled kernel does not.
        blocks = pool._blocks.to("cuda" if torch.cuda.is_available() else "cpu")  # noqa: TID251
        copy_blocks(blocks, sources, targets, pool.layout.num_planes, pool.layout.chunk_pages)
        pool._blocks.copy_(blocks)
    else:
        pool.move(sources, targets)
    rest = sorted(set(pages) - set(targets))
    for plane, old in zip(planes(pool), before, strict=True):
        assert torch.equal(plane.view(torch.uint8)[targets], old[sources])
        assert torch.equal(plane.view(torch.uint8)[rest], old[rest])
    with pytest.raises(AssertionError, match="overlap"):
        pool.move(sources, sources)


@pytest.mark.parametrize(
    ("device_gib", "pool_gib", "chunk_mib"),
    [(140, None, 1024), (79, None, 512), (24, None, 128), (140, 64, 1024), (140, 4, 128), (140, 0, 2)],
)
def test_large_devices_and_pools_have_large_chunks(device_gib, pool_gib, chunk_mib):
    pool_bytes = None if pool_gib is None else pool_gib << 30
    assert cuda_chunk_bytes(device_gib << 30, pool_bytes) == chunk_mib << 20
