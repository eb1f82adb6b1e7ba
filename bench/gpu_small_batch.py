"""Finds the fastest block sizes of products with few tokens, for each shape.

Every figure is measured in a CUDA graph of consecutive calls with different weights, more than fit into the
L2 cache. `torch` is cuBLAS with separate kernels for norm, gate and residual. If the engine's block sizes do
not reach a share of the limit, others are tried; with `--keep`, the fastest are written to
`layers/kernels/tiles.json`.

    python bench/gpu_small_batch.py [--keep] [--tokens 1 8 32 64] [--models llama8b qwen0.6b]
"""

# mypy: disable-error-code="arg-type, misc, no-any-return, no-untyped-call"

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from common import write_result
from gpu_common import Machine
from torch import Tensor

from ebbtide.srt.layers.kernels import tiles
from ebbtide.srt.layers.kernels.launch import num_multiprocessors
from ebbtide.srt.layers.kernels.tiles import (
    TOKEN_BUCKETS,
    Config,
    MatvecConfig,
    ProductConfig,
    Shape,
    choose_product,
    default_product,
    token_bucket,
)
from ebbtide.srt.layers.norm import rms_norm
from ebbtide.srt.layers.small_batch import multiply

EPS = 1e-5
# Bytes of weights before one is used again: far more than the 50 MB of L2 cache.
ROTATED_BYTES = 400e6
GRAPH_BYTES = 2e9
NUM_REPLAYS = 7


@dataclass(frozen=True)
class Product:
    """A product of a model. `normed`: a norm comes before it; `add`: its result is added to the residual."""

    name: str
    shape: Shape
    normed: bool
    add: bool


@dataclass(frozen=True)
class Model:
    name: str
    layer: tuple[Product, ...]
    head: Product


def model(name: str, hidden: int, qkv: int, q: int, intermediate: int, vocab: int) -> Model:
    """Make a model's products. `intermediate` 0: no MLP, since it has experts, see gpu_moe.py."""
    mlp = (
        Product("gate_up", Shape(intermediate, hidden, True), True, False),
        Product("down", Shape(hidden, intermediate), False, True),
    )
    attention = Product("qkv", Shape(qkv, hidden), True, False), Product("o", Shape(hidden, q), False, True)
    head = Product("head", Shape(vocab, hidden), True, False)
    return Model(name, attention + (mlp if intermediate else ()), head)


MODELS = {
    "llama8b": model("llama8b", 4096, 6144, 4096, 14336, 128256),
    "llama8b_tp2": model("llama8b_tp2", 4096, 3072, 2048, 7168, 64128),
    "llama8b_tp4": model("llama8b_tp4", 4096, 1536, 1024, 3584, 32064),
    "llama1b": model("llama1b", 2048, 3072, 2048, 8192, 128256),
    "llama3b": model("llama3b", 3072, 5120, 3072, 8192, 128256),
    "qwen0.6b": model("qwen0.6b", 1024, 4096, 2048, 3072, 151936),
    "qwen2.5-0.5b": model("qwen2.5-0.5b", 896, 1152, 896, 4864, 151936),
    "qwen2.5-1.5b": model("qwen2.5-1.5b", 1536, 2048, 1536, 8960, 151936),
    "qwen2.5-3b": model("qwen2.5-3b", 2048, 2560, 2048, 11008, 151936),
    "gpt-oss": model("gpt-oss", 2880, 5120, 4096, 0, 201088),
    "qwen7b": model("qwen7b", 3584, 4608, 3584, 18944, 152064),
    "qwen3-1.7b": model("qwen3-1.7b", 2048, 4096, 2048, 6144, 151936),
    "qwen3-4b": model("qwen3-4b", 2560, 6144, 4096, 9728, 151936),
    "qwen3-8b": model("qwen3-8b", 4096, 6144, 4096, 12288, 151936),
    "qwen3-14b": model("qwen3-14b", 5120, 7168, 5120, 17408, 151936),
}


