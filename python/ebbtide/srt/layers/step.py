"""Everything that a model and its layers need to know of one forward pass, passed as an argument.

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
    """The largest numbers of tokens for which our own kernels are used instead of a library's.

    Chosen once, when an engine starts. The tiles of these kernels are in `layers.kernels.tiles`.

    Attributes:
        few: for `small_batch` with 16-bit weights; for more tokens the library is as fast.
        few_router: the same for a router's weight, which has few rows.
        few_fp8: the same for 8-bit weights and tokens that are not quantised.
        few_quantized: for `small_batch.fp8_products`, whose tokens are in 8 bits too.
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
        # All kernels but those for tokens in 8 bits support only bfloat16.
        return ON_GPU if dtype == torch.bfloat16 else Kernels(few_quantized=ON_GPU.few_quantized)


# As measured on an H200 by bench/gpu_small_batch.py.
ON_GPU = Kernels(few=64, few_router=1, few_fp8=1, few_quantized=64)
LIBRARIES = Kernels()


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass.

    Attributes:
        input_ids_T, positions_T: int64, the new tokens and their positions in their requests.
        attention: prepared for these tokens.
        kernels: the engine's.
        wanted_M: int64, not empty: the rows whose hidden states are wanted; None: all.
        given_TLK: int64, experts that replace the routers' choice; −1, or None: the choice stands.
        routes_TLK: where layers write the tokens' experts; it may have more rows than tokens. None: nowhere.
        adapters: None: no token has one. Otherwise `wanted_M` is None, so that every layer has all tokens.
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
