"""Backups of a GPU's memory in pinned host memory."""

import pytest
import torch
from fixtures.kept_memory import KeptMemory

from ebbtide.srt.memory_saver import backup as backup_module
from ebbtide.srt.memory_saver.tags import MemoryTag
from ebbtide.srt.memory_saver.virtual_arena import VirtualArena

pytestmark = pytest.mark.gpu

SIZE = (200 << 20) + 12_345


@pytest.fixture
def arena(cuda_device):
    arena = VirtualArena(MemoryTag.WEIGHTS, SIZE, cuda_device.virtual_memory(), 64 << 20)
    arena.resume()
    yield arena
    arena.close()


@pytest.fixture
def contents(arena):
    return arena.view(0, (SIZE,), torch.uint8)


@pytest.fixture(params=[256 << 20, 32 << 20], ids=["one piece", "pieces"])
def piece_bytes(request, monkeypatch):
    monkeypatch.setattr(backup_module, "PIECE_BYTES", request.param)


@pytest.fixture(params=[False, True], ids=["at the save", "in the background"])
def backup(request, arena, cuda_device, piece_bytes):
    backup = KeptMemory(arena, cuda_device.host_pinning(), in_background=request.param)
    yield backup
    backup.close()


def test_contents_come_back_bit_for_bit(arena, backup, contents, caplog):
    for generation in range(3):
        original = torch.randint(0, 256, (SIZE,), dtype=torch.uint8, device="cuda")
        contents.copy_(original)
        backup.save(generation)
        contents.zero_()
        arena.release()
        arena.resume()
        backup.restore()
        assert torch.equal(contents, original)
    assert caplog.records == []  # it was pinned
