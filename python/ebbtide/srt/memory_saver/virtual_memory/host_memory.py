"""How much memory this machine, or the control group that this process lives in, has and could still give."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


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
