"""The device that an engine was started for, and the backend that gives its memory back."""

from __future__ import annotations

import re

from ebbtide.srt.device.base import Device
from ebbtide.srt.device.cpu import CpuDevice
from ebbtide.srt.errors import ConfigurationError
from ebbtide.srt.memory_saver.saver import (
    MemorySaver,
    PlainMemory,
    TorchMemorySaverBackend,
    VirtualMemorySaver,
)


def open_device(name: str) -> Device:
    """The device of a name as torch spells it ("cpu", "cuda:1"), or ConfigurationError."""
    if name == "cpu":
        return CpuDevice()
    match = re.fullmatch(r"cuda(?::(\d+))?", name)
    if match is None:
        raise ConfigurationError(f"device: expected cpu, cuda or cuda:<index>, got {name!r}")
    from ebbtide.srt.device.cuda import CudaDevice  # its packages are on machines with a GPU only

    return CudaDevice(int(match[1] or 0))


def open_memory_saver(backend: str, device: Device) -> MemorySaver:
    """The backend "auto", "torch_memory_saver" or "none"; ConfigurationError if it does not work here."""
    match backend:
        case "auto":
            return VirtualMemorySaver(device.virtual_memory())
        case "torch_memory_saver":
            return TorchMemorySaverBackend(device)
        case _:
            return PlainMemory(device)
