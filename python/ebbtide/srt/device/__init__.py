"""What the engine needs to know of a device, and the one that it was started for."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ebbtide.srt.errors import ConfigurationError

if TYPE_CHECKING:
    from ebbtide.srt.memory_saver.virtual_memory import VirtualMemory
    from ebbtide.srt.memory_saver.virtual_memory.cuda import CudaHostPinning


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Device memory in bytes: in all, free now, and held by one process."""

    total_bytes: int
    free_bytes: int
    process_bytes: int


class Device(Protocol):
    """One device of this process."""

    @property
    def name(self) -> str:
        """As torch spells it, e.g. "cpu" or "cuda:0"."""

    @property
    def uuid(self) -> str | None:
        """What identifies the device to other processes; None for the CPU."""

    def synchronize(self) -> None:
        """Wait until everything launched so far has run."""

    def copying(self, *, beside: bool = False) -> AbstractContextManager[None]:
        """Run work launched inside beside forward passes, and, but for `beside`, after all before."""

    def copies_done(self) -> bool:
        """Whether everything launched inside `copying` has run. Does not wait."""

    def follow_copies(self) -> None:
        """Have all that is launched from here on run after what was launched inside `copying`."""

    def trim(self) -> None:
        """Give memory that is only kept for reuse back to the device."""

    def free_bytes(self) -> int: ...
    def memory_info(self, pid: int | None = None) -> MemoryInfo:
        """Memory now, with what process `pid` holds (None: this process), or ProcessLookupError."""

    def virtual_memory(self) -> VirtualMemory:
        """Where arenas on this device take addresses and memory from."""

    def host_pinning(self) -> CudaHostPinning | None:
        """What makes copies from and to host memory quick; None where nothing has to."""


def open_device(name: str) -> Device:
    """The device of a name as torch spells it ("cpu", "cuda:1"), or ConfigurationError."""
    if name == "cpu":
        from ebbtide.srt.device.cpu import CpuDevice  # torch: the API process does without it

        return CpuDevice()
    match = re.fullmatch(r"cuda(?::(\d+))?", name)
    if match is None:
        raise ConfigurationError(f"device: expected cpu, cuda or cuda:<index>, got {name!r}")
    from ebbtide.srt.device.cuda import CudaDevice  # its packages are on machines with a GPU only

    return CudaDevice(int(match[1] or 0))
