"""All of a layer's products with weights of 8 bits and what lies between them, without attention, by tokens.

Layers with weights of their own follow one another in a CUDA graph; "cublas" is without FlashInfer's kernel.

    python bench/gpu_fp8_layer.py [--tokens 32 64 256]
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from common import write_result
from gpu_fp8_products import SHAPES
from gpu_small_batch import graph_us
from torch import Tensor, nn

from ebbtide.srt.layers.fp8 import Fp8Linear
from ebbtide.srt.layers.kernels.fp8 import blockscale
from ebbtide.srt.layers.linear import Linear
from ebbtide.srt.layers.norm import RMSNorm

NUM_LAYERS = 6
HIDDEN = 4096


def linear_of(name: str) -> Fp8Linear:
    rows, columns = SHAPES[name]
    made = Fp8Linear(Linear(columns, rows, bias=False, dtype=torch.bfloat16))
    values = torch.randn(rows, columns, device="cuda").mul_(60).clamp_(-448, 448).to(torch.float8_e4m3fn)
    scales = torch.rand((rows // 128, columns // 128), device="cuda").mul_(1e-4).add_(1e-4)
    made.weight = nn.Parameter(values, requires_grad=False)
    made.weight_scale_inv = nn.Parameter(scales, requires_grad=False)
    return made


class Layers:
    def __init__(self) -> None:
        self.layers = [{name: linear_of(name) for name in SHAPES} for _ in range(NUM_LAYERS)]
        self.norm = RMSNorm(HIDDEN, eps=1e-5, dtype=torch.bfloat16)
        ones = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)
        self.norm.weight = nn.Parameter(ones, requires_grad=False)

    def run(self, attended: Tensor, residual: Tensor) -> Tensor:
        """From one layer's attention to the queries, keys and values of the next."""
        for layer in self.layers:
            begun = layer["o"].add_to(residual, attended, self.norm)
            gates, down = layer["gate_up"], layer["down"]
            begun = gates.add_gated_to(residual, self.norm, "silu", down, begun, self.norm)
            qkv = layer["qkv"].project(residual, self.norm, begun)
        return qkv


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 32, 33, 64, 96, 128, 192, 256])
    args = parser.parse_args()
    layers = Layers()
    ways = {"taken": blockscale.blockscale_product, "cublas": lambda *operands: None}
    table: list[dict[str, Any]] = []
    for tokens in args.tokens:
        attended, start = (torch.randn(tokens, HIDDEN, device="cuda").bfloat16() for _ in range(2))
        row: dict[str, Any] = {"tokens": tokens}
        for name, way in ways.items():
            blockscale.blockscale_product = way
            row[name] = graph_us(partial(layers.run, attended, start.clone())) / NUM_LAYERS
        table.append(row)
        told = ", ".join(f"{name} {row[name]:.1f} µs" for name in ways)
        print(f"{tokens} tokens, a layer: {told}", flush=True)
    print(write_result("gpu_fp8_layer", {"layers": table}))


if __name__ == "__main__":
    main()
