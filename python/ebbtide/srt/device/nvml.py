"""What NVML, the library behind nvidia-smi, knows of the processes on a device."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def process_bytes(uuid: str, nvml: Any = None) -> dict[int, int]:
    """Device memory of every process that computes on the device, by process id.

    The ids are those of the namespace that the driver sees. In a container it may be another than ours, and
    there may then be nobody: empty also where the package nvidia-ml-py is missing or NVML does not answer.

    Args:
        uuid: of the device, without "GPU-".
        nvml: the module pynvml; None: that itself, if it is installed.
    """
    try:
        library = nvml if nvml is not None else import_module("pynvml")
    except ImportError:
        return {}
    try:
        library.nvmlInit()
        device = library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        processes = library.nvmlDeviceGetComputeRunningProcesses(device)
    except library.NVMLError:
        return {}
    return {process.pid: process.usedGpuMemory for process in processes if process.usedGpuMemory is not None}
