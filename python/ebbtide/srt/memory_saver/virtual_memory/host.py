"""Virtual memory of a Linux host: anonymous pages that are moved, not copied, between addresses.

A handle is a private anonymous mapping. To map it is to move its page tables to the reservation (mremap), to
unmap it is to move them to addresses of its own; once it is released as well, the pages are the operating
system's again. Anonymous memory rather than a memfd, because kernels as a rule have transparent huge pages on
for it and off for shared memory: measured per GiB, 45 ms against 640 ms to resume, 3 ms against 220 ms to
release, and under 1 ms against 500 ms to swap.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import count

import torch

from ebbtide.srt.errors import ConfigurationError, OutOfDeviceMemory
from ebbtide.srt.memory_saver.virtual_memory import Handle, Reservation, read_host_memory

# A huge page on x86-64 and arm64, and a page of the CUDA driver: a host arena rounds as one on a GPU does.
GRANULARITY = 2 << 20

# Left to the process itself: taking the last byte of a control group gets the process killed, not refused.
HEADROOM_BYTES = 64 << 20
# To ask what is free takes as long as to take 2 MiB. What was free may be gone by now: half of the headroom.
UNASKED_BYTES = HEADROOM_BYTES // 2

_PROT_NONE = 0
_PROT_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MREMAP_MAYMOVE, _MREMAP_FIXED, _MREMAP_DONTUNMAP = 1, 2, 4
_MADV_POPULATE_WRITE = 23
_OLDEST_KERNEL = (5, 14)  # MADV_POPULATE_WRITE; MREMAP_DONTUNMAP came with 5.7


def available_bytes() -> int:
    """Bytes that may be taken now: what machine and control group have, less the headroom."""
    return max(0, read_host_memory().available_bytes - HEADROOM_BYTES)


class HostVirtualMemory:
    """VirtualMemory over anonymous host memory; a fresh handle holds zeros.

    `free_bytes` is asked ahead of `create`, because the kernel promises memory that it does not have and ends
    the process when that is touched. ConfigurationError: not Linux, or a kernel older than 5.14.
    """

    granularity = GRANULARITY
    keeps_for_free = False

    def __init__(self, free_bytes: Callable[[], int] = available_bytes) -> None:
        _require_linux()
        self._free_bytes = free_bytes
        self._granted_bytes = 0  # may be taken without asking again
        self._keys = count()
        self._parked_at: dict[Handle, int] = {}  # where the pages of unmapped handles are
        self._handle_at: dict[int, Handle] = {}  # by the address where it is mapped
        self._given_up: set[Handle] = set()  # mapped, and released already

    def reserve(self, num_bytes: int) -> Reservation:
        with _running_out_of_memory(num_bytes, self._free_bytes):
            return Reservation(_reserve_aligned(num_bytes), num_bytes)

    def free_reservation(self, reservation: Reservation) -> None:
        _munmap(reservation.address, reservation.num_bytes)

    def create(self, num_bytes: int) -> Handle:
        if num_bytes > self._granted_bytes:
            free = self._free_bytes()
            if num_bytes > free:
                raise OutOfDeviceMemory(num_bytes, free)
            self._granted_bytes = num_bytes + min(free - num_bytes, UNASKED_BYTES)
        self._granted_bytes -= num_bytes
        with _running_out_of_memory(num_bytes, self._free_bytes):
            address = _reserve_aligned(num_bytes)
            try:
                _populate(address, num_bytes)
            except OSError:
                _munmap(address, num_bytes)
                raise
        handle = Handle(next(self._keys), num_bytes)
        self._parked_at[handle] = address
        return handle

    def map(self, at: Reservation, offset: int, handle: Handle) -> None:
        address = at.address + offset
        _mremap(self._parked_at[handle], handle.num_bytes, address)
        del self._parked_at[handle]
        self._handle_at[address] = handle

    def make_accessible(self, at: Reservation, offset: int, num_bytes: int) -> None:
        """Do nothing: what is mapped can be read and written."""

    def drain(self) -> None:
        """Do nothing: a CPU runs work as it is launched."""

    def unmap(self, at: Reservation, offset: int, num_bytes: int) -> None:
        address, end = at.address + offset, at.address + offset + num_bytes
        while address < end:
            handle = self._handle_at[address]
            if handle in self._given_up:
                self._given_up.remove(handle)
            else:
                with _running_out_of_memory(handle.num_bytes, self._free_bytes):
                    self._parked_at[handle] = _park(address, handle.num_bytes)
            _fence(address, handle.num_bytes)
            del self._handle_at[address]
            address += handle.num_bytes

    def release(self, handle: Handle) -> None:
        if handle in self._parked_at:
            _munmap(self._parked_at.pop(handle), handle.num_bytes)
        else:
            self._given_up.add(handle)

    def as_tensor(self, reservation: Reservation) -> torch.Tensor:
        memory = (ctypes.c_uint8 * reservation.num_bytes).from_address(reservation.address)
        return torch.frombuffer(memory, dtype=torch.uint8)


def _require_linux() -> None:
    version = re.match(r"(\d+)\.(\d+)", os.uname().release)
    if sys.platform != "linux" or version is None or tuple(map(int, version.groups())) < _OLDEST_KERNEL:
        oldest = ".".join(map(str, _OLDEST_KERNEL))
        raise ConfigurationError(
            f"arenas in host memory need Linux {oldest} or newer; this is {sys.platform} {os.uname().release}"
        )


@contextmanager
def _running_out_of_memory(needed_bytes: int, free_bytes: Callable[[], int]) -> Iterator[None]:
    """Turn the kernel's ENOMEM into OutOfDeviceMemory; other errors pass."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise OutOfDeviceMemory(needed_bytes, free_bytes()) from error


