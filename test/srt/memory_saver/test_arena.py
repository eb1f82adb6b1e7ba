"""Arenas over real memory: what a tensor reads, where it is, and what the system says we hold."""

from contextlib import closing

import pytest
import torch
from fixtures.forking import run_script

from ebbtide.srt.errors import EngineError, OutOfDeviceMemory
from ebbtide.srt.memory_saver import MemoryTag
from ebbtide.srt.memory_saver.virtual_arena import VirtualArena
from ebbtide.srt.memory_saver.virtual_memory.host import HostVirtualMemory
from ebbtide.srt.slices import finish

MIB = 1 << 20
GRANULE = HostVirtualMemory.granularity


@pytest.fixture
def make_arena(request, vm):
    def make(num_bytes, source=None, chunk_bytes=None):
        arena = VirtualArena(MemoryTag.WEIGHTS, num_bytes, source if source is not None else vm, chunk_bytes)
        request.addfinalizer(arena.close)
        return arena

    return make


@pytest.fixture(params=[None, GRANULE], ids=["one handle", "chunks"])
def chunk_bytes(request):
    return request.param


def test_an_arena_starts_released_and_views_may_be_made_at_once(make_arena):
    arena = make_arena(GRANULE + 1)
    view = arena.view(4, (3,), torch.int16)
    assert not arena.is_resident
    assert arena.resident_bytes == 0
    assert view.data_ptr() == arena.address + 4
    assert (arena.num_bytes, arena.virtual_bytes) == (GRANULE + 1, 2 * GRANULE)
    assert arena.resume() == arena.resident_bytes == 2 * GRANULE
    arena.view(0, (10,), torch.uint8).zero_()
    view.fill_(7)
    assert arena.view(4, (6,), torch.uint8).tolist() == [7, 0] * 3


def test_memory_goes_back_to_the_operating_system_and_returns_at_resume(make_arena, chunk_bytes, held_bytes):
    size = 32 * MIB
    arena = make_arena(size, chunk_bytes=chunk_bytes)
    released = held_bytes()
    for _ in range(2):
        arena.resume()
        # Before anything touches the memory: that it can be had must show at resume.
        assert held_bytes() - released >= 0.95 * size
        with closing(finish(arena.stage())) as shadow:
            assert abs(held_bytes() - released - 2 * size) <= 0.05 * size
            arena.swap(shadow)
            assert abs(held_bytes() - released - 2 * size) <= 0.05 * size, "a swap copies nothing"
        arena.release()
        assert held_bytes() - released <= 0.05 * size


def test_wrong_views_are_refused(make_arena):
    arena = make_arena(64)
    for offset, length, dtype in [(-1, 1, torch.uint8), (61, 1, torch.float32), (60, 2, torch.float32)]:
        with pytest.raises(ValueError, match="do not lie"):
            arena.view(offset, (length,), dtype)
    with pytest.raises(ValueError, match="multiple of the element size"):
        arena.view(2, (1,), torch.float32)
    assert arena.view(64, (0, 3), torch.float32).shape == (0, 3)


def test_misuse_is_refused_and_changes_nothing(make_arena):
    arena, other = make_arena(GRANULE), make_arena(GRANULE)
    arena.resume()
    shadow = finish(arena.stage())
    with pytest.raises(ValueError, match="another arena"):
        other.swap(shadow)
    arena.release()
    with pytest.raises(EngineError, match="released"):
        arena.swap(shadow)
    arena.resume()
    shadow.close()
    shadow.close()
    with pytest.raises(EngineError, match="closed"):
        arena.swap(shadow)
    arena.view(0, (4,), torch.uint8).fill_(3)
    assert arena.view(0, (4,), torch.uint8).tolist() == [3] * 4
    arena.close()
    arena.close()
    with pytest.raises(EngineError, match="closed"):
        arena.resume()


@pytest.mark.parametrize("is_resident", [False, True])
def test_what_is_not_needed_after_all_is_given_up_for_good(make_arena, held_bytes, is_resident):
    arena = make_arena(8 * 4 * GRANULE, chunk_bytes=4 * GRANULE)
    before = held_bytes()
    if is_resident:
        arena.resume()
    assert arena.shrink(5 * GRANULE) == 6 * 4 * GRANULE
    arena.resume()
    kept = 8 * GRANULE
    assert abs(held_bytes() - before - kept) <= GRANULE
    assert (arena.num_bytes, arena.virtual_bytes, arena.resident_bytes) == (kept, kept, kept)
    arena.view(0, (kept,), torch.uint8).fill_(1)
    with pytest.raises(ValueError, match="do not lie"):
        arena.view(0, (kept + 1,), torch.uint8)
    assert arena.release() == kept
    assert arena.resume() == kept


