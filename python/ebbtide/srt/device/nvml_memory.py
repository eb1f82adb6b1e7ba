"""A CUDA device's memory as NVML sees it: for processes that have no context on the device."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def device_memory_bytes(uuid: str, nvml: Any = None) -> tuple[int, int] | None:
    """Memory of the device, in all and free; None where pynvml is missing or NVML does not answer.

    Args:
        uuid: of the device, without "GPU-".
        nvml: the module pynvml; None: that itself, if it is installed.
    """
    try:
        library = nvml if nvml is not None else import_module("pynvml")
    except ImportError:
        return None
    try:
        library.nvmlInit()
        memory = library.nvmlDeviceGetMemoryInfo(library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
    except library.NVMLError:
        return None
    return memory.total, memory.free
