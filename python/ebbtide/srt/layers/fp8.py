"""Weights of 8 bits (e4m3) with a scale for each block of 128 × 128, and the products with them.

A weight is values · scale, block by block, where scale = the block's largest magnitude / 448. Checkpoints of
DeepSeek-V3 and Qwen3-FP8 keep them alike, and call the scales `weight_scale_inv`.

Shapes: T tokens, K columns, O outputs, R rows of a weight, B and C blocks along rows and columns.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn

from ebbtide.srt.layers.activation import Activation
from ebbtide.srt.layers.linear import Linear, linear
from ebbtide.srt.layers.moe import Experts, run_experts
from ebbtide.srt.layers.norm import RMSNorm

if TYPE_CHECKING:
    from ebbtide.srt.layers.small_batch import Normed

BLOCK: Final = 128
FP8: Final = torch.float8_e4m3fn
LARGEST: Final = 448.0
# What the parameter with the scales is called: the name of the one with the values, and this behind it.
SCALES_SUFFIX: Final = "_scale_inv"


def num_blocks(size: int) -> int:
    """Blocks along a dimension; the last one may be narrower."""
    return -(-size // BLOCK)


def quantize_into(values_RK: Tensor, scales_BC: Tensor, weight_RK: Tensor) -> None:
    """Write a weight as values and scales, on their device. Any floating type, any device.

    Divisions and roundings are those of float32 and of torch's own conversion, on every device: to nearest,
    ties to even. A block of zeros has the scale 1. One with NaN or Inf has a scale that is none.
    """
    weight_RK = weight_RK.to(values_RK.device, non_blocking=True)
    if weight_RK.is_cuda:
        from ebbtide.srt.layers.kernels.fp8_quantize import quantize_blocks

        quantize_blocks(weight_RK, values_RK, scales_BC)
        return
    # Row of blocks by row of blocks: what is computed with stays in the cache.
    for row, scales_C in enumerate(scales_BC):
        rows = slice(row * BLOCK, (row + 1) * BLOCK)
        piece = weight_RK[rows].to(torch.float32)
        padding = -piece.shape[1] % BLOCK
        blocks = nn.functional.pad(piece, (0, padding)).view(len(piece), -1, BLOCK)
        scale_C = blocks.abs().amax((0, 2)) / LARGEST
        scale_C = torch.where(scale_C == 0, 1.0, scale_C)
        scales_C.copy_(scale_C)
        quantized = (blocks / scale_C[:, None]).view(len(piece), -1)[:, : piece.shape[1]]
        values_RK[rows].copy_(quantized)


def dequantize(values_RK: Tensor, scales_BC: Tensor) -> Tensor:
    """The weight, float32."""
    wide = scales_BC.repeat_interleave(BLOCK, 0)[: values_RK.shape[0]]
    return values_RK.to(torch.float32) * wide.repeat_interleave(BLOCK, 1)[:, : values_RK.shape[1]]


def are_scales(scales: Tensor) -> Tensor:
    """Whether all of them are finite and above zero: a bool, where they are."""
    return ((scales > 0) & scales.isfinite()).all()


class Fp8Linear(Linear):
    """A `Linear` whose weight has 8 bits.

    One token on a GPU is multiplied as it is, and the weight is widened as it is read; of several, each group
    of 128 columns of a token is quantised too. On a CPU products are those of the weight in float32, and
    activations keep their dtype.

    Args:
        plain: with parameters on the meta device; what it becomes has its sizes, bias and ranks.

    Attributes:
        weight_scale_inv: float32 [B, C].
    """

    def __init__(self, plain: Linear) -> None:
        super().__init__(1, 1, bias=False, dtype=FP8)
        self.group = plain.group
        self.bias = plain.bias
        self.weight = _meta(tuple(plain.weight.shape), FP8)
        self.weight_scale_inv = _meta_scales(plain.weight)

    @property
    def scales(self) -> Tensor | None:
        return self.weight_scale_inv

    def multiply(self, x_TK: Tensor, bias_O: Tensor | None) -> Tensor:
        if x_TK.is_cuda:
            return self._quantized_product(x_TK, None, bias_O)
        weight_OK = dequantize(self.weight, self.weight_scale_inv)
        bias_O = None if bias_O is None else bias_O.to(torch.float32)
        return linear(x_TK.to(torch.float32), weight_OK, bias_O).to(x_TK.dtype)

    def multiply_normed(self, x_TK: Tensor, norm: RMSNorm, bias_O: Tensor | None) -> Tensor:
        if x_TK.is_cuda:
            return self._quantized_product(x_TK, norm, bias_O)
        return self.multiply(norm(x_TK), bias_O)

    def multiply_onto(self, residual_TO: Tensor, x_TK: Tensor) -> None:
        if x_TK.is_cuda and self.bias is None:
            self._quantized_product(x_TK, None, None, residual_TO)
        else:
            residual_TO += self.multiply(x_TK, self.bias)

    def project_gated(
        self, x_TD: Tensor, norm: RMSNorm, activation: Activation, begun: Normed | None = None
    ) -> Tensor:
        if not self._multiplies_few(x_TD) or self.bias is not None:
            return super().project_gated(x_TD, norm, activation, begun)
        from ebbtide.srt.layers.kernels.fp8_product import quantize_tokens
        from ebbtide.srt.layers.small_batch.fp8_products import multiply_quantized

        tokens = quantize_tokens(x_TD.contiguous(), norm.weight, norm.eps, norm.offset)
        out_TI = x_TD.new_empty((len(x_TD), len(self.weight) // 2))
        multiply_quantized(*tokens, self.weight, self.weight_scale_inv, None, out_TI, gated=activation)
        return out_TI

    def add_gated_to(
        self,
        residual_TO: Tensor,
        norm: RMSNorm,
        activation: Activation,
        down: Linear,
        begun: Normed | None = None,
        then: RMSNorm | None = None,
    ) -> Normed | None:
        is_quantized = (
            residual_TO.is_cuda and len(residual_TO) > 1 and self.bias is None and down.bias is None
        )
        if not is_quantized or not isinstance(down, Fp8Linear):
            return super().add_gated_to(residual_TO, norm, activation, down, begun, then)
        tokens = self._gated_in_eight_bits(residual_TO, norm, activation)
        if down.group.size > 1:
            down.group.add_reduced_(down._product_of(*tokens, len(residual_TO)), residual_TO)
        else:
            down._product_of(*tokens, len(residual_TO), residual_TO)
        return None

    def _gated_in_eight_bits(
        self, x_TD: Tensor, norm: RMSNorm, activation: Activation
    ) -> tuple[Tensor, Tensor]:
        from ebbtide.srt.layers.kernels.fp8_product import quantize_gated, quantize_tokens, room_for_tokens
        from ebbtide.srt.layers.small_batch.fp8_products import gates_at_once, multiply_quantized

        num_rows = len(self.weight) // 2
        if self._multiplies_few(x_TD) and gates_at_once(num_rows, x_TD.shape[1]):
            tokens = quantize_tokens(x_TD.contiguous(), norm.weight, norm.eps, norm.offset)
            values_TI, scales_TG = room_for_tokens(len(x_TD), num_rows, x_TD.device)
            operands = (*tokens, self.weight, self.weight_scale_inv)
            multiply_quantized(
                *operands, None, values_TI[: len(x_TD)], gated=activation, out_scales_TG=scales_TG
            )
            return values_TI, scales_TG
        if self._multiplies_few(x_TD):
            return quantize_tokens(self.project_gated(x_TD, norm, activation))
        return quantize_gated(self.multiply_normed(x_TD, norm, None), activation)

    def _quantized_product(
        self, x_TK: Tensor, norm: RMSNorm | None, bias_O: Tensor | None, residual_TO: Tensor | None = None
    ) -> Tensor:
        from ebbtide.srt.layers.kernels.fp8_product import quantize_tokens

        normed = () if norm is None else (norm.weight, norm.eps, norm.offset)
        product_TO = self._product_of(*quantize_tokens(x_TK.contiguous(), *normed), len(x_TK), residual_TO)
        return product_TO if bias_O is None else product_TO.add_(bias_O)

    def _product_of(
        self, values_TK: Tensor, scales_TG: Tensor, num_tokens: int, residual_TO: Tensor | None = None
    ) -> Tensor:
        """Of tokens in 8 bits (more rows than there are): [T, O], added to the residual if there is one."""
        from ebbtide.srt.layers.kernels.fp8_product import cublas_product, scaled_product
        from ebbtide.srt.layers.small_batch.fp8_products import MAX_TOKENS, multiply_quantized

        operands = (values_TK, scales_TG, self.weight, self.weight_scale_inv)
        is_added = residual_TO is not None
        product_TO = cublas_product(*operands) if num_tokens > MAX_TOKENS else None
        if product_TO is not None:
            product_TO = product_TO[:num_tokens]
            return product_TO if residual_TO is None else residual_TO.add_(product_TO)
        if residual_TO is None:
            shape = num_tokens, len(self.weight)
            residual_TO = torch.empty(shape, dtype=torch.bfloat16, device=values_TK.device)
        if num_tokens > MAX_TOKENS:
            scaled_product(*operands, residual_TO, add=is_added)
        else:
            multiply_quantized(*operands, None, residual_TO, add=is_added)
        return residual_TO

    def _multiplies_few(self, x_TD: Tensor) -> bool:
        """Whether our own kernels multiply tokens of 8 bits."""
        if not x_TD.is_cuda:
            return False
        from ebbtide.srt.layers.small_batch.fp8_products import MAX_TOKENS

        return 1 < len(x_TD) <= MAX_TOKENS

    def few_token_kernels(self, x_TD: Tensor) -> ModuleType | None:
        # One token's products take as long as reading the weight: it keeps its precision.
        return super().few_token_kernels(x_TD) if len(x_TD) == 1 else None


class Fp8Experts(Experts):
    """`Experts` whose weights have 8 bits. Activations keep their dtype.

    Args:
        plain: with parameters on the meta device; what it becomes has its sizes, ranks and routes.

    Attributes:
        gate_up_proj_scale_inv, down_proj_scale_inv: float32, a scale for each block of all experts' rows.
    """

    def __init__(self, plain: Experts) -> None:
        super().__init__(plain.config, 1, FP8)
        self.group, self.layer = plain.group, plain.layer
        self.recorder, self.given = plain.recorder, plain.given
        self.gate_up_proj = _meta(tuple(plain.gate_up_proj.shape), FP8)
        self.down_proj = _meta(tuple(plain.down_proj.shape), FP8)
        self.gate_up_proj_scale_inv = _meta_scales(plain.gate_up_proj)
        self.down_proj_scale_inv = _meta_scales(plain.down_proj)

    @property
    def scales(self) -> tuple[Tensor, Tensor] | None:
        return self.gate_up_proj_scale_inv, self.down_proj_scale_inv

    def run(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        gate_up_RD = dequantize(self.gate_up_proj, self.gate_up_proj_scale_inv)
        down_RI = dequantize(self.down_proj, self.down_proj_scale_inv)
        out_TD = run_experts(x_TD.to(torch.float32), gate_up_RD, down_RI, weights_TK, experts_TK)
        return out_TD.to(x_TD.dtype)


def _meta_scales(weight: Tensor) -> nn.Parameter:
    return _meta((num_blocks(weight.shape[0]), num_blocks(weight.shape[1])), torch.float32)


def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
