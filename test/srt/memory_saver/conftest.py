"""Virtual memory with a budget, and what the kernel says this process holds."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ebbtide.srt.errors import OutOfDeviceMemory
from ebbtide.srt.memory_saver.virtual_memory.base import Handle, Reservation
from ebbtide.srt.memory_saver.virtual_memory.host import HostVirtualMemory


class BudgetedMemory:
    """Real host memory of which only `budget_bytes` may be taken; it can be told to fail at a later map."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.taken_bytes = 0
        self.maps_until_failure: int | None = None
        self._vm = HostVirtualMemory()
        self.granularity = self._vm.granularity

    def reserve(self, num_bytes: int) -> Reservation:
        return self._vm.reserve(num_bytes)

    def free_reservation(self, reservation: Reservation) -> None:
        self._vm.free_reservation(reservation)

    def create(self, num_bytes: int) -> Handle:
        free_bytes = self.budget_bytes - self.taken_bytes
        if num_bytes > free_bytes:
            raise OutOfDeviceMemory(num_bytes, free_bytes)
        self.taken_bytes += num_bytes
        return self._vm.create(num_bytes)

    def release(self, handle: Handle) -> None:
        self._vm.release(handle)
        self.taken_bytes -= handle.num_bytes

    def map(self, at: Reservation, offset: int, handle: Handle) -> None:
        if self.maps_until_failure is not None:
            self.maps_until_failure -= 1
            if self.maps_until_failure < 0:
                self.maps_until_failure = None
                raise OSError("the driver refused")
        self._vm.map(at, offset, handle)

    def unmap(self, at: Reservation, offset: int, num_bytes: int) -> None:
        self._vm.unmap(at, offset, num_bytes)

    def as_tensor(self, reservation: Reservation) -> torch.Tensor:
        return self._vm.as_tensor(reservation)


@pytest.fixture
def budgeted_memory() -> Callable[[int], BudgetedMemory]:
    return BudgetedMemory


@pytest.fixture
def pss_bytes() -> Callable[[], int]:
    """What this process holds, each shared page divided by its sharers."""

    def read() -> int:
        gc.collect()
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))

    return read


@pytest.fixture
def holdings() -> Callable[[], tuple[int, int]]:
    """How many file descriptors are open, and how many bytes of address space are taken."""

    def read() -> tuple[int, int]:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        return len(os.listdir("/proc/self/fd")), pages * os.sysconf("SC_PAGE_SIZE")

    return read
