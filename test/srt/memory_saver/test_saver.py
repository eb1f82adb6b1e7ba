"""Savers other than virtual memory: plain torch memory, and a library that ends the process if misused."""

from contextlib import closing, contextmanager

import pytest
import torch

from ebbtide.srt.device import open_device
from ebbtide.srt.errors import ConfigurationError, EngineError, OutOfDeviceMemory
from ebbtide.srt.memory_saver import MemoryTag, saver as savers
from ebbtide.srt.memory_saver.saver import (
    MARGIN_BYTES,
    PlainMemory,
    TorchMemorySaverBackend,
    open_memory_saver,
)
from ebbtide.srt.slices import finish

MIB = 1 << 20
SIZE = 3 * MIB + 1


class Machine:
    """A device of torch's, as far as savers see it, with a budget."""

    name = "cpu"

    def __init__(self):
        self.free = 1 << 40
        self.cached = 0
        self.num_syncs = 0

    def synchronize(self):
        self.num_syncs += 1

    def free_bytes(self):
        return self.free

    def trim(self):
        self.free += self.cached
        self.cached = 0


class DeadlyLibrary:
    """torch_memory_saver's interface: what would end the process there raises SystemExit here."""

    def __init__(self, machine):
        self.machine = machine
        self.regions = {}  # name → is it there
        self.sizes = {}
        self.current = None

    @contextmanager
    def region(self, tag, enable_cpu_backup):
        if tag in self.regions:
            raise SystemExit("two allocations of one tag")
        before = self.machine.free
        yield
        self.regions[tag] = True
        self.sizes[tag] = before - self.machine.free

    def pause(self, tag):
        if not self.regions[tag]:
            raise SystemExit("paused twice")
        self.regions[tag] = False
        self.machine.free += self.sizes[tag]

    def resume(self, tag):
        if self.regions[tag] or self.sizes[tag] > self.machine.free:
            raise SystemExit("resumed twice, or out of memory")
        self.regions[tag] = True
        self.machine.free -= self.sizes[tag]


@pytest.fixture
def machine():
    return Machine()


@pytest.fixture
def saved(machine, monkeypatch):
    """A backend over the deadly library; what torch allocates counts against the machine's budget."""
    real_empty = torch.empty

    def empty(num_bytes, *, dtype, device):
        machine.free -= num_bytes
        return real_empty(num_bytes, dtype=dtype, device=device)

    backend = TorchMemorySaverBackend(machine, DeadlyLibrary(machine))
    monkeypatch.setattr(savers.torch, "empty", empty)
    yield backend
    monkeypatch.undo()


@pytest.fixture(params=["plain", "saved"])
def saver(request, machine):
    return PlainMemory(machine) if request.param == "plain" else request.getfixturevalue("saved")


@pytest.mark.parametrize("slice_bytes", [MIB, 1 << 30])
def test_a_swap_exchanges_the_contents_under_live_tensors(saver, monkeypatch, slice_bytes):
    monkeypatch.setattr(savers, "EXCHANGE_BYTES", slice_bytes)
    arena = saver.arena(MemoryTag.WEIGHTS, SIZE)
    arena.resume()
    live = arena.view(0, (SIZE,), torch.uint8)
    pointer = live.data_ptr()
    first, second = (torch.randint(256, (SIZE,), dtype=torch.uint8) for _ in range(2))
    live.copy_(first)
    with closing(finish(arena.stage())) as shadow:
        staged = shadow.view(0, (SIZE,), torch.uint8).copy_(second)
        arena.swap(shadow)
        assert torch.equal(live, second)
        assert torch.equal(staged, first)
    assert torch.equal(live, second)
    assert (arena.address, live.data_ptr()) == (pointer, pointer)


def test_states_are_those_of_any_arena(saver):
    arena = saver.arena(MemoryTag.KV_CACHE, SIZE)
    assert not arena.is_resident
    assert arena.resume() == arena.resident_bytes == arena.virtual_bytes >= SIZE
    assert arena.resume() == 0
    assert arena.num_bytes == SIZE
    with pytest.raises(ValueError, match="do not lie"):
        arena.view(0, (SIZE + 1,), torch.uint8)
    arena.close()
    arena.close()
    with pytest.raises(EngineError, match="closed"):
        arena.resume()
    empty = saver.arena(MemoryTag.CUDA_GRAPH, 0)
    assert (empty.resume(), empty.is_resident) == (0, True)
    assert (empty.release(), empty.is_resident) == (0, False)


def test_saved_memory_is_free_while_it_is_released(machine, saved):
    before = machine.free
    arena = saved.arena(MemoryTag.WEIGHTS, SIZE)
    assert machine.free == before
    for num_releases in range(1, 4):
        assert arena.resume() == before - machine.free
        assert arena.release() == arena.virtual_bytes
        assert arena.release() == 0
        assert machine.free == before
        assert machine.num_syncs >= num_releases, "the device is waited for before memory goes"
    arena.close()
    arena = PlainMemory(machine).arena(MemoryTag.WEIGHTS, SIZE)
    arena.resume()
    with pytest.raises(EngineError, match="stays resident"):
        arena.release()


@pytest.mark.parametrize("cached", [0, 1 << 40])
def test_a_resume_without_room_is_refused_and_can_be_retried(machine, saved, cached):
    arena = saved.arena(MemoryTag.WEIGHTS, 64 * MIB)
    machine.free, machine.cached = 64 * MIB + MARGIN_BYTES - 1, cached
    if cached:
        assert arena.resume() == 64 * MIB
        return
    with pytest.raises(OutOfDeviceMemory) as refusal:
        arena.resume()
    assert (refusal.value.needed_bytes, refusal.value.free_bytes) == (64 * MIB, 64 * MIB - 1)
    machine.free += 1
    assert arena.resume() == 64 * MIB
    with pytest.raises(OutOfDeviceMemory):
        saved.arena(MemoryTag.WEIGHTS, 64 * MIB)


PRELOADED = "/y/torch_memory_saver_hook_mode_preload_cu13.abi3.so"


@pytest.mark.parametrize(
    ("preload", "mode"), [("/x/other.so", "torch"), (f"/x/other.so:{PRELOADED}", "preload")]
)
def test_a_preloaded_library_is_noticed_and_torch_is_hooked_without(monkeypatch, preload, mode):
    monkeypatch.setenv("LD_PRELOAD", preload)
    assert savers.hook_mode() == mode


def test_expandable_segments_are_refused_by_name(monkeypatch, machine):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with pytest.raises(ConfigurationError, match="expandable_segments"):
        TorchMemorySaverBackend(machine)


def test_backends_are_chosen_by_name():
    device = open_device("cpu")
    arena = open_memory_saver("auto", device).arena(MemoryTag.WEIGHTS, SIZE)
    arena.resume()
    assert arena.release() >= SIZE
    assert isinstance(open_memory_saver("none", device), PlainMemory)
    for name in ("tpu", "cuda:", "cuda:x", "cpu:1"):
        with pytest.raises(ConfigurationError, match=r"device"):
            open_device(name)
