"""The KV pool: every layer's keys and values are their own bytes of one arena."""

from __future__ import annotations

import pytest
import torch

from ebbtide.srt.mem_cache.kv_pool import KVPool
from ebbtide.srt.memory_saver.tags import MemoryTag
from ebbtide.srt.memory_saver.virtual_arena import VirtualArena
from ebbtide.srt.memory_saver.virtual_memory.host import HostVirtualMemory

# An odd shape: 5 pages of 3 tokens, 3 heads of 10, so that a layer is no multiple of any alignment.
SHAPE = {"num_layers": 3, "num_pages": 5, "page_size": 3, "num_kv_heads": 3, "head_dim": 10}


def make_arena(num_bytes):
    return VirtualArena(MemoryTag.KV_CACHE, num_bytes, HostVirtualMemory())


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def pool(request):
    arena = make_arena(KVPool.bytes_needed(**SHAPE, dtype=request.param))
    arena.resume()
    yield KVPool(arena, **SHAPE, dtype=request.param)
    arena.close()


def all_tensors(pool):
    return [tensor(layer) for layer in range(pool.num_layers) for tensor in (pool.k, pool.v)]


def test_each_layer_has_keys_and_values_of_the_shape_that_attention_reads(pool):
    tensors = all_tensors(pool)
    assert {tuple(tensor.shape) for tensor in tensors} == {(5, 3, 3, 10)}
    assert all(tensor.is_contiguous() for tensor in tensors)
    assert all(tensor.data_ptr() % 256 == 0 for tensor in tensors)


def test_no_two_tensors_share_a_byte(pool):
    tensors = all_tensors(pool)
    for value, tensor in enumerate(tensors):
        tensor.fill_(value)
    assert [tensor.unique().tolist() for tensor in tensors] == [[value] for value in range(len(tensors))]


def test_the_pool_stays_at_its_addresses_across_release_and_resume(pool):
    pointers = [tensor.data_ptr() for tensor in all_tensors(pool)]
    pool.arena.release()
    pool.arena.resume()
    pool.k(2)[4, 2].fill_(1)
    assert pool.k(2).sum().item() == 30
    assert [tensor.data_ptr() for tensor in all_tensors(pool)] == pointers


def test_bytes_of_a_page_are_those_of_its_tokens_in_every_layer():
    shape = {name: SHAPE[name] for name in ("num_layers", "page_size", "num_kv_heads", "head_dim")}
    assert KVPool.bytes_per_page(**shape, dtype=torch.bfloat16) == 2 * 3 * 3 * 3 * 10 * 2
    pages = SHAPE["num_pages"] * KVPool.bytes_per_page(**shape, dtype=torch.bfloat16)
    needed = KVPool.bytes_needed(**SHAPE, dtype=torch.bfloat16)
    assert pages <= needed <= pages + 512 * SHAPE["num_layers"]


def test_an_arena_that_is_too_small_is_refused():
    arena = make_arena(KVPool.bytes_needed(**SHAPE, dtype=torch.float32) - 256)
    with pytest.raises(ValueError, match="do not lie in an arena"):
        KVPool(arena, **SHAPE, dtype=torch.float32)
    arena.close()
