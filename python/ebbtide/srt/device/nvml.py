"""What NVML, the library behind nvidia-smi, knows of a device: for processes that have no context on it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

T = TypeVar("T")


def process_bytes(uuid: str, nvml: Any = None) -> dict[int, int]:
    """Device memory of every process that computes on the device (UUID without "GPU-"), by process id.

    The ids are those of the namespace that the driver sees, in a container perhaps another than ours. Empty
    also where the package nvidia-ml-py is missing or NVML does not answer.
    """

    def by_process(library: Any, device: Any) -> dict[int, int]:
        processes = library.nvmlDeviceGetComputeRunningProcesses(device)
        return {one.pid: one.usedGpuMemory for one in processes if one.usedGpuMemory is not None}

    return _asked(uuid, nvml, by_process) or {}


def device_memory_bytes(uuid: str, nvml: Any = None) -> tuple[int, int] | None:
    """Memory of the device, in all and free; None where pynvml is missing or NVML does not answer."""

    def total_and_free(library: Any, device: Any) -> tuple[int, int]:
        memory = library.nvmlDeviceGetMemoryInfo(device)
        return memory.total, memory.free

    return _asked(uuid, nvml, total_and_free)


def _asked(uuid: str, nvml: Any, ask: Callable[[Any, Any], T]) -> T | None:
    try:
        library = nvml if nvml is not None else import_module("pynvml")
    except ImportError:
        return None
    try:
        library.nvmlInit()
        return ask(library, library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
    except library.NVMLError:
        return None
