"""The CPU as a device."""

import subprocess
import sys
from pathlib import Path

import pytest

from ebbtide.srt.device.cpu import CpuDevice
from ebbtide.srt.memory_saver.tags import MemoryTag
from ebbtide.srt.memory_saver.virtual_arena import VirtualArena

SIZE = 64 << 20


@pytest.fixture
def device():
    return CpuDevice()


def process_bytes_without_files(device):
    # Our part of the libraries' pages changes whenever another process starts or ends.
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    files = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss_File:"))
    return device.memory_info().process_bytes - files


def test_what_a_process_holds_follows_an_arena(device):
    arena = VirtualArena(MemoryTag.KV_CACHE, SIZE, device.virtual_memory())
    released = process_bytes_without_files(device)
    arena.resume()
    assert process_bytes_without_files(device) - released >= 0.95 * SIZE
    arena.close()
    assert process_bytes_without_files(device) - released <= 0.05 * SIZE


def test_another_process_is_asked_by_its_id(device):
    command = [sys.executable, "-c", f"held = b'x' * {SIZE}; print('ready', flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "ready\n"
        held = device.memory_info(child.pid).process_bytes
        child.communicate("\n")
    assert SIZE <= held < 2 * SIZE
    with pytest.raises(ProcessLookupError):
        device.memory_info(child.pid)
