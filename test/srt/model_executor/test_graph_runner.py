"""The scratch memory of captured graphs: it grows until what is captured fits, or the device is full.

The captures themselves: entrypoints/test_cuda_engine.py.
"""

import ctypes
from typing import Any

import pytest
import torch

from ebbtide.srt.errors import OutOfDeviceMemory
from ebbtide.srt.memory_saver import MemoryTag
from ebbtide.srt.memory_saver.arena import Arena
from ebbtide.srt.memory_saver.graph_pool import GraphPool
from ebbtide.srt.memory_saver.saver import VirtualMemorySaver
from ebbtide.srt.memory_saver.virtual_memory.host import HostVirtualMemory
from ebbtide.srt.model_executor.graph_runner import capture_with_room

MIB = 1 << 20


class TorchsPool:
    """What a torch.cuda.MemPool does with its two functions."""

    id = (0, 1)

    def __init__(self, allocate: int, free: int) -> None:
        pointer, size, integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self.allocate = ctypes.CFUNCTYPE(pointer, size, integer, pointer)(allocate)
        self.free = ctypes.CFUNCTYPE(None, pointer, size, integer, pointer)(free)


class Device:
    """A device of 64 MiB, and a step to capture that takes five blocks of 6 MiB."""

    def __init__(self, free_bytes: int = 64 * MIB) -> None:
        self.free_bytes = free_bytes
        self.sizes: list[int] = []
        self.taken: list[int] = []
        self.pools: list[TorchsPool] = []

    def make_arena(self, num_bytes: int) -> Arena:
        self.sizes.append(num_bytes)
        if num_bytes > self.free_bytes:
            raise OutOfDeviceMemory(num_bytes, self.free_bytes)
        arena = VirtualMemorySaver(HostVirtualMemory()).arena(MemoryTag.CUDA_GRAPH, num_bytes, MIB)
        arena.resume()
        return arena

    def make_pool(self, arena: Arena) -> GraphPool:
        def make(allocate: int, free: int) -> tuple[Any, Any]:
            self.pools.append(TorchsPool(allocate, free))
            return self.pools[-1], None

        return GraphPool(arena, make)

    def capture(self, pool: GraphPool) -> None:
        for _ in range(5):
            address = self.pools[-1].allocate(6 * MIB, 0, None)
            if address is None:
                raise torch.OutOfMemoryError("CUDA out of memory")
            self.taken.append(address)

    def discard(self) -> None:
        while self.taken:
            self.pools[-1].free(self.taken.pop(), 6 * MIB, 0, None)

    def run(self, num_bytes: int) -> tuple[Arena, GraphPool]:
        return capture_with_room(self.make_arena, num_bytes, self.capture, self.discard, self.make_pool)


@pytest.mark.parametrize(
    ("first", "sizes"), [(33 * MIB, [33]), (9 * MIB, [9, 18, 36]), (MIB, [1, 2, 4, 8, 16, 32])]
)
def test_too_small_an_arena_is_doubled_and_captured_anew(first: int, sizes: list[int]) -> None:
    device = Device()

    arena, pool = device.run(first)

    assert device.sizes == [size * MIB for size in sizes]
    assert arena.is_resident
    assert pool.peak_bytes > 5 * 6 * MIB
    assert all(arena.address <= address < arena.address + arena.num_bytes for address in device.taken)
    device.discard()
    pool.close()
    arena.close()


def test_a_device_that_is_full_is_said_to_be_and_keeps_nothing() -> None:
    device = Device(free_bytes=20 * MIB)

    with pytest.raises(OutOfDeviceMemory, match=f"needed {36 * MIB} bytes"):
        device.run(9 * MIB)

    assert device.taken == []
