"""What the CUDA driver takes to move memory in chunks between ranges of addresses, and bulk copies beside."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from ebbtide.srt.device.base import Device
from ebbtide.srt.memory_saver.virtual_memory.base import Handle, Reservation, VirtualMemory

_cuda: Any = torch.cuda

MIB, GIB = 1 << 20, 1 << 30
TOTAL_BYTES = 16 * GIB


def measure(
    device: Device, results: dict[str, Any], save: Callable[[], None], runs: int, *, is_tiny: bool
) -> None:
    """Fill in `results`: `chunk_calls` by chunk size, and `copies`."""
    is_cuda = device.uuid is not None
    total_bytes = 64 * MIB if is_tiny else TOTAL_BYTES
    rows: dict[str, Any] = {}
    results["chunk_calls"] = rows
    for chunk_bytes in (4 * MIB, 8 * MIB) if is_tiny else (64 * MIB, 128 * MIB, 256 * MIB):
        for is_busy in (False, True) if is_cuda else (False,):
            name = f"{chunk_bytes // MIB}_mib{'_busy' if is_busy else ''}"
            calls = ChunkCalls(device, total_bytes, chunk_bytes, is_busy=is_busy)
            rows[name] = calls.run(min(runs, 5))
            print(name, {step: times[len(times) // 2] for step, times in rows[name].items()}, flush=True)
            save()
    results["copies"] = copies(device, total_bytes, runs)
    save()


class ChunkCalls:
    """Times, in milliseconds for all chunks together, of each step of moving them; sorted."""

    def __init__(self, device: Device, total_bytes: int, chunk_bytes: int, *, is_busy: bool) -> None:
        self._device = device
        self._vm: VirtualMemory = device.virtual_memory()
        self._chunk_bytes, self._num_chunks = chunk_bytes, total_bytes // chunk_bytes
        self._total_bytes = total_bytes
        self._is_busy = is_busy
        self._times: dict[str, list[float]] = {}
        if is_busy:
            self._matrix = torch.randn((8192, 8192), dtype=torch.bfloat16, device=device.name)

    def run(self, runs: int) -> dict[str, list[float]]:
        here, there = (self._vm.reserve(self._total_bytes) for _ in range(2))
        for _ in range(runs):
            self._round(here, there)
        for at in (here, there):
            self._vm.free_reservation(at)
        return {name: sorted(times) for name, times in self._times.items()}

    def _round(self, here: Reservation, there: Reservation) -> None:
        handles: list[Handle] = []
        self._time("create", lambda: handles.extend(self._create()))
        self._time("map", lambda: self._map(here, handles))
        self._time("access_whole_range", lambda: self._access(here))
        # To another range, chunk by chunk as it is done beside forward passes.
        self._time("unmap_each", lambda: self._unmap_each(here, handles))
        self._time("map_again", lambda: self._map(there, handles))
        self._time("access_each", lambda: self._access_each(there))
        if self._vm.keeps_for_free:
            self._time("unmap_range", lambda: self._vm_unmap(there, self._total_bytes))
            self._time("map_a_third_time", lambda: self._map(here, handles))
            self._time("access_again", lambda: self._access(here))
            self._time("map_alias", lambda: self._map(there, handles))
            self._time("access_alias", lambda: self._access(there))
            self._time("unmap_alias_range", lambda: self._vm_unmap(there, self._total_bytes))
            self._time("move_16_gib", lambda: self._move(here, there, handles))
        self._time("release_mapped", lambda: self._release(handles))
        if self._vm.keeps_for_free:
            self._time("unmap_released_range", lambda: self._vm_unmap(there, self._total_bytes))
        else:
            self._time("unmap_released_each", lambda: self._unmap_each(there, handles))

    def _time(self, name: str, act: Callable[[], None]) -> None:
        self._device.synchronize()
        if self._is_busy:
            for _ in range(20):  # about 28 ms of work, so that a call that waits for the device shows
                torch.mm(self._matrix, self._matrix)
        started = time.perf_counter()
        act()
        self._times.setdefault(name, []).append(round((time.perf_counter() - started) * 1e3, 4))

    def _create(self) -> list[Handle]:
        return [self._vm.create(self._chunk_bytes) for _ in range(self._num_chunks)]

    def _map(self, at: Reservation, handles: list[Handle]) -> None:
        for index, handle in enumerate(handles):
            self._vm.map(at, index * self._chunk_bytes, handle)

    def _access(self, at: Reservation) -> None:
        self._vm.make_accessible(at, 0, self._total_bytes)

    def _access_each(self, at: Reservation) -> None:
        for index in range(self._num_chunks):
            self._vm.make_accessible(at, index * self._chunk_bytes, self._chunk_bytes)

    def _unmap_each(self, at: Reservation, handles: list[Handle]) -> None:
        for index in range(len(handles)):
            self._vm_unmap(at, self._chunk_bytes, index * self._chunk_bytes)

    def _vm_unmap(self, at: Reservation, num_bytes: int, offset: int = 0) -> None:
        self._vm.unmap(at, offset, num_bytes)

    def _move(self, here: Reservation, there: Reservation, handles: list[Handle]) -> None:
        self._vm_unmap(here, self._total_bytes)
        self._map(there, handles)
        self._access(there)

    def _release(self, handles: list[Handle]) -> None:
        for handle in handles:
            self._vm.release(handle)


def copies(device: Device, total_bytes: int, runs: int) -> dict[str, Any]:
    """Device-to-device copies of the same bytes at one boundary, in few pieces and in many."""
    rows: dict[str, Any] = {"bytes": total_bytes}
    source = torch.empty(total_bytes, dtype=torch.uint8, device=device.name)
    target = torch.empty_like(source)
    source.random_()
    for num_pieces in (1, 8, 291, 2910):
        step = -(-total_bytes // num_pieces // 512) * 512
        pairs = list(zip(target.split(step), source.split(step), strict=True))
        times: list[tuple[float, float]] = []
        for _ in range(runs):
            device.synchronize()
            started = time.perf_counter()
            for room, piece in pairs:
                room.copy_(piece)
            launched = time.perf_counter()
            device.synchronize()
            times.append(((launched - started) * 1e3, (time.perf_counter() - started) * 1e3))
        times.sort(key=lambda pair: pair[1])
        launch_ms, whole_ms = times[len(times) // 2]
        rows[f"{num_pieces}_pieces"] = {
            "launch_ms": round(launch_ms, 3),
            "median_ms": round(whole_ms, 3),
            "runs_ms": [round(whole, 3) for _, whole in times],
        }
    print(rows, flush=True)
    return rows
