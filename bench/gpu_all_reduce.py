"""The sum of a tensor over the GPUs of one host: by NCCL, and by the kernels that push to peer memory.

Every figure is that of a CUDA graph in which calls follow one another, as in a captured decode step: the
median over replays of the time of one call, on the slowest rank. `add` is the sum added to another tensor:
with NCCL in a kernel of its own. The sums are checked against each other.

    python bench/gpu_all_reduce.py [--ranks 2]
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from common import write_result
from torch import Tensor

from ebbtide.srt.config import ParallelConfig
from ebbtide.srt.distributed.parallel_group import TorchGroup, join_parallel_group

KIB, MIB = 1 << 10, 1 << 20
SIZES = (
    *(8 * KIB, 16 * KIB, 32 * KIB, 64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB),
    *(1 * MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB, 64 * MIB),
)
TINY_SIZES = (8 * KIB, 64 * KIB)
NUM_CALLS, NUM_WARM_UPS, NUM_RUNS = 32, 3, 15
JOIN_S = 120.0
PATIENCE_S = 300.0

Sum = Callable[[Tensor, Tensor], None]


def methods(nccl: TorchGroup, quick: TorchGroup, num_bytes: int) -> dict[str, Sum]:
    """What can sum a message of this size, by name."""
    backend = "nccl" if nccl.peers is None and quick.peers is not None else "backend"

    def add_by_backend(x: Tensor, onto: Tensor) -> None:
        onto += nccl.all_reduce_(x)

    found: dict[str, Sum] = {
        backend: lambda x, onto: _ignore(nccl.all_reduce_(x)),
        f"{backend}_add": add_by_backend,
    }
    if (peers := quick.peers) is not None:
        if num_bytes <= 256 * KIB:
            found["words"] = lambda x, onto: _ignore(peers.words_(x))
            found["words_add"] = lambda x, onto: _ignore(peers.words_(x, onto))
        found["one_shot"] = lambda x, onto: _ignore(peers.one_shot_(x))
        found["one_shot_add"] = lambda x, onto: _ignore(peers.one_shot_(x, onto))
        found["two_shot"] = lambda x, onto: _ignore(peers.two_shot_(x))
        found["two_shot_add"] = lambda x, onto: _ignore(peers.two_shot_(x, onto))
    return found


def _ignore(_: Tensor) -> None:
    """The sum is in place."""


def measure(
    rank: int, args: argparse.Namespace, folder: Path, answers: multiprocessing.Queue[tuple[int, Any]]
) -> None:
    """What one rank sees: rows of microseconds per call, by method."""
    device = torch.device("cpu" if args.device == "cpu" else f"cuda:{rank}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    parallel = ParallelConfig(tp_size=args.ranks, tp_rank=rank)
    slow, quick = (
        join_parallel_group(parallel, f"file://{folder}/{name}", device, JOIN_S, uses_peer_memory=peers)
        for name, peers in (("backend", False), ("peers", True))
    )
    assert isinstance(slow, TorchGroup)
    assert isinstance(quick, TorchGroup)
    rows = []
    for num_bytes in TINY_SIZES if args.tiny else SIZES:
        count = num_bytes // 2
        found = methods(slow, quick, num_bytes)
        check(found, rank, args.ranks, count, device)
        row: dict[str, Any] = {"num_bytes": num_bytes}
        for name, add in found.items():
            row[f"{name}_us"] = call_us(add, count, device, NUM_CALLS if not args.tiny else 2)
        rows.append(row)
        if rank == 0:
            print(" ".join(f"{key}={_text(value)}" for key, value in row.items()), flush=True)
    answers.put((rank, {"rows": rows, "has_peer_memory": quick.peers is not None}))
    # Who leaves first would end the others' calls.
    quick.smallest(0)
    for group in (quick, slow):
        group.close()


def check(found: dict[str, Sum], rank: int, size: int, count: int, device: torch.device) -> None:
    """Small whole numbers, whose sums bfloat16 holds: every method gives the same ones."""
    numbers = torch.arange(count, device=device) % 13
    total = (numbers * size + sum(range(size))).to(torch.bfloat16)
    for name, add in found.items():
        x, onto = (numbers + rank).to(torch.bfloat16), torch.ones_like(total)
        add(x, onto)
        is_right = torch.equal(onto, total + 1) if name.endswith("_add") else torch.equal(x, total)
        if not is_right:
            raise RuntimeError(f"{name}: wrong sum of {count} numbers")


def call_us(add: Sum, count: int, device: torch.device, num_calls: int) -> list[float]:
    """Microseconds of one call, in each run."""
    x, onto = (torch.zeros(count, dtype=torch.bfloat16, device=device) for _ in range(2))

    def calls() -> None:
        for _ in range(num_calls):
            add(x, onto)

    if device.type == "cpu":
        started = time.perf_counter()
        calls()
        return [(time.perf_counter() - started) / num_calls * 1e6]
    with torch.cuda.stream(torch.cuda.Stream()):
        add(x, onto)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        calls()
        graph.capture_end()
        return [_replay_us(graph) / num_calls for _ in range(NUM_WARM_UPS + NUM_RUNS)][NUM_WARM_UPS:]


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def merged(ranks: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row for each size: of each method the median on the slowest rank, and all its runs."""
    rows = []
    for same_size in zip(*ranks, strict=True):
        row: dict[str, Any] = {"num_bytes": same_size[0]["num_bytes"], "runs": {}}
        for key in same_size[0].keys() - {"num_bytes"}:
            slowest = max((each[key] for each in same_size), key=statistics.median)
            row[key] = round(statistics.median(slowest), 2)
            row["runs"][key] = [round(run, 2) for run in slowest]
        rows.append(row)
    return rows


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    names = sorted({key for row in rows for key in row} - {"num_bytes", "runs"})
    print("".join(["     KiB", *(f"{name:>18s}" for name in names)]))
    for row in rows:
        cells = [f"{row[name]:18.2f}" if name in row else f"{'':18s}" for name in names]
        print("".join([f"{row['num_bytes'] // KIB:8d}", *cells]))


def _text(value: Any) -> str:
    return f"{statistics.median(value):.1f}" if isinstance(value, list) else str(value)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="two sizes: checks the script, measures nothing")
    parser.add_argument("--ranks", type=int, default=2, help="GPUs")
    args = parser.parse_args(argv)
    context = multiprocessing.get_context("spawn")
    answers: multiprocessing.Queue[tuple[int, Any]] = context.Queue()
    with tempfile.TemporaryDirectory(prefix="eb-") as folder:
        processes = [
            context.Process(target=measure, args=(rank, args, Path(folder), answers), daemon=True)
            for rank in range(args.ranks)
        ]
        for process in processes:
            process.start()
        by_rank = dict(answers.get(timeout=PATIENCE_S) for _ in processes)
        for process in processes:
            process.join(JOIN_S)
    rows = merged([by_rank[rank]["rows"] for rank in range(args.ranks)])
    print_table(rows)
    if args.tiny or args.device != "cuda":
        print("not written: this was a check of the script")
        return
    results = {"ranks": args.ranks, "has_peer_memory": by_rank[0]["has_peer_memory"], "sizes": rows}
    label = "" if args.ranks == 2 else f"_tp{args.ranks}"
    print(f"written to {write_result(f'gpu_all_reduce{label}', results)}", flush=True)


if __name__ == "__main__":
    main()
