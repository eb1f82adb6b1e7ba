"""A forward pass, as a model and its layers see it: everything of a pass is an argument.

Shapes: T tokens, L layers, K experts per token, M rows that are wanted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ebbtide.srt.layers.attention.base import AttentionStep
from ebbtide.srt.layers.lora import StepAdapters
from ebbtide.srt.layers.state import StateStep


@dataclass(frozen=True, slots=True)
class Kernels:
    """Which products take kernels of ours instead of a library's: up to how many tokens each serves.

    Chosen once, when an engine starts. The tiles of these kernels are in `layers.kernels.tiles`.

    Attributes:
        few: `small_batch`, by weights of 16 bits; beyond, the library's product takes no longer.
        few_router: the same, by a router's weight, which has few rows.
        few_fp8: the same, by weights of 8 bits: one token keeps its precision.
        few_quantized: `small_batch.fp8_products`, of tokens in 8 bits.
    """

    few: int = 0
    few_router: int = 0
    few_fp8: int = 0
    few_quantized: int = 0

    @classmethod
    def for_(cls, device: torch.device, dtype: torch.dtype) -> Kernels:
        """The kernels for a model of this dtype."""
        if device.type != "cuda":
            return LIBRARIES
        # Only those of tokens in 8 bits take another type than bfloat16.
        return ON_GPU if dtype == torch.bfloat16 else Kernels(few_quantized=ON_GPU.few_quantized)


# As measured on an H200 by bench/gpu_small_batch.py.
ON_GPU = Kernels(few=64, few_router=1, few_fp8=1, few_quantized=64)
LIBRARIES = Kernels()


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass.

    Attributes:
        input_ids_T, positions_T: int64, the new tokens and where they stand in their requests.
        attention: prepared for these tokens.
        kernels: the engine's.
        wanted_M: int64, not empty: the rows whose hidden states are wanted; None: all.
        given_TLK: int64, experts that tokens take in place of the routers' choice; −1, or None: it holds.
        routes_TLK: where layers write the experts of the tokens, with room for more of them; None: nowhere.
        adapters: None: no token has one. Else every layer has all tokens: `wanted_M` is None.
        states: of the requests; None: no layer keeps any.
    """

    input_ids_T: Tensor
    positions_T: Tensor
    attention: AttentionStep
    kernels: Kernels
    wanted_M: Tensor | None = None
    given_TLK: Tensor | None = None
    routes_TLK: Tensor | None = None
    adapters: StepAdapters | None = None
    states: StateStep | None = None
