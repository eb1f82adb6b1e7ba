"""What the host's memory is, and how much of it a process holds. Needs no torch: the API process asks."""

from __future__ import annotations

from pathlib import Path

from ebbtide.srt.device.base import MemoryInfo
from ebbtide.srt.memory_saver.virtual_memory.host_memory import read_host_memory


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
