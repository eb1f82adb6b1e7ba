"""What is available: the least of the machine and of every control group above the process."""

import pytest

from ebbtide.srt.memory_saver.virtual_memory import HostMemory, read_host_memory

MEMINFO = (
    "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    600 kB\nHugePages_Total:       0\n"
)
MACHINE = HostMemory(total_bytes=1000 * 1024, available_bytes=600 * 1024)


class Machine:
    """A /proc, and a mount point for control groups, in a temporary folder."""

    def __init__(self, folder):
        self.proc = folder / "proc"
        self.mount_point = folder / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.mount_point.mkdir()
        (self.proc / "meminfo").write_text(MEMINFO)

    def join(self, version, group, mount_root="/"):
        membership = f"0::{group}" if version == 2 else f"4:memory:{group}"
        filesystem = "cgroup2 cgroup2 rw,nsdelegate" if version == 2 else "cgroup cgroup rw,memory"
        (self.proc / "self" / "cgroup").write_text(f"7:cpu,cpuacct:/elsewhere\n{membership}\n")
        (self.proc / "self" / "mountinfo").write_text(
            f"25 1 0:22 / /proc rw,relatime - proc proc rw\n"
            f"31 23 0:35 {mount_root} {self.mount_point} rw,relatime shared:9 - {filesystem}\n"
        )

    def limit(self, version, group, limit, used, inactive_file=0):
        folder = self.mount_point / group
        folder.mkdir(parents=True, exist_ok=True)
        files = ("memory.max", "memory.current", "anon", "inactive_file")
        if version == 1:
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "inactive_file", "total_inactive_file")
        (folder / files[0]).write_text(f"{limit}\n")
        (folder / files[1]).write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"{files[2]} 5\n{files[3]} {inactive_file}\n")


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_without_control_groups_the_machine_counts(machine):
    assert read_host_memory(machine.proc) == MACHINE


UNLIMITED = 9223372036854771712


@pytest.mark.parametrize(
    ("version", "groups", "expected"),
    [
        # What is cached of files is available.
        (2, {"pod/job": (5000, 4000, 300)}, HostMemory(5000, 1300)),
        # The tightest on the way up counts.
        (2, {"pod/job": ("max", 4000), "pod": (9000, 8900)}, HostMemory(9000, 100)),
        (2, {"pod/job": (5000, 5100)}, HostMemory(5000, 0)),
        (2, {"pod/job": ("garbage", 1)}, MACHINE),
        (1, {"pod/job": (7000, 6000, 50)}, HostMemory(7000, 1050)),
        (1, {"pod/job": (UNLIMITED, 6000)}, MACHINE),
    ],
    ids=["limit", "on the way up", "over", "not a number", "version 1", "unlimited"],
)
def test_the_limits_of_control_groups_count(machine, version, groups, expected):
    machine.join(version, "/pod/job")
    for group, figures in groups.items():
        machine.limit(version, group, *figures)
    assert read_host_memory(machine.proc) == expected


@pytest.mark.parametrize(
    ("group", "mount_root"),
    [("/docker/abc", "/docker/abc"), ("/", "/"), ("/docker/abc", "/kubepods"), ("/../outside", "/")],
    ids=["bind mount", "namespace", "outside the mount", "above the namespace"],
)
def test_in_a_container_the_mount_is_our_group(machine, group, mount_root):
    machine.join(2, group, mount_root)
    machine.limit(2, ".", 5000, 4000)
    assert read_host_memory(machine.proc) == HostMemory(5000, 1000)
