"""Where a step's time goes: the kernels of a replayed graph, or of a prefill, from torch's profiler.

A few layers of a model's shape stand for all. Steps are launched ahead of the device, as the engine does it.
Kernels overlap: of each that time counts in which the device works at it and at none that began earlier, and
nothing is left between kernels and gaps. Of each kernel: all its launches of a step together, how many there
are, and one.

    python bench/gpu_step_profile.py --model llama8b --layers 8 --batch 32 256 512 --prefill 8x1024
    python bench/gpu_step_profile.py --quantization fp8 --kv-cache-dtype fp8_e4m3
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_common import SHAPES

sys.path.insert(0, str(Path(__file__).parent.parent / "test" / "srt"))

from fixtures.model_runs import RunnerDriver

from ebbtide.srt.model_executor.batch_plan import BatchPlan, LogprobSpec, SampleSpec
from ebbtide.srt.sampling_params import SamplingParams

NUM_STEPS = 4


def plan_of(
    driver: RunnerDriver,
    size: int,
    context_len: int,
    num_new: int = 1,
    *,
    asks: bool = False,
    longest: int | None = None,
) -> tuple[BatchPlan, list[int]]:
    """A step of so many new tokens for each of `size` requests, and the pages, which no two of them share.

    Args:
        asks: for the logprobs of all new tokens, which are a prompt.
        longest: the context of the last request, if that is another.
    """
    starts_R = np.full(size, context_len, dtype=np.int32)
    if longest is not None:
        starts_R[-1] = longest
    rows = [driver.runner.page_table.allocate_row() for _ in range(size)]
    held: list[int] = []
    for row, start in zip(rows, starts_R.tolist(), strict=True):
        pages = driver.allocator.allocate(-(-(start + num_new + 64) // driver.page_size))
        assert pages is not None
        driver.runner.page_table.write(row, 0, pages)
        held += pages
    params = SamplingParams(temperature=1.0)
    plan = BatchPlan(
        input_ids_T=np.arange(size * num_new, dtype=np.int64) % 1000 + 7,
        page_rows_R=np.array(rows, dtype=np.int32),
        starts_R=starts_R,
        num_new_R=np.full(size, num_new, dtype=np.int32),
        samples_R=np.ones(size, dtype=np.bool_),
        num_outputs_R=np.full(size, 0 if asks else 5, dtype=np.int64),
        specs=[
            SampleSpec(params, seed, frozenset(), list(range(num_new)), [], LogprobSpec(start=0))
            if asks
            else SampleSpec(params, seed, frozenset(), [1, 2], [3], LogprobSpec())
            for seed in range(size)
        ],
    )
    return plan, held


def step_ms(driver: RunnerDriver, plan: BatchPlan) -> float:
    for _ in range(3):
        driver.runner.launch(plan).wait()
    started = time.perf_counter()
    steps = [driver.runner.launch(plan) for _ in range(10)]
    steps[-1].wait()
    return (time.perf_counter() - started) * 100


def kernels(driver: RunnerDriver, plan: BatchPlan) -> tuple[dict[str, list[float]], float]:
    """Microseconds of every launch, by name, and of the gaps between them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        steps = [driver.runner.launch(plan) for _ in range(NUM_STEPS)]
        steps[-1].wait()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = defaultdict(list)
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    done_us = spans[0][0]
    gaps_us = 0.0
    for begun_us, ended_us, name in spans:
        gaps_us += max(0.0, begun_us - done_us)
        found[name].append(max(0.0, ended_us - max(begun_us, done_us)))
        done_us = max(done_us, ended_us)
    return found, gaps_us


def show(driver: RunnerDriver, what: str, size: int, *plan_sizes: int, max_rows: int, **options: Any) -> None:
    plan, pages = plan_of(driver, size, *plan_sizes, **options)
    print(f"== {what}: step {step_ms(driver, plan):.3f} ms")
    if max_rows:
        found, gaps_us = kernels(driver, plan)
        rows = sorted(found.items(), key=lambda row: -sum(row[1]))
        total = sum(sum(times) for _, times in rows) / NUM_STEPS
        print(f"   kernels {total / 1e3:.3f} ms, gaps {gaps_us / NUM_STEPS / 1e3:.3f} ms")
        for name, times in rows[:max_rows]:
            per_step, count = sum(times) / NUM_STEPS, len(times) / NUM_STEPS
            each = f"{count:5.1f}x {per_step / count:8.2f} us"
            print(f"   {per_step:9.1f} us/step {each}  {name[:100]}", flush=True)
    driver.allocator.free(pages)
    for row in plan.page_rows_R.tolist():
        driver.runner.page_table.free_row(row)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=tuple(SHAPES), default="llama8b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, nargs="+", default=[256], help="requests of decode steps")
    parser.add_argument("--context", type=int, default=640)
    parser.add_argument("--longest", type=int, help="context of one of the requests")
    parser.add_argument("--quantization", choices=("fp8",))
    parser.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "fp8_e4m3"))
    parser.add_argument("--prefill", nargs="*", default=[], metavar="REQUESTSxTOKENS")
    parser.add_argument("--prompt-logprobs", action="store_true", help="of prompts with their logprobs, too")
    parser.add_argument(
        "--kernels", type=int, default=16, help="how many are shown; 0: the step's time alone"
    )
    args = parser.parse_args(argv)
    shape = replace(
        SHAPES[args.model],
        config=SHAPES[args.model].config | {"num_hidden_layers": args.layers},
    )
    prompts = [(int(size), int(length)) for size, length in (given.split("x") for given in args.prefill)]
    longest = args.longest or 0
    sizes = [size * (args.context + 80) + longest for size in args.batch] + [
        n * (length + 80) for n, length in prompts
    ]
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        driver = RunnerDriver(
            shape.write(Path(folder)),
            max_total_tokens=max(sizes) + 4096,
            cuda_graph_bs=args.batch,
            max_running_requests=max([*args.batch, *(size for size, _ in prompts)]),
            chunked_prefill_size=max([8192, *(size * length for size, length in prompts)]),
            load_format="dummy",
            skip_tokenizer_init=True,
            device="cuda",
            quantization=args.quantization,
            kv_cache_dtype=args.kv_cache_dtype,
        )
        for size in args.batch:
            what = f"{args.model} x{args.layers} layers, batch {size}"
            show(driver, what, size, args.context, max_rows=args.kernels)
            if args.longest is not None:
                what += f", one of {args.longest} tokens"
                show(driver, what, size, args.context, max_rows=args.kernels, longest=args.longest)
        for size, length in prompts:
            what = f"{args.model} x{args.layers} layers, prompts {size} x {length}"
            show(driver, what, size, 0, length, max_rows=args.kernels)
            if args.prompt_logprobs:
                show(driver, f"{what}, logprobs", size, 0, length, max_rows=args.kernels, asks=True)


if __name__ == "__main__":
    main()