def test_an_arena_of_no_bytes_has_both_states_and_no_memory(make_arena, budgeted_memory):
    arena = make_arena(0, budgeted_memory(0))
    assert (arena.num_bytes, arena.virtual_bytes, arena.address) == (0, 0, 0)
    assert not arena.is_resident
    assert arena.resume() == 0
    assert arena.is_resident
    assert arena.view(0, (0,), torch.float32).numel() == 0
    with closing(finish(arena.stage())) as shadow:
        arena.swap(shadow)
    assert arena.release() == 0
    assert not arena.is_resident


def test_a_resume_that_does_not_fit_keeps_nothing_and_can_be_retried(make_arena, budgeted_memory, held_bytes):
    vm = budgeted_memory(3 * 8 * MIB)
    arena = make_arena(5 * 8 * MIB, vm, chunk_bytes=8 * MIB)
    before = held_bytes()
    with pytest.raises(OutOfDeviceMemory) as refusal:
        arena.resume()
    assert (refusal.value.needed_bytes, refusal.value.free_bytes) == (40 * MIB, 24 * MIB)
    assert not arena.is_resident
    assert vm.taken_bytes == 0
    assert held_bytes() - before < 4 * MIB
    vm.budget_bytes = 40 * MIB
    assert arena.resume() == 40 * MIB
    assert arena.view(0, (40 * MIB,), torch.uint8).fill_(1).sum(dtype=torch.int64).item() == 40 * MIB


def test_staging_by_chunks_takes_them_one_by_one_and_gives_all_back_if_it_is_left(
    make_arena, budgeted_memory, assert_nothing_leaks
):
    vm = budgeted_memory(8 * GRANULE)
    arena = make_arena(3 * GRANULE, vm, chunk_bytes=GRANULE)
    arena.resume()
    with assert_nothing_leaks():
        steps = arena.stage()
        for taken in (4, 5):
            assert next(steps) == GRANULE
            assert vm.taken_bytes == taken * GRANULE
        steps.close()
    assert vm.taken_bytes == 3 * GRANULE


def test_cycles_leak_nothing(vm, chunk_bytes, held_bytes, assert_nothing_leaks):
    def cycle():
        arena = VirtualArena(MemoryTag.WEIGHTS, 4 * GRANULE, vm, chunk_bytes)
        arena.resume()
        with closing(finish(arena.stage())) as shadow:
            whole = (0, (4 * GRANULE,), torch.uint8)
            shadow.view(*whole).copy_(arena.view(*whole))
            arena.swap(shadow)
        arena.release()
        arena.resume()
        arena.close()

    cycle()
    pss = held_bytes()
    with assert_nothing_leaks():
        for _ in range(20):
            cycle()
    assert abs(held_bytes() - pss) < GRANULE


LIMITED_PROCESS = """
import resource
import torch
from ebbtide.srt.errors import OutOfDeviceMemory
from ebbtide.srt.memory_saver import MemoryTag
from ebbtide.srt.memory_saver.virtual_arena import VirtualArena
from ebbtide.srt.memory_saver.virtual_memory.host import HostVirtualMemory
from ebbtide.srt.slices import finish

def held(what="VmData"):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(what)) << 10

def limit(num_bytes):
    resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, resource.RLIM_INFINITY))

def attempt(name, action):
    try:
        print(name, action())
    except OutOfDeviceMemory as refusal:
        print(name, "refused", refusal.needed_bytes >> 20, refusal.free_bytes > 0)

arena = VirtualArena(MemoryTag.KV_CACHE, 256 << 20, HostVirtualMemory(), chunk_bytes=64 << 20)
view = arena.view(0, (256 << 20,), torch.uint8)
before, addresses_before = held(), held("VmSize")
limit(before + (160 << 20))
attempt("resume", arena.resume)
print(arena.resident_bytes, held() - before, held("VmSize") - addresses_before < 1 << 20)
limit(before + (264 << 20))
attempt("resume", arena.resume)
attempt("stage", lambda: finish(arena.stage()))
limit(resource.RLIM_INFINITY)
view.fill_(1)
shadow = finish(arena.stage())
shadow.view(0, (256 << 20,), torch.uint8).fill_(2)
limit(held() + (8 << 20))
attempt("swap", lambda: arena.swap(shadow))
print(view[0].item(), view[-1].item())
limit(resource.RLIM_INFINITY)
attempt("swap", lambda: arena.swap(shadow))
print(view[0].item(), view[-1].item())
limit(held())
attempt("release", arena.release)
"""


def test_memory_that_the_kernel_refuses_is_a_refusal_and_not_the_end_of_the_process():
    done = run_script(LIMITED_PROCESS)
    assert done.stdout.splitlines() == [
        "resume refused 256 True",
        "0 0 True",
        f"resume {256 * MIB}",
        "stage refused 256 True",
        "swap refused 64 True",
        "1 1",
        "swap None",
        "2 2",
        f"release {256 * MIB}",
    ], done.stderr
