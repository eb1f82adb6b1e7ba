"""CUDA virtual memory against a driver that keeps the books: what is asked of it, what refusals become."""

from enum import IntEnum
from itertools import count
from types import SimpleNamespace

import pytest

from ebbtide.srt.errors import EngineError, OutOfDeviceMemory
from ebbtide.srt.memory_saver import MemoryTag
from ebbtide.srt.memory_saver.virtual_arena import ChunkPool, VirtualArena
from ebbtide.srt.memory_saver.virtual_memory.cuda import CudaDriver, CudaHostPinning, CudaVirtualMemory
from ebbtide.srt.slices import finish

GRANULE = 2 << 20


class Status(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2


class BookkeepingDriver:
    """The functions of cuda.bindings.driver that are used, over a device of `free_bytes`."""

    CUresult = Status
    CUmemAllocationProp = CUmemLocation = CUmemAccessDesc = SimpleNamespace
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED=1)
    CU_MEMHOSTREGISTER_PORTABLE = 1

    def __init__(self, free_bytes):
        self.free_bytes = free_bytes
        self.keys = count(1)
        self.sizes = {}  # by handle
        self.released = set()
        self.mapped = {}  # address → handle
        self.accessible = set()  # addresses of mappings
        self.reserved = {}
        self.pinned = {}
        self.calls = []
        self.failing_unmap = self.failing_release = None  # which call of its name fails, from 1

    def cuGetErrorString(self, status):
        return Status.CUDA_SUCCESS, f"the text of {status.name}".encode()

    def cuMemGetAllocationGranularity(self, properties, option):
        assert (properties.location.type, properties.location.id) == (1, 3)
        return Status.CUDA_SUCCESS, GRANULE

    def cuMemAddressReserve(self, size, alignment, address, flags):
        if size > 1 << 47:
            return Status.CUDA_ERROR_OUT_OF_MEMORY, None
        start = max((end for end in self.reserved.values()), default=1 << 40)
        self.reserved[start] = start + size
        return Status.CUDA_SUCCESS, start

    def cuMemAddressFree(self, address, size):
        if any(address <= mapped < address + size for mapped in self.mapped):
            return (Status.CUDA_ERROR_INVALID_VALUE,)
        del self.reserved[address]
        return (Status.CUDA_SUCCESS,)

    def cuMemCreate(self, size, properties, flags):
        self.calls.append("cuMemCreate")
        if size > self.free_bytes:
            return Status.CUDA_ERROR_OUT_OF_MEMORY, None
        self.free_bytes -= size
        key = next(self.keys)
        self.sizes[key] = size
        return Status.CUDA_SUCCESS, key

    def cuMemMap(self, address, size, offset, key, flags):
        self.calls.append("cuMemMap")
        if self.sizes.get(key) != size or address in self.mapped:
            return (Status.CUDA_ERROR_INVALID_VALUE,)
        self.mapped[address] = key
        return (Status.CUDA_SUCCESS,)

    def cuMemSetAccess(self, address, size, descriptions, number):
        self.calls.append("cuMemSetAccess")
        inside = {place for place in self.mapped if address <= place < address + size}
        if number != 1 or sum(self.sizes[self.mapped[place]] for place in inside) != size:
            return (Status.CUDA_ERROR_INVALID_VALUE,)
        self.accessible |= inside
        return (Status.CUDA_SUCCESS,)

    def cuMemUnmap(self, address, size):
        self.calls.append("cuMemUnmap")
        if self.calls.count("cuMemUnmap") == self.failing_unmap:
            return (Status.CUDA_ERROR_INVALID_VALUE,)
        inside = [place for place in sorted(self.mapped) if address <= place < address + size]
        if sum(self.sizes[self.mapped[place]] for place in inside) != size:
            return (Status.CUDA_ERROR_INVALID_VALUE,)
        for place in inside:
            key = self.mapped.pop(place)
            self.accessible.discard(place)
            self._free(key)
        return (Status.CUDA_SUCCESS,)

    def cuMemRelease(self, key):
        self.calls.append("cuMemRelease")
        if self.calls.count("cuMemRelease") == self.failing_release or key in self.released:
            return (Status.CUDA_ERROR_INVALID_VALUE,)
        self.released.add(key)
        self._free(key)
        return (Status.CUDA_SUCCESS,)

    def _free(self, key):
        if key in self.released and key not in self.mapped.values():
            self.free_bytes += self.sizes.pop(key)

    def cuDevicePrimaryCtxRetain(self, index):
        return Status.CUDA_SUCCESS, f"context {index}"

    def cuCtxSetCurrent(self, context):
        assert context == "context 3"
        return (Status.CUDA_SUCCESS,)

    def cuMemHostRegister(self, address, size, flags):
        if address in self.pinned:
            return (Status.CUDA_ERROR_INVALID_VALUE,)
        self.pinned[address] = size
        return (Status.CUDA_SUCCESS,)

    def cuMemHostUnregister(self, address):
        del self.pinned[address]
        return (Status.CUDA_SUCCESS,)