class Weights:
    """Takes consecutive matrices from one buffer; at its end, begins at the start again."""

    def __init__(self, num_bytes: int) -> None:
        tile = torch.randn(1 << 24, device="cuda").mul_(0.02).bfloat16()
        self._flat = tile.repeat(-(-num_bytes // (2 * len(tile))))
        self._used = 0

    def cut(self, shape: Shape) -> Tensor:
        count = shape.num_bytes // 2
        if self._used + count > len(self._flat):
            self._used = 0
        start, self._used = self._used, self._used + count
        return self._flat[start : start + count].view(-1, shape.num_columns)


@dataclass(frozen=True)
class Case:
    """Tensors to measure a product with. With several tokens, the norm is a separate kernel."""

    product: Product
    x: Tensor
    norm: Tensor
    out: Tensor
    weights: list[Tensor]

    @classmethod
    def make(cls, product: Product, num_tokens: int, weights: Weights) -> Case:
        shape = product.shape
        x = torch.randn(num_tokens, shape.num_columns, device="cuda").bfloat16()
        norm = torch.randn(shape.num_columns, device="cuda").mul_(0.1).add_(1).bfloat16()
        return cls(
            product,
            x,
            norm,
            torch.zeros(num_tokens, shape.num_rows, device="cuda", dtype=torch.bfloat16),
            [weights.cut(shape) for _ in range(max(1, round(ROTATED_BYTES / shape.num_bytes)))],
        )

    def run(self, weight: Tensor, config: Config | None, out: Tensor) -> None:
        x, norm = self.x, self.norm if self.product.normed else None
        if norm is not None and len(x) > 1:
            x, norm = rms_norm(x, norm, EPS), None
        gated = "silu" if self.product.shape.gated else None
        multiply(x, norm, EPS, weight, None, out, gated=gated, add=self.product.add, config=config)

    def run_torch(self, weight: Tensor) -> None:
        torch_product(self.product, self.x, self.norm, weight, self.out)

    def error(self, config: Config) -> str | None:
        """Compare the result with float32 and with a second run; returns what is wrong, or None."""
        outs = [torch.zeros_like(self.out) for _ in range(2)]
        for out in outs:
            self.run(self.weights[0], config, out)
        if not torch.equal(outs[0], outs[1]):
            return "varies from run to run"
        # Only the first and last 300 rows, to save time.
        rows = torch.arange(self.product.shape.num_rows, device="cuda")
        rows = torch.cat((rows[:300], rows[-300:])).unique()
        x = self.x.float()
        if self.product.normed:
            x = F.rms_norm(x, self.norm.shape, self.norm.float(), EPS)
        weight = self.weights[0]
        expected = x @ weight[rows].float().T
        if self.product.shape.gated:
            expected = F.silu(expected) * (x @ weight[rows + self.product.shape.num_rows].float().T)
        distance = (outs[0][:, rows].float() - expected).norm() / expected.norm()
        return None if distance < 0.01 else f"relative distance {distance.item():.3g}"


def torch_product(product: Product, x: Tensor, norm: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """The same product by cuBLAS and separate kernels."""
    if product.normed:
        x = F.rms_norm(x, norm.shape, norm, EPS)
    if product.add:
        return out.addmm_(x, weight.T)
    y = F.linear(x, weight)
    if product.shape.gated:
        gate, up = y.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)
    return y


def graph_us(body: Callable[[], None]) -> float:
    """Median time of a graph's replay, in microseconds."""
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(NUM_REPLAYS + 1)]
    graph.replay()
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    times = [1e3 * before.elapsed_time(after) for before, after in pairwise(events)]
    return statistics.median(times)


def case_us(case: Case, run: Callable[[Tensor], None]) -> float:
    """Time of a product in a graph of many, in microseconds."""
    rounds = max(1, min(round(GRAPH_BYTES / case.product.shape.num_bytes), 150) // len(case.weights))

    def body() -> None:
        for _ in range(rounds):
            for weight in case.weights:
                run(weight)

    return graph_us(body) / (rounds * len(case.weights))


def candidates(product: Product, num_tokens: int) -> Iterator[Config]:
    shape = product.shape
    if num_tokens == 1:
        yield from matvec_candidates(shape)
        return
    small = num_tokens <= 8
    if shape.gated:
        tiles = [(64, 64, 4, 5), (128, 64, 8, 4), (64, 128, 4, 4), (32, 128, 4, 5), (64, 128, 8, 4)]
    elif small:
        tiles = [(64, 128, 4, 5), (64, 64, 4, 8), (32, 128, 4, 7), (32, 256, 4, 5), (16, 256, 4, 7)]
    else:
        tiles = [(64, 128, 4, 5), (64, 64, 4, 8), (128, 64, 8, 6), (128, 64, 4, 4), (128, 128, 8, 4)]
        tiles += [(32, 128, 4, 7), (64, 256, 4, 3)]
    for rows, columns, warps, stages in tiles:
        num_programs = -(-shape.num_rows // rows)
        # From programs for about half of the 132 multiprocessors up to three for each.
        fitting = [
            s for s in (1, 2, 3, 4, 8) if 60 <= num_programs * s <= 420 and shape.num_columns >= 512 * s
        ]
        for splits in fitting[:3] or [1 if num_programs > 90 else 4]:
            yield ProductConfig(rows, columns, splits, warps, stages)


def matvec_candidates(shape: Shape) -> Iterator[Config]:
    columns_and_warps = [(1024, 4), (512, 2)]
    if shape.num_columns <= 1024:
        columns_and_warps += [(1024, 2), (1024, 1)]
    elif shape.num_columns % 2048 == 0:
        columns_and_warps += [(2048, 4)]
    for columns, warps in columns_and_warps:
        for rows in (1, 2, 4) if shape.gated else (2, 4, 8):
            yield MatvecConfig(rows, columns, warps)


def compile_all(jobs: list[tuple[Case, Config]]) -> dict[tuple[str, Config], str]:
    """Run each configuration once, in parallel threads; returns the errors of those that fail."""

    def attempt(job: tuple[Case, Config]) -> str | None:
        case, config = job
        try:
            return case.error(config)
        except Exception as error:  # The compiler may refuse a combination: it is reported and skipped.
            return f"{type(error).__name__}: {error}".splitlines()[0][:200]

    with ThreadPoolExecutor(16) as pool:
        failures = {}
        for (case, config), failure in zip(jobs, pool.map(attempt, jobs), strict=True):
            if failure is not None:
                failures[case.product.name, config] = failure
    torch.cuda.synchronize()
    return failures


def sweep(
    model: Model, num_tokens: int, weights: Weights, limit: float, enough: float
) -> list[dict[str, Any]]:
    """Measure every product, and if it is too slow, also all candidates.

    Args:
        limit: rate of the memory, in bytes per microsecond.
        enough: the share of the limit from which no candidates are tried.
    """
    rows = []
    for product in (*model.layer, model.head):
        case = Case.make(product, num_tokens, weights)
        now = choose_product(num_tokens, product.shape, torch.device("cuda"))
        num_bytes = product.shape.num_bytes
        row: dict[str, Any] = {"model": model.name, "product": product.name, "tokens": num_tokens}
        row |= {"bytes": num_bytes, "torch_us": round(case_us(case, case.run_torch), 2)}
        tried = try_all(case, [now])
        if not tried or num_bytes / limit / tried[0][0] < enough:
            default = default_product(
                token_bucket(num_tokens), product.shape, num_multiprocessors(case.x.device)
            )
            others = dict.fromkeys((default, *candidates(product, num_tokens)))
            others.pop(now, None)
            row["tried"] = len(others)
            tried += try_all(case, list(others))
        if tried:
            row["now_us"] = tried[0][0] if tried[0][1] == now else None
            best_us, best = min(tried, key=lambda pair: pair[0])
            row |= {"best_us": best_us, "best": best}
            print(
                f"{model.name} T={num_tokens:<3} {product.name:8} now {row['now_us']} best {best_us:7.2f} µs "
                f"({num_bytes / best_us / limit:4.0%})  torch {row['torch_us']:7.2f} µs  {short(best)}",
                flush=True,
            )
        rows.append(row)
    return rows


def try_all(case: Case, configs: list[Config]) -> list[tuple[float, Config]]:
    """Microseconds of the configurations that work."""
    failures = compile_all([(case, config) for config in configs])
    for (name, config), failure in failures.items():
        print(f"  {name} {config}: {failure}")
    return [
        (round(case_us(case, lambda weight, config=config: case.run(weight, config, case.out)), 2), config)
        for config in configs
        if (case.product.name, config) not in failures
    ]


def short(config: Config) -> str:
    return "/".join(str(int(value)) for value in asdict(config).values())


def keep(num_tokens: int, found: list[dict[str, Any]], model: Model) -> None:
    """Write configurations that are better than the current ones to the file that the engine reads."""
    shapes = {product.name: product.shape for product in (*model.layer, model.head)}
    for row in found:
        if "best" in row and (row["now_us"] is None or row["best_us"] < 0.98 * row["now_us"]):
            key = shapes[row["product"]].key
            tiles.keep(key, {token_bucket(num_tokens): row["best"]}, torch.device("cuda"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKEN_BUCKETS)
    parser.add_argument("--models", nargs="+", default=["llama8b", "qwen0.6b"], choices=sorted(MODELS))
    parser.add_argument("--enough", type=float, default=0.85, help="share of the limit not to improve on")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--limit-s", type=float, default=240.0, help="begin nothing new after this time")
    args = parser.parse_args()
    deadline_s = time.perf_counter() + args.limit_s
    limit = Machine.measure("cuda").copy_bytes_per_s
    print(f"copy: {limit / 1e12:.2f} TB/s read and written", flush=True)
    weights = Weights(6 << 30)
    rows: list[dict[str, Any]] = []
    for num_tokens, name in itertools.product(args.tokens, args.models):
        if time.perf_counter() > deadline_s:
            print(f"left out for lack of time: {name}, {num_tokens} tokens")
            continue
        model = MODELS[name]
        found = sweep(model, num_tokens, weights, limit / 1e6, args.enough)
        if args.keep:
            keep(num_tokens, found, model)
        rows += [row | {"best": asdict(row["best"])} if "best" in row else row for row in found]
    print(write_result("gpu_small_batch", {"copy_bytes_per_s": limit, "products": rows}))


if __name__ == "__main__":
    main()
