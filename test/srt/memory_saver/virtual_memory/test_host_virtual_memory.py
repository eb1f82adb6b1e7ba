"""Host virtual memory by itself: contents go with the handle; no misuse touches memory that is not ours."""

import os
from types import SimpleNamespace

import pytest
from fixtures.forking import run_script

from ebbtide.srt.errors import ConfigurationError, OutOfDeviceMemory
from ebbtide.srt.memory_saver.virtual_memory.host import HostVirtualMemory

GRANULE = HostVirtualMemory.granularity


@pytest.fixture
def vm():
    return HostVirtualMemory()


def test_contents_go_with_the_handle_and_memory_with_it_alone(vm, anonymous_bytes):
    before = anonymous_bytes()
    # More than the machine has: addresses take no memory.
    here, there = vm.reserve(1 << 42), vm.reserve(8 * GRANULE)
    assert anonymous_bytes() - before < GRANULE
    assert here.address % GRANULE == there.address % GRANULE == 0, "for huge pages"
    handle = vm.create(8 * GRANULE)
    assert anonymous_bytes() - before >= 7.6 * GRANULE
    vm.map(here, GRANULE, handle)
    assert not vm.as_tensor(here)[GRANULE : 9 * GRANULE].any()
    vm.as_tensor(here)[GRANULE : 9 * GRANULE].fill_(11)
    vm.unmap(here, GRANULE, 8 * GRANULE)
    vm.map(there, 0, handle)
    contents = vm.as_tensor(there)
    assert contents.min() == contents.max() == 11
    del contents
    vm.unmap(there, 0, 8 * GRANULE)
    vm.release(handle)
    assert anonymous_bytes() - before <= 0.4 * GRANULE
    vm.free_reservation(here)
    vm.free_reservation(there)


def test_more_than_is_available_is_refused_before_it_is_taken():
    vm = HostVirtualMemory(free_bytes=lambda: 3 * GRANULE)
    with pytest.raises(OutOfDeviceMemory):
        vm.reserve(1 << 60)
    with pytest.raises(OutOfDeviceMemory) as refusal:
        vm.create(4 * GRANULE)
    assert (refusal.value.needed_bytes, refusal.value.free_bytes) == (4 * GRANULE, 3 * GRANULE)
    vm.release(vm.create(3 * GRANULE))


def test_a_handle_released_while_mapped_keeps_its_memory_until_it_is_unmapped(vm, anonymous_bytes):
    size = 8 * GRANULE
    place = vm.reserve(size)
    before = anonymous_bytes()
    handle = vm.create(size)
    vm.map(place, 0, handle)
    memory = vm.as_tensor(place).fill_(6)
    vm.release(handle)
    assert (memory[0], memory[-1]) == (6, 6)
    assert anonymous_bytes() - before >= 0.95 * size
    vm.unmap(place, 0, size)
    assert anonymous_bytes() - before <= 0.05 * size
    vm.free_reservation(place)


FAULTING_PROCESS = """
from ebbtide.srt.memory_saver.virtual_memory.host import HostVirtualMemory

vm = HostVirtualMemory()
place, handle = vm.reserve(vm.granularity), vm.create(vm.granularity)
memory = vm.as_tensor(place)
vm.map(place, 0, handle)
memory[0] = 1
vm.unmap(place, 0, vm.granularity)
print("unmapped", flush=True)
memory[0] = 1
print("written")
"""


def test_touching_what_is_not_mapped_faults_instead_of_taking_memory_behind_our_back():
    done = run_script(FAULTING_PROCESS)
    assert done.stdout.splitlines() == ["unmapped"]
    assert done.returncode == -11


def test_a_kernel_that_cannot_is_named(monkeypatch):
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(release="4.18.0-553.el8"))
    with pytest.raises(ConfigurationError, match=r"Linux 5\.14 or newer; this is linux 4\.18\.0-553\.el8"):
        HostVirtualMemory()
