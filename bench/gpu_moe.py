"""The experts of one layer of Qwen3-30B-A3B in bfloat16, against what the memory and the tensor cores allow.

Everything runs in CUDA graphs, as decoding does: each holds many calls, with a new input (and so other
experts) every time, in turn on the weights of two layers, so that no weight is still in the cache. `layer`
is the whole MLP with its router, `experts` only what comes after it. The limit is the time to read the
weights of the experts that the tokens chose, plus inputs and outputs, at the rate of a copy measured in the
same process, or that of the products at the rate of a large product, whichever is longer.

`--sweep` also tries other tiles for every number of tokens and prints the quickest.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from common import write_result
from gpu_machine import Machine
from torch import Tensor, nn

from ebbtide.srt.layers.kernels import fused_moe
from ebbtide.srt.layers.kernels.fused_moe import Plan, Tile
from ebbtide.srt.layers.moe import MoeConfig, MoeMLP

HIDDEN = 2048
CONFIG = MoeConfig(num_experts=128, num_experts_per_token=8, inner_size=768, renormalize=True)
NUM_TOKENS = (1, 32, 256, 4096)
NUM_RUNS = 5
DEVICE = torch.device("cuda")

FEW_ROWS = [
    Tile(rows, step, warps, stages)
    for rows, step, warps, stages in (
        (16, 128, 2, 4),
        (16, 256, 4, 4),
        (32, 64, 4, 6),
        (32, 128, 4, 3),
        (32, 128, 4, 5),
        (32, 256, 4, 3),
        (64, 64, 4, 5),
        (64, 128, 4, 3),
    )
]
MANY_ROWS = [
    Tile(rows, 64, warps, stages)
    for rows, warps, stages in ((64, 4, 3), (64, 4, 5), (128, 4, 3), (128, 8, 3), (128, 8, 4), (256, 8, 3))
]


class Batch:
    """Inputs for many calls with the same number of tokens, and two layers to run them on."""

    def __init__(self, num_tokens: int, layers: Sequence[MoeMLP]) -> None:
        self.num_tokens = num_tokens
        self.layers = layers
        self.num_calls = 4 if num_tokens > 1024 else 24
        shape = (self.num_calls, num_tokens, HIDDEN)
        self.inputs = torch.randn(shape, device=DEVICE).to(torch.bfloat16)
        self.routes = [self._route(call) for call in range(self.num_calls)]

    def _route(self, call: int) -> tuple[Tensor, Tensor]:
        logits = self.layers[call % 2].gate(self.inputs[call])
        return fused_moe.route(logits, CONFIG.num_experts_per_token, CONFIG.renormalize)

    def layer(self, call: int) -> Tensor:
        out: Tensor = self.layers[call % 2](self.inputs[call])
        return out

    def experts(self, call: int, plan: Plan | None = None) -> Tensor:
        experts = self.layers[call % 2].experts
        weights = (experts.gate_up_proj, experts.down_proj)
        return fused_moe.fused_experts(self.inputs[call], *weights, *self.routes[call], plan)

    def limit_us(self, machine: Machine) -> tuple[float, str]:
        """The least time of a call, and what sets it."""
        num_chosen = statistics.mean(len(experts.unique()) for _, experts in self.routes)
        num_slots = self.num_tokens * CONFIG.num_experts_per_token
        weights = num_chosen * 3 * CONFIG.inner_size * HIDDEN
        activations = 2 * self.num_tokens * HIDDEN
        reading_s = 2 * (weights + activations) / machine.copy_bytes_per_s
        computing_s = num_slots * 6 * CONFIG.inner_size * HIDDEN / machine.flops
        if reading_s > computing_s:
            return reading_s * 1e6, f"memory, {num_chosen:.1f} experts"
        return computing_s * 1e6, "tensor cores"

    def time_us(self, call: Callable[[int], Tensor]) -> list[float]:
        """Microseconds per call, of `NUM_RUNS` replays of a graph of all calls."""
        call(0)
        call(1)  # compiled and loaded before the capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for index in range(self.num_calls):
                call(index)
        times = [replay_ms(graph) * 1e3 / self.num_calls for _ in range(NUM_RUNS + 1)]
        return times[1:]


def replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


def make_layer() -> MoeMLP:
    layer = MoeMLP(CONFIG, HIDDEN, torch.bfloat16)
    for module, name in (
        (layer.gate, "weight"),
        (layer.experts, "gate_up_proj"),
        (layer.experts, "down_proj"),
    ):
        shape = getattr(module, name).shape
        value = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) / shape[1] ** 0.5
        setattr(module, name, nn.Parameter(value, requires_grad=False))
    return layer


def candidates(num_tokens: int, best: Plan) -> Iterator[Plan]:
    """Other tiles and block sizes, one change at a time."""
    tiles = FEW_ROWS if num_tokens <= 256 else MANY_ROWS
    yield from (replace(best, gate_up=tile) for tile in tiles)
    yield from (replace(best, down=tile) for tile in tiles)
    for block_tokens in (16, 32, 64, 128):
        gate_up, down = fused_moe.TILES[block_tokens]
        for lists_slots in (False, True):
            if (lists_slots and num_tokens > 1) or num_tokens <= block_tokens <= 2 * num_tokens:
                yield Plan(block_tokens, lists_slots, gate_up, down)


def sweep(batch: Batch) -> list[dict[str, Any]]:
    """Median microseconds of every candidate, quickest first; one that does not compile is noted."""
    num_slots = batch.num_tokens * CONFIG.num_experts_per_token
    default = fused_moe.choose_plan(batch.num_tokens, num_slots, CONFIG.num_experts, torch.bfloat16)
    rows: list[dict[str, Any]] = []
    for plan in (default, *candidates(batch.num_tokens, default)):
        row: dict[str, Any] = {"plan": str(plan)}
        try:
            row["us"] = statistics.median(batch.time_us(lambda call, plan=plan: batch.experts(call, plan)))
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:200]
        rows.append(row)
    rows[0]["default"] = True
    rows.sort(key=lambda row: float(row.get("us", "inf")))
    for row in rows[:5]:
        print(f"    {row.get('us', float('nan')):9.1f} us  {row['plan']}{'  (default)' * ('default' in row)}")
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--tokens", type=int, nargs="+", default=NUM_TOKENS)
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    machine = Machine.measure("cuda")
    results: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "moe": vars(CONFIG),
        "copy_bytes_per_s": machine.copy_bytes_per_s,
        "flops": machine.flops,
        "machine_runs": machine.runs,
        "rows": {},
    }
    print(f"copy {machine.copy_bytes_per_s / 1e12:.2f} TB/s, products {machine.flops / 1e12:.0f} TFLOP/s")
    layers = [make_layer() for _ in range(2)]
    for num_tokens in args.tokens:
        batch = Batch(num_tokens, layers)
        limit_us, basis = batch.limit_us(machine)
        row: dict[str, Any] = {"limit_us": limit_us, "limit_basis": basis}
        for name, call in (("layer", batch.layer), ("experts", batch.experts)):
            runs = batch.time_us(call)
            median = statistics.median(runs)
            row[name] = {"median_us": median, "runs_us": runs, "fraction_of_limit": limit_us / median}
            print(
                f"{num_tokens:5d} tokens, {name:7s}: {median:9.1f} us, limit {limit_us:8.1f} us ({basis}), "
                f"{limit_us / median:.0%}",
                flush=True,
            )
        if args.sweep:
            row["sweep"] = sweep(batch)
        results["rows"][str(num_tokens)] = row
    print(f"written to {write_result('gpu_moe', results)}")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