class Machine:
    """A device with its driver, and torch's cache of `cached_bytes` that a trim gives back."""

    def __init__(self, free_bytes, cached_bytes=0):
        self.driver = BookkeepingDriver(free_bytes)
        self.cached_bytes = cached_bytes
        self.num_trims = 0
        self.vm = CudaVirtualMemory(
            3,
            free_bytes=lambda: self.driver.free_bytes,
            synchronize=lambda: self.driver.calls.append("synchronize"),
            trim=self.trim,
            driver=CudaDriver(self.driver),
        )

    def trim(self):
        self.num_trims += 1
        self.driver.free_bytes += self.cached_bytes
        self.cached_bytes = 0

    def arena(self, num_bytes, chunk_bytes=GRANULE):
        return VirtualArena(MemoryTag.WEIGHTS, num_bytes, self.vm, chunk_bytes)


@pytest.mark.parametrize("action", ["release", "swap"])
def test_the_device_is_waited_for_once_before_anything_is_unmapped(action):
    machine = Machine(16 * GRANULE)
    arena = machine.arena(4 * GRANULE)
    arena.resume()
    shadow = finish(arena.stage())
    machine.driver.calls.clear()
    before = dict(machine.driver.mapped)
    if action == "swap":
        arena.swap(shadow)
        live = [arena.address + index * GRANULE for index in range(4)]
        handles = [handle for place, handle in sorted(before.items()) if place not in live]
        assert machine.driver.mapped == dict(zip(live, handles, strict=True))
        assert machine.driver.accessible == set(live)
    else:
        arena.release()
    assert machine.driver.calls[:2] == ["synchronize", "cuMemUnmap"]
    assert machine.driver.calls.count("synchronize") == 1
    # However many chunks there are, each range goes in one call.
    assert machine.driver.calls.count("cuMemUnmap") == (2 if action == "swap" else 1)


@pytest.mark.parametrize(("call", "number"), [("unmap", 1), ("release", 1), ("release", 3)])
def test_a_release_that_the_driver_breaks_off_is_ended_by_a_second_one(call, number):
    machine = Machine(8 * GRANULE)
    arena = machine.arena(4 * GRANULE)
    arena.resume()
    setattr(machine.driver, f"failing_{call}", number)
    with pytest.raises(EngineError, match="cuMem"):
        arena.release()
    assert arena.is_resident == (call == "unmap")
    held_bytes = arena.resident_bytes
    assert arena.release() == held_bytes
    assert (machine.driver.free_bytes, machine.driver.mapped) == (8 * GRANULE, {})
    assert machine.vm.held_bytes == arena.release() == 0
    assert arena.resume() == 4 * GRANULE
    # A resume after a release that was broken off takes only what is missing.
    machine.driver.failing_release = machine.driver.calls.count("cuMemRelease") + 3
    with pytest.raises(EngineError, match="cuMemRelease"):
        arena.release()
    assert arena.resume() == arena.resident_bytes == 4 * GRANULE
    assert (machine.driver.free_bytes, len(machine.driver.accessible)) == (4 * GRANULE, 4)


@pytest.mark.parametrize("num_steps", [1, 2])
def test_giving_a_shadow_back_is_a_chunk_at_a_time_and_all_of_them_if_it_is_left(num_steps):
    machine = Machine(8 * GRANULE)
    arena = machine.arena(2 * GRANULE, GRANULE)
    arena.resume()
    steps = finish(arena.stage()).close_by_chunks()
    machine.driver.calls.clear()
    assert [next(steps) for _ in range(num_steps)] == [GRANULE] * num_steps
    assert machine.driver.calls.count("cuMemUnmap") == num_steps
    steps.close()
    assert machine.driver.free_bytes == 6 * GRANULE


