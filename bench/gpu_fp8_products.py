"""Products of a model's layer with weights of 8 bits: what each library and each kernel takes, by tokens.

Every figure is that of a CUDA graph in which calls follow one another on different weights, of more than the
second-level cache holds. Rows that quantise activations count that in, unless their name says "quantised".

    python bench/gpu_fp8_products.py [--tokens 1 8 32] [--shapes qkv o gate_up down]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from common import write_result
from gpu_small_batch import graph_us
from torch import Tensor

from ebbtide.srt.layers.kernels.fp8_product import quantize_tokens, scaled_product
from ebbtide.srt.layers.small_batch import multiply
from ebbtide.srt.layers.small_batch.tuning import (
    Config,
    MatvecConfig,
    ProductConfig,
    Shape,
    default_config,
)

SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
}
TOKENS = (1, 8, 32, 64, 128, 256, 2048, 8192)
MOST_FEW = 128
ROTATED_BYTES = 240e6
GRAPH_BYTES = 800e6
TILES = [
    (64, 128, 4, 4),
    (128, 128, 4, 3),
    (128, 128, 8, 4),
    (128, 64, 4, 4),
    (64, 64, 4, 5),
]


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


def few_configs(case: Case, gated: bool) -> Iterator[Config]:
    """For the kernels of few tokens; rows of a gated product are half of the weight's."""
    rows = case.rows // 2 if gated else case.rows
    if case.tokens == 1:
        pairs = [
            (2, 1024, 4),
            (4, 1024, 4),
            (8, 1024, 4),
            (4, 2048, 4),
            (2, 2048, 4),
            (8, 512, 2),
        ]
        yield from (MatvecConfig(*pair) for pair in pairs)
        return
    tiles = [
        (64, 128, 4, 5),
        (64, 128, 4, 7),
        (128, 128, 8, 5),
        (128, 64, 8, 8),
        (64, 64, 4, 8),
    ]
    if case.tokens <= 8:
        tiles += [(32, 128, 4, 7)]
    for block_rows, columns, warps, stages in tiles:
        programs = -(-rows // block_rows)
        splits = [s for s in (1, 2, 4) if 90 <= programs * s <= 420][:1] or [1 if programs > 90 else 4]
        for split in splits:
            yield ProductConfig(block_rows, columns, split, warps, stages, False)


def variants(name: str, case: Case) -> dict[str, Callable[[Tensor], Any]]:
    """What is to be measured, by name; each is called with a weight."""
    x, out, scales, tokens = case.x, case.out, case.scales, case.tokens
    found: dict[str, Callable[[Tensor], Any]] = {}
    if tokens <= MOST_FEW:
        for config in few_configs(case, False):
            label = "few " + "/".join(str(int(value)) for value in vars(config).values())
            found[label] = lambda w, c=config: multiply(x, None, 0.0, w, None, out, config=c, scales=scales)
    if tokens >= 32:
        values, x_scales = quantize_tokens(x)
        for tile in TILES:
            found[f"triton quantised {tile}"] = lambda w, t=tile: scaled_product(
                values, x_scales, w, scales, out, add=False, tile=t
            )
        found["quantise"] = lambda w: quantize_tokens(x)
    found |= library_variants(case)
    return found


def library_variants(case: Case) -> dict[str, Callable[[Tensor], Any]]:
    x, scales = case.x, case.scales
    values, x_scales = quantize_tokens(x)
    padded_tokens, groups = len(values), case.columns // 128
    w_scales = F.pad(scales, (0, -groups % 4)).t()
    row_scale = torch.ones(padded_tokens, 1, device="cuda")
    column_scale = torch.ones(1, case.rows, device="cuda")

    def rowwise(w: Tensor) -> Tensor:
        return torch._scaled_mm(
            values,
            w.t(),
            row_scale,
            column_scale,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )

    def blockwise(w: Tensor) -> Tensor:
        kinds = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
        return F.scaled_mm(
            values,
            w.t(),
            x_scales,
            kinds[0],
            w_scales,
            kinds[1],
            output_dtype=torch.bfloat16,
        )[: case.tokens]

    def flashinfer(w: Tensor) -> Tensor:
        from flashinfer.gemm import fp8_blockscale_gemm_sm90

        return fp8_blockscale_gemm_sm90(x, w, None, scales)

    def flashinfer_quantised(w: Tensor) -> Tensor:
        from flashinfer.gemm import fp8_blockscale_gemm_sm90

        return fp8_blockscale_gemm_sm90(values[: case.tokens], w, x_scales.t()[:, : case.tokens], scales)

    return {
        "scaled_mm rowwise quantised": rowwise,
        "scaled_mm blockwise quantised": blockwise,
        "flashinfer": flashinfer,
        "flashinfer quantised": flashinfer_quantised,
    }


def error_of(case: Case, run: Callable[[Tensor], Any]) -> tuple[str | None, float | None]:
    """What went wrong, and the relative distance from the product in float32."""
    try:
        case.out.zero_()
        result = run(case.weights[0])
        result = case.out if not isinstance(result, Tensor) else result
        expected = case.expected()
        actual = result[:64].float()
        return None, float((actual - expected).norm() / expected.norm())
    except Exception as error:
        return f"{type(error).__name__}: {error}".replace("\n", " ")[:300], None


def measure(name: str, num_tokens: int) -> list[dict[str, Any]]:
    rows, columns = SHAPES[name]
    case = Case(rows, columns, num_tokens)
    table = []
    found = variants(name, case)
    with ThreadPoolExecutor(12) as pool:
        compiling = {label: run for label, run in found.items() if label.startswith(("few", "triton"))}
        list(pool.map(partial(error_of, case), compiling.values()))
    torch.cuda.synchronize()
    wide = torch.randn(rows, columns, device="cuda").bfloat16()
    wides = [wide] + [wide.clone() for _ in case.weights[1 : 1 + len(case.weights) // 2]]
    eights, case.weights = case.weights, wides
    table.append({"what": "bf16 cuBLAS", "us": case.us(lambda w: F.linear(case.x, w))})
    if num_tokens <= 64:
        config = default_config(max(8, num_tokens) if num_tokens > 1 else 1, Shape(rows, columns))
        table.append(
            {
                "what": "bf16 few",
                "us": case.us(lambda w: multiply(case.x, None, 0.0, w, None, case.out, config=config)),
            }
        )
    case.weights = eights
    for label, run in found.items():
        problem, distance = error_of(case, run)
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
                told = f"{row['us']:8.2f} µs" if "us" in row else row["problem"]
                print(f"   {row['what']:34} {told} {row.get('error') or ''}", flush=True)
    print(write_result("gpu_fp8_products", {"products": table}))


if __name__ == "__main__":
    main()
