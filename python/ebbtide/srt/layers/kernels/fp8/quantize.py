"""Quantises weights to 8 bits in blocks of 128 × 128, in one pass. `layers.fp8` defines the result.

Also widens them, four numbers at a time: a 32-bit word becomes four numbers in as few instructions as
possible.

Shapes: S spans (weights), R rows of their blocks.
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

from collections.abc import Iterator
from itertools import pairwise
from typing import Final

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from ebbtide.srt.layers.kernels.instructions import follow
from ebbtide.srt.layers.kernels.launch import overlap_options

_BLOCK: Final = 128
_NUM_WARPS: Final = 16


def quantize_blocks(weight_RK: Tensor, values_RK: Tensor, scales_BC: Tensor) -> None:
    """Quantise a weight of whole blocks into `values_RK` and `scales_BC`, on the same device."""
    num_rows, num_columns = weight_RK.shape
    if num_rows % _BLOCK or num_columns % _BLOCK:
        raise ValueError(f"a weight of {num_rows} x {num_columns} is not made of blocks of {_BLOCK}")
    weight_RK = weight_RK if weight_RK.stride(1) == 1 else weight_RK.contiguous()
    _quantize[(num_columns // _BLOCK, num_rows // _BLOCK)](
        weight_RK,
        values_RK,
        scales_BC,
        weight_RK.stride(0),
        values_RK.stride(0),
        *scales_BC.stride(),
        num_warps=_NUM_WARPS,
    )


def widen_blocks(values_RK: Tensor, scales_BC: Tensor, dtype: torch.dtype) -> Tensor:
    """Widen values by their scales, both contiguous. The last blocks may be smaller."""
    num_rows, num_columns = values_RK.shape
    weight_RK = torch.empty(values_RK.shape, dtype=dtype, device=values_RK.device)
    _widen_blocks[(triton.cdiv(num_columns, _BLOCK), triton.cdiv(num_rows, _BLOCK))](
        values_RK, scales_BC, weight_RK, num_rows, num_columns, num_warps=8, **overlap_options(values_RK)
    )
    return weight_RK


class QuantizedSpans:
    """Prepared quantization of bfloat16 weights, which can be launched on the stream on which it was made.

    Args:
        spans_S8: the addresses of the weight, its values and its scales; numbers of rows and of columns of
            blocks; elements from row to row of the weight, of the values and of the scales. Addresses of
            weights and values are multiples of 16, and so are the bytes of their rows. All that memory must
            live until the kernels are done.
        device: of all memory.

    Attributes:
        found_S: once the kernels are done, 1 for weights with NaN or Inf, otherwise 0.
    """

    def __init__(self, spans_S8: NDArray[np.int64], device: torch.device) -> None:
        self._num_spans = len(spans_S8)
        self._device = device
        rows_R7 = _rows(spans_S8)
        # Sorted by length, since all rows of one kernel must be equally long.
        self._host_rows_R7 = rows_R7[np.argsort(rows_R7[:, 3], kind="stable")]
        self._blocks_R = self._host_rows_R7[:, 3].copy()
        self._upload()

    def move(self, source_bytes: int, destination_bytes: int) -> None:
        """Shift all source and destination addresses by this many bytes. `found_S` starts anew."""
        self._host_rows_R7[:, 0] += source_bytes
        self._host_rows_R7[:, 1:3] += destination_bytes
        self._upload()

    def _upload(self) -> None:
        self.found_S = torch.zeros(self._num_spans, dtype=torch.int32, device=self._device)
        self._rows_R7 = torch.from_numpy(self._host_rows_R7)
        if self._device.type == "cuda":
            self._rows_R7 = self._rows_R7.pin_memory().to(self._device, non_blocking=True)

    def launch(self, launch_bytes: int) -> Iterator[int]:
        """Launch kernels that read and write about `launch_bytes` each. Yields the bytes of each kernel."""
        # Each element is 2 bytes read and 1 byte written.
        bytes_R = self._blocks_R * (3 * _BLOCK * _BLOCK)
        is_cut_R = np.diff(np.cumsum(bytes_R) // launch_bytes) | np.diff(self._blocks_R)
        bounds = [0, *(np.flatnonzero(is_cut_R) + 1), len(bytes_R)]
        for first, end in pairwise(bounds):
            rows = self._rows_R7[first:end]
            _quantize_rows[(int(self._blocks_R[first]), len(rows))](rows, self.found_S, num_warps=_NUM_WARPS)
            yield int(bytes_R[first:end].sum())


def _rows(spans_S8: NDArray[np.int64]) -> NDArray[np.int64]:
    """[R, 7]: weight, values, scales, columns of blocks, elements from row to row of the first two, span."""
    num_rows_S = spans_S8[:, 3]
    span_R = np.repeat(np.arange(len(spans_S8)), num_rows_S)
    first_S = np.cumsum(num_rows_S) - num_rows_S
    row_R = np.arange(len(span_R)) - first_S[span_R]
    span_R8 = spans_S8[span_R]
    rows_R7 = np.empty((len(span_R), 7), dtype=np.int64)
    rows_R7[:, 0] = span_R8[:, 0] + row_R * span_R8[:, 5] * (2 * _BLOCK)
    rows_R7[:, 1] = span_R8[:, 1] + row_R * span_R8[:, 6] * _BLOCK
    rows_R7[:, 2] = span_R8[:, 2] + row_R * span_R8[:, 7] * 4
    rows_R7[:, 3:6] = span_R8[:, 4:7]
    rows_R7[:, 6] = span_R
    return rows_R7


@triton.jit
def _scale_of(weight):  # type: ignore[no-untyped-def]
    """The largest magnitude / 448, [1]. NaN and Inf are kept."""
    # Compared as integers, magnitudes have the same order, and NaN is the largest; `max` would drop it.
    bits = weight.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(tl.max(bits, axis=1), axis=0).to(tl.float32, bitcast=True)
    scale = tl.div_rn(tl.broadcast_to(largest, (1,)), tl.full((1,), 448.0, tl.float32))
    return tl.where(scale == 0.0, 1.0, scale)


@triton.jit
def divided(x, scale):  # type: ignore[no-untyped-def]
    """x / scale, rounded as a division, in a third of its time. `scale` has one column or one row.

    A product with the correctly rounded inverse is off by at most two units in the last place. The first
    correction leaves less than one, the second none (Markstein, "Computation of elementary functions on the
    IBM RISC System/6000 processor", 1990). Small scales are enlarged first, so that remainders do not
    underflow.
    """
    larger = tl.where(scale < 2.0**-60, 2.0**60, 1.0)
    x *= larger
    scale *= larger
    inverse = tl.broadcast_to(tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale), x.shape)
    negative = tl.broadcast_to(-scale, x.shape)
    quotient = x * inverse
    quotient = tl.fma(tl.fma(quotient, negative, x), inverse, quotient)
    quotient = tl.fma(tl.fma(quotient, negative, x), inverse, quotient)
    # A zero stays as it is, since a correction would lose its sign.
    return tl.where(x == 0.0, x, quotient)


@triton.jit
def in_eight_bits(x, AXIS: tl.constexpr, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The values and scales of COUNT groups along an axis, rounded like torch's divisions."""
    largest = tl.max(tl.abs(x), axis=AXIS)
    scale = tl.where(largest > 0.0, tl.div_rn(largest, tl.full((COUNT,), 448.0, tl.float32)), 1.0)
    return divided(x, tl.expand_dims(scale, AXIS)), scale


@triton.jit
def _widen_blocks(  # type: ignore[no-untyped-def]
    values_ptr, scales_ptr, weight_ptr, num_rows, num_columns, OVERLAPPED: tl.constexpr
) -> None:
    """Each program widens one block."""
    follow(OVERLAPPED)
    rows = tl.program_id(1).to(tl.int64) * 128 + tl.arange(0, 128)[:, None]
    columns = tl.program_id(0) * 128 + tl.arange(0, 128)[None, :]
    inside = (rows < num_rows) & (columns < num_columns)
    scale = tl.load(scales_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0))
    at = rows * num_columns + columns
    values = tl.load(values_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(weight_ptr + at, (values * scale).to(weight_ptr.dtype.element_ty), mask=inside)


# Not specialised for strides of scales, which are too varied for a kernel each.
@triton.jit(do_not_specialize=["scales_row", "scales_column"])
def _quantize(  # type: ignore[no-untyped-def]
    weight_ptr, values_ptr, scales_ptr, weight_row, values_row, scales_row, scales_column
) -> None:
    rows = tl.program_id(1).to(tl.int64) * 128 + tl.arange(0, 128)
    columns = tl.program_id(0) * 128 + tl.arange(0, 128)
    weight = tl.load(weight_ptr + rows[:, None] * weight_row + columns[None, :]).to(tl.float32)
    scale = _scale_of(weight)
    values = divided(weight, scale[:, None]).to(values_ptr.dtype.element_ty)
    tl.store(values_ptr + rows[:, None] * values_row + columns[None, :], values)
    one = tl.arange(0, 1)
    tl.store(scales_ptr + tl.program_id(1) * scales_row + tl.program_id(0) * scales_column + one, scale)


@triton.jit(do_not_specialize_on_alignment=["rows_ptr"])
def _quantize_rows(rows_ptr, found_ptr) -> None:  # type: ignore[no-untyped-def]
    """Each program quantises one block."""
    row_ptr = rows_ptr + tl.program_id(1).to(tl.int64) * 7
    block = tl.program_id(0)
    weight_ptr = tl.multiple_of(tl.load(row_ptr).to(tl.pointer_type(tl.bfloat16)), 16)
    values_ptr = tl.multiple_of(tl.load(row_ptr + 1).to(tl.pointer_type(tl.float8e4nv)), 16)
    scales_ptr = tl.load(row_ptr + 2).to(tl.pointer_type(tl.float32))
    weight_row, values_row = tl.load(row_ptr + 4), tl.load(row_ptr + 5)
    rows, columns = tl.arange(0, 128), tl.arange(0, 128)
    weights = weight_ptr + rows[:, None] * tl.multiple_of(weight_row, 8) + columns[None, :]
    places = values_ptr + rows[:, None] * tl.multiple_of(values_row, 16) + columns[None, :]
    weight = tl.load(weights + block * 128).to(tl.float32)
    scale = _scale_of(weight)
    tl.store(places + block * 128, divided(weight, scale[:, None]).to(tl.float8e4nv))
    one = tl.arange(0, 1)
    tl.store(scales_ptr + block + one, scale)
    is_found = (scale.to(tl.int32, bitcast=True) & 0x7F800000) == 0x7F800000
    tl.store(found_ptr + tl.load(row_ptr + 6) + one, 1, mask=is_found)


@triton.jit
def _floats(words):  # type: ignore[no-untyped-def]
    """The lower and the upper bfloat16 of 32-bit words, in float32."""
    return (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)


@triton.jit
def four(words, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """The four e4m3 numbers of 32-bit words, in float32."""
    if ASM:
        a, b, c, d = tl.inline_asm_elementwise(
            """{
                .reg .b16 low, high, p, q;
                .reg .b32 first, second;
                mov.b32 {low, high}, $4;
                cvt.rn.f16x2.e4m3x2 first, low;
                cvt.rn.f16x2.e4m3x2 second, high;
                mov.b32 {p, q}, first;
                cvt.f32.f16 $0, p;
                cvt.f32.f16 $1, q;
                mov.b32 {p, q}, second;
                cvt.f32.f16 $2, p;
                cvt.f32.f16 $3, q;
            }""",
            "=f,=f,=f,=f,r",
            [words],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        a = (words & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
        b = ((words >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
        c = ((words >> 16) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
        d = ((words >> 24) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return a, b, c, d


@triton.jit
def four_of(ptr, word, inside, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load groups of four consecutive bfloat16 numbers, in float32."""
    if ASM:
        four = tl.load(ptr + word, mask=inside, other=0)
        low, high = four.to(tl.int32), (four >> 32).to(tl.int32)
        a, b = _floats(low)
        c, d = _floats(high)
    else:
        a = tl.load(ptr + 4 * word, mask=inside, other=0.0)
        b = tl.load(ptr + 4 * word + 1, mask=inside, other=0.0)
        c = tl.load(ptr + 4 * word + 2, mask=inside, other=0.0)
        d = tl.load(ptr + 4 * word + 3, mask=inside, other=0.0)
    return a, b, c, d


@triton.jit
def fours(words, x0, x1, x2, x3, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """The sum of the four products of each word's numbers with x0 to x3."""
    w0, w1, w2, w3 = four(words, ASM)
    return w0 * x0[None, :] + w1 * x1[None, :] + w2 * x2[None, :] + w3 * x3[None, :]


@triton.jit
def row_sums(words, x0, x1, x2, x3, scale, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.sum(fours(words, x0, x1, x2, x3, ASM) * scale[None, :], axis=1)
