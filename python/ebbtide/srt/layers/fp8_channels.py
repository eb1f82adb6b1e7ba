"""Weights of 8 bits (e4m3) with a scale for each row, and products with activations that have one per token.

SGLang calls this `w8a8_fp8`, compressed-tensors FP8 with the strategies `channel` and `token`; both call the
scales `weight_scale`.

Shapes: T tokens, K columns, O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ebbtide.srt.layers.fp8 import CHANNELS, EightBitLinear, dequantize, on_meta
from ebbtide.srt.layers.linear import Linear
from ebbtide.srt.layers.norm import RMSNorm


class ChannelLinear(EightBitLinear):
    """The one with a scale for each output. On a GPU every token is quantised, too, and cuBLAS multiplies.

    Attributes:
        weight_scale: float32 [O, 1].
    """

    def __init__(self, plain: Linear) -> None:
        super().__init__(plain)
        self.weight_scale = on_meta(CHANNELS.shape(*self.weight.shape), torch.float32)

    def multiply_onto(self, residual_TO: Tensor, x_TK: Tensor) -> None:
        residual_TO += self.multiply(x_TK, self.bias)

    def few_token_kernels(self, x_TD: Tensor) -> None:
        # None of them knows scales of rows.
        return None

    def _dequantized(self) -> Tensor:
        return dequantize(self.weight, self.weight_scale, CHANNELS)

    def _quantized_product(self, x_TK: Tensor, norm: RMSNorm | None, bias_O: Tensor | None) -> Tensor:
        from ebbtide.srt.layers.kernels.fp8_rows import product_of_rows, quantize_tokens

        product_TO = product_of_rows(*quantize_tokens(x_TK, norm), self.weight, self.weight_scale)[
            : len(x_TK)
        ]
        return product_TO if bias_O is None else product_TO.add_(bias_O)
