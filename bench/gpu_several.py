"""Measures updates, rollouts and batches of one engine on several GPUs, with default flags.

The measurements are those of gpu_update_default, gpu_rollout and gpu_throughput, but with one start of the
engine for all. The trainer has a rank with all weights on each GPU, and starts before the engine.

- `update`: the rows `tp4_*` of gpu_update_default, from its parts `idle`, `in_place` and `kept`.
- `one_gpu`: the same, but all ranks read the tensors of the trainer's first rank: rows `tp4_one_gpu_*`.
- `batches`: greedy batches of 1, 32 and 256, as in gpu_throughput; also with another `--model`, or in FP8.
- `grpo`: 64 prompts with 8 samples each, as in gpu_rollout.

    python bench/gpu_several.py --tp 4
    python bench/gpu_several.py --tp 2 --dp 2 --parts grpo
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
from gpu_common import Machine, Report, Shape, checkpoint_shapes, engine_args, model_folder, parse, parser_of
from gpu_goals import WORKLOADS
from gpu_rollout import lengths
from gpu_throughput import TINY_WORKLOADS, least_seconds, tokens_per_s
from gpu_trainer_ranks import TrainerRanks
from gpu_update_default import Bench, Measuring
from rollout_calls import RL, Rollouts

from ebbtide import Engine

MODELS = ("llama8b", "qwen32b", "qwen30b-a3b")
PARTS = ("update", "one_gpu", "batches", "grpo")
UPDATES = ("idle", "in_place", "kept")


def measure_updates(report: Report, args: argparse.Namespace, bench: Bench, machine: Machine) -> None:
    prefix = f"default.tp{args.tp}_"
    copy_ms = 2 * bench.ranks.num_bytes / args.tp / machine.copy_bytes_per_s * 1e3
    given = {"model": args.model, "parts": UPDATES, "streams": [64], "runs": args.update_runs}
    those = argparse.Namespace(**vars(args) | given)

    async def measure() -> None:
        if "update" in args.parts:
            await Measuring(report, bench, those, prefix, copy_ms).run()
        if "one_gpu" in args.parts:
            assert isinstance(bench.ranks, TrainerRanks)
            await bench.ranks.lend_from_one()
            await Measuring(report, bench, those, f"{prefix}one_gpu_", copy_ms).run()

    asyncio.run(measure())


def measure_batches(
    report: Report, args: argparse.Namespace, engine: Engine, shape: Shape, machine: Machine
) -> None:
    rng = np.random.default_rng(0)
    workloads = TINY_WORKLOADS if args.tiny else WORKLOADS
    for row, (size, lens) in zip(WORKLOADS, workloads.items(), strict=False):
        kept_as = f"-{args.quantization}" if args.quantization else ""
        key = f"parallel.{args.model}{kept_as}.tp{args.tp}.{row}"
        with report.attempt(key):
            tokens_per_s(engine, rng, shape["vocab_size"], size, lens)
            runs = [tokens_per_s(engine, rng, shape["vocab_size"], size, lens) for _ in range(args.runs)]
            # The limit for FP8 weights is not implemented.
            least_s = None if kept_as else least_seconds(shape, machine, size, *lens)
            report.add(
                key,
                runs,
                best=True,
                limit=None if least_s is None else args.tp * size * lens[1] / least_s,
                limit_basis="that of one GPU times their number: bytes at the copy rate, or operations "
                "at the rate of a matrix product",
            )


def measure_grpo(report: Report, args: argparse.Namespace, engine: Engine, shape: Shape) -> None:
    key = f"parallel.grpo.tp{args.tp}" + (f"dp{args.dp}" if args.dp > 1 else "")
    with report.attempt(key):
        rollouts, lens = Rollouts(engine, shape), lengths(args)
        rollouts.batch(8, (64, 16), RL, return_logprob=True)
        prompt_len = 32 if args.tiny else 512
        runs = [rollouts.grpo(prompt_len, lens) for _ in range(args.runs)]
        report.add(key, runs, output_tokens=int(lens.sum()))


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", choices=MODELS, default="llama8b", help="others: `batches` alone")
    parser.add_argument("--quantization", choices=("fp8",), help="`batches` alone")
    parser.add_argument("--tp", type=int, choices=(1, 2, 4), default=4)
    parser.add_argument("--dp", type=int, choices=(1, 2), default=1, help="replicas: `grpo` alone")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--update-runs", type=int, default=5)
    args = parse(parser, argv)
    if args.dp > 1 and args.parts != ["grpo"]:
        parser.error("--dp: expected --parts grpo")
    if (args.model != "llama8b" or args.quantization) and args.parts != ["batches"]:
        parser.error("--model, --quantization: expected --parts batches")
    begun = time.perf_counter()

    def at(what: str) -> None:
        print(f"{time.perf_counter() - begun:6.1f} s: {what}", flush=True)

    report = Report("gpu_several", args)
    given: dict[str, Any] = {"max_total_tokens": 32_768} if args.tiny else {}
    if args.quantization is not None:
        given["quantization"] = args.quantization
    if args.tiny:
        args.update_runs = 1
    with ExitStack() as held, model_folder(args, args.model) as (shape, folder):
        # In another process, so that this one, which has the engine, takes no memory on the GPU.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            measuring = pool.submit(partial(Machine.measure, tiny=args.tiny), args.device)
            is_updated = bool({"update", "one_gpu"} & {*args.parts})
            if is_updated:
                trainer = held.enter_context(TrainerRanks(checkpoint_shapes(shape), args.device, args.tp))
            machine = measuring.result()
        report.facts["machine"] = machine.runs
        at("the trainer and the machine's rates are there")
        arguments = engine_args(
            args, folder, incremental_streaming_output=True, tp_size=args.tp, dp_size=args.dp, **given
        )
        with Engine(**arguments) as engine:
            at("the engine is there")
            report.facts["memory"] = engine.memory_occupation()
            if is_updated:
                bench = Bench(args, engine, shape)
                bench.ranks = trainer
                with report.attempt(f"default.tp{args.tp}_reply_idle"):
                    measure_updates(report, args, bench, machine)
                at("updates")
            if "batches" in args.parts:
                measure_batches(report, args, engine, shape, machine)
                at("batches")
            if "grpo" in args.parts:
                measure_grpo(report, args, engine, shape)
                at("grpo")
    report.finish()


if __name__ == "__main__":
    main()
