"""The memory of the host and of GPUs, and how much of it processes hold.

Needs neither torch nor a CUDA context: the API process asks. GPUs are asked through NVML, the library behind
nvidia-smi.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from ebbtide.srt.device import MemoryInfo
from ebbtide.srt.memory_saver.virtual_memory.host_memory import read_host_memory

T = TypeVar("T")


def host_memory_info(pid: int | None = None) -> MemoryInfo:
    """Memory now; what a process holds is its proportional set size (Pss): pages shared by n count 1/n.

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
    [pss_kib] = [int(line.split()[1]) for line in lines if line.startswith("Pss:")]
    return pss_kib * 1024


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
