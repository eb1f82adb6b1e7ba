"""Quantises rows of weights or tokens to 8 bits (e4m3) with a scale each, and multiplies them by cuBLAS.

Shapes: T tokens, R rows, K columns, J of them, O outputs.
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

from __future__ import annotations

from typing import TypeAlias

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ebbtide.srt.layers.kernels.fp8.quantize import divided
from ebbtide.srt.layers.kernels.instructions import announce, wait
from ebbtide.srt.layers.kernels.launch import overlap_options

# Weight, eps and offset of an `RMSNorm`.
NormTerms: TypeAlias = tuple[Tensor, float, float]

# cuBLAS requires multiples of 16, and is as fast for 32 tokens as for fewer.
_LEAST_TOKENS, _TOKENS = 32, 16


def quantize_rows(weight_RK: Tensor, values_RJ: Tensor, scales_R1: Tensor, first_column: int = 0) -> None:
    """Write `values_RJ`, the J columns from `first_column` on, and `scales_R1`, which cover all columns."""
    weight_RK = weight_RK if weight_RK.stride(1) == 1 else weight_RK.contiguous()
    _launch(weight_RK, None, values_RJ, scales_R1, first_column)


def quantize_tokens(x_TK: Tensor, norm: NormTerms | None = None) -> tuple[Tensor, Tensor]:
    """Quantise x, or norm(x), to e4m3. Returns values [T', K] and scales [T', 1].

    T' is T rounded up to a size that cuBLAS takes. Rows after T are padding without meaning.
    """
    num_rows = max(_LEAST_TOKENS, -(-len(x_TK) // _TOKENS) * _TOKENS)
    values_TK = torch.empty((num_rows, x_TK.shape[1]), dtype=torch.float8_e4m3fn, device=x_TK.device)
    scales_T1 = torch.empty((num_rows, 1), dtype=torch.float32, device=x_TK.device)
    _launch(x_TK.contiguous(), norm, values_TK, scales_T1)
    return values_TK, scales_T1


def product_of_rows(x_TK: Tensor, x_scales_T1: Tensor, weight_OK: Tensor, scales_O1: Tensor) -> Tensor:
    """x Wᵀ, [T, O] in bfloat16. O and K must be multiples of 16."""
    by_row = F.ScalingType.RowWise
    product_TO: Tensor = F.scaled_mm(
        x_TK, weight_OK.t(), x_scales_T1, by_row, scales_O1.t(), by_row, output_dtype=torch.bfloat16
    )
    return product_TO


def _launch(
    x_RK: Tensor, norm: NormTerms | None, values_RJ: Tensor, scales_R1: Tensor, first_column: int = 0
) -> None:
    num_rows, num_columns = x_RK.shape
    weight, eps, offset = (None, 0.0, 0.0) if norm is None else norm
    block = triton.next_power_of_2(num_columns)
    _quantize[(num_rows,)](
        x_RK,
        weight,
        values_RJ,
        scales_R1,
        x_RK.stride(0),
        values_RJ.stride(0),
        first_column,
        values_RJ.shape[1],
        eps,
        offset,
        COLUMNS=num_columns,
        BLOCK=block,
        NORM=norm is not None,
        num_warps=min(16, max(4, block // 512)),
        **overlap_options(x_RK),
    )


@triton.jit(do_not_specialize=["first_column"])
def _quantize(  # type: ignore[no-untyped-def]
    x_ptr,
    norm_ptr,
    values_ptr,
    scales_ptr,
    x_row,
    values_row,
    first_column,
    stored_columns,
    eps,
    offset,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    OVERLAPPED: tl.constexpr,
) -> None:
    """Each program quantises one row."""
    announce(OVERLAPPED)
    columns = tl.arange(0, BLOCK)
    inside = columns < COLUMNS
    if NORM:
        weight = tl.load(norm_ptr + columns, mask=inside, other=0.0).to(tl.float32) + offset
    wait(OVERLAPPED)
    row = tl.program_id(0).to(tl.int64)
    x = tl.load(x_ptr + row * x_row + columns, mask=inside, other=0.0)
    if NORM:
        wide = x.to(tl.float32)
        # Rounded like the output of the norm's own kernel.
        x = (wide * (1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / COLUMNS + eps)) * weight).to(x.dtype)
    x = x.to(tl.float32)
    # Compared as integers, magnitudes have the same order, and NaN is the largest; `max` would drop it.
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.broadcast_to(tl.max(bits, axis=0).to(tl.float32, bitcast=True), (1,))
    scale = tl.div_rn(largest, tl.full((1,), 448.0, tl.float32))
    scale = tl.where(scale == 0.0, 1.0, scale)
    stored = inside & (columns >= first_column) & (columns < first_column + stored_columns)
    values = divided(x, scale).to(values_ptr.dtype.element_ty)
    tl.store(values_ptr + row * values_row + columns - first_column, values, mask=stored)
    tl.store(scales_ptr + row + tl.arange(0, 1), scale)
