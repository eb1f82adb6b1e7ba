"""A CUDA device: its streams, its memory, and who holds it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from ebbtide.srt.device import MemoryInfo, process_bytes
from ebbtide.srt.errors import ConfigurationError, EngineError
from ebbtide.srt.memory_saver.virtual_memory.cuda import CudaHostPinning, CudaVirtualMemory

_cuda: Any = torch.cuda  # not all of it has types

# Of the room for small tensors, which torch keeps apart: 1 MiB is the largest of them.
SMALL_PIECES: Final = [1 << 20] * 16


class CudaDevice:
    """One CUDA device; making it makes the device torch's current one in this thread. `index`: as torch
    counts.

    ConfigurationError: torch sees no such device, or the package cuda-bindings is missing.
    """

    def __init__(self, index: int) -> None:
        num_devices = _cuda.device_count()
        if not 0 <= index < num_devices:
            raise ConfigurationError(f"device=cuda:{index}: torch sees {num_devices} CUDA devices")
        _cuda.set_device(index)
        _cuda.synchronize(index)  # whatever comes first makes the context: let it be this
        self._index = index
        self._copy_stream = _cuda.Stream(index)
        self._copied = _cuda.Event()
        self._room_bytes = 0
        self._virtual_memory = CudaVirtualMemory(
            index, free_bytes=self.free_bytes, synchronize=self.synchronize, trim=self.trim
        )

    @property
    def name(self) -> str:
        return f"cuda:{self._index}"

    @property
    def uuid(self) -> str:
        return str(_cuda.get_device_properties(self._index).uuid)

    def synchronize(self) -> None:
        _cuda.synchronize(self._index)

    @contextmanager
    def copying(self, *, beside: bool = False) -> Iterator[None]:
        """Send work launched inside to a stream of its own.

        What it reads must live until `copies_done`: a tensor that was made outside, on another stream, would
        be given to the next who asks as soon as it is dropped.
        """
        if not beside:
            self._copy_stream.wait_stream(_cuda.current_stream(self._index))
        try:
            with _cuda.stream(self._copy_stream):
                yield
        finally:
            self._copied.record(self._copy_stream)

    def copies_done(self) -> bool:
        is_done: bool = self._copied.query()
        return is_done

    def follow_copies(self) -> None:
        _cuda.current_stream(self._index).wait_event(self._copied)

    def trim(self) -> None:
        self._room_bytes = 0
        _cuda.empty_cache()

    def make_room(self, num_bytes: int) -> bool:
        if num_bytes > self._room_bytes:
            self.trim()  # What is kept in pieces becomes part of it.
            sizes = (num_bytes, *SMALL_PIECES)
            try:
                room = [torch.empty(size, dtype=torch.uint8, device=self.name) for size in sizes]
            except torch.OutOfMemoryError:
                return False
            del room
            self._room_bytes = num_bytes
        return True

    def peak_bytes(self) -> int:
        peak_bytes: int = _cuda.max_memory_allocated(self._index) - _cuda.memory_allocated(self._index)
        _cuda.reset_peak_memory_stats(self._index)
        return peak_bytes

    def free_bytes(self) -> int:
        free_bytes: int = _cuda.mem_get_info(self._index)[0]
        return free_bytes

    def memory_info(self, pid: int | None = None) -> MemoryInfo:
        """Memory now; what a process holds is NVML's figure, which has the context and the code in it.

        Where NVML does not know this process by its id, as in some containers, it holds at least what its
        arenas and torch's allocator have. EngineError: another process, and NVML counts in other ids.
        """
        free, total = _cuda.mem_get_info(self._index)
        return MemoryInfo(total, free, self._process_bytes(pid))

    def virtual_memory(self) -> CudaVirtualMemory:
        return self._virtual_memory

    def host_pinning(self) -> CudaHostPinning:
        return CudaHostPinning(self._index, self.synchronize)

    def _process_bytes(self, pid: int | None) -> int:
        ours = os.getpid()
        if pid is None:
            pid = ours
        if not Path("/proc", str(pid)).exists():
            raise ProcessLookupError(f"there is no process {pid}")
        held_bytes = process_bytes(self.uuid)
        if ours in held_bytes:
            return held_bytes.get(pid, 0)
        if pid != ours:
            raise EngineError(
                f"what process {pid} holds of {self.name} is not known: NVML does not see the processes of "
                "this container"
            )
        return self._virtual_memory.held_bytes + self._cached_bytes()

    def _cached_bytes(self) -> int:
        """What torch's allocator has from the device. Pools of their own may lie in arenas: not counted."""
        return sum(
            segment["total_size"]
            for segment in _cuda.memory_snapshot()
            if segment["device"] == self._index and tuple(segment["segment_pool_id"]) == (0, 0)
        )
