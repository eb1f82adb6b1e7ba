"""The CPU and its memory."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from ebbtide.srt.device.base import MemoryInfo
from ebbtide.srt.memory_saver.virtual_memory.host import HostVirtualMemory
from ebbtide.srt.memory_saver.virtual_memory.host_memory import read_host_memory


class CpuDevice:
    """The host as a device: to launch is to run, and its memory is the machine's or the control group's."""

    name = "cpu"
    uuid = None

    def __init__(self) -> None:
        self._virtual_memory = HostVirtualMemory()

    def synchronize(self) -> None:
        """Return: on a CPU a call has run when it returns."""

    def copying(self) -> AbstractContextManager[None]:
        """Copies run where they are launched."""
        return nullcontext()

    def copies_done(self) -> bool:
        return True

    def trim(self) -> None:
        """Nothing is kept for reuse."""

    def free_bytes(self) -> int:
        """What could be had without swapping."""
        return read_host_memory().available_bytes

    def memory_info(self, pid: int | None = None) -> MemoryInfo:
        """Memory now; what a process holds is its proportional set size (Pss): pages shared by n count 1/n.

        Raises:
            ProcessLookupError: there is no such process.
            PermissionError: the process is another user's.
        """
        host = read_host_memory()
        return MemoryInfo(host.total_bytes, host.available_bytes, _pss_bytes(pid))

    def virtual_memory(self) -> HostVirtualMemory:
        return self._virtual_memory

    def host_pinning(self) -> None:
        """All memory is the host's own."""


def _pss_bytes(pid: int | None) -> int:
    path = Path("/proc", "self" if pid is None else str(pid), "smaps_rollup")
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        raise ProcessLookupError(f"there is no process {pid}") from None
    [pss_kib] = [int(line.split()[1]) for line in lines if line.startswith("Pss:")]
    return pss_kib * 1024
