"""What a release of a tag keeps: bit for bit, and copied only when there is something new to copy."""

import logging

import pytest
import torch
from fixtures.budgeted_memory import BudgetedMemory

from ebbtide.srt.errors import EngineError, OutOfDeviceMemory
from ebbtide.srt.memory_saver import MemoryTag, backup as backup_module
from ebbtide.srt.memory_saver.backup import ArenaMemory, BackedUpMemory, JointMemory
from ebbtide.srt.memory_saver.virtual_arena import VirtualArena
from ebbtide.srt.memory_saver.virtual_memory.host import HostVirtualMemory

SIZE = 5_000_001


@pytest.fixture
def arena():
    arena = VirtualArena(
        MemoryTag.WEIGHTS, SIZE, HostVirtualMemory(), chunk_bytes=HostVirtualMemory.granularity
    )
    arena.resume()
    yield arena
    arena.close()


class Backup:
    """Memory whose contents a release keeps, by the number of what they are."""

    def __init__(self, arena, pinning=None, *, in_background=False):
        self.generation = 0
        self.memory = BackedUpMemory(arena, lambda: self.generation, pinning, keeps_contents=in_background)

    def save(self, generation):
        self.generation = generation
        self.memory.prepare_release(keep=True)

    def close(self):
        """Give the host's memory back, which an engine keeps to its end."""
        if self.memory._allocation is not None:
            self.memory._allocation.join()
        self.memory._buffer.close()


@pytest.fixture
def backup(arena):
    backup = Backup(arena)
    yield backup
    backup.close()


@pytest.fixture
def contents(arena):
    return arena.view(0, (SIZE,), torch.uint8)


def test_an_unchanged_generation_is_not_copied_again_and_a_new_one_is(backup, contents):
    for generation, is_new in ((0, True), (0, False), (8, True), (8, False)):
        contents.fill_(2 * generation + is_new)
        backup.save(generation)
        contents.fill_(99)
        backup.memory.resume()
        assert contents.unique().tolist() == [2 * generation + 1]


def test_host_memory_is_taken_once_at_the_first_save(arena, backup, anonymous_bytes):
    assert backup.memory.backup_bytes == 0
    before = anonymous_bytes()
    backup.save(generation=0)
    held = backup.memory.backup_bytes
    assert held >= SIZE
    assert 0.95 * held <= anonymous_bytes() - before <= 1.5 * held
    for generation in range(1, 10):
        backup.save(generation)
    assert backup.memory.backup_bytes == held
    assert anonymous_bytes() - before <= 1.5 * held
    backup.close()
    assert backup.memory.backup_bytes == 0
    assert anonymous_bytes() - before <= 0.5 * held


def test_a_released_arena_is_not_saved(arena, backup):
    backup.save(generation=0)
    arena.release()
    with pytest.raises(EngineError, match="this memory is released"):
        backup.save(generation=1)


class Pinning:
    """Pins on paper; `limit` is how many pieces the system lets it pin."""

    def __init__(self, limit=1000):
        self.limit = limit
        self.pinned = {}
        self.num_syncs = 0

    def pin(self, address, num_bytes):
        if len(self.pinned) == self.limit:
            raise EngineError("cuMemHostRegister: out of memory")
        self.pinned[address] = num_bytes

    def unpin(self, address):
        del self.pinned[address]

    def synchronize(self):
        self.num_syncs += 1


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(backup_module, "PIECE_BYTES", HostVirtualMemory.granularity)


def save_and_restore(arena, backup, contents):
    original = torch.randint(0, 256, contents.shape, dtype=torch.uint8)
    contents.copy_(original)
    backup.save(generation=0)
    arena.release()
    backup.memory.resume()
    assert torch.equal(contents.cpu(), original)


@pytest.mark.parametrize("in_background", [False, True])
def test_a_pinned_buffer_is_pinned_piece_by_piece_and_contents_are_exact(
    arena, contents, small_pieces, in_background
):
    pinning = Pinning()
    backup = Backup(arena, pinning, in_background=in_background)
    save_and_restore(arena, backup, contents)
    assert sum(pinning.pinned.values()) == backup.memory.backup_bytes >= SIZE
    assert len(pinning.pinned) == 3
    assert pinning.num_syncs == 2
    backup.save(generation=0)
    assert pinning.num_syncs == 2
    backup.close()
    assert pinning.pinned == {}


@pytest.mark.gpu
@pytest.mark.parametrize("in_background", [False, True])
def test_so_are_those_of_a_gpu(cuda_device, monkeypatch, caplog, in_background):
    monkeypatch.setattr(backup_module, "PIECE_BYTES", 32 << 20)
    arena = VirtualArena(MemoryTag.WEIGHTS, (200 << 20) + 12_345, cuda_device.virtual_memory(), 64 << 20)
    arena.resume()
    backup = Backup(arena, cuda_device.host_pinning(), in_background=in_background)
    save_and_restore(arena, backup, arena.view(0, (arena.num_bytes,), torch.uint8))
    assert caplog.records == [], "it was pinned"
    backup.close()
    arena.close()


def test_memory_that_cannot_be_pinned_is_used_as_it_is_with_one_warning(
    arena, contents, small_pieces, caplog
):
    pinning = Pinning(limit=2)
    backup = Backup(arena, pinning)
    with caplog.at_level(logging.WARNING):
        save_and_restore(arena, backup, contents)
        backup.save(generation=1)
    assert pinning.pinned == {}
    assert [record.message for record in caplog.records] == [
        "host copy of weights: not pinned, copies will be slower: cuMemHostRegister: out of memory"
    ]
    backup.close()


def test_no_room_in_the_background_shows_at_the_save_and_can_be_retried(arena, contents, monkeypatch):
    room = [0]

    class Tight(HostVirtualMemory):
        def __init__(self):
            super().__init__(free_bytes=lambda: room[0])

    monkeypatch.setattr(backup_module, "HostVirtualMemory", Tight)
    backup = Backup(arena, Pinning(), in_background=True)
    with pytest.raises(OutOfDeviceMemory):
        backup.save(generation=0)
    assert backup.memory.backup_bytes == 0
    room[0] = 1 << 40
    save_and_restore(arena, backup, contents)
    backup.close()


def test_what_is_kept_for_reuse_goes_after_the_arena(arena):
    resident_at_trim = []
    memory = ArenaMemory(arena, trim=lambda: resident_at_trim.append(arena.is_resident))
    assert memory.release() == memory.virtual_bytes
    assert resident_at_trim == [False]
    assert memory.resume() == memory.virtual_bytes
    assert resident_at_trim == [False]


def test_two_memories_of_a_tag_come_back_together_or_not_at_all() -> None:
    vm = BudgetedMemory(4 * SIZE, HostVirtualMemory())
    first, second = (VirtualArena(MemoryTag.WEIGHTS, SIZE, vm) for _ in range(2))
    for arena in (first, second):
        arena.resume()
    joint = JointMemory(
        *(BackedUpMemory(arena, lambda: 1, keeps_contents=False) for arena in (first, second))
    )
    contents = second.view(0, (SIZE,), torch.uint8).fill_(7)
    joint.prepare_release(keep=False)
    assert joint.release() == joint.virtual_bytes == first.virtual_bytes + second.virtual_bytes
    vm.budget_bytes = first.virtual_bytes + second.virtual_bytes // 2
    with pytest.raises(OutOfDeviceMemory):
        joint.resume()
    assert joint.resident_bytes == 0
    vm.budget_bytes = 4 * SIZE
    assert joint.resume() == joint.virtual_bytes
    assert (contents == 7).all()
