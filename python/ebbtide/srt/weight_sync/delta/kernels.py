"""A bucket of gap-coded changes, written by one kernel straight into fused and sharded parameters.

A program takes a block of codes of one tensor. What lies ahead of the block, in elements and in values, is
summed up beforehand by a kernel over all blocks. Shapes: T tensors, B blocks of codes.
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ebbtide.srt.model_executor.weight_copies import NonFinite
from ebbtide.srt.weight_sync.delta.gap_coding import ESCAPES
from ebbtide.srt.weight_sync.delta.state_sum import (
    BITS,
    COLUMN_SEED,
    LOW_32_BITS,
    MIXING_FACTORS,
    ROW_SEED,
    bits_of,
)
from ebbtide.srt.weight_sync.payload.pickle_reader import finish

BLOCK = 1024
# So many blocks are a turn's work: one or two milliseconds of a device's bandwidth, which forward passes
# beside do not have.
BLOCKS_AT_ONCE = 1 << 16
# Of `Place.numbers`.
NUM_FIELDS = 8
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
        bounds_T3: int64: each tensor's first block, its first code, and the end of its codes.
        ahead_B: int64, elements of its tensor that are passed ahead of the block.
        values_ahead_B: int64, values of the bucket that belong to what is ahead of the block.
        lasts: each tensor's last position; -1 where it has none.
        num_values: of each tensor.
    """

    codes: Tensor
    tensor_B: Tensor
    bounds_T3: Tensor
    ahead_B: Tensor
    values_ahead_B: Tensor
    lasts: list[int]
    num_values: list[int]


