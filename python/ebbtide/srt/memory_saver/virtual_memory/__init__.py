"""What an arena needs of a machine: addresses that stay, and memory that comes and goes behind them.

And how much memory this machine, or the control group that this process lives in, has and could still give.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Reservation:
    """A range of virtual addresses that is ours until it is freed, with or without memory behind it."""

    address: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Handle:
    """Physical memory. `key` means something only to the VirtualMemory that created it."""

    key: int
    num_bytes: int


class VirtualMemory(Protocol):
    """Reserves addresses and maps physical memory under them.

    Every size and offset is a multiple of `granularity`. A handle is mapped at one place at a time, where
    nothing else is. Unmapping keeps its contents; releasing gives the memory back. Before memory is unmapped
    that a device may still be using, `drain` is called, once for however many handles.

    Attributes:
        keeps_for_free: whether unmapping a handle and keeping its contents needs no memory and no copy.
    """

    keeps_for_free: bool

    @property
    def granularity(self) -> int: ...
    def reserve(self, num_bytes: int) -> Reservation:
        """Take addresses, without memory. Raises OutOfDeviceMemory when the address space is exhausted."""

    def free_reservation(self, reservation: Reservation) -> None:
        """Give the addresses back. Nothing may be mapped there, and no tensor over them may be used again."""

    def create(self, num_bytes: int) -> Handle:
        """Take physical memory, contents undefined. Raises OutOfDeviceMemory and keeps nothing."""

    def map(self, at: Reservation, offset: int, handle: Handle) -> None:
        """Put the whole handle under `at.address + offset`."""

    def make_accessible(self, at: Reservation, offset: int, num_bytes: int) -> None:
        """Let a range be read and written, with handles mapped under all of it.

        Apart from `map` because on a device it costs the same for one handle as for many.
        """

    def drain(self) -> None:
        """Wait until nothing that was launched before can touch memory any more."""

    def unmap(self, at: Reservation, offset: int, num_bytes: int) -> None:
        """Take away the handles that fill `num_bytes` from `at.address + offset` on, with their contents.

        Raises OutOfDeviceMemory when keeping one needs more than there is: that and those behind it are then
        where they were. This cannot happen to handles that were released.
        """

    def release(self, handle: Handle) -> None:
        """Give up a handle: its memory goes back to the system now or, if it is mapped, at the unmap."""

    def as_tensor(self, reservation: Reservation) -> torch.Tensor:
        """A flat uint8 tensor over the whole reservation; only mapped parts may be read or written."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes in all, and bytes that could be had without swapping (cached file pages count as available)."""

    total_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True)
class _Controller:
    """The files of one cgroup version's memory controller."""

    limit: str
    usage: str
    reclaimable: str


_V1 = _Controller("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Controller("memory.max", "memory.current", "inactive_file")


def read_host_memory(proc: Path = Path("/proc")) -> HostMemory:
    """Read /proc/meminfo and every cgroup limit above this process; the least of each counts.

    A control group that cannot be read, or has no limit, takes nothing away.
    """
    meminfo = _numbers_by_name(proc / "meminfo")
    total, available = meminfo["MemTotal:"] * 1024, meminfo["MemAvailable:"] * 1024
    for folder, controller in _memory_cgroups(proc):
        try:
            limit = int((folder / controller.limit).read_text())
            used = int((folder / controller.usage).read_text())
            reclaimable = _numbers_by_name(folder / "memory.stat").get(controller.reclaimable, 0)
        except (OSError, ValueError):  # the root group has no such files, and "max" is not a number
            continue
        total = min(total, limit)
        available = min(available, max(0, limit - used + reclaimable))
    return HostMemory(total, available)


def _numbers_by_name(path: Path) -> dict[str, int]:
    """Parse lines of `name number [unit]`."""
    words = (line.split() for line in path.read_text().splitlines())
    return {name: int(number) for name, number, *_ in words}


def _memory_cgroups(proc: Path) -> Iterator[tuple[Path, _Controller]]:
    """The folders of this process's memory control groups, each with its ancestors up to the mount."""
    try:
        memberships = (proc / "self" / "cgroup").read_text().splitlines()
        mounts = (proc / "self" / "mountinfo").read_text().splitlines()
    except OSError:
        return
    for membership in memberships:
        _, controllers, group = membership.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        controller = _V1 if controllers else _V2
        for mount_root, mount_point in _cgroup_mounts(mounts, controller):
            # A container's group may lie outside what is mounted: then the mount itself is our group.
            within = Path(group).is_relative_to(mount_root)
            folder = mount_point / Path(group).relative_to(mount_root) if within else mount_point
            for level in (folder, *folder.parents):
                if not level.is_relative_to(mount_point):
                    break
                yield level, controller


def _cgroup_mounts(mounts: list[str], controller: _Controller) -> Iterator[tuple[Path, Path]]:
    """(path within the hierarchy, mount point) of each mount that carries the memory controller."""
    for mount in mounts:
        fields, _, filesystem = mount.partition(" - ")
        kind, _, options = filesystem.split(" ", 2)
        carries_v1 = kind == "cgroup" and "memory" in options.split(",")
        if carries_v1 if controller is _V1 else kind == "cgroup2":
            mount_root, mount_point = fields.split(" ")[3:5]
            yield Path(mount_root), Path(mount_point)
