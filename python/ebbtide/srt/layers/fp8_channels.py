"""Weights of 8 bits (e4m3) with a scale for each row, and products with activations that have one per token.

SGLang calls this `w8a8_fp8`, compressed-tensors FP8 with the strategies `channel` and `token`; both call the
scales `weight_scale`.

Shapes: T tokens, K columns, O outputs; of experts those of `layers.moe`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ebbtide.srt.layers.fp8 import CHANNELS, EightBitExperts, EightBitLinear, dequantize
from ebbtide.srt.layers.linear import Inputs, Linear
from ebbtide.srt.layers.moe import Experts, RoutedTokens
from ebbtide.srt.layers.parameters import parameter
from ebbtide.srt.layers.step import Kernels

if TYPE_CHECKING:
    from ebbtide.srt.layers.kernels.lora import ExpertFactors


class ChannelLinear(EightBitLinear):
    """`EightBitLinear` with a scale for each output. On a GPU tokens are quantised, too, for cuBLAS.

    Attributes:
        weight_scale: float32 [O, 1].
    """

    def __init__(self, plain: Linear) -> None:
        super().__init__(plain)
        self.weight_scale = parameter(*CHANNELS.shape(*self.weight.shape), dtype=torch.float32)

    def multiply_onto(self, residual_TO: Tensor, x_TK: Tensor, kernels: Kernels) -> None:
        residual_TO += self.multiply(Inputs(x_TK), self.bias, kernels)

    def takes_few(self, x_TD: Tensor, kernels: Kernels) -> bool:
        # None of these kernels knows scales of rows.
        return False

    def _dequantized(self) -> Tensor:
        return dequantize(self.weight, self.weight_scale, CHANNELS)

    def _quantized_product(self, x: Inputs, kernels: Kernels) -> Tensor:
        from ebbtide.srt.layers.kernels.fp8.rows import product_of_rows, quantize_tokens

        norm = None if x.norm is None else (x.norm.weight, x.norm.eps, x.norm.offset)
        tokens = quantize_tokens(x.x_TD, norm)
        return product_of_rows(*tokens, self.weight, self.weight_scale)[: len(x.x_TD)]


class ChannelExperts(EightBitExperts):
    """Experts with a scale for each row of each of them. On a GPU tokens keep their precision: the values are
    widened as they are read, and a row's sum is multiplied by its scale.

    Attributes:
        gate_up_proj_scale, down_proj_scale: float32 [R, 1] of R rows of all experts.
    """

    layout = CHANNELS

    def __init__(self, plain: Experts) -> None:
        super().__init__(plain)
        self.gate_up_proj_scale = parameter(*CHANNELS.shape(*self.gate_up_proj.shape), dtype=torch.float32)
        self.down_proj_scale = parameter(*CHANNELS.shape(*self.down_proj.shape), dtype=torch.float32)

    @property
    def scales(self) -> tuple[Tensor, Tensor]:
        return self.gate_up_proj_scale, self.down_proj_scale

    def run_fused(
        self, tokens: RoutedTokens, residual_TD: Tensor | None, adapted: ExpertFactors | None
    ) -> Tensor:
        from ebbtide.srt.layers.kernels.fused_moe import fused_experts

        x_TD, chosen = tokens.x_TD, tokens[1:]
        weights = (self.gate_up_proj, self.down_proj)
        return fused_experts(
            x_TD, *weights, *chosen, residual_TD=residual_TD, scales=self.scales, adapted=adapted
        )
