"""Who holds device memory, as NVML counts it."""

from types import SimpleNamespace

import pytest

from ebbtide.srt.device.memory import process_bytes


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
