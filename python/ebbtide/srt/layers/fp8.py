"""8-bit weights (e4m3) with scales, and products with them.

A weight is values · scale, with scale = largest magnitude / 448 of a block of 128 × 128, or of a row. The
checkpoints of DeepSeek-V3 and Qwen3-FP8 have blocks, and name the scales `weight_scale_inv`. Those of
compressed-tensors with the strategies `channel` and `token` (SGLang: `w8a8_fp8`) have rows, and name them
`weight_scale`.

Shapes: T tokens, K columns, O outputs, R rows of a weight, B and C blocks along rows and columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ebbtide.srt.layers import parameter
from ebbtide.srt.layers.heads import RoutedTokens
from ebbtide.srt.layers.linear import Gated, Inputs, Linear
from ebbtide.srt.layers.moe import AdaptedExperts, Experts, run_experts
from ebbtide.srt.layers.norm import Activation
from ebbtide.srt.layers.step import Kernels

if TYPE_CHECKING:
    from ebbtide.srt.layers.kernels.lora import ExpertFactors

BLOCK: Final = 128
FP8: Final = torch.float8_e4m3fn
LARGEST: Final = 448.0


@dataclass(frozen=True)
class ScaleLayout:
    """The layout of a weight's scales.

    Attributes:
        quantization: its value of `--quantization`.
        suffix: what is appended to the name of a weight to name its scales.
        block_rows, block_columns: the block that shares one scale; None: all columns.
        multiple_of: sizes of weights must be multiples of this.
    """

    quantization: str
    suffix: str
    block_rows: int
    block_columns: int | None
    multiple_of: int

    def shape(self, num_rows: int, num_columns: int) -> tuple[int, int]:
        """The shape of a weight's scales. The last blocks of the weight may be smaller."""
        columns = 1 if self.block_columns is None else -(-num_columns // self.block_columns)
        return -(-num_rows // self.block_rows), columns

    def __str__(self) -> str:
        return "row" if self.block_columns is None else f"block of {self.block_rows} x {self.block_columns}"


BLOCKS: Final = ScaleLayout("fp8", "_scale_inv", BLOCK, BLOCK, multiple_of=BLOCK)
# cuBLAS requires multiples of 16.
CHANNELS: Final = ScaleLayout("w8a8_fp8", "_scale", 1, None, multiple_of=16)
SCALE_LAYOUTS: Final = {layout.quantization: layout for layout in (BLOCKS, CHANNELS)}


def quantize_into(
    values_RK: Tensor,
    scales_BC: Tensor,
    weight_RK: Tensor,
    layout: ScaleLayout = BLOCKS,
    first_column: int = 0,
) -> None:
    """Quantise a weight of any floating dtype on any device into values and scales on their device.

    Every device divides in float32 and rounds as torch converts: to nearest, ties to even. A block of zeros
    gets the scale 1, one with NaN or Inf a scale that is not finite.

    Args:
        first_column: of the columns of the weight to write. A row's scale always covers all its columns.
    """
    weight_RK = weight_RK.to(values_RK.device, non_blocking=True)
    if layout is CHANNELS:
        _quantize_rows_into(values_RK, scales_BC, weight_RK, first_column)
        return
    if weight_RK.is_cuda and len(weight_RK) % BLOCK == 0:
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
    """The weight in float32. `values_RK` may be only the weight's first rows."""
    if layout is CHANNELS:
        return values_RK.to(torch.float32) * scales_BC[: len(values_RK)]
    wide = scales_BC.repeat_interleave(BLOCK, 0)[: values_RK.shape[0]]
    return values_RK.to(torch.float32) * wide.repeat_interleave(BLOCK, 1)[:, : values_RK.shape[1]]


def widened(values_RK: Tensor, scales_BC: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in a model's dtype, with scales of blocks."""
    if not values_RK.is_cuda:
        return dequantize(values_RK, scales_BC).to(dtype)
    from ebbtide.srt.layers.kernels.fp8.quantize import widen_blocks

    return widen_blocks(values_RK, scales_BC, dtype)


def are_scales(scales: Tensor) -> Tensor:
    """Whether all are finite and positive in float32, in which they are kept. A bool on their device."""
    scales = scales.to(torch.float32)
    return ((scales > 0) & scales.isfinite()).all()


class QuantizedTokens(NamedTuple):
    """Tokens in 8 bits. See `layers.kernels.fp8.product`.

    Attributes:
        values_TK: e4m3; it has padding rows after the tokens.
        scales_TG: float32, one for each group of 128 columns.
    """

    values_TK: Tensor
    scales_TG: Tensor


class EightBitLinear(Linear, ABC):
    """A `Linear` with an 8-bit weight. On a CPU, it multiplies by the weight in float32, and activations keep
    their dtype.

    Args:
        plain: the `Linear` to replace, with parameters on the meta device; sizes, bias and ranks are taken
            over.

    Attributes:
        layout: of the scales, a float32 parameter whose name has the layout's suffix.
    """

    layout: ScaleLayout

    def __init__(self, plain: Linear) -> None:
        super().__init__(1, 1, bias=False, dtype=FP8)
        self.group = plain.group
        self.bias = plain.bias
        _keep_in_eight_bits(self, "weight", plain.weight, self.layout)

    @property
    def own_scales(self) -> Tensor:
        """The weight's scales."""
        scales: Tensor = getattr(self, "weight" + self.layout.suffix)
        return scales

    def multiply(self, x: Inputs, bias_O: Tensor | None, kernels: Kernels) -> Tensor:
        if x.x_TD.is_cuda:
            product_TO = self._quantized_product(x, kernels)
            return product_TO if bias_O is None else product_TO.add_(bias_O)
        x_TK = x.tensor()
        bias_O = None if bias_O is None else bias_O.to(torch.float32)
        return F.linear(x_TK.to(torch.float32), self._dequantized(), bias_O).to(x_TK.dtype)

    def wide_weight(self, dtype: torch.dtype) -> Tensor:
        return self._dequantized().to(dtype)

    def _dequantized(self) -> Tensor:
        """The weight in float32, [O, K]."""
        return dequantize(self.weight, self.own_scales, self.layout)

    @abstractmethod
    def _quantized_product(self, x: Inputs, kernels: Kernels) -> Tensor:
        """The product [T, O] on a GPU, without bias."""


class Fp8Linear(EightBitLinear):
    """`EightBitLinear` with a scale for each block of the weight.

    On a GPU, a single token keeps its dtype, and the weight is widened as it is read. Several tokens are
    quantised too, with a scale for each group of 128 columns.
    """

    layout = BLOCKS

    @property
    def scales(self) -> Tensor | None:
        return self.own_scales

    @property
    def _blocks(self) -> tuple[Tensor, Tensor]:
        """The rows of the weight that fill whole blocks, and their scales."""
        return self.weight, self.own_scales

    def wide_weight(self, dtype: torch.dtype) -> Tensor:
        return widened(self.weight, self.own_scales, dtype)

    def takes_few(self, x_TD: Tensor, kernels: Kernels) -> bool:
        return len(x_TD) <= kernels.few_fp8

    def multiply_onto(self, residual_TO: Tensor, x_TK: Tensor, kernels: Kernels) -> None:
        if x_TK.is_cuda and self.bias is None:
            self._product_of(_quantized(Inputs(x_TK)), len(x_TK), kernels, residual_TO)
        else:
            residual_TO += self.multiply(Inputs(x_TK), self.bias, kernels)

    def gate(self, x: Inputs, activation: Activation, kernels: Kernels) -> Tensor:
        num_tokens = len(x.x_TD)
        if self.bias is not None or not 1 < num_tokens <= kernels.few_quantized:
            return super().gate(x, activation, kernels)
        from ebbtide.srt.layers.small_batch.fp8_products import multiply_quantized

        out_TI = x.x_TD.new_empty((num_tokens, len(self.weight) // 2))
        weight = (self.weight, self.own_scales)
        multiply_quantized(*_quantized(x), *weight, out_TI, gated=activation)
        return out_TI

    def add_to(self, residual_TO: Tensor, x: Tensor | Gated, kernels: Kernels) -> None:
        num_tokens = len(residual_TO)
        takes = residual_TO.is_cuda and num_tokens > 1 and self.bias is None
        if takes and isinstance(x, Gated) and isinstance(x.linear, Fp8Linear) and x.linear.bias is None:
            tokens = x.linear._gated_in_eight_bits(x.x, x.activation, kernels)
            if self.group.size == 1:
                self._product_of(tokens, num_tokens, kernels, residual_TO)
            else:
                self.group.add_reduced_(self._product_of(tokens, num_tokens, kernels), residual_TO)
        else:
            super().add_to(residual_TO, x, kernels)

    def _gated_in_eight_bits(self, x: Inputs, activation: Activation, kernels: Kernels) -> QuantizedTokens:
        from ebbtide.srt.layers.kernels.fp8.product import quantize_gated, room_for_tokens
        from ebbtide.srt.layers.kernels.tiles import gates_at_once
        from ebbtide.srt.layers.small_batch.fp8_products import multiply_quantized

        (num_tokens, num_columns), num_rows = x.x_TD.shape, len(self.weight) // 2
        if num_tokens > kernels.few_quantized:
            product_TO = self._product_of(_quantized(x), num_tokens, kernels)
            return QuantizedTokens(*quantize_gated(product_TO, activation))
        if not gates_at_once(num_rows, num_columns):
            return _quantized(Inputs(self.gate(x, activation, kernels)))
        tokens = _quantized(x)
        values_TI, scales_TG = room_for_tokens(num_tokens, num_rows, x.x_TD.device)
        operands = (*tokens, self.weight, self.own_scales)
        multiply_quantized(*operands, values_TI[:num_tokens], gated=activation, out_scales_TG=scales_TG)
        return QuantizedTokens(values_TI, scales_TG)

    def _quantized_product(self, x: Inputs, kernels: Kernels) -> Tensor:
        return self._product_of(_quantized(x), len(x.x_TD), kernels)

    def _product_of(
        self, tokens: QuantizedTokens, num_tokens: int, kernels: Kernels, residual_TO: Tensor | None = None
    ) -> Tensor:
        """The product [T, O] of tokens in 8 bits. With a residual, it is added to that in place."""
        product_TO = self._library_product(tokens, num_tokens, kernels)
        if product_TO is not None:
            product_TO = product_TO[:num_tokens]
            return product_TO if residual_TO is None else residual_TO.add_(product_TO)
        is_added = residual_TO is not None
        if residual_TO is None:
            shape = num_tokens, len(self._blocks[0])
            residual_TO = torch.empty(shape, dtype=torch.bfloat16, device=self.weight.device)
        operands = (*tokens, *self._blocks)
        if num_tokens > kernels.few_quantized:
            from ebbtide.srt.layers.kernels.fp8.product import scaled_product

            scaled_product(*operands, residual_TO, add=is_added)
        else:
            from ebbtide.srt.layers.small_batch.fp8_products import multiply_quantized

            multiply_quantized(*operands, residual_TO, add=is_added)
        return residual_TO

    def _library_product(self, tokens: QuantizedTokens, num_tokens: int, kernels: Kernels) -> Tensor | None:
        """The product by a library's kernel, perhaps with padding rows; None if our own kernel is faster."""
        from ebbtide.srt.layers.kernels.fp8.blockscale import blockscale_product
        from ebbtide.srt.layers.kernels.fp8.product import cublas_product

        operands = (*tokens, *self._blocks)
        product_TO = blockscale_product(*operands, num_tokens)
        if product_TO is None and num_tokens > kernels.few_quantized:
            product_TO = cublas_product(*operands)
        return product_TO


class RaggedFp8Linear(Fp8Linear):
    """`Fp8Linear` whose last rows need not fill a block; these are multiplied in the tokens' dtype."""

    def takes_few(self, x_TD: Tensor, kernels: Kernels) -> bool:
        return False

    @property
    def _blocks(self) -> tuple[Tensor, Tensor]:
        num_blocks = len(self.weight) // BLOCK
        return self.weight[: num_blocks * BLOCK], self.own_scales[:num_blocks]

    def _quantized_product(self, x: Inputs, kernels: Kernels) -> Tensor:
        num_blocks = len(self.weight) // BLOCK
        rest = self.weight[num_blocks * BLOCK :], self.own_scales[num_blocks:]
        x_TK = x.tensor()
        rest_TR = F.linear(x_TK, widened(*rest, x_TK.dtype))
        return torch.cat((super()._quantized_product(x, kernels), rest_TR), 1) if num_blocks else rest_TR


class ChannelLinear(EightBitLinear):
    """`EightBitLinear` with a scale for each output. On a GPU tokens are quantised too, for cuBLAS."""

    layout = CHANNELS

    def multiply_onto(self, residual_TO: Tensor, x_TK: Tensor, kernels: Kernels) -> None:
        residual_TO += self.multiply(Inputs(x_TK), self.bias, kernels)

    def takes_few(self, x_TD: Tensor, kernels: Kernels) -> bool:
        # The kernels for few tokens do not support scales of rows.
        return False

    def _quantized_product(self, x: Inputs, kernels: Kernels) -> Tensor:
        from ebbtide.srt.layers.kernels.fp8.rows import product_of_rows, quantize_tokens

        norm = None if x.norm is None else (x.norm.weight, x.norm.eps, x.norm.offset)
        tokens = quantize_tokens(x.x_TD, norm)
        return product_of_rows(*tokens, self.weight, self.own_scales)[: len(x.x_TD)]


def _quantized(x: Inputs) -> QuantizedTokens:
    from ebbtide.srt.layers.kernels.fp8.product import quantize_tokens

    normed = () if x.norm is None else (x.norm.weight, x.norm.eps, x.norm.offset)
    return QuantizedTokens(*quantize_tokens(x.x_TD.contiguous(), *normed))


class EightBitExperts(Experts):
    """`Experts` with 8-bit weights. On a CPU, products are like those of `EightBitLinear`.

    Args:
        plain: the experts to replace, with parameters on the meta device; sizes, ranks and routes are taken
            over.

    Attributes:
        layout: of the scales of all experts' rows, as in `EightBitLinear`.
    """

    layout: ScaleLayout

    def __init__(self, plain: Experts) -> None:
        super().__init__(plain.config, 1, FP8, plain.layer)
        self.group = plain.group
        _keep_in_eight_bits(self, "gate_up_proj", plain.gate_up_proj, self.layout)
        _keep_in_eight_bits(self, "down_proj", plain.down_proj, self.layout)

    @property
    def scales(self) -> tuple[Tensor, Tensor]:
        suffix = self.layout.suffix
        return getattr(self, "gate_up_proj" + suffix), getattr(self, "down_proj" + suffix)

    def run(self, tokens: RoutedTokens, adapted: AdaptedExperts | None) -> Tensor:
        gate_up_scales, down_scales = self.scales
        gate_up_RD = dequantize(self.gate_up_proj, gate_up_scales, self.layout)
        down_RI = dequantize(self.down_proj, down_scales, self.layout)
        wide = tokens._replace(x_TD=tokens.x_TD.to(torch.float32))
        return run_experts(wide, gate_up_RD, down_RI, adapted).to(tokens.x_TD.dtype)


class Fp8Experts(EightBitExperts):
    """`EightBitExperts` with a scale for each block. On a GPU, few tokens keep their dtype, and more tokens
    are quantised, as in `Fp8Linear`.
    """

    layout = BLOCKS

    def run_fused(
        self, tokens: RoutedTokens, residual_TD: Tensor | None, adapted: ExpertFactors | None
    ) -> Tensor:
        assert adapted is None, "these kernels know no adapters, which was refused at the start"
        from ebbtide.srt.layers.kernels.fp8.moe import fused_quantized_experts

        weights = (self.gate_up_proj, self.down_proj)
        return fused_quantized_experts(tokens, *weights, self.scales, residual_TD)


class ChannelExperts(EightBitExperts):
    """`EightBitExperts` with a scale for each row. On a GPU tokens keep their dtype: values are widened as
    they are read, and each row's sum is multiplied by its scale.
    """

    layout = CHANNELS


def _keep_in_eight_bits(module: nn.Module, name: str, weight: Tensor, layout: ScaleLayout) -> None:
    """Replace a module's weight by 8-bit values and their scales, on the meta device."""
    setattr(module, name, parameter(*weight.shape, dtype=FP8))
    setattr(module, name + layout.suffix, parameter(*layout.shape(*weight.shape), dtype=torch.float32))