def _reserve_aligned(num_bytes: int) -> int:
    """Reserve addresses that start at a multiple of the granularity: a huge page is mapped nowhere else."""
    start = _mmap(None, num_bytes + GRANULARITY, _PROT_NONE, _ANONYMOUS | _MAP_NORESERVE)
    before = -start % GRANULARITY
    if before:
        _munmap(start, before)
    _munmap(start + before + num_bytes, GRANULARITY - before)
    return start + before


def _populate(address: int, num_bytes: int) -> None:
    """Put memory under a reserved range, every page of it at once, so that running out shows here."""
    _mmap(address, num_bytes, _PROT_READ_WRITE, _ANONYMOUS | _MAP_FIXED)
    try:
        _madvise(address, num_bytes, mmap.MADV_HUGEPAGE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel without huge pages: slower, not wrong
            raise
    # A child that some library forks would keep released pages from going back to the operating system.
    _madvise(address, num_bytes, mmap.MADV_DONTFORK)
    _madvise(address, num_bytes, _MADV_POPULATE_WRITE)


def _park(source: int, num_bytes: int) -> int:
    """Move pages to addresses of their own. What stays at the source is empty, to be fenced.

    The source is never unmapped (DONTUNMAP): another thread's allocation could settle in the hole. The price
    is that the kernel counts the range twice for a moment, against RLIMIT_DATA or a strict overcommit limit.
    """
    target = _reserve_aligned(num_bytes)
    try:
        _mremap(source, num_bytes, target, _MREMAP_DONTUNMAP)
    except OSError:
        _munmap(target, num_bytes)
        raise
    return target


def _fence(address: int, num_bytes: int) -> None:
    """Make a range a bare reservation again, whatever is there."""
    _mmap(address, num_bytes, _PROT_NONE, _ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED)


def _mremap(source: int, num_bytes: int, target: int, flags: int = 0) -> None:
    flags |= _MREMAP_MAYMOVE | _MREMAP_FIXED
    _check(_libc().mremap(source, num_bytes, num_bytes, flags, target), "mremap")


def _mmap(address: int | None, num_bytes: int, protection: int, flags: int) -> int:
    return _check(_libc().mmap(address, num_bytes, protection, flags, -1, 0), "mmap")


def _munmap(address: int, num_bytes: int) -> None:
    _check(_libc().munmap(address, num_bytes), "munmap")


def _madvise(address: int, num_bytes: int, advice: int) -> None:
    _check(_libc().madvise(address, num_bytes, advice), "madvise")


def _check(result: int, call: str) -> int:
    if result in (-1, ctypes.c_void_p(-1).value):
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes = (pointer, size, integer, integer, integer, ctypes.c_long)
    libc.mmap.restype = pointer
    libc.mremap.argtypes = (pointer, size, size, integer, pointer)
    libc.mremap.restype = pointer
    libc.munmap.argtypes = (pointer, size)
    libc.madvise.argtypes = (pointer, size, integer)
    return libc
