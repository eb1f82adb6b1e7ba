"""Products of 64 to 512 tokens with the weights of a dense model's layer: cuBLAS against Triton's tiles.

Every figure is that of a CUDA graph in which calls follow one another on different weights, of more than the
second-level cache holds. `torch` is what runs for so many tokens today: cuBLAS, with the gates' activation
and the residual's sum in kernels of their own where they are. The limit is the operations at the rate of a
large product, or the weights at the rate of a copy.

    python bench/gpu_products.py --tokens 256 --models llama8b
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from common import write_result
from gpu_machine import Machine
from gpu_small_batch import MODELS, Product
from triton.tools.tensor_descriptor import TensorDescriptor

from ebbtide.srt.layers.activation import gated
from ebbtide.srt.model_executor.rehearsal import compiling_only

NUM_CALLS, NUM_REPLAYS = 8, 5
ROTATED_BYTES = 300e6


@triton.jit
def _tiles(
    x,
    weight,
    out_ptr,
    partial_ptr,
    num_tokens,
    num_rows,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLITS: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """One tile of the product; tiles of the same weights lie side by side in the grid."""
    if OVERLAPPED:
        tl.extra.cuda.gdc_launch_dependents()
    first_token = tl.program_id(0) * BM
    first_row = tl.program_id(1) * BN
    split = tl.program_id(2)
    per_split: tl.constexpr = K // SPLITS
    total = tl.zeros((BM, BN), tl.float32)
    if GATED:
        total_up = tl.zeros((BM, BN), tl.float32)
    if OVERLAPPED:
        tl.extra.cuda.gdc_wait()
    for k in range(split * per_split, (split + 1) * per_split, BK):
        tokens = x.load([first_token, k])
        total = tl.dot(tokens, weight.load([first_row, k]).T, total)
        if GATED:
            total_up = tl.dot(tokens, weight.load([num_rows + first_row, k]).T, total_up)
    m = first_token + tl.arange(0, BM)
    n = first_row + tl.arange(0, BN)
    inside = (m < num_tokens)[:, None] & (n < num_rows)[None, :]
    place = m[:, None].to(tl.int64) * num_rows + n[None, :]
    if SPLITS > 1:
        tl.store(partial_ptr + split.to(tl.int64) * num_tokens * num_rows + place, total, mask=inside)
    else:
        if GATED:
            total = total / (1.0 + tl.exp(-total)) * total_up
        if ADD:
            total += tl.load(out_ptr + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + place, total.to(tl.bfloat16), mask=inside)


@triton.jit
def _sum(
    partial_ptr,
    out_ptr,
    count,
    SPLITS: tl.constexpr,
    ADD: tl.constexpr,
    B: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    if OVERLAPPED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0) * B + tl.arange(0, B)
    total = tl.zeros((B,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(partial_ptr + split * count + at)
    if ADD:
        total += tl.load(out_ptr + at).to(tl.float32)
    tl.store(out_ptr + at, total.to(tl.bfloat16))


@dataclass(frozen=True)
class Tile:
    tokens: int
    rows: int
    columns: int
    warps: int
    stages: int
    splits: int = 1


def tiles(product: Product, num_tokens: int) -> list[Tile]:
    shapes = [
        (64, 128, 4),
        (128, 64, 4),
        (128, 128, 4),
        (128, 128, 8),
        (128, 256, 8),
        (256, 64, 8),
        (256, 128, 8),
    ]
    found = []
    for (tokens, rows, warps), (columns, stages) in itertools.product(
        shapes, [(64, 3), (64, 4), (64, 5), (128, 2), (128, 3)]
    ):
        rows_read = rows * (2 if product.shape.gated else 1)
        if stages * columns * 2 * (tokens + rows_read) > 225_000 or tokens > max(64, num_tokens):
            continue
        if tokens * rows_read > 128 * 64 * warps or stages * columns * (tokens + rows_read) < 64 * 3 * 128:
            continue
        num_tiles = -(-num_tokens // tokens) * -(-product.shape.num_rows // rows)
        for splits in (1,) if product.shape.gated else (1, 2, 3, 4):
            k = product.shape.num_columns
            if k % (splits * columns) or (splits > 1 and num_tiles > 150):
                continue
            found.append(Tile(tokens, rows, columns, warps, stages, splits))
    return found


class Case:
    def __init__(self, product: Product, num_tokens: int) -> None:
        self.product, self.num_tokens = product, num_tokens
        shape = product.shape
        count = max(2, int(-(-ROTATED_BYTES // shape.num_bytes)))
        rows = shape.num_rows * (2 if shape.gated else 1)
        self.weights = [
            torch.empty(rows, shape.num_columns, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)
            for _ in range(count)
        ]
        self.x = torch.randn(num_tokens, shape.num_columns, device="cuda").bfloat16()
        self.out = torch.zeros(num_tokens, shape.num_rows, dtype=torch.bfloat16, device="cuda")
        self.partial = torch.empty(4 * num_tokens * shape.num_rows if not shape.gated else 16, device="cuda")

    def by_torch(self, call: int) -> None:
        weight = self.weights[call % len(self.weights)]
        if self.product.add:
            torch.addmm(self.out, self.x, weight.t(), out=self.out)
        elif self.product.shape.gated:
            gated(torch.mm(self.x, weight.t()))
        else:
            torch.mm(self.x, weight.t(), out=self.out)

    def by_tiles(self, call: int, tile: Tile) -> None:
        weight, shape = self.weights[call % len(self.weights)], self.product.shape
        x = TensorDescriptor.from_tensor(self.x, [tile.tokens, tile.columns])
        w = TensorDescriptor.from_tensor(weight, [tile.rows, tile.columns])
        grid = (-(-self.num_tokens // tile.tokens), -(-shape.num_rows // tile.rows), tile.splits)
        _tiles[grid](
            x, w, self.out, self.partial, self.num_tokens, shape.num_rows,
            K=shape.num_columns, BM=tile.tokens, BN=tile.rows, BK=tile.columns, SPLITS=tile.splits,
            GATED=shape.gated, ADD=self.product.add, OVERLAPPED=True, launch_pdl=True,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        if tile.splits > 1:
            _sum[(self.out.numel() // 1024,)](
                self.partial, self.out, self.out.numel(), SPLITS=tile.splits, ADD=self.product.add, B=1024,
                OVERLAPPED=True, launch_pdl=True,
            )  # fmt: skip

    def error(self, tile: Tile) -> float:
        self.out.zero_()
        self.by_tiles(0, tile)
        product = self.x @ self.weights[0].t()
        wanted = gated(product) if self.product.shape.gated else product
        return float((self.out.float() - wanted.float()).abs().max() / wanted.float().abs().max())

    def time_us(self, call: Callable[[int], None], num_replays: int = NUM_REPLAYS) -> float:
        call(0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for index in range(NUM_CALLS):
                call(index)
        times = []
        for _ in range(num_replays + 1):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / NUM_CALLS)
        return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[256])
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=["llama8b"])
    parser.add_argument("--libraries-only", action="store_true", help="no tiles of Triton's")
    parser.add_argument("--limit-s", type=float, default=60.0, help="begin nothing new after this time")
    args = parser.parse_args()
    deadline_s = time.perf_counter() + args.limit_s
    machine = Machine.measure("cuda")
    rows: list[dict[str, Any]] = []
    for num_tokens, name in itertools.product(args.tokens, args.models):
        sums = {"torch": 0.0, "best": 0.0, "limit": 0.0}
        for product in MODELS[name].layer:
            if time.perf_counter() > deadline_s:
                break
            case, shape = Case(product, num_tokens), product.shape
            tried = [] if args.libraries_only else tiles(product, num_tokens)
            with ThreadPoolExecutor(os.cpu_count()) as threads, compiling_only(threads, ignore_errors=True):
                for tile in tried:
                    case.by_tiles(0, tile)
            by_torch = {}
            for library in ("cublas", "cublaslt"):
                torch.backends.cuda.preferred_blas_library(library)
                by_torch[library] = case.time_us(case.by_torch)
            found: list[tuple[float, Tile]] = []
            for tile in tried:
                if time.perf_counter() > deadline_s + 15:
                    break
                try:
                    found.append((case.time_us(partial(case.by_tiles, tile=tile), 2), tile))
                except Exception as error:
                    print(f"  {tile}: {type(error).__name__} {str(error)[:80]}")
            found.sort(key=lambda pair: pair[0])
            flops = 2 * num_tokens * shape.num_bytes / 2
            limit = max(flops / machine.flops, shape.num_bytes / machine.copy_bytes_per_s) * 1e6
            quickest = [(round(us, 1), tuple(vars(tile).values())) for us, tile in found[:4]]
            sums["torch"] += min(by_torch.values())
            sums["best"] += min(*(us for us, _ in found[:1]), *by_torch.values())
            sums["limit"] += limit
            libraries = ", ".join(f"{library} {us:.1f}" for library, us in by_torch.items())
            error = f", error of the quickest {case.error(found[0][1]):.4f}" if found else ""
            print(
                f"{name} {num_tokens} {product.name:8s} {libraries}, limit {limit:.1f} us; {quickest}{error}",
                flush=True,
            )
            rows.append(
                {
                    "model": name,
                    "tokens": num_tokens,
                    "product": product.name,
                    "torch_us": by_torch,
                    "limit_us": limit,
                    "tiles": [(us, vars(tile)) for us, tile in found[:12]],
                }
            )
        print(f"== {name}, {num_tokens} tokens, a layer: {sums}", flush=True)
    print(write_result("gpu_products", {"flops": machine.flops, "products": rows}))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
