"""Arenas of a GPU's memory, beyond what every arena does: captured graphs, a full device, NVML's view."""

from contextlib import closing

import pytest
import torch

from ebbtide.srt.errors import OutOfDeviceMemory
from ebbtide.srt.memory_saver import MemoryTag
from ebbtide.srt.memory_saver.virtual_arena import VirtualArena
from ebbtide.srt.slices import finish

pytestmark = pytest.mark.gpu

GIB = 1 << 30
ROWS = 1024
MATRIX_BYTES = ROWS * ROWS * 2


@pytest.fixture
def make_arena(request, cuda_device):
    def make(num_bytes, chunk_bytes=None):
        arena = VirtualArena(MemoryTag.WEIGHTS, num_bytes, cuda_device.virtual_memory(), chunk_bytes)
        request.addfinalizer(arena.close)
        return arena

    return make


@pytest.fixture
def full_device(make_arena, cuda_device):
    """An arena that leaves about 1 GiB."""
    cuda_device.trim()
    filler = make_arena((cuda_device.free_bytes() - GIB) // GIB * GIB, chunk_bytes=GIB)
    filler.resume()
    return filler


def capture(run):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = run()
    return graph, result


@pytest.mark.parametrize("chunk_bytes", [None, 2 << 20], ids=["one handle", "chunks"])
def test_a_graph_captured_before_a_swap_replays_on_the_new_contents(make_arena, chunk_bytes):
    arena = make_arena(16 * MATRIX_BYTES, chunk_bytes)
    arena.resume()
    weight = arena.view(15 * MATRIX_BYTES, (ROWS, ROWS), torch.bfloat16)
    first, second, x = (torch.randn(ROWS, ROWS, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    weight.copy_(first)
    graph, result = capture(lambda: x @ weight)
    graph.replay()
    assert torch.equal(result, x @ first)
    with closing(finish(arena.stage())) as shadow:
        shadow.view(15 * MATRIX_BYTES, (ROWS, ROWS), torch.bfloat16).copy_(second)
        arena.swap(shadow)
        graph.replay()
        assert torch.equal(result, x @ second)
        graph.replay()  # still on its way when the handles change places
        arena.swap(shadow)
        graph.replay()
        assert torch.equal(result, x @ first)
    arena.release()
    arena.resume()
    weight.copy_(second)
    graph.replay()
    assert torch.equal(result, x @ second)


def test_work_that_was_launched_finishes_before_its_memory_goes(make_arena):
    arena = make_arena(64 * MATRIX_BYTES)
    arena.resume()
    values = arena.view(0, (32 * ROWS, ROWS), torch.bfloat16).fill_(1)
    total = torch.zeros((), device="cuda", dtype=torch.float32)
    for _ in range(50):
        total += values.sum(dtype=torch.float32)
    arena.release()
    assert total.item() == 50 * 32 * ROWS * ROWS


def test_a_device_without_room_refuses_keeps_nothing_and_can_be_tried_again(
    make_arena, full_device, cuda_device
):
    arena = make_arena(4 * GIB, chunk_bytes=GIB // 4)
    free = cuda_device.free_bytes()
    for _ in range(3):
        with pytest.raises(OutOfDeviceMemory) as refusal:
            arena.resume()
        assert refusal.value.needed_bytes == 4 * GIB
        assert abs(refusal.value.free_bytes - free) <= GIB // 4
        assert cuda_device.free_bytes() >= free
    full_device.release()
    assert arena.resume() == 4 * GIB
    arena.view(0, (4 * GIB,), torch.uint8).fill_(1)
    cuda_device.synchronize()


def test_what_torch_keeps_for_reuse_makes_room(make_arena, cuda_device):
    cached = torch.empty(4 * GIB, dtype=torch.uint8, device="cuda")
    filler = make_arena((cuda_device.free_bytes() - GIB) // GIB * GIB, chunk_bytes=GIB)
    filler.resume()
    del cached
    assert make_arena(4 * GIB, chunk_bytes=GIB).resume() == 4 * GIB
