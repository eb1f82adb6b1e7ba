"""What the engine needs to know of a device, the one that it was started for, and who holds memory of it.

Needs neither torch nor a CUDA context: the API process asks for memory. GPUs are asked through NVML, the
library behind nvidia-smi.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ebbtide.srt.errors import ConfigurationError
from ebbtide.srt.memory_saver.virtual_memory import read_host_memory

if TYPE_CHECKING:
    from ebbtide.srt.memory_saver.virtual_memory import VirtualMemory
    from ebbtide.srt.memory_saver.virtual_memory.cuda import CudaHostPinning
    from ebbtide.srt.memory_saver.virtual_memory.host import HostVirtualMemory

T = TypeVar("T")


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

    def make_room(self, num_bytes: int) -> bool:
        """Have so much kept for reuse until the next `trim`; whether it is, or there is too little."""

    def peak_bytes(self) -> int:
        """By how much tensors have taken more at a time, since this was last asked, than they take now."""

    def free_bytes(self) -> int: ...
    def memory_info(self, pid: int | None = None) -> MemoryInfo:
        """Memory now, with what process `pid` holds (None: this process), or ProcessLookupError."""

    def virtual_memory(self) -> VirtualMemory:
        """Where arenas on this device take addresses and memory from."""

    def host_pinning(self) -> CudaHostPinning | None:
        """What makes copies from and to host memory quick; None where nothing has to."""


class CpuDevice:
    """The host as a device: to launch is to run, and its memory is the machine's or the control group's."""

    name = "cpu"
    uuid = None

    def __init__(self) -> None:
        from ebbtide.srt.memory_saver.virtual_memory.host import HostVirtualMemory  # has torch

        self._virtual_memory = HostVirtualMemory()

    def synchronize(self) -> None: ...
    def copying(self, *, beside: bool = False) -> AbstractContextManager[None]:
        return nullcontext()

    def copies_done(self) -> bool:
        return True

    def follow_copies(self) -> None: ...
    def trim(self) -> None: ...
    def make_room(self, num_bytes: int) -> bool:
        return True

    def peak_bytes(self) -> int:
        return 0

    def free_bytes(self) -> int:
        """What could be had without swapping."""
        return read_host_memory().available_bytes

    def memory_info(self, pid: int | None = None) -> MemoryInfo:
        return host_memory_info(pid)

    def virtual_memory(self) -> HostVirtualMemory:
        return self._virtual_memory

    def host_pinning(self) -> None: ...


def open_device(name: str) -> Device:
    """The device of a name as torch spells it ("cpu", "cuda:1"), or ConfigurationError."""
    if name == "cpu":
        return CpuDevice()
    match = re.fullmatch(r"cuda(?::(\d+))?", name)
    if match is None:
        raise ConfigurationError(f"device: expected cpu, cuda or cuda:<index>, got {name!r}")
    from ebbtide.srt.device.cuda import CudaDevice  # its packages are on machines with a GPU only

    return CudaDevice(int(match[1] or 0))


def host_memory_info(pid: int | None = None) -> MemoryInfo:
    """Memory now; what a process holds is its proportional set size (Pss): pages shared by n count 1/n.

    Without those of files, as libraries: their share changes whenever another process starts or ends.

    ProcessLookupError: there is no such process. PermissionError: it is another user's.
    """
    host = read_host_memory()
    return MemoryInfo(host.total_bytes, host.available_bytes, _pss_bytes(pid))


def _pss_bytes(pid: int | None) -> int:
    path = Path("/proc", "self" if pid is None else str(pid), "smaps_rollup")
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        raise ProcessLookupError(f"there is no process {pid}") from None
    kib = {line.split()[0]: int(line.split()[1]) for line in lines if line.startswith("Pss")}
    # Older kernels tell the sum alone.
    return (kib["Pss:"] - kib.get("Pss_File:", 0)) * 1024


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