def coded_blocks(codes: Tensor, num_codes: Sequence[int]) -> CodedBlocks:
    """Find out where each block stands. Waits for the device.

    Args:
        num_codes: of each tensor, in order.
    """
    device = codes.device
    counts = torch.tensor(num_codes)
    num_blocks = -(-counts // BLOCK)
    first_blocks, ends = torch.cumsum(num_blocks, 0) - num_blocks, torch.cumsum(counts, 0)
    bounds_T3 = torch.stack([first_blocks, ends - counts, ends], 1).to(device)
    total = int(num_blocks.sum())
    tensor_B = torch.repeat_interleave(
        torch.arange(len(num_codes), dtype=torch.int32, device=device),
        num_blocks.to(device),
        output_size=total,
    )
    # Of integers and of where rows begin kernels are compiled anew: each has memory of its own.
    passed_B1, values_B1 = (torch.zeros(total + 1, dtype=torch.int64, device=device) for _ in range(2))
    if total:
        _count[(total,)](
            codes, tensor_B, bounds_T3, passed_B1, values_B1, ESCAPE=ESCAPES[codes.dtype], BLOCK=BLOCK
        )
    passed_B1, values_B1 = torch.cumsum(passed_B1, 0), torch.cumsum(values_B1, 0)
    ends_T = (first_blocks + num_blocks).to(device)
    at_first_T = passed_B1[bounds_T3[:, 0]]
    passed_T = passed_B1[ends_T] - at_first_T
    values_T = values_B1[ends_T] - values_B1[bounds_T3[:, 0]]
    passed, num_values = torch.stack([passed_T, values_T]).tolist()
    return CodedBlocks(
        codes=codes,
        tensor_B=tensor_B,
        bounds_T3=bounds_T3,
        ahead_B=passed_B1[:-1] - at_first_T[tensor_B.long()],
        values_ahead_B=values_B1[:-1],
        lasts=[elements - 1 for elements in passed],
        num_values=num_values,
    )


class PlacedBlocks:
    """A bucket's blocks, and where their values go on this rank.

    Args:
        values: of all tensors, in order, of the dtype of every place.
        places: of each tensor, see `Place.numbers`; None for one that nobody needs.
        base: the memory in which all places lie, as integers of the values' size.
    """

    def __init__(
        self, blocks: CodedBlocks, values: Tensor, places: Sequence[list[int] | None], base: Tensor
    ) -> None:
        self._blocks = blocks
        self._values = values
        self._base = base
        self._rows = [[0] * NUM_FIELDS if place is None else place for place in places]
        table_T8 = torch.tensor(self._rows, dtype=torch.int64)
        self._places_T8 = table_T8.to(values.device, non_blocking=True)
        self._nonfinite = NonFinite()

    def apply(self) -> Iterator[int]:
        """Write the values that are this rank's; yields bytes of all values."""
        yield from self._launch(self._base, writes=True)
        # All of them at once: it is seldom asked which.
        self._nonfinite.add("", self._values)
        self._nonfinite.finish()
        yield self._values.nbytes

    def nonfinite(self) -> list[int]:
        """Once that has run: the tensors of which a value is NaN or Inf."""
        if not self._nonfinite.names():
            return []
        parts = torch.split(self._values, self._blocks.num_values)
        return [index for index, part in enumerate(parts) if not bool(part.isfinite().all())]

    def sums_after(self, known: Sequence[int | None]) -> Generator[int, None, Tensor]:
        """This rank's share of each tensor's sum as it is to be, int64 [T]; yields bytes. Nothing is written.

        Args:
            known: its share as it is; None: it is summed up.
        """
        sums_T = torch.tensor([before or 0 for before in known], dtype=torch.int64)
        sums_T = sums_T.to(self._values.device, non_blocking=True)
        yield from self._launch(sums_T, writes=False)
        self._add_state_sums(sums_T, [before is None for before in known])
        return sums_T

    def _add_state_sums(self, sums_T: Tensor, is_unknown: Sequence[bool]) -> None:
        """Of the tensors of which nothing is known."""
        rows = zip(self._rows, is_unknown, strict=True)
        tiles = [_num_tiles(*row[4:]) if is_asked else 0 for row, is_asked in rows]
        num_tiles_T = torch.tensor(tiles)
        total = int(num_tiles_T.sum())
        if total == 0:
            return
        device = self._base.device
        firsts_T = (torch.cumsum(num_tiles_T, 0) - num_tiles_T).to(device)
        tensors_T = torch.arange(len(tiles), dtype=torch.int32, device=device)
        tensor_of = torch.repeat_interleave(tensors_T, num_tiles_T.to(device), output_size=total)
        _sum_state[(total,)](
            tensor_of,
            firsts_T,
            self._places_T8,
            self._base,
            sums_T,
            MASK=(1 << 8 * self._base.element_size()) - 1,
            ROWS=SUM_ROWS,
            COLUMNS=SUM_COLUMNS,
        )

    def _launch(self, sums_T: Tensor, *, writes: bool) -> Iterator[int]:
        blocks = self._blocks
        total = len(blocks.tensor_B)
        for first in range(0, total, BLOCKS_AT_ONCE):
            if first:
                yield 0
            _patch[(min(BLOCKS_AT_ONCE, total - first),)](
                blocks.codes,
                bits_of(self._values),
                blocks.tensor_B,
                blocks.bounds_T3,
                blocks.ahead_B,
                blocks.values_ahead_B,
                self._places_T8,
                self._base,
                sums_T,
                first,
                ESCAPE=ESCAPES[blocks.codes.dtype],
                MASK=(1 << 8 * self._base.element_size()) - 1,
                WRITES=writes,
                BLOCK=BLOCK,
            )


def compile_deltas(device: torch.device, dtype: torch.dtype) -> None:
    """Have everything ready that a delta of this dtype needs: it should not wait for a compiler."""
    for codes_dtype in ESCAPES:
        blocks = coded_blocks(torch.zeros(1, dtype=codes_dtype, device=device), [1])
        values = torch.zeros(1, dtype=dtype, device=device)
        base = torch.zeros(1, dtype=BITS[dtype.itemsize], device=device)
        placed = PlacedBlocks(blocks, values, [[0, 1, 1, 0, 1, 0, 1, 1]], base)
        finish(placed.sums_after([None]))
        for _ in placed.apply():
            pass


def _num_tiles(num_rows: int, _: int, num_columns: int, counts: int) -> int:
    return counts * -(-num_rows // SUM_ROWS) * -(-num_columns // SUM_COLUMNS)


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
    step, is_end = _steps(codes_ptr, bounds_ptr + tensor * 3, block, ESCAPE, BLOCK)
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
    sums_ptr,
    first,
    ESCAPE: tl.constexpr,
    MASK: tl.constexpr,
    WRITES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    block = tl.program_id(0).to(tl.int64) + first
    tensor = tl.load(tensor_ptr + block)
    step, is_end = _steps(codes_ptr, bounds_ptr + tensor * 3, block, ESCAPE, BLOCK)
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
    else:
        before = tl.load(target, mask=is_own, other=0).to(tl.int64) & MASK
        factor = _mixed(row.to(tl.int64) ^ _ROW_SEED) * _mixed(column.to(tl.int64) ^ _COLUMN_SEED)
        change = tl.where(is_own, factor * ((value.to(tl.int64) & MASK) - before), 0)
        tl.atomic_add(sums_ptr + tensor, tl.sum(change, 0) * tl.load(place + 7))


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
