"""Captured graphs whose scratch memory is released and resumed."""

import gc

import pytest
import torch

from ebbtide.srt.memory_saver import MemoryTag
from ebbtide.srt.memory_saver.graph_pool import GraphPool
from ebbtide.srt.memory_saver.virtual_arena import VirtualArena

pytestmark = pytest.mark.gpu

MIB = 1 << 20
ROWS = 2048


@pytest.fixture
def arena(cuda_device):
    arena = VirtualArena(MemoryTag.CUDA_GRAPH, 512 * MIB, cuda_device.virtual_memory(), 32 * MIB)
    arena.resume()
    yield arena
    arena.close()


@pytest.fixture
def pool(arena):
    pool = GraphPool(arena)
    yield pool
    pool.close()


class Network:
    """Two layers with intermediate results of some megabytes."""

    def __init__(self):
        self.x = torch.randn(256, ROWS, device="cuda", dtype=torch.bfloat16)
        self.up, self.down = (
            torch.randn(ROWS, ROWS, device="cuda", dtype=torch.bfloat16) / ROWS**0.5 for _ in range(2)
        )

    def __call__(self):
        return torch.nn.functional.silu(self.x @ self.up) @ self.down


def capture(network, pool):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        network()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool.id, stream=stream):
        result = network()
    return graph, result


def test_graphs_that_share_a_pool_replay_after_release_and_resume(arena, pool, cuda_device, device_bytes):
    networks = [Network() for _ in range(2)]
    captured = [capture(network, pool) for network in networks]
    assert all(arena.address <= result.data_ptr() < arena.address + pool.peak_bytes for _, result in captured)
    pool.trim()
    held = []
    for _ in range(20):
        free = cuda_device.free_bytes()
        freed = arena.release()
        assert freed > 0
        assert cuda_device.free_bytes() - free >= 0.95 * freed
        torch.randn(64 * MIB, device="cuda")  # others use the device meanwhile
        arena.resume()
        for network, (graph, result) in zip(networks, captured, strict=True):
            network.x.normal_()
            graph.replay()
            assert torch.equal(result, network())
        held.append(device_bytes())
    assert abs(held[-1] - held[0]) < 2 * MIB
    for graph, _ in captured:
        graph.reset()
    del captured, graph, result


def test_a_capture_that_does_not_fit_is_out_of_memory_and_harms_nothing(cuda_device):
    arena = VirtualArena(MemoryTag.CUDA_GRAPH, 2 * MIB, cuda_device.virtual_memory())
    arena.resume()
    pool = GraphPool(arena)
    with pytest.raises(torch.OutOfMemoryError):
        capture(lambda: torch.ones(64 * MIB, device="cuda"), pool)
    gc.collect()  # the graph that was begun
    torch.cuda.synchronize()
    assert torch.ones(4, device="cuda").sum().item() == 4
    pool.close()
    arena.close()
