"""Weights to 8 bits, block by block of 128 × 128, in one pass. `layers.fp8` says what comes out."""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

import triton
import triton.language as tl
from torch import Tensor


def quantize_blocks(weight_RK: Tensor, values_RK: Tensor, scales_BC: Tensor) -> None:
    """Write `values_RK` and `scales_BC`; all on one device, any strides."""
    num_rows, num_columns = weight_RK.shape
    _quantize[(triton.cdiv(num_columns, 128), triton.cdiv(num_rows, 128))](
        weight_RK,
        values_RK,
        scales_BC,
        num_rows,
        num_columns,
        *weight_RK.stride(),
        *values_RK.stride(),
        *scales_BC.stride(),
        num_warps=8,
    )


@triton.jit(do_not_specialize=["num_rows", "num_columns"])
def _quantize(  # type: ignore[no-untyped-def]
    weight_ptr,
    values_ptr,
    scales_ptr,
    num_rows,
    num_columns,
    weight_row,
    weight_column,
    values_row,
    values_column,
    scales_row,
    scales_column,
) -> None:
    rows = tl.program_id(1).to(tl.int64) * 128 + tl.arange(0, 128)
    columns = tl.program_id(0).to(tl.int64) * 128 + tl.arange(0, 128)
    inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    places = rows[:, None] * weight_row + columns[None, :] * weight_column
    weight = tl.load(weight_ptr + places, mask=inside, other=0.0).to(tl.float32)
    # As integers magnitudes are in the same order, and NaN is above everything: a maximum would lose it.
    bits = weight.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(tl.max(bits, axis=1), axis=0).to(tl.float32, bitcast=True)
    scale = tl.div_rn(tl.broadcast_to(largest, (1,)), tl.full((1,), 448.0, tl.float32))
    scale = tl.where(scale == 0.0, 1.0, scale)
    values = tl.div_rn(weight, tl.broadcast_to(scale[:, None], (128, 128))).to(values_ptr.dtype.element_ty)
    tl.store(values_ptr + rows[:, None] * values_row + columns[None, :] * values_column, values, mask=inside)
    one = tl.arange(0, 1)
    tl.store(scales_ptr + tl.program_id(1) * scales_row + tl.program_id(0) * scales_column + one, scale)
