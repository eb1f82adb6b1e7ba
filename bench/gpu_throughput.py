"""Measures tokens per second of whole calls by shape and batch size, compared with the machine's limits.

Each run is a call of `Engine.generate` with random prompts, new ones in each run so that no prefix is cached,
with greedy sampling and ignored end of sequence. Output tokens count; the time includes the prefill. After a
first call of the same size, the best run counts.

The limit is the sum over all decode steps and the prefill of the longer of two times: to read the necessary
bytes (weights, and the KV of all requests) at the rate of a copy on the device; and to do the operations at
the rate of a large matrix product.

    python bench/gpu_throughput.py --shapes llama8b --only 1 32
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from gpu_common import Machine, Report, Shape, engine_args, model_folder, parse, parser_of
from gpu_goals import WORKLOADS

from ebbtide import Engine

TINY_WORKLOADS = {1: (8, 8), 4: (8, 8)}


def least_seconds(shape: Shape, machine: Machine, batch_size: int, prompt_len: int, output_len: int) -> float:
    """The least possible seconds of a call on this machine."""
    prompt_tokens = batch_size * prompt_len
    seconds = max(
        shape.flops(prompt_tokens, prompt_len / 2, batch_size) / machine.flops,
        shape.decode_weight_bytes(prompt_tokens) / machine.copy_bytes_per_s,
    )
    for context_len in range(prompt_len + 1, prompt_len + output_len):
        num_bytes = shape.decode_weight_bytes(batch_size) + batch_size * shape.kv_bytes(context_len)
        flops = shape.flops(batch_size, context_len, batch_size)
        seconds += max(num_bytes / machine.copy_bytes_per_s, flops / machine.flops)
    return seconds


def tokens_per_s(
    engine: Engine, rng: np.random.Generator, vocab_size: int, batch_size: int, lens: tuple[int, int]
) -> float:
    prompts = rng.integers(0, vocab_size, (batch_size, lens[0])).tolist()
    params = {"temperature": 0.0, "max_new_tokens": lens[1], "ignore_eos": True}
    started = time.perf_counter()
    outputs = engine.generate(input_ids=prompts, sampling_params=params)
    seconds = time.perf_counter() - started
    num_tokens = sum(len(output["output_ids"]) for output in outputs)
    if num_tokens != batch_size * lens[1]:
        raise RuntimeError(f"{num_tokens} tokens came, {batch_size * lens[1]} were asked for")
    return num_tokens / seconds


def measure_shape(report: Report, args: argparse.Namespace, machine: Machine, name: str) -> None:
    workloads = TINY_WORKLOADS if args.tiny else WORKLOADS
    chosen = {size: lens for size, lens in workloads.items() if not args.only or size in args.only}
    largest = max(workloads)
    needed = max(size * (sum(lens) + 64) for size, lens in workloads.items())
    keys = [_key(args, name, size) for size in chosen]
    with report.attempt(*keys), model_folder(args, name) as (shape, folder):
        sizes: dict[str, Any] = {"max_total_tokens": needed, "max_running_requests": largest}
        sizes |= shape.server_args
        sizes["cuda_graph_max_bs"] = largest
        started = time.perf_counter()
        with Engine(**engine_args(args, folder, **sizes)) as engine:
            start_s = time.perf_counter() - started
            report.facts.setdefault("start_s", {})[name] = start_s
            print(f"{name}: started in {start_s:.1f} s", flush=True)
            rng = np.random.default_rng(0)
            for size, lens in chosen.items():
                with report.attempt(_key(args, name, size)):
                    warmup = tokens_per_s(engine, rng, shape["vocab_size"], size, lens)
                    runs = [
                        tokens_per_s(engine, rng, shape["vocab_size"], size, lens) for _ in range(args.runs)
                    ]
                    least_s = least_seconds(shape, machine, size, *lens)
                    report.add(
                        _key(args, name, size),
                        runs,
                        best=True,
                        limit=size * lens[1] / least_s,
                        limit_basis="bytes of weights and KV per step at the copy rate, or operations at the "
                        "rate of a matrix product, whichever takes longer",
                        warmup=warmup,
                        ms_per_step=size * lens[1] / max(runs) / lens[1] * 1e3,
                        decode_weight_bytes=shape.decode_weight_bytes(size),
                        kv_bytes_per_token=shape.kv_bytes_per_token,
                    )


def _key(args: argparse.Namespace, name: str, batch_size: int) -> str:
    # With `--tiny`, its workloads stand for the first rows, in order.
    size = dict(zip(TINY_WORKLOADS, WORKLOADS, strict=False))[batch_size] if args.tiny else batch_size
    return f"throughput.{name}.{size}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", nargs="+", default=["llama8b", "qwen0.6b"])
    parser.add_argument("--only", nargs="+", type=int, default=[], help="batch sizes")
    args = parse(parser, argv)
    machine = Machine.measure(args.device, tiny=args.tiny)
    machine.measure_sustained(args.device, tiny=args.tiny)
    report = Report("gpu_throughput", args)
    report.facts["machine"] = machine.runs
    for name in args.shapes:
        measure_shape(report, args, machine, name)
    report.finish()


if __name__ == "__main__":
    main()
