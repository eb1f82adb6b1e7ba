"""Products of a model's layer with weights of 8 bits: what each library and each kernel takes, by tokens.

Every figure is that of a CUDA graph in which calls follow one another on different weights, of more than the
second-level cache holds. Rows of "quantized" and of libraries are those of tokens that are quantised already:
"quantise" is to be added. `gate_up` counts the activation in, but for the libraries'.

    python bench/gpu_fp8_products.py [--tokens 1 8 32] [--shapes qkv o gate_up down]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from common import write_result
from gpu_small_batch import graph_us
from torch import Tensor

from ebbtide.srt.layers.activation import Activation
from ebbtide.srt.layers.kernels.fp8.blockscale import blockscale_product
from ebbtide.srt.layers.kernels.fp8.product import cublas_product, quantize_tokens
from ebbtide.srt.layers.small_batch.fp8_products import (
    MAX_STATIONARY,
    PassingConfig,
    QuantizedConfig,
    StationaryConfig,
    choose_quantized,
    multiply_one,
    multiply_quantized,
)

SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
}
TOKENS = (1, 32, 8, 64)
MOST_FEW = 64
ROTATED_BYTES = 240e6
GRAPH_BYTES = 800e6


class Case:
    """One product: weights in 8 bits, several of them, and activations."""

    def __init__(self, num_rows: int, num_columns: int, num_tokens: int) -> None:
        device = "cuda"
        self.rows, self.columns, self.tokens = num_rows, num_columns, num_tokens
        self.x = torch.randn(num_tokens, num_columns, device=device).bfloat16()
        blocks = (-(-num_rows // 128), num_columns // 128)
        self.scales = torch.rand(blocks, device=device).mul_(1e-4).add_(1e-4)
        count = max(2, round(ROTATED_BYTES / (num_rows * num_columns)))
        first = torch.randn(num_rows, num_columns, device=device).mul_(60).clamp_(-448, 448)
        self.weights = [first.to(torch.float8_e4m3fn)]
        self.weights += [self.weights[0].clone() for _ in range(count - 1)]
        self.out = torch.empty(num_tokens, num_rows, device=device, dtype=torch.bfloat16)

    def expected(self) -> Tensor:
        scales = self.scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return self.x[:64].float() @ (self.weights[0].float() * scales).T

    def us(self, run: Callable[[Tensor], Any]) -> float:
        rounds = max(
            1,
            round(min(GRAPH_BYTES / (self.rows * self.columns), 60) / len(self.weights)),
        )
        if self.tokens >= 2048:
            rounds = 1

        def body() -> None:
            for _ in range(rounds):
                for weight in self.weights:
                    run(weight)

        return graph_us(body) / (rounds * len(self.weights))


def configs_of_one(case: Case) -> list[StationaryConfig | PassingConfig]:
    """Around that which is taken."""
    if case.columns > MAX_STATIONARY:
        passing = [
            (rows, words, warps) for rows in (2, 4, 8, 16) for words in (512, 1024) for warps in (4, 8)
        ]
        return [PassingConfig(*tile) for tile in passing if tile[0] * tile[1] <= 8192]
    tiles = [(4, 2, 4), (4, 1, 4), (2, 2, 4), (2, 4, 4), (2, 1, 4), (1, 4, 4), (8, 1, 8), (8, 1, 4)]
    return [StationaryConfig(*tile) for tile in tiles]


def quantized_configs(case: Case) -> list[QuantizedConfig]:
    """That which is taken, and others like it."""
    taken = choose_quantized(case.tokens, case.rows, case.columns)
    return [
        taken,
        replace(taken, num_warps=12 - taken.num_warps),
        replace(taken, num_stages=taken.num_stages + 1),
    ]


def variants(name: str, case: Case) -> dict[str, Callable[[Tensor], Any]]:
    """What is to be measured, by name; each is called with a weight."""
    x, out, scales, tokens = case.x, case.out, case.scales, case.tokens
    gated: Activation | None = "silu" if name == "gate_up" else None
    out = out[:, : case.rows // 2].contiguous() if gated else out
    found: dict[str, Callable[[Tensor], Any]] = {}
    values, x_scales = quantize_tokens(x)
    if tokens == 1:
        for one in configs_of_one(case):
            found[f"{_kind(one)} {_told(one)}"] = lambda w, c=one: (
                multiply_one(x, None, 0.0, w, scales, None, out, c, gated=gated),
                out,
            )[1]
    elif tokens <= MOST_FEW:
        for many in quantized_configs(case):
            found[f"quantized {_told(many)}"] = lambda w, c=many: (
                multiply_quantized(values, x_scales, w, scales, None, out, c, gated=gated),
                out,
            )[1]
    return found | ({} if tokens == 1 else library_variants(case))


def _kind(config: StationaryConfig | PassingConfig) -> str:
    return "passing" if isinstance(config, PassingConfig) else "stationary"


def _told(config: QuantizedConfig | StationaryConfig | PassingConfig) -> str:
    return "/".join(str(int(value)) for value in vars(config).values())


def library_variants(case: Case) -> dict[str, Callable[[Tensor], Any]]:
    """Of tokens that are quantised."""
    scales = case.scales
    values, x_scales = quantize_tokens(case.x)
    found: dict[str, Callable[[Tensor], Any]] = {"quantise": lambda w: quantize_tokens(case.x)[0]}
    found["cublas"] = lambda w: cublas_product(values, x_scales, w, scales)
    if blockscale_product(values, x_scales, case.weights[0], scales, case.tokens) is not None:
        found["flashinfer"] = lambda w: blockscale_product(values, x_scales, w, scales, case.tokens)
    return found


def error_of(name: str, case: Case, run: Callable[[Tensor], Any]) -> tuple[str | None, float | None]:
    """What went wrong, and the relative distance from the product in float32."""
    try:
        case.out.zero_()
        actual = run(case.weights[0])[:64].float()
        expected = case.expected()
        if actual.shape[1] != case.rows:
            gate, up = expected.chunk(2, dim=1)
            expected = F.silu(gate) * up
        if actual.shape[1] != expected.shape[1] or actual.shape[0] < len(expected):
            return None, None
        return None, float((actual[: len(expected)] - expected).norm() / expected.norm())
    except Exception as error:
        return f"{type(error).__name__}: {error}".replace("\n", " ")[:300], None


def measure(name: str, num_tokens: int) -> list[dict[str, Any]]:
    rows, columns = SHAPES[name]
    case = Case(rows, columns, num_tokens)
    table = []
    found = variants(name, case)
    with ThreadPoolExecutor(14) as pool:
        list(pool.map(partial(error_of, name, case), found.values()))
    torch.cuda.synchronize()
    for label, run in found.items():
        problem, distance = error_of(name, case, run)
        row: dict[str, Any] = {"what": label, "error": distance}
        try:
            row |= {"problem": problem} if problem else {"us": case.us(run)}
        except Exception as error:
            row["problem"] = f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
        table.append(row)
    return [{"product": name, "tokens": num_tokens, "bytes": rows * columns} | row for row in table]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=sorted(SHAPES))
    parser.add_argument("--limit-s", type=float, default=90.0, help="begin nothing new after this time")
    args = parser.parse_args()
    deadline_s = time.perf_counter() + args.limit_s
    table: list[dict[str, Any]] = []
    for num_tokens in args.tokens:
        for name in args.shapes:
            if time.perf_counter() > deadline_s:
                print(f"left out for lack of time: {name}, {num_tokens} tokens")
                continue
            rows = measure(name, num_tokens)
            table += rows
            print(f"{name} T={num_tokens}")
            for row in sorted(rows, key=lambda row: row.get("us", 1e9)):
                told = row["problem"] if "us" not in row else f"{row['us']:8.2f} µs"
                rate = f"{row['bytes'] / row['us'] / 1e6:.2f} TB/s" if "us" in row else ""
                print(f"   {row['what']:34} {told} {rate} {row.get('error') or ''}", flush=True)
    print(write_result("gpu_fp8_products", {"products": table}))


if __name__ == "__main__":
    main()
