"""The experts of one layer in 8 bits, beside bfloat16 and the memory's limit: which plan suits which batch.

In CUDA graphs that hold many calls, each with other experts, in turn on the weights of two layers. The limit
is the bytes of the chosen experts' weights at 4.0 TB/s, a copy's rate.

    python bench/gpu_fp8_moe.py [--tokens 1 32 256] [--shapes qwen30b]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from typing import Any

import torch
from common import write_result
from gpu_small_batch import graph_us
from torch import Tensor

from ebbtide.srt.layers.fp8 import BLOCKS, FP8, quantize_into
from ebbtide.srt.layers.kernels.fp8.moe import FewPlan, ManyPlan, choose_fp8_plan, fused_quantized_experts
from ebbtide.srt.layers.kernels.fused_moe import fused_experts
from ebbtide.srt.layers.moe import route

SHAPES = {"qwen30b": (128, 8, 2048, 768), "mixtral": (8, 2, 4096, 14_336)}
BYTES_PER_US = 4.0e6
NUM_LAYERS = 2


class Case:
    """Weights of two layers, and tokens with their experts for many calls."""

    def __init__(self, shape: tuple[int, int, int, int], num_tokens: int) -> None:
        num_experts, self.top_k, hidden, inner = shape
        self.num_experts, self.num_calls = num_experts, 4 if num_tokens > 1024 else 16
        sizes = (num_experts * 2 * inner, hidden), (num_experts * hidden, inner)
        self.wide = [
            tuple(torch.randn(size, device="cuda", dtype=torch.bfloat16) / size[1] ** 0.5 for size in sizes)
            for _ in range(NUM_LAYERS)
        ]
        self.narrow = [tuple(self._quantized(weight) for weight in weights) for weights in self.wide]
        self.x = torch.randn(self.num_calls, num_tokens, hidden, device="cuda").bfloat16()
        logits = torch.randn(self.num_calls, num_tokens, num_experts, device="cuda")
        self.routes = [
            (weights, experts.int()) for weights, experts in (route(one, self.top_k, True) for one in logits)
        ]
        chosen = statistics.mean(len(experts.unique()) for _, experts in self.routes)
        self.limit_us = chosen * 3 * inner * hidden / BYTES_PER_US

    def _quantized(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        values = torch.empty(weight.shape, dtype=FP8, device="cuda")
        scales = torch.empty(*BLOCKS.shape(*weight.shape), device="cuda")
        quantize_into(values, scales, weight)
        return values, scales

    def bf16(self, call: int) -> Tensor:
        return fused_experts(self.x[call], *self.wide[call % NUM_LAYERS], *self.routes[call])

    def fp8(self, call: int, plan: ManyPlan | FewPlan | None = None) -> Tensor:
        (gate_up, gate_up_scales), (down, down_scales) = self.narrow[call % NUM_LAYERS]
        scales = gate_up_scales, down_scales
        return fused_quantized_experts(self.x[call], gate_up, down, *self.routes[call], scales, plan=plan)

    def us(self, run: Callable[[int], Tensor]) -> float:
        return graph_us(lambda: [run(call) for call in range(self.num_calls)]) / self.num_calls


def plans(num_tokens: int) -> list[ManyPlan | FewPlan]:
    few = [
        FewPlan(rows, steps, down_rows, warps)
        for rows, steps in ((1, 4), (2, 2), (2, 4), (4, 2), (4, 4))
        for down_rows in (4, 8)
        for warps in (2, 4)
    ]
    sizes = [16] if num_tokens <= 64 else [16, 32, 64] if num_tokens <= 512 else [64, 128]
    many = [
        ManyPlan(size, gate_up, down, rows)
        for size in sizes
        for gate_up, down, rows in (
            ((8, 3), (8, 4), 128),
            ((8, 2), (8, 3), 128),
            ((4, 3), (4, 4), 128),
            ((4, 2), (4, 4), 64),
            ((8, 4), (8, 6), 128),
            ((4, 4), (4, 6), 64),
        )
    ]
    return few * (num_tokens <= 8) + many * (num_tokens > 1)


def measure(case: Case, num_tokens: int) -> list[dict[str, Any]]:
    found: dict[str, Callable[[int], Tensor]] = {"bfloat16": case.bf16, "taken": case.fp8}
    for plan in plans(num_tokens):
        found[f"{type(plan).__name__} {astuple(plan)}"] = lambda call, plan=plan: case.fp8(call, plan)

    def problem_of(run: Callable[[int], Tensor]) -> str | None:
        try:
            run(0)
        except Exception as error:
            return f"{type(error).__name__}: {error}".replace("\n", " ")[:200]
        return None

    with ThreadPoolExecutor(14) as pool:
        problems = list(pool.map(problem_of, found.values()))
    torch.cuda.synchronize()
    expected = case.bf16(0).float()
    rows: list[dict[str, Any]] = []
    for (what, run), problem in zip(found.items(), problems, strict=True):
        row: dict[str, Any] = {"what": what, "problem": problem}
        if problem is None:
            row["error"] = float((run(0).float() - expected).norm() / expected.norm())
            row["us"] = round(case.us(run), 2)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 32, 256, 4096])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=tuple(SHAPES))
    args = parser.parse_args()
    table: list[dict[str, Any]] = []
    for name in args.shapes:
        for num_tokens in args.tokens:
            case = Case(SHAPES[name], num_tokens)
            rows = measure(case, num_tokens)
            taken = choose_fp8_plan(num_tokens, case.num_experts, case.top_k)
            print(f"{name}, {num_tokens} tokens: limit {case.limit_us:.1f} us; taken {taken}")
            for row in rows[:2] + sorted(rows[2:], key=lambda row: row.get("us", 1e9))[:8]:
                told = row["problem"] or f"{row['us']:9.2f} us   {row['error']:.4f}"
                print(f"   {row['what']:44} {told}", flush=True)
            table += [{"shape": name, "tokens": num_tokens, "limit_us": case.limit_us} | row for row in rows]
            write_result("gpu_fp8_moe", {"experts": table})
            del case


if __name__ == "__main__":
    main()
