"""The CPU and its memory."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from ebbtide.srt.device import MemoryInfo, host_memory_info
from ebbtide.srt.memory_saver.virtual_memory import read_host_memory
from ebbtide.srt.memory_saver.virtual_memory.host import HostVirtualMemory


class CpuDevice:
    """The host as a device: to launch is to run, and its memory is the machine's or the control group's."""

    name = "cpu"
    uuid = None

    def __init__(self) -> None:
        self._virtual_memory = HostVirtualMemory()

    def synchronize(self) -> None: ...
    def copying(self, *, beside: bool = False) -> AbstractContextManager[None]:
        return nullcontext()

    def copies_done(self) -> bool:
        return True

    def follow_copies(self) -> None: ...
    def trim(self) -> None: ...
    def free_bytes(self) -> int:
        """What could be had without swapping."""
        return read_host_memory().available_bytes

    def memory_info(self, pid: int | None = None) -> MemoryInfo:
        return host_memory_info(pid)

    def virtual_memory(self) -> HostVirtualMemory:
        return self._virtual_memory

    def host_pinning(self) -> None: ...
