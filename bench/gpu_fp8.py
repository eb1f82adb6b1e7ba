"""Weights of 8 bits: tokens per second of whole calls, and an update of bf16 weights under 64 streams.

At default flags; random weights, quantised as they are loaded. Throughput is measured as `gpu_throughput`
does, and the update as the rows `*_in_place_64` of `gpu_update_default`: the sender's bf16 tensors lie on the
same card, and are quantised where they land. `--precisions bf16 fp8` measures both, in engines of their own.

    python bench/gpu_fp8.py --models llama8b qwen30b-a3b --parts throughput update
"""

from __future__ import annotations

import asyncio
import time
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import numpy as np
from common import write_result
from gpu_common import Shape, checkpoint_shapes, engine_args, model_folder, parse, parser_of
from gpu_goals import WORKLOADS
from gpu_throughput import TINY_WORKLOADS, tokens_per_s
from gpu_trainer_ranks import TrainerRanks
from gpu_update_default import Bench

from ebbtide import Engine

# By model and batch: tokens per second.
GOALS = {"llama8b": {1: 400, 32: 8_200, 256: 14_500}, "qwen30b-a3b": {}}
UPDATE_GOALS = {"stall_ms": 15.0, "reply_ms": 100.0}
NUM_STREAMS = 64


class Figures:
    """Rows, written as they come: what stops the script takes nothing back."""

    def __init__(self, args: Namespace) -> None:
        self._args = args
        self._rows: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}

    def add(self, **row: Any) -> None:
        self._rows.append(row)
        told = {key: value for key, value in row.items() if key != "all_runs"}
        print("  ".join(f"{key}={value}" for key, value in told.items()), flush=True)
        if not self._args.tiny:
            write_result("gpu_fp8" + self._args.label, {"rows": self._rows, **self.facts})


def throughput(args: Namespace, engine: Engine, shape: Shape, figures: Figures, **what: Any) -> None:
    """Whole calls; the best of the runs counts."""
    rng = np.random.default_rng(0)
    for size, lens in (TINY_WORKLOADS if args.tiny else WORKLOADS).items():
        tokens_per_s(engine, rng, shape["vocab_size"], size, lens)
        runs = [tokens_per_s(engine, rng, shape["vocab_size"], size, lens) for _ in range(args.runs)]
        goal = GOALS[what["model"]].get(size) if what["precision"] == "fp8" else None
        figures.add(**what, batch=size, tok_per_s=round(max(runs), 1), goal=goal, runs=runs)


def update(args: Namespace, engine: Engine, shape: Shape, figures: Figures, **what: Any) -> None:
    """All tensors of the sender's, in_place, with streams that decode."""
    bench = Bench(args, engine, shape)
    updates = {"in_place": lambda: bench.update("in_place", flush=False)}
    with TrainerRanks(checkpoint_shapes(shape), args.device, 1) as bench.ranks:
        sent_bytes = bench.ranks.num_bytes
        runs = asyncio.run(bench.streams.steady(NUM_STREAMS, updates))
    for key, goal in UPDATE_GOALS.items():
        values = [run[key] for run in runs["in_place"]]
        normal = [run["stall_ms"] for run in runs["normal"]]
        figures.add(
            **what,
            update=key,
            median=round(float(np.median(values)), 2),
            least=round(min(values), 2),
            most=round(max(values), 2),
            goal=goal if what["precision"] == "fp8" else None,
            normal_gap_ms=round(float(np.median(normal)), 2),
            sent_bytes=sent_bytes,
            all_runs=runs,
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="+", default=list(GOALS), choices=tuple(GOALS))
    parser.add_argument("--precisions", nargs="+", default=["fp8"], choices=("bf16", "fp8", "w8a8_fp8"))
    parser.add_argument("--parts", nargs="+", default=["throughput", "update"])
    args = parse(parser, argv)
    figures = Figures(args)
    for model in args.models:
        for precision in args.precisions:
            given = {} if precision == "bf16" else {"quantization": precision}
            what = {"model": model, "precision": precision}
            started = time.perf_counter()
            with (
                model_folder(args, model) as (shape, folder),
                Engine(**engine_args(args, folder, incremental_streaming_output=True, **given)) as engine,
            ):
                tags = engine.memory_occupation()["tags"]
                figures.add(
                    **what,
                    start_s=round(time.perf_counter() - started, 1),
                    weight_bytes=tags["weights"]["resident_bytes"],
                )
                if "throughput" in args.parts:
                    throughput(args, engine, shape, figures, **what)
                if "update" in args.parts:
                    update(args, engine, shape, figures, **what)


if __name__ == "__main__":
    main()