def test_a_copy_of_lent_chunks_takes_no_memory_and_few_calls():
    machine = Machine(9 * GRANULE)
    pool = ChunkPool(machine.vm, GRANULE)
    kv, weights = pool.arena(MemoryTag.KV_CACHE, 6 * GRANULE), pool.arena(MemoryTag.WEIGHTS, 3 * GRANULE)
    kv.resume()
    weights.resume()
    places = set(machine.driver.mapped)
    assert machine.driver.free_bytes == 0
    for _ in range(2):
        formerly = dict(machine.driver.mapped)
        machine.driver.calls.clear()
        kv.lend([3, 4, 5])
        assert machine.driver.calls == ["synchronize", "cuMemUnmap"]
        shadow = finish(weights.stage())
        machine.driver.calls.clear()
        weights.swap(shadow)
        # Two ranges are unmapped, three chunks are mapped, and one range is made accessible.
        assert machine.driver.calls == [
            "synchronize",
            *["cuMemUnmap"] * 2,
            *["cuMemMap"] * 3,
            "cuMemSetAccess",
        ]
        with pytest.raises(EngineError, match="still in use"):
            kv.take_back([3])
        machine.driver.calls.clear()
        shadow.repay()
        kv.take_back([3, 4, 5])
        assert machine.driver.calls == [*["cuMemMap"] * 3, "cuMemSetAccess"]
        shadow.close()
        # What was mapped under either of them is mapped under the other.
        lent = [kv.address + index * GRANULE for index in (3, 4, 5)]
        live = [weights.address + index * GRANULE for index in range(3)]
        now = machine.driver.mapped
        assert {now[place] for place in lent} == {formerly[place] for place in live}
        assert {now[place] for place in live} == {formerly[place] for place in lent}
        assert machine.driver.accessible == set(now) == places
        assert machine.driver.released == set()
    kv.close()
    weights.close()
    assert (machine.driver.free_bytes, machine.vm.held_bytes) == (9 * GRANULE, 0)


@pytest.mark.parametrize("number", [1, 3, 4])
def test_a_swap_that_the_driver_breaks_off_is_undone_with_lent_chunks_too(number, monkeypatch):
    machine = Machine(9 * GRANULE)
    pool = ChunkPool(machine.vm, GRANULE)
    kv, weights = pool.arena(MemoryTag.KV_CACHE, 6 * GRANULE), pool.arena(MemoryTag.WEIGHTS, 3 * GRANULE)
    kv.resume()
    weights.resume()
    kv.lend([3, 4, 5])
    shadow = finish(weights.stage())
    before = dict(machine.driver.mapped)
    maps, num_maps = machine.driver.cuMemMap, count(1)
    failing = lambda *args: (Status.CUDA_ERROR_INVALID_VALUE,) if next(num_maps) == number else maps(*args)  # noqa: E731
    monkeypatch.setattr(machine.driver, "cuMemMap", failing)
    if number <= 3:
        with pytest.raises(EngineError, match="cuMemMap"):
            weights.swap(shadow)
        assert machine.driver.mapped == before
        assert machine.driver.accessible == set(before)
    else:
        weights.swap(shadow)
        shadow.repay()
        with pytest.raises(EngineError, match="cuMemMap"):
            kv.take_back([3, 4, 5])
        kv.take_back([3, 4, 5])
        assert len(machine.driver.accessible) == 9
    shadow.close()
    kv.take_back([3, 4, 5])
    assert (kv.resident_bytes, weights.resident_bytes) == (6 * GRANULE, 3 * GRANULE)


def test_out_of_memory_says_what_there_is_and_keeps_nothing():
    machine = Machine(2 * GRANULE, cached_bytes=GRANULE)
    arena = machine.arena(4 * GRANULE)
    with pytest.raises(OutOfDeviceMemory):
        machine.vm.reserve(1 << 48)
    with pytest.raises(OutOfDeviceMemory) as refusal:
        arena.resume()
    assert (refusal.value.needed_bytes, refusal.value.free_bytes) == (4 * GRANULE, 3 * GRANULE)
    assert (machine.driver.free_bytes, machine.driver.mapped) == (3 * GRANULE, {})
    assert machine.cached_bytes == 0, "what torch keeps for reuse was given back first"
    machine.driver.free_bytes = 4 * GRANULE
    assert arena.resume() == 4 * GRANULE


def test_host_memory_is_pinned_and_unpinned_in_the_context_of_the_device():
    driver = BookkeepingDriver(0)
    pinning = CudaHostPinning(3, synchronize=lambda: None, driver=CudaDriver(driver))
    pinning.pin(4096, 8192)
    assert driver.pinned == {4096: 8192}
    with pytest.raises(EngineError, match="cuMemHostRegister"):
        pinning.pin(4096, 8192)
    pinning.unpin(4096)
    assert driver.pinned == {}
