"""Releasing the memory of a tag, and what goes with it."""

import pytest
import torch
from fixtures.budgeted_memory import BudgetedMemory

from ebbtide.srt.errors import OutOfDeviceMemory
from ebbtide.srt.memory_saver.backup import ArenaMemory, BackedUpMemory, JointMemory
from ebbtide.srt.memory_saver.tags import MemoryTag
from ebbtide.srt.memory_saver.virtual_arena import VirtualArena
from ebbtide.srt.memory_saver.virtual_memory.host import HostVirtualMemory

SIZE = 3_000_000


@pytest.fixture
def arena():
    arena = VirtualArena(MemoryTag.WEIGHTS, SIZE, HostVirtualMemory())
    arena.resume()
    yield arena
    arena.close()


def test_what_is_kept_for_reuse_goes_after_the_arena(arena):
    resident_at_trim = []
    memory = ArenaMemory(arena, trim=lambda: resident_at_trim.append(arena.is_resident))
    assert memory.release() == memory.virtual_bytes
    assert resident_at_trim == [False]
    assert memory.resume() == memory.virtual_bytes
    assert resident_at_trim == [False]


class Pinning:
    def pin(self, address, num_bytes):
        pass

    def unpin(self, address):
        pass

    def synchronize(self):
        pass


@pytest.mark.parametrize("pinning", [None, Pinning()], ids=["host", "pinned"])
def test_backed_up_weights_come_back_bit_for_bit(arena, pinning):
    weights = BackedUpMemory(arena, lambda: 4, pinning, keeps_contents=True)
    contents = arena.view(0, (SIZE,), torch.uint8)
    original = torch.randint(256, (SIZE,), dtype=torch.uint8)
    contents.copy_(original)
    weights.prepare_release(keep=True)
    assert weights.release() == weights.resume() == weights.virtual_bytes
    assert torch.equal(contents, original)
    assert weights.backup_bytes >= SIZE


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
