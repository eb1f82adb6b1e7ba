"""What the CUDA driver takes to give up and take the memory of a KV cache, and to open a trainer's memory.

- `release`: so many GiB in chunks of each size, given up in several orders: unmapped in one call and then
  released one by one; released first, and then unmapped; released by several threads; the range unmapped in
  parts by several threads. Behind each step, how many GiB of it the device has again.
- `open`: another process allocates the tensors of Llama-3.1-8B by torch, and this one opens each allocation
  by CUDA IPC and closes it again: with nothing else running, and while kernels of this process copy 16 GB.
  What one allocation of all the bytes takes is beside it.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import torch
from common import write_result
from gpu_common import SHAPES, checkpoint_shapes
from gpu_machine import GIB
from gpu_occupation import DriverProbe

MIB = 1 << 20
SIZES = {"128_mib": 128 * MIB, "1_gib": GIB, "4_gib": 4 * GIB, "all": None}
THREADS = 4


def ms_of(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return round((time.perf_counter() - began) * 1e3, 3)


class Releases:
    """Ways to give up a range of so many bytes, in chunks."""

    def __init__(self, probe: DriverProbe, num_bytes: int, chunk_bytes: int) -> None:
        self._probe = probe
        self._count = num_bytes // chunk_bytes
        self._chunk_bytes, self._num_bytes = chunk_bytes, self._count * chunk_bytes
        context = probe.call("cuCtxGetCurrent")
        self._pool = ThreadPoolExecutor(THREADS, initializer=lambda: probe.call("cuCtxSetCurrent", context))

    def run(self) -> dict[str, dict[str, float]]:
        ways = {
            "unmap_then_release": [self._unmap, self._release],
            "release_then_unmap": [self._release, self._unmap],
            "unmap_then_release_by_threads": [self._unmap, self._release_by_threads],
            "unmap_by_threads_then_release": [self._unmap_by_threads, self._release],
        }
        return {name: self._given_up(steps) for name, steps in ways.items()}

    def _given_up(self, steps: Sequence[Callable[[int, list[Any]], None]]) -> dict[str, float]:
        times: dict[str, float] = {}
        address = int(self._probe.call("cuMemAddressReserve", self._num_bytes, 0, 0, 0))
        handles: list[Any] = []
        times["take"] = ms_of(lambda: handles.extend(self._take(address)))
        free_bytes = torch.cuda.mem_get_info()[0]
        for number, step in enumerate(steps):
            times[step.__name__.strip("_")] = ms_of(lambda step=step: step(address, handles))  # type: ignore[misc]
            times[f"free_after_step_{number}"] = (torch.cuda.mem_get_info()[0] - free_bytes) / GIB
        self._probe.call("cuMemAddressFree", address, self._num_bytes)
        return times

    def _take(self, address: int) -> list[Any]:
        handles = []
        for index in range(self._count):
            handle = self._probe.call("cuMemCreate", self._chunk_bytes, self._probe.properties, 0)
            self._probe.call("cuMemMap", address + index * self._chunk_bytes, self._chunk_bytes, 0, handle, 0)
            handles.append(handle)
        self._probe.call("cuMemSetAccess", address, self._num_bytes, [self._probe.access], 1)
        return handles

    def _unmap(self, address: int, handles: list[Any]) -> None:
        self._probe.call("cuMemUnmap", address, self._num_bytes)

    def _release(self, address: int, handles: list[Any]) -> None:
        for handle in handles:
            self._probe.call("cuMemRelease", handle)

    def _release_by_threads(self, address: int, handles: list[Any]) -> None:
        parts = [handles[number::THREADS] for number in range(THREADS)]
        list(self._pool.map(lambda part: self._release(address, part), parts))

    def _unmap_by_threads(self, address: int, handles: list[Any]) -> None:
        each = -(-self._count // THREADS)
        parts = [range(first, min(first + each, self._count)) for first in range(0, self._count, each)]

        def unmap(part: range) -> None:
            begin = address + part.start * self._chunk_bytes
            self._probe.call("cuMemUnmap", begin, len(part) * self._chunk_bytes)

        list(self._pool.map(unmap, parts))


def lend(pipe: Connection) -> None:
    """The other process: handles of the allocations of the tensors, and of one of all the bytes."""
    from ebbtide.trainer.lending import driver

    tensors = [
        torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        for shape in checkpoint_shapes(SHAPES["llama8b"]).values()
    ]
    ranges = dict(driver().range_of(tensor.data_ptr()) for tensor in tensors)
    pipe.send([(num_bytes, driver().handle_of(begin)) for begin, num_bytes in ranges.items()])
    pipe.recv()
    del tensors
    torch.cuda.empty_cache()
    whole = torch.empty(sum(ranges.values()), dtype=torch.uint8, device="cuda")
    pipe.send([(whole.nbytes, driver().handle_of(whole.data_ptr()))])
    pipe.recv()


def measure_open(runs: int) -> dict[str, Any]:
    from cuda.bindings import driver

    flags = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    source = torch.ones(16 * 10**9 // 8, dtype=torch.int64, device="cuda")
    target = torch.empty_like(source)
    stream = torch.cuda.Stream()
    results: dict[str, Any] = {}
    pipe, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=lend, args=(theirs,), daemon=True)
    process.start()

    def opened(handle: bytes) -> int:
        made = driver.CUipcMemHandle()
        ctypes.memmove(made.getPtr(), handle, len(handle))
        status, address = driver.cuIpcOpenMemHandle(made, flags)
        assert status == driver.CUresult.CUDA_SUCCESS, status
        return int(address)

    def one_run(handles: list[tuple[int, bytes]], *, is_busy: bool) -> dict[str, Any]:
        torch.cuda.synchronize()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if is_busy:
            with torch.cuda.stream(stream):
                began.record(stream)
                for into, out_of in zip(target.chunk(8), source.chunk(8), strict=True):
                    into.copy_(out_of)
                ended.record(stream)
        addresses: list[int] = []
        each = [ms_of(lambda handle=handle: addresses.append(opened(handle))) for _, handle in handles]  # type: ignore[misc]
        is_still_busy = is_busy and not ended.query()
        torch.cuda.synchronize()
        copy_ms = began.elapsed_time(ended) if is_busy else None
        close = ms_of(lambda: [driver.cuIpcCloseMemHandle(address) for address in addresses])
        small = [ms for ms, (num_bytes, _) in zip(each, handles, strict=True) if num_bytes <= 32 * MIB]
        large = [ms for ms, (num_bytes, _) in zip(each, handles, strict=True) if num_bytes > 32 * MIB]
        return {
            "open": round(sum(each), 3),
            "close": close,
            "small": (len(small), round(sum(small), 3)),
            "large": (len(large), round(sum(large), 3)),
            "slowest": sorted(each)[-3:],
            "copy": copy_ms,
            "copy_outlasts": is_still_busy,
        }

    for name in ("tensors", "one_allocation"):
        handles = pipe.recv()
        for is_busy in (False, True):
            rows = [one_run(handles, is_busy=is_busy) for _ in range(runs + 1)][1:]
            results[f"{name}{'_busy' if is_busy else ''}"] = rows
            print(name, len(handles), "busy" if is_busy else "idle", rows[-1], flush=True)
        pipe.send(None)
    process.join(20)
    return results


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=int, default=99)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args(argv)
    results: dict[str, Any] = {"gib": args.gib, "release": {}}
    probe = DriverProbe()
    for name, size in SIZES.items():
        releases = Releases(probe, args.gib * GIB, size or args.gib * GIB)
        rows = [releases.run() for _ in range(args.runs)]
        results["release"][name] = rows
        for way, times in rows[-1].items():
            print(name, way, {step: round(ms, 2) for step, ms in times.items()}, flush=True)
        write_result("gpu_driver_calls", results)
    results["open"] = measure_open(args.runs)
    write_result("gpu_driver_calls", results)


if __name__ == "__main__":
    main()
