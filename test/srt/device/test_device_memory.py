"""Who holds memory of the host, and of GPUs as NVML counts it."""

import mmap
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ebbtide.srt.device import host_memory_info, process_bytes


class NVMLError(Exception):
    pass


def make_nvml(processes):
    def by_uuid(uuid):
        if uuid != "GPU-1234":
            raise NVMLError("not found")
        return "handle"

    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetComputeRunningProcesses=lambda handle: processes,
    )


@pytest.fixture
def nvml():
    return make_nvml([SimpleNamespace(pid=7, usedGpuMemory=100), SimpleNamespace(pid=8, usedGpuMemory=None)])


def test_processes_are_listed_with_what_they_hold(nvml):
    assert process_bytes("1234", nvml) == {7: 100}


def test_a_device_that_nvml_does_not_know_has_nobody(nvml):
    assert process_bytes("5678", nvml) == {}


def test_another_process_of_the_host_is_asked_by_its_id():
    size = 64 << 20
    command = [sys.executable, "-c", f"held = b'x' * {size}; print('ready', flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "ready\n"
        held = host_memory_info(child.pid).process_bytes
        child.communicate("\n")
    assert size <= held < 2 * size
    with pytest.raises(ProcessLookupError):
        host_memory_info(child.pid)


def test_what_a_process_holds_does_not_change_with_the_files_that_it_reads():
    """Others may read them too: a part of that would come and go with each of them."""
    size = 64 << 20
    before = host_memory_info().process_bytes
    with open(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so", "rb") as file:
        mapped = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
    assert len(mapped[::4096]) == size // 4096
    assert host_memory_info().process_bytes - before < size // 8
