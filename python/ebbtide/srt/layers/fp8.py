"""Weights of 8 bits (e4m3) with a scale for each block of 128 × 128, and the products with them.

A weight is values · scale, block by block, where scale = the block's largest magnitude / 448. Checkpoints of
DeepSeek-V3 and Qwen3-FP8 keep them alike, and call the scales `weight_scale_inv`. With a scale for each row
instead the products are those of `fp8_channels`.

Shapes: T tokens, K columns, O outputs, R rows of a weight, B and C blocks along rows and columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn

from ebbtide.srt.layers.activation import Activation
from ebbtide.srt.layers.linear import Linear, QuantizedTokens, linear
from ebbtide.srt.layers.moe import Experts, run_experts
from ebbtide.srt.layers.norm import RMSNorm

if TYPE_CHECKING:
    from ebbtide.srt.layers.linear import Begun

BLOCK: Final = 128
FP8: Final = torch.float8_e4m3fn
LARGEST: Final = 448.0


@dataclass(frozen=True)
class ScaleLayout:
    """How the scales of a weight lie.

    Attributes:
        quantization: what `--quantization` calls it.
        suffix: what the parameter with the scales is called: the name of the one with the values, and this.
        block_rows, block_columns: what has one scale; None: all columns.
        multiple_of: what sizes of weights are multiples of.
    """

    quantization: str
    suffix: str
    block_rows: int
    block_columns: int | None
    multiple_of: int

    def shape(self, num_rows: int, num_columns: int) -> tuple[int, int]:
        """The shape of a weight's scales; its last blocks may be narrower."""
        columns = 1 if self.block_columns is None else -(-num_columns // self.block_columns)
        return -(-num_rows // self.block_rows), columns

    def __str__(self) -> str:
        return "row" if self.block_columns is None else f"block of {self.block_rows} x {self.block_columns}"


BLOCKS: Final = ScaleLayout("fp8", "_scale_inv", BLOCK, BLOCK, multiple_of=BLOCK)
# cuBLAS takes multiples of 16.
CHANNELS: Final = ScaleLayout("w8a8_fp8", "_scale", 1, None, multiple_of=16)
SCALE_LAYOUTS: Final = {layout.quantization: layout for layout in (BLOCKS, CHANNELS)}


def quantize_into(
    values_RK: Tensor,
    scales_BC: Tensor,
    weight_RK: Tensor,
    layout: ScaleLayout = BLOCKS,
    first_column: int = 0,
) -> None:
    """Write a weight as values and scales, on their device. Any floating type, any device.

    Divisions and roundings are those of float32 and of torch's own conversion, on every device: to nearest,
    ties to even. A block of zeros has the scale 1, one with NaN or Inf a scale that is not finite.

    Args:
        first_column: of the weight's columns that are written; scales of rows are those of all columns.
    """
    weight_RK = weight_RK.to(values_RK.device, non_blocking=True)
    if layout is CHANNELS:
        _quantize_rows_into(values_RK, scales_BC, weight_RK, first_column)
        return
    if weight_RK.is_cuda:
        from ebbtide.srt.layers.kernels.fp8.quantize import quantize_blocks

        quantize_blocks(weight_RK, values_RK, scales_BC)
        return
    # One row of blocks at a time, so that intermediate results stay in the cache.
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


def _quantize_rows_into(values_RJ: Tensor, scales_R1: Tensor, weight_RK: Tensor, first_column: int) -> None:
    if weight_RK.is_cuda:
        from ebbtide.srt.layers.kernels.fp8.rows import quantize_rows

        quantize_rows(weight_RK, values_RJ, scales_R1, first_column)
        return
    # Some rows at a time, so that intermediate results stay in the cache.
    pieces = (torch.split(x, BLOCK) for x in (weight_RK, values_RJ, scales_R1))
    for piece, values, scales in zip(*pieces, strict=True):
        wide = piece.to(torch.float32)
        scale = wide.abs().amax(1, keepdim=True) / LARGEST
        scales.copy_(torch.where(scale == 0, 1.0, scale))
        values.copy_(wide.narrow(1, first_column, values.shape[1]) / scales)


def dequantize(values_RK: Tensor, scales_BC: Tensor, layout: ScaleLayout = BLOCKS) -> Tensor:
    """The weight in float32. The values may be its first rows only."""
    if layout is CHANNELS:
        return values_RK.to(torch.float32) * scales_BC[: len(values_RK)]
    wide = scales_BC.repeat_interleave(BLOCK, 0)[: values_RK.shape[0]]
    return values_RK.to(torch.float32) * wide.repeat_interleave(BLOCK, 1)[:, : values_RK.shape[1]]


def are_scales(scales: Tensor) -> Tensor:
    """Whether all are finite and above zero in float32, the type they are kept in: a bool on their device."""
    scales = scales.to(torch.float32)
    return ((scales > 0) & scales.isfinite()).all()


class EightBitLinear(Linear, ABC):
    """A `Linear` whose weight has 8 bits. On a CPU products are those of the weight in float32, and
    activations keep their dtype.

    Args:
        plain: with parameters on the meta device; what it becomes has its sizes, bias and ranks.
    """

    def __init__(self, plain: Linear) -> None:
        super().__init__(1, 1, bias=False, dtype=FP8)
        self.group = plain.group
        self.bias = plain.bias
        self.weight = on_meta(tuple(plain.weight.shape), FP8)

    def multiply(self, x_TK: Tensor, bias_O: Tensor | None) -> Tensor:
        if x_TK.is_cuda:
            return self._quantized_product(x_TK, None, bias_O)
        bias_O = None if bias_O is None else bias_O.to(torch.float32)
        return linear(x_TK.to(torch.float32), self._dequantized(), bias_O).to(x_TK.dtype)

    def multiply_normed(self, x_TK: Tensor, norm: RMSNorm, bias_O: Tensor | None) -> Tensor:
        if x_TK.is_cuda:
            return self._quantized_product(x_TK, norm, bias_O)
        return self.multiply(norm(x_TK), bias_O)

    @abstractmethod
    def _dequantized(self) -> Tensor:
        """The weight in float32, [O, K]."""

    @abstractmethod
    def _quantized_product(self, x_TK: Tensor, norm: RMSNorm | None, bias_O: Tensor | None) -> Tensor:
        """The product on a GPU, [T, O]. Tokens are normalised first if there is a norm."""


class Fp8Linear(EightBitLinear):
    """`EightBitLinear` with a scale for each block of the weight.

    One token on a GPU is multiplied as it is, and the weight is widened as it is read; of several, each group
    of 128 columns of a token is quantised too.

    Attributes:
        weight_scale_inv: float32 [B, C].
    """

    def __init__(self, plain: Linear) -> None:
        super().__init__(plain)
        self.weight_scale_inv = _meta_scales(plain.weight)

    @property
    def scales(self) -> Tensor | None:
        return self.weight_scale_inv

    def multiply_onto(self, residual_TO: Tensor, x_TK: Tensor) -> None:
        if x_TK.is_cuda and self.bias is None:
            self._quantized_product(x_TK, None, None, residual_TO)
        else:
            residual_TO += self.multiply(x_TK, self.bias)

    def project(self, x_TD: Tensor, norm: RMSNorm | None = None, begun: Begun | None = None) -> Tensor:
        if not isinstance(begun, QuantizedTokens):
            return super().project(x_TD, norm, begun)
        product_TO = self._product_of(*begun, len(x_TD))
        return product_TO if self.bias is None else product_TO.add_(self.bias)

    def project_gated(
        self, x_TD: Tensor, norm: RMSNorm, activation: Activation, begun: Begun | None = None
    ) -> Tensor:
        if not self._multiplies_few(x_TD) or self.bias is not None:
            return super().project_gated(x_TD, norm, activation, begun)
        from ebbtide.srt.layers.small_batch.fp8_products import multiply_quantized

        tokens = _tokens_of(x_TD, norm, begun)
        out_TI = x_TD.new_empty((len(x_TD), len(self.weight) // 2))
        multiply_quantized(*tokens, self.weight, self.weight_scale_inv, None, out_TI, gated=activation)
        return out_TI

    def add_to(self, residual_TO: Tensor, x_TD: Tensor, then: RMSNorm | None = None) -> Begun | None:
        if not self._adds_in_eight_bits(residual_TO):
            return super().add_to(residual_TO, x_TD, then)
        return self._add_product(residual_TO, _tokens_of(x_TD), then)

    def add_gated_to(
        self,
        residual_TO: Tensor,
        norm: RMSNorm,
        activation: Activation,
        down: Linear,
        begun: Begun | None = None,
        then: RMSNorm | None = None,
    ) -> Begun | None:
        is_quantized = residual_TO.is_cuda and len(residual_TO) > 1 and self.bias is None
        if not (is_quantized and isinstance(down, Fp8Linear) and down.bias is None):
            return super().add_gated_to(residual_TO, norm, activation, down, begun, then)
        tokens = self._gated_in_eight_bits(residual_TO, norm, activation, begun)
        if down._adds_in_eight_bits(residual_TO):
            return down._add_product(residual_TO, tokens, then)
        down.group.add_reduced_(down._product_of(*tokens, len(residual_TO)), residual_TO)
        return None

    def _gated_in_eight_bits(
        self, x_TD: Tensor, norm: RMSNorm, activation: Activation, begun: Begun | None
    ) -> QuantizedTokens:
        from ebbtide.srt.layers.kernels.fp8.product import quantize_gated, room_for_tokens
        from ebbtide.srt.layers.small_batch.fp8_products import gates_at_once, multiply_quantized

        num_rows = len(self.weight) // 2
        if not self._multiplies_few(x_TD):
            tokens = _tokens_of(x_TD, norm, begun)
            return QuantizedTokens(*quantize_gated(self._product_of(*tokens, len(x_TD)), activation))
        if not gates_at_once(num_rows, x_TD.shape[1]):
            return _tokens_of(self.project_gated(x_TD, norm, activation, begun))
        tokens = _tokens_of(x_TD, norm, begun)
        values_TI, scales_TG = room_for_tokens(len(x_TD), num_rows, x_TD.device)
        operands = (*tokens, self.weight, self.weight_scale_inv)
        multiply_quantized(*operands, None, values_TI[: len(x_TD)], gated=activation, out_scales_TG=scales_TG)
        return QuantizedTokens(values_TI, scales_TG)

    def _adds_in_eight_bits(self, residual_TO: Tensor) -> bool:
        """Whether the product of tokens in 8 bits is added to the residual here."""
        return residual_TO.is_cuda and len(residual_TO) > 1 and self.bias is None and self.group.size == 1

    def _add_product(
        self, residual_TO: Tensor, tokens: QuantizedTokens, then: RMSNorm | None
    ) -> QuantizedTokens | None:
        """Add the product of tokens in 8 bits to the residual; returns the next norm, in 8 bits too."""
        from ebbtide.srt.layers.kernels.fp8.product import add_and_quantize

        num_tokens = len(residual_TO)
        operands = (*tokens, self.weight, self.weight_scale_inv)
        product_TO = None if then is None else _library_product(*operands, num_tokens)
        if then is None or product_TO is None:
            # A norm runs one program for each token. Few tokens are added quicker by one for each output.
            self._product_of(*tokens, num_tokens, residual_TO)
            return None if then is None else _tokens_of(residual_TO, then)
        return QuantizedTokens(*add_and_quantize(residual_TO, product_TO, then.weight, then.eps, then.offset))

    def _dequantized(self) -> Tensor:
        return dequantize(self.weight, self.weight_scale_inv)

    def _quantized_product(
        self, x_TK: Tensor, norm: RMSNorm | None, bias_O: Tensor | None, residual_TO: Tensor | None = None
    ) -> Tensor:
        product_TO = self._product_of(*_tokens_of(x_TK, norm), len(x_TK), residual_TO)
        return product_TO if bias_O is None else product_TO.add_(bias_O)

    def _product_of(
        self, values_TK: Tensor, scales_TG: Tensor, num_tokens: int, residual_TO: Tensor | None = None
    ) -> Tensor:
        """The product of tokens in 8 bits, [T, O]; added to the residual if there is one.

        Values and scales are those of T tokens or more.
        """
        from ebbtide.srt.layers.kernels.fp8.product import scaled_product
        from ebbtide.srt.layers.small_batch.fp8_products import MAX_TOKENS, multiply_quantized

        operands = (values_TK, scales_TG, self.weight, self.weight_scale_inv)
        is_added = residual_TO is not None
        product_TO = _library_product(*operands, num_tokens)
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


def _library_product(
    values_TK: Tensor, scales_TG: Tensor, weight: Tensor, weight_scales: Tensor, num_tokens: int
) -> Tensor | None:
    """The product by a library's kernel, with T rows or more; None where it is ours that is quicker."""
    from ebbtide.srt.layers.kernels.fp8.blockscale import blockscale_product
    from ebbtide.srt.layers.kernels.fp8.product import cublas_product
    from ebbtide.srt.layers.small_batch.fp8_products import MAX_TOKENS

    operands = (values_TK, scales_TG, weight, weight_scales)
    product_TO = blockscale_product(*operands, num_tokens)
    if product_TO is None and num_tokens > MAX_TOKENS:
        product_TO = cublas_product(*operands)
    return product_TO


def _tokens_of(x_TK: Tensor, norm: RMSNorm | None = None, begun: Begun | None = None) -> QuantizedTokens:
    """norm(x), or x, in 8 bits: `begun`, if whoever wrote x has made that already."""
    if isinstance(begun, QuantizedTokens):
        return begun
    from ebbtide.srt.layers.kernels.fp8.product import quantize_tokens

    normed = () if norm is None else (norm.weight, norm.eps, norm.offset)
    return QuantizedTokens(*quantize_tokens(x_TK.contiguous(), *normed))


class EightBitExperts(Experts, ABC):
    """`Experts` whose weights have 8 bits. On a CPU products are as those of `EightBitLinear`.

    Args:
        plain: with parameters on the meta device; what it becomes has its sizes, ranks and routes.
    """

    def __init__(self, plain: Experts) -> None:
        super().__init__(plain.config, 1, FP8)
        self.group, self.layer = plain.group, plain.layer
        self.recorder, self.given = plain.recorder, plain.given
        self.gate_up_proj = on_meta(tuple(plain.gate_up_proj.shape), FP8)
        self.down_proj = on_meta(tuple(plain.down_proj.shape), FP8)

    def run(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor) -> Tensor:
        out_TD = run_experts(x_TD.to(torch.float32), *self._dequantized(), weights_TK, experts_TK)
        return out_TD.to(x_TD.dtype)

    @abstractmethod
    def _dequantized(self) -> tuple[Tensor, Tensor]:
        """Both weights in float32."""


class Fp8Experts(EightBitExperts):
    """`EightBitExperts` with a scale for each block. On a GPU few tokens keep their precision, and more
    of them are quantised, as with `Fp8Linear`.

    Attributes:
        gate_up_proj_scale_inv, down_proj_scale_inv: float32, a scale for each block of all experts' rows.
    """

    def __init__(self, plain: Experts) -> None:
        super().__init__(plain)
        self.gate_up_proj_scale_inv = _meta_scales(plain.gate_up_proj)
        self.down_proj_scale_inv = _meta_scales(plain.down_proj)

    def run_fused(
        self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, residual_TD: Tensor | None
    ) -> Tensor:
        from ebbtide.srt.layers.kernels.fp8.moe import fused_quantized_experts

        weights = (self.gate_up_proj, self.down_proj)
        scales = self.gate_up_proj_scale_inv, self.down_proj_scale_inv
        return fused_quantized_experts(x_TD, *weights, weights_TK, experts_TK, scales, residual_TD)

    def _dequantized(self) -> tuple[Tensor, Tensor]:
        gate_up_RD = dequantize(self.gate_up_proj, self.gate_up_proj_scale_inv)
        return gate_up_RD, dequantize(self.down_proj, self.down_proj_scale_inv)


def _meta_scales(weight: Tensor) -> nn.Parameter:
    return on_meta(BLOCKS.shape(*weight.shape), torch.float32)


def on_meta(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    """A parameter without memory."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
