"""Where a step's time goes: the kernels of a replayed graph, or of a prefill, from torch's profiler.

A few layers of a model's shape stand for all. Of each kernel: all its launches of a step together, how
many there are, and one.

    python bench/gpu_step_profile.py --model llama8b --layers 8 --batch 32 256 512 --prefill 8x1024
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

import numpy as np
import torch
from gpu_common import SHAPES

sys.path.insert(0, str(Path(__file__).parent.parent / "test" / "srt"))

from fixtures.model_runs import RunnerDriver

from ebbtide.srt.model_executor.batch_plan import BatchPlan, LogprobSpec, SampleSpec
from ebbtide.srt.sampling_params import SamplingParams

NUM_STEPS = 4


def plan_of(driver: RunnerDriver, size: int, context_len: int, num_new: int = 1) -> BatchPlan:
    """A step of so many new tokens for each of `size` requests; rows have pages of their own."""
    rows = [driver.runner.page_table.allocate_row() for _ in range(size)]
    for row in rows:
        pages = driver.allocator.allocate(-(-(context_len + num_new + 64) // driver.page_size))
        assert pages is not None
        driver.runner.page_table.write(row, 0, pages)
    params = SamplingParams(temperature=1.0)
    return BatchPlan(
        input_ids_T=np.arange(size * num_new, dtype=np.int64) % 1000 + 7,
        page_rows_R=np.array(rows, dtype=np.int32),
        starts_R=np.full(size, context_len, dtype=np.int32),
        num_new_R=np.full(size, num_new, dtype=np.int32),
        samples_R=np.ones(size, dtype=np.bool_),
        num_outputs_R=np.full(size, 5, dtype=np.int64),
        specs=[SampleSpec(params, seed, frozenset(), [1, 2], [3], LogprobSpec()) for seed in range(size)],
    )


def step_ms(driver: RunnerDriver, plan: BatchPlan) -> float:
    for _ in range(3):
        driver.runner.launch(plan).wait()
    started = time.perf_counter()
    steps = [driver.runner.launch(plan) for _ in range(10)]
    steps[-1].wait()
    return (time.perf_counter() - started) * 100


def kernels(driver: RunnerDriver, plan: BatchPlan) -> dict[str, list[float]]:
    """Microseconds of every launch, by name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(NUM_STEPS):
            driver.runner.launch(plan).wait()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = defaultdict(list)
    for event in profile.events():
        found[event.name].append(float(event.device_time_total))
    return found


def show(driver: RunnerDriver, what: str, plan: BatchPlan) -> None:
    print(f"== {what}: step {step_ms(driver, plan):.3f} ms")
    rows = sorted(kernels(driver, plan).items(), key=lambda row: -sum(row[1]))
    total = sum(sum(times) for _, times in rows) / NUM_STEPS
    print(f"   kernels {total / 1e3:.3f} ms")
    for name, times in rows[:16]:
        per_step = sum(times) / NUM_STEPS
        count = len(times) / NUM_STEPS
        print(
            f"   {per_step:9.1f} us/step {count:5.1f}x {per_step / count:8.2f} us  {name[:100]}", flush=True
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=tuple(SHAPES), default="llama8b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, nargs="+", default=[256], help="requests of decode steps")
    parser.add_argument("--context", type=int, default=640)
    parser.add_argument("--prefill", nargs="*", default=[], metavar="REQUESTSxTOKENS")
    args = parser.parse_args(argv)
    shape = replace(
        SHAPES[args.model],
        config=SHAPES[args.model].config | {"num_hidden_layers": args.layers},
    )
    prompts = [(int(size), int(length)) for size, length in (given.split("x") for given in args.prefill)]
    tokens = sum(args.batch) * (args.context + 80) + sum(n * (length + 80) for n, length in prompts) + 4096
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        driver = RunnerDriver(
            shape.write(Path(folder)),
            max_total_tokens=tokens,
            cuda_graph_bs=args.batch,
            max_running_requests=sum(args.batch) + sum(size for size, _ in prompts),
            chunked_prefill_size=max([8192, *(size * length for size, length in prompts)]),
            load_format="dummy",
            skip_tokenizer_init=True,
            device="cuda",
        )
        for size in args.batch:
            what = f"{args.model} x{args.layers} layers, batch {size}"
            show(driver, what, plan_of(driver, size, args.context))
        for size, length in prompts:
            what = f"{args.model} x{args.layers} layers, prompts {size} x {length}"
            show(driver, what, plan_of(driver, size, 0, length))


if __name__ == "__main__":
    main()
