"""What the engine holds: what it reports, and what the operating system says."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from ebbtide.srt.device.cpu import CpuDevice

if TYPE_CHECKING:
    from ebbtide import Engine


@dataclass(frozen=True)
class MemorySample:
    """Memory at one moment.

    Attributes:
        time_s: since the probe was made.
        tag_bytes: resident bytes per memory tag, as `memory_occupation()` reports them.
        parked_bytes: KV in host memory, of requests that wait for room in the cache.
        process_bytes: proportional set size (Pss) of all processes of the engine together.
    """

    time_s: float
    tag_bytes: dict[str, int]
    process_bytes: int
    parked_bytes: int = 0


class MemoryProbe:
    """Measures an engine. Its processes are taken to be all that this one has started so far."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._device = CpuDevice()
        self._pids = [process.pid for process in psutil.Process().children(recursive=True)]
        self._start = time.perf_counter()

    def sample(self) -> MemorySample:
        tags = self._engine.memory_occupation()["tags"]
        return MemorySample(
            time_s=time.perf_counter() - self._start,
            tag_bytes={tag: state["resident_bytes"] for tag, state in tags.items()},
            parked_bytes=tags["kv_cache"]["backup_bytes"],
            process_bytes=sum(self._device.memory_info(pid).process_bytes for pid in self._pids),
        )
