"""Host backups: bit-exact, and copied only when there is something new to copy."""

from __future__ import annotations

import pytest
import torch

from ebbtide.srt.errors import EngineError
from ebbtide.srt.memory_saver.arena import Arena
from ebbtide.srt.memory_saver.backup import HostBackup
from ebbtide.srt.memory_saver.tags import MemoryTag
from ebbtide.srt.memory_saver.virtual_memory.host import HostVirtualMemory

SIZE = 5_000_001


@pytest.fixture
def arena():
    arena = Arena(MemoryTag.WEIGHTS, SIZE, HostVirtualMemory(), chunk_bytes=HostVirtualMemory.granularity)
    arena.resume()
    yield arena
    arena.close()


@pytest.fixture
def backup(arena):
    backup = HostBackup(arena)
    yield backup
    backup.close()


@pytest.fixture
def contents(arena):
    return arena.view(0, (SIZE,), torch.uint8)


def test_contents_come_back_bit_for_bit_after_a_release(arena, backup, contents):
    original = torch.randint(0, 256, (SIZE,), dtype=torch.uint8)
    contents.copy_(original)
    backup.save(generation=0)
    arena.release()
    arena.resume()
    assert not torch.equal(contents, original)
    backup.restore()
    assert torch.equal(contents, original)


def test_an_unchanged_generation_is_not_copied_again_and_a_new_one_is(backup, contents):
    contents.fill_(1)
    backup.save(generation=7)
    contents.fill_(2)
    backup.save(generation=7)
    backup.restore()
    assert contents.unique().tolist() == [1]
    contents.fill_(3)
    backup.save(generation=8)
    contents.fill_(4)
    backup.restore()
    assert contents.unique().tolist() == [3]
    assert backup.generation == 8


def test_generation_zero_is_a_generation(backup, contents):
    assert backup.generation is None
    contents.fill_(1)
    backup.save(generation=0)
    assert backup.generation == 0
    contents.fill_(2)
    backup.save(generation=0)
    backup.restore()
    assert contents.unique().tolist() == [1]


def test_host_memory_is_taken_once_at_the_first_save(arena, backup, pss_bytes):
    assert backup.num_bytes == 0
    before = pss_bytes()
    backup.save(generation=0)
    held = backup.num_bytes
    assert held >= SIZE
    assert 0.95 * held <= pss_bytes() - before <= 1.5 * held
    for generation in range(1, 10):
        backup.save(generation)
    assert backup.num_bytes == held
    assert pss_bytes() - before <= 1.5 * held
    backup.close()
    backup.close()
    assert backup.num_bytes == 0
    assert backup.generation is None
    assert pss_bytes() - before <= 0.5 * held


def test_nothing_can_be_restored_that_was_not_saved(backup):
    with pytest.raises(EngineError, match="no backup of weights"):
        backup.restore()


def test_a_released_arena_is_neither_saved_nor_restored(arena, backup):
    backup.save(generation=0)
    arena.release()
    with pytest.raises(EngineError, match="weights is released"):
        backup.save(generation=1)
    with pytest.raises(EngineError, match="weights is released"):
        backup.restore()
    assert backup.generation == 0


def test_an_arena_of_no_bytes_is_saved_and_restored():
    arena = Arena(MemoryTag.CUDA_GRAPH, 0, HostVirtualMemory())
    arena.resume()
    backup = HostBackup(arena)
    backup.save(generation=3)
    backup.restore()
    assert (backup.generation, backup.num_bytes) == (3, 0)
