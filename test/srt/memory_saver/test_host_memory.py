"""What is available: the least of the machine and of every control group above the process."""

from __future__ import annotations

import pytest

from ebbtide.srt.memory_saver.virtual_memory.host_memory import HostMemory, read_host_memory

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

    def join(self, membership, mount_root, filesystem):
        (self.proc / "self" / "cgroup").write_text(f"7:cpu,cpuacct:/elsewhere\n{membership}\n")
        (self.proc / "self" / "mountinfo").write_text(
            f"25 1 0:22 / /proc rw,relatime - proc proc rw\n"
            f"31 23 0:35 {mount_root} {self.mount_point} rw,relatime shared:9 - {filesystem}\n"
        )

    def join_v2(self, group, mount_root="/"):
        self.join(f"0::{group}", mount_root, "cgroup2 cgroup2 rw,nsdelegate")

    def join_v1(self, group, mount_root="/"):
        self.join(f"4:memory:{group}", mount_root, "cgroup cgroup rw,memory")

    def write_v2(self, group, limit, used, inactive_file=0):
        folder = self.mount_point / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive_file}\n")

    def write_v1(self, group, limit, used, inactive_file=0):
        folder = self.mount_point / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {inactive_file}\n")


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_without_control_groups_the_machine_counts(machine):
    assert read_host_memory(machine.proc) == MACHINE


def test_a_v2_limit_counts_and_cached_files_are_available(machine):
    machine.join_v2("/pod/job")
    machine.write_v2("pod/job", limit=5000, used=4000, inactive_file=300)
    assert read_host_memory(machine.proc) == HostMemory(5000, 1300)


def test_the_tightest_group_on_the_way_up_counts(machine):
    machine.join_v2("/pod/job")
    machine.write_v2("pod/job", limit="max", used=4000)
    machine.write_v2("pod", limit=9000, used=8900)
    assert read_host_memory(machine.proc) == HostMemory(9000, 100)


def test_a_v1_limit_counts(machine):
    machine.join_v1("/docker/abc")
    machine.write_v1("docker/abc", limit=7000, used=6000, inactive_file=50)
    assert read_host_memory(machine.proc) == HostMemory(7000, 1050)


def test_an_unlimited_v1_group_takes_nothing_away(machine):
    machine.join_v1("/docker/abc")
    machine.write_v1("docker/abc", limit=9223372036854771712, used=6000)
    assert read_host_memory(machine.proc) == MACHINE


@pytest.mark.parametrize(
    ("group", "mount_root"),
    [("/docker/abc", "/docker/abc"), ("/", "/"), ("/docker/abc", "/kubepods"), ("/../outside", "/")],
    ids=["bind mount", "namespace", "outside the mount", "above the namespace"],
)
def test_in_a_container_the_mount_is_our_group(machine, group, mount_root):
    machine.join_v2(group, mount_root)
    machine.write_v2(".", limit=5000, used=4000)
    assert read_host_memory(machine.proc) == HostMemory(5000, 1000)


def test_a_group_over_its_limit_has_nothing_available(machine):
    machine.join_v2("/job")
    machine.write_v2("job", limit=5000, used=5100)
    assert read_host_memory(machine.proc) == HostMemory(5000, 0)


def test_a_group_that_cannot_be_read_takes_nothing_away(machine):
    machine.join_v2("/job")
    assert read_host_memory(machine.proc) == MACHINE
    machine.write_v2("job", limit="garbage", used=1)
    assert read_host_memory(machine.proc) == MACHINE


def test_this_machine_can_be_read():
    memory = read_host_memory()
    assert 0 < memory.available_bytes <= memory.total_bytes
