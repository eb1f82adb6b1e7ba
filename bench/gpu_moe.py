"""Measures the experts of a layer in bfloat16, compared with the limits of memory and tensor cores.

All calls run in CUDA graphs, as in decoding. A graph has many calls, each with a new input and so with other
experts, alternating between the weights of two layers, so that no weight is still in the cache. `layer` is
the whole MLP with its router, `experts` the part after the router. The limit is the longer of two times: to
read the weights of the chosen experts, inputs and outputs, at the rate of a copy; and to compute the
products, at the rate of a large product. Both rates are measured in the same process. `grouped_mm` is the two
products alone by torch's grouped GEMM, on tokens that are already sorted by expert.

`--sweep` tries tiles for every number of tokens; with `--keep`, the fastest are written to `tiles.json`.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import torch
from common import write_result
from gpu_common import Machine
from torch import Tensor

from ebbtide.srt.layers.heads import Clamp, MoeConfig, RoutedTokens
from ebbtide.srt.layers.kernels import tiles
from ebbtide.srt.layers.kernels.biased_moe import by_groups, fused_biased_experts
from ebbtide.srt.layers.kernels.fused_moe import fused_experts
from ebbtide.srt.layers.kernels.moe_routing import route
from ebbtide.srt.layers.kernels.tiles import (
    DEFAULTS,
    ONE_BY_ONE,
    Layer,
    Plan,
    Tile,
    choose_plan,
)
from ebbtide.srt.layers.moe import BiasedExperts, MoeMLP
from ebbtide.srt.layers.step import ON_GPU
from ebbtide.srt.models.sharding import replace_parameter

SHAPES = {
    "qwen30b": (2048, MoeConfig(128, 8, 768, renormalize=True)),
    "qwen30b_tp2": (2048, MoeConfig(128, 8, 384, renormalize=True)),
    "qwen30b_tp4": (2048, MoeConfig(128, 8, 192, renormalize=True)),
    "mixtral": (4096, MoeConfig(8, 2, 14_336, renormalize=True)),
    "mixtral_tp2": (4096, MoeConfig(8, 2, 7168, renormalize=True)),
    "nemotron-3-nano": (
        2688,
        MoeConfig(128, 6, 1856, renormalize=True, scoring="sigmoid", has_bias=True, is_gated=False),
    ),
    "gpt-oss": (2880, MoeConfig(32, 4, 2880, renormalize=True, clamp=Clamp(1.702, 7.0))),
}
NUM_TOKENS = (1, 32, 256, 1024, 4096, 8192)
NUM_RUNS = 5
DEVICE = torch.device("cuda")
STEP: Any = SimpleNamespace(kernels=ON_GPU, given_TLK=None, routes_TLK=None, adapters=None)

ALONE = [
    Tile(rows, step, warps, 1)
    for rows, step, warps in (
        (2, 1024, 4),
        (2, 2048, 4),
        (4, 512, 4),
        (4, 1024, 4),
        (4, 1024, 8),
        (8, 512, 4),
        (8, 1024, 8),
        (16, 256, 4),
    )
]
FEW_ROWS = [
    Tile(rows, step, warps, stages)
    for rows, step, warps, stages in (
        (16, 256, 4, 4),
        (32, 128, 4, 3),
        (32, 128, 4, 5),
        (32, 256, 4, 3),
        (64, 64, 4, 5),
        (64, 64, 4, 8),
        (64, 128, 4, 3),
        (64, 128, 4, 4),
        (64, 256, 4, 3),
        (128, 64, 4, 4),
        (128, 64, 8, 5),
        (128, 128, 8, 3),
    )
]
MANY_ROWS = [
    Tile(rows, 64, warps, stages)
    for rows, warps, stages in ((64, 4, 3), (64, 4, 5), (128, 4, 3), (128, 8, 3), (128, 8, 4), (256, 8, 3))
]


class Batch:
    """Inputs for many calls with the same number of tokens, and two layers to call."""

    def __init__(self, num_tokens: int, hidden: int, config: MoeConfig, layers: Sequence[MoeMLP]) -> None:
        self.num_tokens, self.hidden, self.config = num_tokens, hidden, config
        self.layers = layers
        self.num_calls = 4 if num_tokens > 1024 else 24
        shape = (self.num_calls, num_tokens, hidden)
        self.inputs = torch.randn(shape, device=DEVICE).to(torch.bfloat16)
        self.routes = [self._route(call) for call in range(self.num_calls)]
        self.sorted = [self._sorted(experts) for _, experts in self.routes]

    def _route(self, call: int) -> tuple[Tensor, Tensor]:
        scores = self.layers[call % 2].gate(self.inputs[call], STEP)
        return route(scores, self.config)

    def _sorted(self, experts: Tensor) -> tuple[Tensor, Tensor]:
        """Token indices sorted by expert, and the end of each expert's tokens."""
        flat = experts.flatten().long()
        counts = flat.bincount(minlength=self.config.num_experts)
        return flat.argsort() // experts.shape[1], counts.cumsum(0).int()

    def layer(self, call: int) -> Tensor:
        out: Tensor = self.layers[call % 2](self.inputs[call], STEP).tensor()
        return out

    def experts(self, call: int, plan: Plan | None = None) -> Tensor:
        experts, tokens = self.layers[call % 2].experts, RoutedTokens(self.inputs[call], *self.routes[call])
        if isinstance(experts, BiasedExperts):
            return fused_biased_experts(tokens, experts.weights, experts.clamp)
        return fused_experts(tokens, experts.gate_up_proj, experts.down_proj, plan)

    def grouped_mm(self, call: int) -> Tensor:
        experts, (tokens, ends) = self.layers[call % 2].experts, self.sorted[call]
        if isinstance(experts, BiasedExperts):
            routed = RoutedTokens(self.inputs[call], *self.routes[call])
            return by_groups(routed, experts.weights, experts.clamp)
        gate_up = experts.gate_up_proj.view(self.config.num_experts, -1, self.hidden)
        down = experts.down_proj.view(self.config.num_experts, self.hidden, -1)
        inner = torch._grouped_mm(self.inputs[call][tokens], gate_up.transpose(1, 2), ends)
        half = inner[:, : down.shape[2]].contiguous()
        return torch._grouped_mm(half, down.transpose(1, 2), ends)

    def limit_us(self, machine: Machine) -> tuple[float, str]:
        """The least possible time of a call, in microseconds, and the limit that sets it."""
        num_chosen = statistics.mean(len(experts.unique()) for _, experts in self.routes)
        num_slots = self.num_tokens * self.config.num_experts_per_token
        of_slot = (3 if self.config.is_gated else 2) * self.config.inner_size * self.hidden
        weights = num_chosen * of_slot
        activations = 2 * self.num_tokens * self.hidden
        reading_s = 2 * (weights + activations) / machine.copy_bytes_per_s
        computing_s = num_slots * 2 * of_slot / machine.flops
        if reading_s > computing_s:
            return reading_s * 1e6, f"memory, {num_chosen:.1f} experts"
        return computing_s * 1e6, "tensor cores"

    @property
    def key(self) -> Layer:
        config = self.config
        return Layer(config.num_experts, config.num_experts_per_token, self.hidden, config.inner_size)

    def time_us(self, call: Callable[[int], Tensor], num_runs: int = NUM_RUNS) -> list[float]:
        """Microseconds per call, for each of `num_runs` replays of a graph of all calls."""
        call(0)
        call(1)  # Kernels must be compiled and loaded before the capture.
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for index in range(self.num_calls):
                call(index)
        times = [replay_ms(graph) * 1e3 / self.num_calls for _ in range(num_runs + 1)]
        return times[1:]


def replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def make_layer(hidden: int, config: MoeConfig) -> MoeMLP:
    layer = MoeMLP(config, hidden, torch.bfloat16, layer=0)
    for name, parameter in list(layer.named_parameters()):
        value = torch.randn(parameter.shape, device=DEVICE, dtype=parameter.dtype) / hidden**0.5
        replace_parameter(layer, name, value)
    return layer


def starts(num_tokens: int, config: MoeConfig) -> list[Plan]:
    """Plans with block sizes that may be fast for this many tokens."""
    share = num_tokens * config.num_experts_per_token / config.num_experts
    found = [plan for size, plan in DEFAULTS.items() if size <= max(16, 4 * share) and size >= min(64, share)]
    return [ONE_BY_ONE] * (num_tokens <= 8) + found


def sweep(batch: Batch) -> tuple[Plan, list[dict[str, Any]]]:
    """The fastest plan, and the median microseconds, or the error, of all plans that were tried."""
    rows: list[dict[str, Any]] = []

    def time_us(plan: Plan) -> float:
        try:
            us = statistics.median(batch.time_us(lambda call: batch.experts(call, plan), num_runs=2))
        except Exception as error:
            rows.append({"plan": asdict(plan), "error": f"{type(error).__name__}: {error}"[:200]})
            return float("inf")
        rows.append({"plan": asdict(plan), "us": us})
        return us

    quickest: list[tuple[float, Plan]] = []
    for start in starts(batch.num_tokens, batch.config):
        size = start.block_tokens
        candidates = ALONE if size == 1 else FEW_ROWS if size <= 32 else MANY_ROWS + FEW_ROWS[4:9:2]
        plans = [replace(start, gate_up=tile, down=tile) for tile in candidates]
        with ThreadPoolExecutor(16) as pool:
            compiled = list(pool.map(lambda plan: _compiles(batch, plan), plans))
        plans = [start, *itertools.compress(plans, compiled)]
        us, best = min(((time_us(replace(start, gate_up=plan.gate_up)), plan) for plan in plans), key=_first)
        best = replace(start, gate_up=best.gate_up)
        quickest.append(
            min(
                ((time_us(replace(best, down=plan.down)), replace(best, down=plan.down)) for plan in plans),
                key=_first,
            )
        )
    us, best = min(quickest, key=_first)
    print(f"    {us:9.1f} us  {best}", flush=True)
    return best, rows


