"""Tokens per second of rollouts as reinforcement learning makes them, at default flags.

- `grpo_*`: 64 prompts, 8 samples of each, temperature 1 with logprobs. Output lengths are log-normal (median
  245, sigma 0.85, cut at 2,048), the same for every run. Whole calls; output tokens count.
- `ratio_*`: a batch with what samplers and trainers ask for, as a share of the same batch greedy and without
  logprobs. Runs of both alternate.
- `prefill_*`: prompts alone, one token each.
- `decode_*`: decoding with long contexts; the prefill is taken off by a call for one token.
- `gap_*`: gaps between the chunks of streams, all streams together.

Lengths of decode steps are held against the bytes that they must read at the best rate seen for reading:
`read_bytes_per_s`, a sum over 4 GiB.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from gpu_common import SHAPES, TINY, Report, Shape, engine_args, model_folder, parse, parser_of
from gpu_machine import GIB, Machine, synchronize
from gpu_throughput import least_seconds
from numpy.typing import NDArray

from ebbtide import Engine

NUM_PROMPTS, NUM_SAMPLES = 64, 8
MEDIAN_LEN, SIGMA, MAX_LEN = 245, 0.85, 2048
RL: dict[str, Any] = {"temperature": 1.0}
ASKED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "t1": (RL, {}),
    "rl": (RL, {"return_logprob": True}),
    "topp": (RL | {"top_p": 0.95, "top_k": 50}, {"return_logprob": True}),
    "top20": (RL, {"return_logprob": True, "top_logprobs_num": 20}),
    "prompt_logprobs": (RL, {"return_logprob": True, "logprob_start_len": 0}),
    "penalties": (RL | {"frequency_penalty": 0.2, "repetition_penalty": 1.1}, {"return_logprob": True}),
}
"""Sampling parameters and fields of the request, by the name of the row."""
BATCHES = {1: (128, 256), 32: (256, 256), 256: (512, 256)}
PREFILLS = {"16x8192": (16, 8192), "128x1024": (128, 1024), "16x16384": (16, 16_384)}
DECODES = {"64x8k": (64, 8192, 128), "16x32k": (16, 32_768, 128)}
PARTS = ("grpo", "ratios", "prefill", "decode", "gaps")


def measure_reading(device: str, *, tiny: bool) -> list[float]:
    """Bytes per second of a sum over memory that is in no cache."""
    values = torch.ones((1 << 20) if tiny else 4 * GIB // 4, dtype=torch.float32, device=device)
    rates = []
    for _ in range(6):
        synchronize(device)
        started = time.perf_counter()
        for _ in range(3):
            values.sum()
        synchronize(device)
        rates.append(3 * values.nbytes / (time.perf_counter() - started))
    return rates


class Rollouts:
    """Calls of one engine, with prompts that were not seen before."""

    def __init__(self, args: argparse.Namespace, engine: Engine, shape: Shape) -> None:
        self._args = args
        self._engine = engine
        self._vocab_size = shape["vocab_size"]
        self._rng = np.random.default_rng(0)

    def prompts(self, count: int, length: int) -> list[list[int]]:
        prompts: list[list[int]] = self._rng.integers(0, self._vocab_size, (count, length)).tolist()
        return prompts

    def call(
        self, prompts: list[list[int]], lens: Sequence[int], params: dict[str, Any], **fields: Any
    ) -> float:
        """Seconds of a whole call."""
        asked = [params | {"max_new_tokens": int(length), "ignore_eos": True} for length in lens]
        gc.collect()
        started = time.perf_counter()
        outputs = self._engine.generate(input_ids=prompts, sampling_params=asked, **fields)
        seconds = time.perf_counter() - started
        num_tokens = sum(len(output["output_ids"]) for output in outputs)
        if num_tokens != sum(lens):
            raise RuntimeError(f"{num_tokens} tokens came, {sum(lens)} were asked for")
        return seconds

    def grpo(self, prompt_len: int, lens: NDArray[np.int64]) -> float:
        """Tokens per second."""
        num_samples = len(lens) // NUM_PROMPTS
        prompts = [prompt for prompt in self.prompts(NUM_PROMPTS, prompt_len) for _ in range(num_samples)]
        return float(lens.sum() / self.call(prompts, lens.tolist(), RL, return_logprob=True))

    def batch(self, size: int, lens: tuple[int, int], params: dict[str, Any], **fields: Any) -> float:
        """Tokens per second."""
        return size * lens[1] / self.call(self.prompts(size, lens[0]), [lens[1]] * size, params, **fields)

    def prefill(self, size: int, length: int) -> float:
        """Prompt tokens per second."""
        return size * length / self.call(self.prompts(size, length), [1] * size, {"temperature": 0.0})

    def decode(self, size: int, context_len: int, output_len: int) -> float:
        """Tokens per second behind the prefill, whose prompts are cached then."""
        prompts = self.prompts(size, context_len)
        greedy = {"temperature": 0.0}
        self.call(prompts, [1] * size, greedy)
        first = self.call(prompts, [1] * size, greedy)
        return size * (output_len - 1) / (self.call(prompts, [output_len] * size, greedy) - first)

    async def gaps(self, size: int, lens: tuple[int, int]) -> dict[str, float]:
        """Milliseconds between chunks, and until the first one."""

        async def stream(prompt: list[int]) -> list[float]:
            params = RL | {"max_new_tokens": lens[1], "ignore_eos": True}
            times = [time.perf_counter()]
            async for _ in await self._engine.async_generate(
                input_ids=prompt, sampling_params=params, return_logprob=True, stream=True
            ):
                times.append(time.perf_counter())
            return times

        gc.collect()
        gc.disable()
        try:
            all_times = await asyncio.gather(*(stream(prompt) for prompt in self.prompts(size, lens[0])))
        finally:
            gc.enable()
        gaps = [
            (after - before) * 1e3 for times in all_times for before, after in itertools.pairwise(times[1:])
        ]
        return {
            "p50": float(np.percentile(gaps, 50)),
            "p99": float(np.percentile(gaps, 99)),
            "max": max(gaps),
            "first": statistics.median((times[1] - times[0]) * 1e3 for times in all_times),
        }


def lengths(args: argparse.Namespace) -> NDArray[np.int64]:
    count = NUM_PROMPTS * (1 if args.tiny else NUM_SAMPLES)
    drawn = np.random.default_rng(1).lognormal(np.log(MEDIAN_LEN), SIGMA, count)
    return np.clip(drawn, 1, 16 if args.tiny else MAX_LEN).astype(np.int64)


def measure(
    report: Report, rollouts: Rollouts, args: argparse.Namespace, shape: Shape, machine: Machine
) -> None:
    def repeated(run: Callable[[], float]) -> list[float]:
        """After one that does not count."""
        run()
        return [run() for _ in range(args.runs)]

    if "grpo" in args.parts:
        lens = lengths(args)
        for prompt_len in (512, 4096):
            with report.attempt(f"rollout.grpo_{prompt_len}_tok_s"):
                length = 32 if args.tiny else prompt_len
                runs = repeated(lambda length=length: rollouts.grpo(length, lens))
                report.add(f"rollout.grpo_{prompt_len}_tok_s", runs, output_tokens=int(lens.sum()))
    for size, lens_of in BATCHES.items() if "ratios" in args.parts else ():
        count, pair = (2, (8, 8)) if args.tiny else (size, lens_of)
        for name, (params, fields) in ASKED.items():
            with report.attempt(f"rollout.ratio_{name}_b{size}"):
                plain, asked = [], []
                for _ in range(args.runs + 1):
                    plain.append(rollouts.batch(count, pair, {"temperature": 0.0}))
                    asked.append(rollouts.batch(count, pair, params, **fields))
                ratios = [one / other for one, other in zip(asked[1:], plain[1:], strict=True)]
                limit = count * pair[1] / least_seconds(shape, machine, count, *pair)
                report.add(
                    f"rollout.ratio_{name}_b{size}",
                    ratios,
                    greedy_tok_s=plain[1:],
                    tok_s=asked[1:],
                    greedy_limit_tok_s=limit,
                )
    for name, (size, length) in PREFILLS.items() if "prefill" in args.parts else ():
        with report.attempt(f"rollout.prefill_{name}_tok_s"):
            count, long = (2, 32) if args.tiny else (size, length)
            runs = repeated(lambda count=count, long=long: rollouts.prefill(count, long))
            flops_per_token = shape.flops(1, long / 2, 1 / long)
            report.add(
                f"rollout.prefill_{name}_tok_s",
                runs,
                limit=machine.flops / flops_per_token,
                limit_basis="operations at the rate of a large matrix product",
                tflops=statistics.median(runs) * flops_per_token / 1e12,
            )
    for name, (size, context_len, output_len) in DECODES.items() if "decode" in args.parts else ():
        with report.attempt(f"rollout.decode_{name}_tok_s"):
            count, long, out = (2, 32, 8) if args.tiny else (size, context_len, output_len)
            runs = [rollouts.decode(count, long, out) for _ in range(args.runs)]
            step_bytes = (
                shape.decode_weight_bytes(count) + count * (long + out / 2) * shape.kv_bytes_per_token
            )
            report.add(
                f"rollout.decode_{name}_tok_s",
                runs,
                limit=count * max(report.facts["read_bytes_per_s"]) / step_bytes,
                limit_basis="weights and KV at the best rate seen for reading",
            )
    for size, lens_of in ((64, (256, 256)), (256, (512, 256))) if "gaps" in args.parts else ():
        keys = [f"rollout.gap_{what}_b{size}" for what in ("p50", "p99", "max", "first")]
        with report.attempt(*keys):
            count, pair = (2, (8, 8)) if args.tiny else (size, lens_of)
            all_runs = [asyncio.run(rollouts.gaps(count, pair)) for _ in range(args.runs + 1)][1:]
            for what in ("p50", "p99", "max", "first"):
                report.add(f"rollout.gap_{what}_b{size}", [run[what] for run in all_runs])


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", choices=tuple(SHAPES), default="llama8b")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    args = parse(parser, argv)
    machine = Machine.measure(args.device, tiny=args.tiny)
    report = Report("gpu_rollout", args)
    report.facts["machine"] = machine.runs
    report.facts["read_bytes_per_s"] = measure_reading(args.device, tiny=args.tiny)
    shape = TINY if args.tiny else SHAPES[args.model]
    with report.attempt("rollout.grpo_512_tok_s"), model_folder(args, args.model) as (_, folder):
        given = {"max_total_tokens": 32_768} if args.tiny else {}
        with Engine(**engine_args(args, folder, **given)) as engine:
            measure(report, Rollouts(args, engine, shape), args, shape, machine)
    report.finish()


if __name__ == "__main__":
    main()
