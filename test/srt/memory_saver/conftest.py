"""The kinds of virtual memory, one with a budget, and what the system says that this process holds."""

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch
from fixtures.budgeted_memory import BudgetedMemory

from ebbtide.srt.device import Device, open_device
from ebbtide.srt.errors import ConfigurationError
from ebbtide.srt.memory_saver.virtual_memory import VirtualMemory
from ebbtide.srt.memory_saver.virtual_memory.host import HostVirtualMemory


@pytest.fixture(scope="session")
def cuda_device() -> Device:
    try:
        return open_device("cuda")
    except ConfigurationError as error:
        pytest.skip(str(error))


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def vm(request: pytest.FixtureRequest) -> VirtualMemory:
    """Each kind of virtual memory in turn."""
    if request.param == "host":
        return HostVirtualMemory()
    device: Device = request.getfixturevalue("cuda_device")
    return device.virtual_memory()


@pytest.fixture
def budgeted_memory(vm: VirtualMemory) -> Callable[[int], BudgetedMemory]:
    return lambda budget_bytes: BudgetedMemory(budget_bytes, vm)


@pytest.fixture
def held_bytes(vm: VirtualMemory, request: pytest.FixtureRequest) -> Callable[[], int]:
    """Memory that is taken on the machine `vm` is of, as the system counts it."""
    kind = "anonymous_bytes" if isinstance(vm, HostVirtualMemory) else "device_bytes"
    read: Callable[[], int] = request.getfixturevalue(kind)
    return read


@pytest.fixture
def anonymous_bytes() -> Callable[[], int]:
    """Memory that is mapped in this process and of no file.

    Not our part of it (Pss): that of libraries, and of what forks have in common, changes whenever another
    process starts, writes or ends.
    """

    def read() -> int:
        gc.collect(1)  # what this test has made: a whole collection takes longer than the test
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))

    return read


@pytest.fixture
def device_bytes(cuda_device: Device) -> Callable[[], int]:
    """Memory of the device that is not free, but for what torch's allocator has taken for tests' tensors."""

    def read() -> int:
        gc.collect()
        cuda_device.synchronize()
        info = cuda_device.memory_info()
        return info.total_bytes - info.free_bytes - torch.accelerator.memory_reserved()

    # Processes of tests before give theirs back behind their end.
    taken, before = read(), None
    while taken != before:
        time.sleep(1)
        taken, before = read(), taken
    return read


@pytest.fixture
def assert_nothing_leaks(
    vm: VirtualMemory, held_bytes: Callable[[], int]
) -> Callable[[], AbstractContextManager[None]]:
    """Within, no file descriptor may stay open, and nothing of an arena's size may stay taken.

    On the host that is address space; on a device, memory.
    """

    def held() -> tuple[int, int]:
        gc.collect(1)
        if not isinstance(vm, HostVirtualMemory):
            return len(os.listdir("/proc/self/fd")), held_bytes()
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        return len(os.listdir("/proc/self/fd")), pages * os.sysconf("SC_PAGE_SIZE")

    @contextmanager
    def check() -> Iterator[None]:
        descriptors, taken = held()
        yield
        assert held()[0] == descriptors
        assert held()[1] - taken < vm.granularity

    return check