def _compiles(batch: Batch, plan: Plan) -> bool:
    try:
        batch.experts(0, plan)
    except Exception:
        return False
    return True


def _first(pair: tuple[float, Plan]) -> float:
    return pair[0]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--shapes", choices=tuple(SHAPES), nargs="+", default=["qwen30b"])
    parser.add_argument("--tokens", type=int, nargs="+", default=NUM_TOKENS)
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    machine = Machine.measure("cuda")
    results: dict[str, Any] = {
        "copy_bytes_per_s": machine.copy_bytes_per_s,
        "flops": machine.flops,
        "machine_runs": machine.runs,
    }
    print(f"copy {machine.copy_bytes_per_s / 1e12:.2f} TB/s, products {machine.flops / 1e12:.0f} TFLOP/s")
    for name in args.shapes:
        hidden, config = SHAPES[name]
        results[name] = {"hidden_size": hidden, "moe": vars(config), "rows": {}}
        layers = [make_layer(hidden, config) for _ in range(2)]
        for num_tokens in args.tokens:
            batch = Batch(num_tokens, hidden, config, layers)
            row: dict[str, Any] = {}
            # Experts with biases have no plans.
            if args.sweep and config.clamp is None:
                best, row["sweep"] = sweep(batch)
                if args.keep:
                    tiles.keep(batch.key.key, {num_tokens: best}, DEVICE)
            results[name]["rows"][str(num_tokens)] = row | measure(name, batch, machine)
    print(f"written to {write_result('gpu_moe', results)}")


def measure(name: str, batch: Batch, machine: Machine) -> dict[str, Any]:
    limit_us, basis = batch.limit_us(machine)
    row: dict[str, Any] = {"limit_us": limit_us, "limit_basis": basis}
    for what, call in (("layer", batch.layer), ("experts", batch.experts), ("grouped_mm", batch.grouped_mm)):
        try:
            runs = batch.time_us(call)
        except Exception as error:
            print(f"{name} {batch.num_tokens:5d} tokens, {what}: {error}"[:200])
            continue
        median = statistics.median(runs)
        row[what] = {"median_us": median, "runs_us": runs, "fraction_of_limit": limit_us / median}
        print(
            f"{name} {batch.num_tokens:5d} tokens, {what:10s}: {median:9.1f} us, limit {limit_us:8.1f} us "
            f"({basis}), {limit_us / median:.0%}",
            flush=True,
        )
    row["plan"] = asdict(choose_plan(batch.num_tokens, batch.key, torch.bfloat16, DEVICE))
    return row


if __name__ == "__main__":
    with torch.inference_mode():
        main()
