"""Several GPUs of one host: tokens per second by tensor-parallel size, broadcast updates, acknowledgement.

- throughput: as gpu_throughput.py, for each shape and tensor-parallel size; `efficiency` is tokens per second
  over those of tp=1 times the size, where tp=1 was measured in the same run;
- broadcast: a trainer on the GPU behind those of the engine sends all weights by NCCL, in one request of
  single tensors: bytes over the time from the request to its reply, with the engine idle; then under 64
  streams, in_place, where the longest gap counts as in gpu_update.py. The limit is a copy of 4 GiB from one
  GPU to the other, measured before;
- acknowledge: 64 streams decode; from a pause in mode in_place to its reply, and the continue to its reply.

    python bench/gpu_parallel.py --parts throughput --shapes llama8b --tp 1 2
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_common import Report, Server, Shape, engine_args, model_folder, parse, parser_of, running_server
from gpu_goals import TP_SIZES, WORKLOADS
from gpu_machine import GB, GIB, Machine, synchronize
from gpu_throughput import TINY_WORKLOADS, least_seconds, tokens_per_s
from gpu_trainer import Trainer
from gpu_update import NUM_STREAMS, Bench

from ebbtide import Engine

PARTS = ("throughput", "broadcast", "acknowledge")
GROUP = "bench"
GAP_BEYOND_MS = 5.0
GOAL_OF_COPY = 0.7
NUM_PAUSES = 30


def measure_throughput(report: Report, args: argparse.Namespace, machine: Machine) -> None:
    tokens: dict[tuple[str, int, int], float] = {}
    for name in args.shapes:
        for tp_size in args.tp:
            with report.attempt(*(_key(name, tp_size, size) for size in WORKLOADS)):
                measure_size(report, args, machine, (name, tp_size), tokens)


def measure_size(
    report: Report,
    args: argparse.Namespace,
    machine: Machine,
    which: tuple[str, int],
    tokens: dict[tuple[str, int, int], float],
) -> None:
    """One shape at one tensor-parallel size; notes its tokens per second by batch size in `tokens`."""
    name, tp_size = which
    workloads = dict(zip(WORKLOADS, (TINY_WORKLOADS if args.tiny else WORKLOADS).items(), strict=False))
    largest = max(size for size, _ in workloads.values())
    sizes: dict[str, Any] = {
        "max_total_tokens": max(size * (sum(lens) + 64) for size, lens in workloads.values()),
        "max_running_requests": largest,
        "cuda_graph_max_bs": largest,
        "tp_size": tp_size,
    }
    with model_folder(args, name) as (shape, folder), Engine(**engine_args(args, folder, **sizes)) as engine:
        rng = np.random.default_rng(0)
        for row, (size, lens) in workloads.items():
            tokens_per_s(engine, rng, shape["vocab_size"], size, lens)
            runs = [tokens_per_s(engine, rng, shape["vocab_size"], size, lens) for _ in range(args.runs)]
            tokens[name, tp_size, row] = max(runs)
            alone = tokens.get((name, 1, row))
            report.add(
                _key(name, tp_size, row),
                runs,
                best=True,
                limit=tp_size * size * lens[1] / least_seconds(shape, machine, size, *lens),
                limit_basis="that of one GPU times their number: bytes at the copy rate, or operations at "
                "the rate of a matrix product",
                efficiency=max(runs) / (alone * tp_size) if alone is not None else None,
            )


def _key(name: str, tp_size: int, batch_size: int) -> str:
    return f"parallel.{name}.tp{tp_size}.{batch_size}"


# -------------------------------------------------------------------------------------------------- broadcast


class BroadcastBench(Bench):
    """The streams of gpu_update.py under a broadcast."""

    def __init__(self, args: argparse.Namespace, shape: Shape, server: Server, trainer: Trainer) -> None:
        super().__init__(args, shape, server, trainer)
        names, dtypes, shapes = trainer.headers()
        self._announcement = {"names": names, "dtypes": dtypes, "shapes": shapes, "group_name": GROUP}

    async def join(self, tp_size: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        world_size, backend = tp_size + 1, "nccl" if self._args.device == "cuda" else "gloo"
        joining = asyncio.to_thread(self.trainer.join, GROUP, port, world_size, backend)
        request = self.post(
            "/init_weights_update_group",
            master_address="127.0.0.1",
            master_port=port,
            rank_offset=1,
            world_size=world_size,
            group_name=GROUP,
            backend=backend,
        )
        await asyncio.gather(joining, request)

    async def update(self, **terms: Any) -> dict[str, Any]:
        """One broadcast of everything; returns the reply."""
        request = self.post("/update_weights_from_distributed", **self._announcement, **terms)
        _, reply = await asyncio.gather(asyncio.to_thread(self.trainer.broadcast), request)
        return reply

    async def _prepared(self, kind: str) -> Callable[[], Awaitable[dict[str, Any]]]:
        return lambda: self.update(pause_mode="in_place", flush_cache=False)

    async def seconds(self) -> float:
        started = time.perf_counter()
        await self.update(flush_cache=True)
        return time.perf_counter() - started


def copy_gb_per_s(args: argparse.Namespace) -> list[float]:
    """From the trainer's GPU to the engine's, once in each run."""
    num_bytes = (1 << 20) if args.tiny else 4 * GIB
    there, here = (args.device, args.device) if args.device == "cpu" else ("cuda:1", "cuda:0")
    source = torch.ones(num_bytes, dtype=torch.uint8, device=there)
    target = torch.empty(num_bytes, dtype=torch.uint8, device=here)
    rates = []
    for _ in range(5):
        synchronize(args.device)
        started = time.perf_counter()
        target.copy_(source, non_blocking=True)
        synchronize(args.device)
        rates.append(num_bytes / (time.perf_counter() - started) / GB)
    del source, target
    if args.device != "cpu":
        torch.cuda.empty_cache()
    return rates


def measure_broadcast(report: Report, args: argparse.Namespace) -> None:
    tp_size = args.tp[0]
    copies = copy_gb_per_s(args)
    for name in args.shapes:
        keys = f"parallel.broadcast.{name}", f"parallel.broadcast_gap.{name}"
        with report.attempt(*keys), model_folder(args, name) as (shape, folder):
            device = f"cuda:{tp_size}" if args.device == "cuda" else args.device
            with (
                running_server(server_args(args, folder, tp_size)) as server,
                Trainer(folder, device) as trainer,
            ):
                server.wait_ready()
                seconds, runs = asyncio.run(broadcasts(args, shape, server, trainer, tp_size))
                report.facts.setdefault("server_log_end", {})[name] = server.log[-4000:]
                num_bytes = trainer.num_bytes
            report.add(
                keys[0],
                [num_bytes / run_s / GB for run_s in seconds],
                goal_value=GOAL_OF_COPY * max(copies),
                limit=max(copies),
                limit_basis="a copy of 4 GiB between the two GPUs",
                copies=copies,
                num_bytes=num_bytes,
                tp_size=tp_size,
            )
            normal_ms = statistics.median(run["normal_longest_gap_ms"] for run in runs)
            report.add(
                keys[1],
                [run["longest_gap_ms"] for run in runs],
                goal_value=normal_ms + GAP_BEYOND_MS,
                limit=normal_ms,
                limit_basis="the longest gap of an equally long window before, in the same streams",
                all_runs=runs,
                tp_size=tp_size,
            )


async def broadcasts(
    args: argparse.Namespace, shape: Shape, server: Server, trainer: Trainer, tp_size: int
) -> tuple[list[float], list[dict[str, Any]]]:
    """Seconds of updates of an idle engine, and the runs under streams; one of each before does not count."""
    async with BroadcastBench(args, shape, server, trainer) as bench:
        await bench.join(tp_size)
        await bench.seconds()
        seconds = [await bench.seconds() for _ in range(args.runs)]
        await bench.run("in_place")
        return seconds, [await bench.run("in_place") for _ in range(args.runs)]


# ------------------------------------------------------------------------------------------------ acknowledge


class PauseBench(Bench):
    """Pauses and continues while the streams decode.

    Attributes:
        pause_ms, continue_ms: from each request to its reply.
    """

    def __init__(self, args: argparse.Namespace, shape: Shape, server: Server) -> None:
        super().__init__(args, shape, server, None)
        self.pause_ms: list[float] = []
        self.continue_ms: list[float] = []

    async def _prepared(self, kind: str) -> Callable[[], Awaitable[dict[str, Any]]]:
        return self._pauses

    async def _pauses(self) -> dict[str, Any]:
        for _ in range(NUM_PAUSES):
            self.pause_ms.append(await self._timed("/pause_generation", mode="in_place"))
            self.continue_ms.append(await self._timed("/continue_generation"))
            await asyncio.sleep(0.01)
        return {}

    async def _timed(self, path: str, **body: Any) -> float:
        started = time.perf_counter()
        await self.post(path, **body)
        return (time.perf_counter() - started) * 1e3


def measure_acknowledge(report: Report, args: argparse.Namespace) -> None:
    for tp_size in args.tp:
        key = f"parallel.acknowledge.tp{tp_size}"
        with report.attempt(key), model_folder(args, args.shapes[0]) as (shape, folder):
            with running_server(server_args(args, folder, tp_size)) as server:
                server.wait_ready()
                bench, run = asyncio.run(pauses(args, shape, server))
            report.add(
                key,
                bench.pause_ms,
                limit=run["median_gap_ms"],
                limit_basis="a forward pass: the median gap of the same streams just before",
                continue_ms=bench.continue_ms,
            )


async def pauses(args: argparse.Namespace, shape: Shape, server: Server) -> tuple[PauseBench, dict[str, Any]]:
    async with PauseBench(args, shape, server) as bench:
        return bench, await bench.run("in_place")


def server_args(args: argparse.Namespace, folder: Path, tp_size: int) -> dict[str, Any]:
    return engine_args(
        args,
        folder,
        max_total_tokens=32_768 if args.tiny else NUM_STREAMS * 2048,
        max_running_requests=NUM_STREAMS,
        incremental_streaming_output=True,
        log_level="warning",
        tp_size=tp_size,
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--shapes", nargs="+", choices=tuple(TP_SIZES), default=["llama8b"])
    parser.add_argument("--tp", nargs="+", type=int, default=[1, 2], help="tensor-parallel sizes")
    args = parse(parser, argv)
    report = Report("gpu_parallel", args)
    if "throughput" in args.parts:
        machine = Machine.measure(args.device, tiny=args.tiny)
        report.facts["machine"] = machine.runs
        measure_throughput(report, args, machine)
    if "broadcast" in args.parts:
        measure_broadcast(report, args)
    if "acknowledge" in args.parts:
        measure_acknowledge(report, args)
    report.finish()


if __name__ == "__main__":
    main()
