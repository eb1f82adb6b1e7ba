"""What the engine asks of a device, how a device is opened by name, and which processes hold its memory.

Needs neither torch nor a CUDA context, since the API process asks for memory too. GPUs are queried through
NVML, the library of nvidia-smi.
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
    """Device memory in bytes: total, free now, and held by one process."""

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
        """An id that is the same in all processes; None for the CPU."""

    def synchronize(self) -> None:
        """Wait until everything launched so far has finished."""

    def copying(self, *, beside: bool = False) -> AbstractContextManager[None]:
        """Run what is launched inside concurrently with forward passes.

        `beside`: don't wait for what was launched before.
        """

    def copies_done(self) -> bool:
        """Whether everything launched inside `copying` has finished. Does not wait."""

    def follow_copies(self) -> None:
        """Make everything launched from now on run after what was launched inside `copying`."""

    def trim(self) -> None:
        """Give memory that is cached for reuse back to the device."""

    def make_room(self, num_bytes: int) -> bool:
        """Keep this much memory cached for reuse until the next `trim`. False: too little is free."""

    def peak_bytes(self) -> int:
        """How many bytes more than now tensors have taken at their peak since the last call."""

    def free_bytes(self) -> int: ...
    def memory_info(self, pid: int | None = None) -> MemoryInfo:
        """Memory now, and what process `pid` holds; None: this one. ProcessLookupError: no such process."""

    def virtual_memory(self) -> VirtualMemory:
        """The source of addresses and physical memory of arenas on this device."""

    def host_pinning(self) -> CudaHostPinning | None:
        """Pins host memory, for fast copies; None where copies need no pinning."""


class CpuDevice:
    """The host as a device. Launched work runs at once; memory is the machine's, or the control group's."""

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
        """Memory that is available without swapping."""
        return read_host_memory().available_bytes

    def memory_info(self, pid: int | None = None) -> MemoryInfo:
        return host_memory_info(pid)

    def virtual_memory(self) -> HostVirtualMemory:
        return self._virtual_memory

    def host_pinning(self) -> None: ...


def open_device(name: str) -> Device:
    """Open a device by torch's name for it ("cpu", "cuda:1"). ConfigurationError: there is none."""
    if name == "cpu":
        return CpuDevice()
    match = re.fullmatch(r"cuda(?::(\d+))?", name)
    if match is None:
        raise ConfigurationError(f"device: expected cpu, cuda or cuda:<index>, got {name!r}")
    from ebbtide.srt.device.cuda import CudaDevice  # needs packages that only GPU machines have

    return CudaDevice(int(match[1] or 0))


def host_memory_info(pid: int | None = None) -> MemoryInfo:
    """Host memory now; a process holds its proportional set size (Pss): a page shared by n counts 1/n.

    Pages of files, such as libraries, do not count: their share changes whenever another process starts or
    ends.

    ProcessLookupError: there is no such process. PermissionError: it belongs to another user.
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
    # Older kernels report only the sum, without the share of files.
    return (kib["Pss:"] - kib.get("Pss_File:", 0)) * 1024


def process_bytes(uuid: str, nvml: Any = None) -> dict[int, int]:
    """Device memory in bytes of every process that computes on the device, by process id.

    `uuid` is without "GPU-". The ids are of the driver's namespace, which may differ from a container's.
    Empty if the package nvidia-ml-py is missing or NVML does not answer.
    """

    def by_process(library: Any, device: Any) -> dict[int, int]:
        processes = library.nvmlDeviceGetComputeRunningProcesses(device)
        return {one.pid: one.usedGpuMemory for one in processes if one.usedGpuMemory is not None}

    return _asked(uuid, nvml, by_process) or {}


def device_memory_bytes(uuid: str, nvml: Any = None) -> tuple[int, int] | None:
    """The device's total and free bytes; None if pynvml is missing or NVML does not answer."""

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
