"""The CPU as a device."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from ebbtide.srt.device.cpu import CpuDevice
from ebbtide.srt.memory_saver.arena import Arena
from ebbtide.srt.memory_saver.tags import MemoryTag

SIZE = 64 << 20


@pytest.fixture
def device():
    return CpuDevice()


def test_it_is_what_torch_calls_it(device):
    assert torch.device(device.name).type == "cpu"
    device.synchronize()


def test_memory_info_follows_an_arena(device):
    arena = Arena(MemoryTag.KV_CACHE, SIZE, device.virtual_memory())
    released = device.memory_info()
    arena.resume()
    resident = device.memory_info()
    arena.close()
    closed = device.memory_info()
    assert resident.process_bytes - released.process_bytes >= 0.95 * SIZE
    assert closed.process_bytes - released.process_bytes <= 0.05 * SIZE
    assert resident.total_bytes == released.total_bytes
    assert 0 < resident.process_bytes < resident.total_bytes
    assert 0 < resident.free_bytes < resident.total_bytes


def test_another_process_is_asked_by_its_id(device):
    command = [sys.executable, "-c", f"held = b'x' * {SIZE}; print('ready', flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "ready\n"
        held = device.memory_info(child.pid).process_bytes
        child.communicate("\n")
    assert SIZE <= held < 2 * SIZE
    with pytest.raises(ProcessLookupError):
        device.memory_info(child.pid)
