"""Measures release and resume of 16 GB of weights and 64 GiB of KV, also with a backup of the weights.

A value is the median of three cycles, in milliseconds from call to reply of `Engine`; `duration_ms`, the time
in the scheduler, is beside it. "Clean pages": resumed 4 s after the release, when the driver has scrubbed the
freed memory; meanwhile matrix products keep the GPU busy, as a trainer does. "Just freed": resumed at once.
"Idle": resumed after 4 s without any work on the GPU, which then needs time to wake up.

The limit is the time of the driver's calls for the same bytes in chunks of 1 GiB: cuMemUnmap and cuMemRelease
for a release; cuMemCreate, cuMemMap and cuMemSetAccess for a resume. It is measured in this process under the
same conditions when the engine has ended, with as much free memory. With a backup, the time of a copy at the
rate of pinned memory is added.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from gpu_common import GIB, Machine, Report, engine_args, model_folder, parse, parser_of, synchronize, wall_ms

from ebbtide import Engine

KV_BYTES = 64 * GIB
CHUNK_BYTES = GIB
SCRUB_S = 4.0
MODEL = "llama8b"
TAGS = ("weights", "kv_cache")


def train(device: str, seconds: float) -> None:
    """Keep the device busy for this many seconds."""
    left = torch.randn(4096, 4096, device=device)
    product = torch.empty_like(left)
    until_s = time.perf_counter() + seconds
    while time.perf_counter() < until_s:
        for _ in range(10):
            torch.mm(left, left, out=product)
        synchronize(device)


class DriverProbe:
    """Measures the driver's own time to free and allocate memory in chunks."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self._driver: Any = driver
        torch.zeros(1, device="cuda")  # Makes the context current in this thread.
        prop = driver.CUmemAllocationProp()
        prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = torch.cuda.current_device()
        self.properties = prop
        access = driver.CUmemAccessDesc()
        access.location = prop.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self.access = access

    def call(self, name: str, *arguments: Any) -> Any:
        status, *values = getattr(self._driver, name)(*arguments)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{name}: {status}")
        return values[0] if values else None

    @contextmanager
    def leaving(self, num_bytes: int) -> Iterator[None]:
        """Allocate all of the device's memory in chunks, except `num_bytes` and less than a chunk more.

        With more free memory, the driver would return clean pages instead of scrubbing those just freed.
        """
        num_held = (torch.cuda.mem_get_info()[0] - num_bytes) // CHUNK_BYTES
        handles = [self.call("cuMemCreate", CHUNK_BYTES, self.properties, 0) for _ in range(num_held)]
        try:
            yield
        finally:
            for handle in handles:
                self.call("cuMemRelease", handle)

    def measure(self, num_bytes: int, *, waits: bool = True) -> dict[str, float]:
        """Milliseconds to release, and to resume just freed pages, and clean ones on a busy and an idle GPU.

        Args:
            waits: False: only release, and resume just freed pages.
        """
        num_chunks = -(-num_bytes // CHUNK_BYTES)
        address = int(self.call("cuMemAddressReserve", num_chunks * CHUNK_BYTES, 0, 0, 0))
        try:
            handles = self._take(address, num_chunks)
            _, release_ms = wall_ms(lambda: self._give(address, handles))
            handles, just_freed_ms = wall_ms(lambda: self._take(address, num_chunks))
            self._give(address, handles)
            times = {"release": release_ms, "resume_just_freed": just_freed_ms}
            if not waits:
                return times
            train("cuda", SCRUB_S)
            handles, clean_ms = wall_ms(lambda: self._take(address, num_chunks))
            self._give(address, handles)
            time.sleep(SCRUB_S)
            handles, idle_ms = wall_ms(lambda: self._take(address, num_chunks))
            self._give(address, handles)
        finally:
            self.call("cuMemAddressFree", address, num_chunks * CHUNK_BYTES)
        train("cuda", SCRUB_S)
        return times | {"resume": clean_ms, "resume_idle": idle_ms}

    def _take(self, address: int, num_chunks: int) -> list[Any]:
        handles = []
        for index in range(num_chunks):
            handle = self.call("cuMemCreate", CHUNK_BYTES, self.properties, 0)
            self.call("cuMemMap", address + index * CHUNK_BYTES, CHUNK_BYTES, 0, handle, 0)
            handles.append(handle)
        self.call("cuMemSetAccess", address, num_chunks * CHUNK_BYTES, [self.access], 1)
        return handles

    def _give(self, address: int, handles: list[Any]) -> None:
        self.call("cuMemUnmap", address, len(handles) * CHUNK_BYTES)
        for handle in handles:
            self.call("cuMemRelease", handle)


def driver_times(
    args: argparse.Namespace, sizes: dict[str, int], left_bytes: int, report: Report
) -> dict[str, dict[str, float]]:
    """The driver's times by tag and operation, with `left_bytes` free; empty on a CPU."""
    if args.device != "cuda":
        return {}
    try:
        probe, times = DriverProbe(), {}
        for tag, size in sizes.items():
            with probe.leaving(size + left_bytes):
                times[tag] = probe.measure(size)
    except Exception as error:
        report.facts["driver_probe_error"] = f"{type(error).__name__}: {error}"
        return {}
    report.facts["driver_ms"] = times
    return times


def timed(action: Callable[[], dict[str, Any]], tag: str) -> dict[str, float]:
    reply, latency_ms = wall_ms(action)
    moved = reply["freed_bytes"] if "freed_bytes" in reply else reply["mapped_bytes"]
    if not moved[tag]:
        raise RuntimeError(f"no byte of {tag} was moved: {reply}")
    return {"latency_ms": latency_ms, "duration_ms": reply["duration_ms"], "bytes": moved[tag]}


def release(engine: Engine, tag: str) -> dict[str, float]:
    return timed(lambda: engine.release_memory_occupation([tag]), tag)


def resume(engine: Engine, tag: str) -> dict[str, float]:
    return timed(lambda: engine.resume_memory_occupation([tag]), tag)


def note(
    report: Report, key: str, runs: list[dict[str, float]], limit_ms: float | None, limit_basis: str
) -> None:
    report.add(
        key,
        [run["latency_ms"] for run in runs],
        limit=limit_ms,
        limit_basis=limit_basis,
        duration_ms=statistics.median(run["duration_ms"] for run in runs),
        bytes=runs[0]["bytes"],
        all_runs=runs,
    )


def measure_tags(report: Report, args: argparse.Namespace) -> None:
    kinds = ("release", "resume", "resume_just_freed", "resume_idle")
    keys = [f"{what}.{tag}" for tag in TAGS for what in kinds]
    with report.attempt(*keys), model_folder(args, MODEL) as (shape, folder):
        kv_bytes = (1 << 22) if args.tiny else KV_BYTES
        num_tokens = kv_bytes // shape.kv_bytes_per_token
        weight_bytes = int(shape.decode_weight_bytes(1)) + 2 * shape["vocab_size"] * shape["hidden_size"]
        arguments = engine_args(args, folder, max_total_tokens=num_tokens, max_running_requests=64)
        runs: dict[str, dict[str, list[dict[str, float]]]] = {}
        with Engine(**arguments) as engine:
            left_bytes = engine.memory_occupation()["device"]["free_bytes"]
            for tag in TAGS:
                with report.attempt(*(key for key in keys if key.endswith(tag))):
                    runs[tag] = tag_runs(args, engine, tag)
        sizes = {"weights": weight_bytes, "kv_cache": kv_bytes}
        limits = driver_times(args, sizes, left_bytes, report)
        basis = "the driver's own calls for the same bytes, as much memory left"
        for tag, of_tag in runs.items():
            for what, those in of_tag.items():
                note(report, f"{what}.{tag}", those, limits.get(tag, {}).get(what), basis)


def tag_runs(args: argparse.Namespace, engine: Engine, tag: str) -> dict[str, list[dict[str, float]]]:
    """`args.runs` cycles of each kind, after a first one that does not count."""
    pause_s = 0.0 if args.tiny else SCRUB_S
    release(engine, tag)
    resume(engine, tag)
    waits: dict[str, Callable[[], None]] = {
        "resume_just_freed": lambda: None,
        "resume": lambda: train(args.device, pause_s),
        "resume_idle": lambda: time.sleep(pause_s),
    }
    runs: dict[str, list[dict[str, float]]] = {"release": [], **{what: [] for what in waits}}
    for _ in range(args.runs):
        for what, wait in waits.items():
            runs["release"].append(release(engine, tag))
            wait()
            runs[what].append(resume(engine, tag))
    return runs


def measure_backup(report: Report, args: argparse.Namespace, machine: Machine) -> None:
    keys = ["backup.release_changed", "backup.release_unchanged", "backup.resume"]
    with report.attempt(*keys), model_folder(args, MODEL) as (shape, folder):
        arguments = engine_args(
            args,
            folder,
            max_total_tokens=4096,
            max_running_requests=8,
            enable_weights_cpu_backup=True,
        )
        norm = torch.ones(shape["hidden_size"], dtype=torch.bfloat16)
        with Engine(**arguments) as engine:
            first = release(engine, "weights")
            resume(engine, "weights")
            changed: list[dict[str, Any]] = []
            unchanged: list[dict[str, Any]] = []
            resumed: list[dict[str, Any]] = []
            for number in range(args.runs):
                # One parameter is enough: any change makes the whole backup stale.
                engine.update_weights_from_tensor([("model.norm.weight", norm + number / 8)])
                for releases in (changed, unchanged):
                    releases.append(release(engine, "weights"))
                    train(args.device, 0.0 if args.tiny else SCRUB_S)
                    resumed.append(resume(engine, "weights"))
            report.facts["backup_first_release"] = first
            num_bytes = changed[0]["bytes"]
            to_host_ms = num_bytes / machine.to_host_bytes_per_s * 1e3
            to_device_ms = num_bytes / machine.to_device_bytes_per_s * 1e3
            note(report, "backup.release_changed", changed, to_host_ms, "copy to pinned memory")
            given = report.rows.get("release.weights", {}).get("limit")
            note(report, "backup.release_unchanged", unchanged, given, "the driver's own calls")
            note(report, "backup.resume", resumed, to_device_ms, "copy from pinned memory")


def measure_driver(
    report: Report, args: argparse.Namespace, prefix: str, num_bytes: int, left_bytes: int
) -> None:
    """Measure the driver's times for the bytes of the KV cache. The engine must have ended.

    Args:
        left_bytes: free device memory beside the cache, as when the engine ran.
    """
    if args.device != "cuda":
        return
    probe = DriverProbe()
    with probe.leaving(num_bytes + max(left_bytes, CHUNK_BYTES)):
        runs = [probe.measure(num_bytes, waits=False) for _ in range(args.runs)]
    for row, key, slower in (("release_kv", "release", None), ("resume_kv_all", "resume_just_freed", 1.1)):
        own = [run[key] for run in runs]
        report.add(f"{prefix}driver_{row}", own)
        ours, limit = report.rows.get(prefix + row, {}), statistics.median(own)
        if "value" in ours:
            report.add(
                prefix + row,
                ours["runs"],
                limit=limit,
                limit_basis="the driver's own calls for the same bytes, as much memory left",
                goal_value=None if slower is None else limit * slower,
                all_runs=ours["all_runs"],
            )


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--parts", nargs="+", choices=("tags", "backup"), default=["tags", "backup"])
    args = parse(parser, argv)
    machine = Machine.measure(args.device, tiny=args.tiny)
    report = Report("gpu_occupation", args)
    report.facts["machine"] = machine.runs
    if "tags" in args.parts:
        measure_tags(report, args)
    if "backup" in args.parts:
        measure_backup(report, args, machine)
    report.finish()


if __name__ == "__main__":
    main()
