"""A bucket of gap-coded changes, written by one kernel straight into fused and sharded parameters.

A program takes a block of codes of one tensor. What lies ahead of the block, in elements and in values, is
summed up beforehand by a kernel over all blocks. Shapes: T tensors, B blocks of codes.
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ebbtide.formats.delta import (
    BITS,
    COLUMN_SEED,
    ESCAPES,
    LOW_32_BITS,
    MIXING_FACTORS,
    ROW_SEED,
    bits_of,
)
from ebbtide.srt.model_executor.host_copies import download, upload
from ebbtide.srt.slices import Slices, finish
from ebbtide.srt.weight_sync.patch import MatrixParts

# Twice as many codes take 1.6 times as long to sum up: the scans over a block spill.
BLOCK = 512
# How many blocks are a turn's work: one or two milliseconds of a device's bandwidth, which forward passes
# at the same time do not have.
BLOCKS_AT_ONCE = 1 << 17
# The bits that are all ones in NaN and Inf, of those types that have them and mean something without scales.
EXPONENTS = {
    torch.bfloat16: 0x7F80,
    torch.float16: 0x7C00,
    torch.float32: 0x7F800000,
    torch.float64: 0x7FF0000000000000,
}
# The columns of a tensor, and how many rows of them, that a program sums up.
SUM_COLUMNS, SUM_ROWS = 512, 64
_FACTOR_0, _FACTOR_1 = map(tl.constexpr, MIXING_FACTORS)
_LOW_32_BITS, _ROW_SEED, _COLUMN_SEED = (
    tl.constexpr(LOW_32_BITS),
    tl.constexpr(ROW_SEED),
    tl.constexpr(COLUMN_SEED),
)


@dataclass(frozen=True)
class CodedBlocks:
    """The codes of a bucket, in blocks.

    Attributes:
        codes: of all tensors.
        tensor_B: int32, whose codes these are.
        bounds_T4: int64: each tensor's first block, its first code, the end of its codes, and of its blocks.
        ahead_B: int64, elements of its tensor that are passed ahead of the block.
        values_ahead_B: int64, values of the bucket that belong to what is ahead of the block.
        lasts: each tensor's last position; -1 where it has none.
        num_values: of each tensor.
    """

    codes: Tensor
    tensor_B: Tensor
    bounds_T4: Tensor
    ahead_B: Tensor
    values_ahead_B: Tensor
    lasts: list[int]
    num_values: list[int]


def coded_blocks(codes: Tensor, num_codes: Sequence[int]) -> CodedBlocks:
    """Find out where each block stands. Waits for the device. `num_codes`: of each tensor, in order."""
    device = codes.device
    counts = np.array(num_codes, dtype=np.int64)
    num_blocks = -(-counts // BLOCK)
    code_ends, block_ends = counts.cumsum(), num_blocks.cumsum()
    table = np.stack([block_ends - num_blocks, code_ends - counts, code_ends, block_ends], 1)
    bounds_T4 = upload(table, device)
    firsts_T, ends_T = bounds_T4[:, 0], bounds_T4[:, 3]
    total = int(num_blocks.sum())
    tensor_B = torch.repeat_interleave(
        torch.arange(len(num_codes), dtype=torch.int32, device=device), ends_T - firsts_T, output_size=total
    )
    # Kernels are compiled anew for integers and rows that are aligned otherwise: each has its own memory.
    passed_B1, values_B1 = (torch.zeros(total + 1, dtype=torch.int64, device=device) for _ in range(2))
    if total:
        _count[(total,)](
            codes, tensor_B, bounds_T4, passed_B1, values_B1, ESCAPE=ESCAPES[codes.dtype], BLOCK=BLOCK
        )
    passed_B1, values_B1 = torch.cumsum(passed_B1, 0), torch.cumsum(values_B1, 0)
    at_first_T = passed_B1[firsts_T]
    found = torch.stack([passed_B1[ends_T] - at_first_T, values_B1[ends_T] - values_B1[firsts_T]])
    ahead_B = passed_B1[:-1] - at_first_T[tensor_B]
    passed, num_values = found.tolist()
    return CodedBlocks(
        codes=codes,
        tensor_B=tensor_B,
        bounds_T4=bounds_T4,
        ahead_B=ahead_B,
        values_ahead_B=values_B1[:-1],
        lasts=[elements - 1 for elements in passed],
        num_values=num_values,
    )


class PlacedBlocks:
    """A bucket's blocks, and where their values go on this rank.

    Args:
        values: of all tensors, in order, of the dtype of every place.
        places: of each tensor.
        base: the memory in which all places lie, as integers of the values' size.
    """

    def __init__(self, blocks: CodedBlocks, values: Tensor, places: MatrixParts, base: Tensor) -> None:
        self._blocks = blocks
        self._values = values
        self._base = base
        self._places = places
        self._found_T = torch.zeros(len(places.rows_T8), dtype=torch.int32, device=values.device)
        self._found_on_host_T: Tensor | None = None

    def verify(self) -> Iterator[int]:
        """There are no digests but the sums."""
        return iter(())

    def apply(self) -> Slices[None]:
        """Write the values that are this rank's; yields bytes of all values."""
        yield from self._launch(self._found_T, writes=True)
        self._found_on_host_T = download(self._found_T)
        yield self._values.nbytes

    def nonfinite(self) -> list[int]:
        """Once that has run: the tensors of which a value is NaN or Inf."""
        return [] if self._found_on_host_T is None else self._found_on_host_T.nonzero()[:, 0].tolist()

    def sums_after(self, known: Sequence[int | None]) -> Slices[Tensor]:
        """This rank's share of each tensor's sum as it is to be, int64 [T]; yields bytes. Nothing is written.

        Args:
            known: its share as it is; None: it is summed up.
        """
        sums_T = upload(np.array([before or 0 for before in known], dtype=np.int64), self._values.device)
        yield from self._launch(sums_T, writes=False)
        self._add_state_sums(sums_T, [before is None for before in known])
        return sums_T

    def _add_state_sums(self, sums_T: Tensor, is_unknown: Sequence[bool]) -> None:
        """Add the sums of the tensors of which nothing is known."""
        num_rows_T, num_columns_T, counts_T = self._places.rows_T8[:, [4, 6, 7]].T
        tiles_T = -(-num_rows_T // SUM_ROWS) * -(-num_columns_T // SUM_COLUMNS) * counts_T * is_unknown
        total = int(tiles_T.sum())
        if total == 0:
            return
        device = self._base.device
        ends_T = tiles_T.cumsum()
        firsts_T = upload(ends_T - tiles_T, device)
        tensors_T = torch.arange(len(tiles_T), dtype=torch.int32, device=device)
        tensor_of = torch.repeat_interleave(tensors_T, upload(tiles_T, device), output_size=total)
        _sum_state[(total,)](
            tensor_of,
            firsts_T,
            self._places.on_device_T8,
            self._base,
            sums_T,
            MASK=(1 << 8 * self._base.element_size()) - 1,
            ROWS=SUM_ROWS,
            COLUMNS=SUM_COLUMNS,
        )

    def _launch(self, out_T: Tensor, *, writes: bool) -> Slices[None]:
        """Add this rank's share of the changes to sums; or write, and find what holds NaN or Inf."""
        blocks = self._blocks
        total = len(blocks.tensor_B)
        for first in range(0, total, BLOCKS_AT_ONCE):
            if first:
                yield 0
            _patch[(min(BLOCKS_AT_ONCE, total - first),)](
                blocks.codes,
                bits_of(self._values),
                blocks.tensor_B,
                blocks.bounds_T4,
                blocks.ahead_B,
                blocks.values_ahead_B,
                self._places.on_device_T8,
                self._base,
                out_T,
                first,
                ESCAPE=ESCAPES[blocks.codes.dtype],
                MASK=(1 << 8 * self._base.element_size()) - 1,
                EXPONENT=EXPONENTS.get(self._values.dtype, 0),
                WRITES=writes,
                BLOCK=BLOCK,
            )


def compile_deltas(device: torch.device, dtype: torch.dtype) -> None:
    """Have everything ready that a delta of this dtype needs: it should not wait for a compiler."""
    for codes_dtype in ESCAPES:
        blocks = coded_blocks(torch.zeros(1, dtype=codes_dtype, device=device), [1])
        values = torch.zeros(1, dtype=dtype, device=device)
        base = torch.zeros(1, dtype=BITS[dtype.itemsize], device=device)
        placed = PlacedBlocks(blocks, values, MatrixParts.of([[0, 1, 1, 0, 1, 0, 1, 1]], device), base)
        finish(placed.sums_after([None]))
        for _ in placed.apply():
            pass


@triton.jit
def _mixed(indices):  # type: ignore[no-untyped-def]
    """As `state_sum.mixed`, of int64 indices with their seed."""
    indices = indices * _FACTOR_0
    indices = indices ^ ((indices >> 32) & _LOW_32_BITS)
    indices = indices * _FACTOR_1
    indices = indices ^ ((indices >> 32) & _LOW_32_BITS)
    return indices | 1


@triton.jit
def _steps(codes_ptr, bounds_ptr, block, ESCAPE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many elements each code of a block passes, and whether its gap ends there."""
    first_block = tl.load(bounds_ptr)
    lane = tl.load(bounds_ptr + 1) + (block - first_block) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < tl.load(bounds_ptr + 2)
    code = tl.load(codes_ptr + lane, mask=inside, other=0).to(tl.int32) & ESCAPE
    is_end = inside & (code != ESCAPE)
    step = tl.where(is_end, code + 1, tl.where(inside, ESCAPE - 1, 0))
    return step, is_end


@triton.jit
def _count(  # type: ignore[no-untyped-def]
    codes_ptr, tensor_ptr, bounds_ptr, passed_ptr, values_ptr, ESCAPE: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    block = tl.program_id(0).to(tl.int64)
    tensor = tl.load(tensor_ptr + block)
    step, is_end = _steps(codes_ptr, bounds_ptr + tensor * 4, block, ESCAPE, BLOCK)
    tl.store(passed_ptr + block + 1, tl.sum(step, 0).to(tl.int64))
    tl.store(values_ptr + block + 1, tl.sum(is_end.to(tl.int32), 0).to(tl.int64))


@triton.jit(do_not_specialize=["first"])
def _patch(  # type: ignore[no-untyped-def]
    codes_ptr,
    values_ptr,
    tensor_ptr,
    bounds_ptr,
    ahead_ptr,
    values_ahead_ptr,
    places_ptr,
    base_ptr,
    out_ptr,
    first,
    ESCAPE: tl.constexpr,
    MASK: tl.constexpr,
    EXPONENT: tl.constexpr,
    WRITES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    block = tl.program_id(0).to(tl.int64) + first
    tensor = tl.load(tensor_ptr + block)
    step, is_end = _steps(codes_ptr, bounds_ptr + tensor * 4, block, ESCAPE, BLOCK)
    # A tensor has less than 2^31 elements, which makes for quick divisions.
    position = (tl.load(ahead_ptr + block) - 1).to(tl.int32) + tl.cumsum(step, 0)
    value_at = tl.load(values_ahead_ptr + block) + tl.cumsum(is_end.to(tl.int32), 0) - 1
    value = tl.load(values_ptr + value_at, mask=is_end, other=0)

    place = places_ptr + tensor * 8
    num_columns = tl.maximum(tl.load(place + 2), 1).to(tl.int32)
    row = position // num_columns
    column = position - row * num_columns
    own_row = row - tl.load(place + 3).to(tl.int32)
    own_column = column - tl.load(place + 5).to(tl.int32)
    is_own = is_end & (own_row >= 0) & (own_row < tl.load(place + 4))
    is_own = is_own & (own_column >= 0) & (own_column < tl.load(place + 6))
    target = base_ptr + tl.load(place) + own_row.to(tl.int64) * tl.load(place + 1) + own_column
    if WRITES:
        tl.store(target, value, mask=is_own)
        if EXPONENT:
            is_bad = is_end & ((value & EXPONENT) == EXPONENT)
            tl.store(out_ptr + tensor, 1, mask=tl.max(is_bad.to(tl.int32), 0) > 0)
    else:
        before = tl.load(target, mask=is_own, other=0).to(tl.int64) & MASK
        factor = _mixed(row.to(tl.int64) ^ _ROW_SEED) * _mixed(column.to(tl.int64) ^ _COLUMN_SEED)
        change = tl.where(is_own, factor * ((value.to(tl.int64) & MASK) - before), 0)
        tl.atomic_add(out_ptr + tensor, tl.sum(change, 0) * tl.load(place + 7))


@triton.jit
def _sum_state(  # type: ignore[no-untyped-def]
    tensor_ptr,
    first_ptr,
    places_ptr,
    base_ptr,
    sums_ptr,
    MASK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    tile = tl.program_id(0).to(tl.int64)
    tensor = tl.load(tensor_ptr + tile)
    place = places_ptr + tensor * 8
    stride, num_rows, num_columns = tl.load(place + 1), tl.load(place + 4), tl.load(place + 6)
    tile -= tl.load(first_ptr + tensor)
    tiles_across = (num_columns + COLUMNS - 1) // COLUMNS
    column = (tile % tiles_across) * COLUMNS + tl.arange(0, COLUMNS)
    begin = (tile // tiles_across) * ROWS
    first_row = tl.load(place + 3)
    region = base_ptr + tl.load(place) + column
    sums = tl.zeros((COLUMNS,), dtype=tl.int64)
    for step in range(ROWS):
        row = begin + step
        inside = column < tl.where(row < num_rows, num_columns, 0)
        bits = tl.load(region + row * stride, mask=inside, other=0)
        sums += (bits.to(tl.int64) & MASK) * _mixed((row + first_row) ^ _ROW_SEED)
    total = tl.sum(sums * _mixed((column + tl.load(place + 5)) ^ _COLUMN_SEED), 0)
    tl.atomic_add(sums_ptr + tensor, total)
