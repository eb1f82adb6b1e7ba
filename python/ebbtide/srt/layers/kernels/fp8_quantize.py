"""Weights to 8 bits, block by block of 128 × 128, in one pass. `layers.fp8` says what comes out."""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

import triton
import triton.language as tl
from torch import Tensor


def quantize_blocks(weight_RK: Tensor, values_RK: Tensor, scales_BC: Tensor) -> None:
    """Write `values_RK` and `scales_BC`; all on one device, whole blocks, rows in one piece."""
    num_rows, num_columns = weight_RK.shape
    if num_rows % 128 or num_columns % 128:
        raise ValueError(f"a weight of {num_rows} x {num_columns} is not made of blocks of 128")
    weight_RK = weight_RK if weight_RK.stride(1) == 1 else weight_RK.contiguous()
    _quantize[(num_columns // 128, num_rows // 128)](
        weight_RK,
        values_RK,
        scales_BC,
        weight_RK.stride(0),
        values_RK.stride(0),
        *scales_BC.stride(),
        num_warps=8,
    )


# The scales' strides are of all kinds, and a kernel for each is not worth its compilation.
@triton.jit(do_not_specialize=["scales_row", "scales_column"])
def _quantize(  # type: ignore[no-untyped-def]
    weight_ptr, values_ptr, scales_ptr, weight_row, values_row, scales_row, scales_column
) -> None:
    rows = tl.program_id(1).to(tl.int64) * 128 + tl.arange(0, 128)
    columns = tl.program_id(0) * 128 + tl.arange(0, 128)
    weight = tl.load(weight_ptr + rows[:, None] * weight_row + columns[None, :]).to(tl.float32)
    # As integers magnitudes are in the same order, and NaN is above everything: a maximum would lose it.
    bits = weight.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(tl.max(bits, axis=1), axis=0).to(tl.float32, bitcast=True)
    scale = tl.div_rn(tl.broadcast_to(largest, (1,)), tl.full((1,), 448.0, tl.float32))
    scale = tl.where(scale == 0.0, 1.0, scale)
    values = tl.div_rn(weight, tl.broadcast_to(scale[:, None], (128, 128))).to(values_ptr.dtype.element_ty)
    tl.store(values_ptr + rows[:, None] * values_row + columns[None, :], values)
    one = tl.arange(0, 1)
    tl.store(scales_ptr + tl.program_id(1) * scales_row + tl.program_id(0) * scales_column + one, scale)
