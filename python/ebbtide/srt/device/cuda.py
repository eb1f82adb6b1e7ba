"""A CUDA device: its streams, its memory, and which processes hold it."""

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

# Torch serves tensors of up to 1 MiB from a pool of their own, so room for these is made separately.
SMALL_PIECES: Final = [1 << 20] * 16


class CudaDevice:
    """One CUDA device. The constructor makes it torch's current device in this thread.

    `index`: as torch counts. ConfigurationError: torch sees no such device, or cuda-bindings is missing.
    """

    def __init__(self, index: int) -> None:
        num_devices = _cuda.device_count()
        if not 0 <= index < num_devices:
            raise ConfigurationError(f"device=cuda:{index}: torch sees {num_devices} CUDA devices")
        _cuda.set_device(index)
        _cuda.synchronize(index)  # creates the CUDA context now, not in some later call
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
        """Run what is launched inside on a separate stream.

        Tensors that it reads must live until `copies_done`: torch's allocator does not know of this stream,
        and hands the memory of a dropped tensor to the next one that asks.
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
            self.trim()  # so that cached pieces can become part of one large block
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
        """Memory now. A process holds what NVML reports, which includes its CUDA context and code.

        If NVML does not know this process's id, as in some containers, the figure is the memory of its arenas
        and torch's allocator, a lower bound. EngineError: another process was asked for in that case.
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
        """What torch's allocator holds. Private pools do not count, since they may be in arenas."""
        return sum(
            segment["total_size"]
            for segment in _cuda.memory_snapshot()
            if segment["device"] == self._index and tuple(segment["segment_pool_id"]) == (0, 0)
        )
