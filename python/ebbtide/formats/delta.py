"""How a delta is written: where it changes tensors, and the checksum of what they are to become.

**Positions**, in about one byte per changed element. Flat positions in ascending order become gaps: how many
elements lie between one and the one before it (the first against -1). A gap is one code; the largest code is
an escape: it stands for as many elements as it says, less one, and the gap goes on. Codes are bytes, or two
bytes where changes are far between.

**The checksum** of a tensor, which ranks can add up from their parts of it, and a delta can carry forward.
The tensor is a matrix W of unsigned integers, its elements' bits, with as many columns as its last dimension.
Its sum is that of row(i) · W[i, j] · column(j), modulo 2^64, where row and column are odd numbers that depend
on every bit of the index. A part of the matrix has a part of the sum; where elements change, the sum changes
by that of the differences. Integers wrap around alike on every device, in whatever order they are added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

# SplitMix64's factors (Steele, Lea, Flood, 2014).
MIXING_FACTORS: Final = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
LOW_32_BITS: Final = 0xFFFFFFFF
# What makes the numbers of rows and of columns differ.
ROW_SEED: Final = 0x51_7CC1_B727_220A_95
COLUMN_SEED: Final = 0x1B_8735_93CC_9E2D_51
# Elements that are widened at once.
SLICE_LEN: Final = 1 << 22

BITS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Positions are computed with in 32 bits; larger tensors are sent whole.
MAX_ELEMENTS: Final = (1 << 31) - 1
# Codes of two bytes travel as int16, whose bits are those of the unsigned number.
ESCAPES: Final = {torch.uint8: 0xFF, torch.int16: 0xFFFF}


def encode_positions(positions: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """The codes of several tensors' positions, and how many there are of each.

    Args:
        positions: for each tensor int32 or int64, ascending and different, from 0; all on one device.
    """
    # One tensor at a time: positions are many, and what becomes of them on the way takes memory.
    counts = {
        dtype: torch.stack([_num_codes(_gaps(one), escape) for one in positions]).tolist()
        for dtype, escape in ESCAPES.items()
    }
    dtype = min(counts, key=lambda one: one.itemsize * sum(counts[one]))
    rows = zip(positions, counts[dtype], strict=True)
    return torch.cat([_codes(_gaps(one), count, dtype) for one, count in rows]), counts[dtype]


def _gaps(positions: Tensor) -> Tensor:
    return torch.diff(positions, prepend=positions.new_full((1,), -1)) - 1


def _num_codes(gaps: Tensor, escape: int) -> Tensor:
    return (gaps // (escape - 1)).sum(dtype=torch.int64) + len(gaps)


def _codes(gaps: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    escape = ESCAPES[dtype]
    codes = torch.full((count,), -1, dtype=torch.int16, device=gaps.device).to(dtype)
    ends = torch.cumsum(gaps // (escape - 1) + 1, 0) - 1
    codes[ends] = (gaps % (escape - 1)).to(torch.int32).to(dtype)
    return codes


def decode_positions(codes: Tensor) -> Tensor:
    """The positions of one tensor, int64. A gap that does not end is left out."""
    escape = ESCAPES[codes.dtype]
    wide = codes.to(torch.int64) & escape
    is_end = wide != escape
    positions = torch.cumsum(torch.where(is_end, wide + 1, escape - 1), 0) - 1
    return positions[is_end]


def bits_of(tensor: Tensor) -> Tensor:
    return tensor.view(BITS[tensor.dtype.itemsize])


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    num_columns = shape[-1] if shape else 1
    return torch.Size(shape[:-1]).numel(), num_columns


def state_sum(
    part: Tensor,
    first_row: int = 0,
    first_column: int = 0,
    mix: Callable[[int, int, int, torch.device], Tensor] | None = None,
) -> Tensor:
    """The sum of a part of a matrix, int64 of no dimensions, on the part's device.

    Args:
        part: [rows, columns], of any dtype; the columns of a row lie side by side.
        first_row, first_column: where it begins in the whole matrix.
        mix: `mixed`, or what remembers it for many matrices of one shape.
    """
    device, mix = part.device, mixed if mix is None else mix
    columns = mix(first_column, part.shape[1], COLUMN_SEED, device)
    rows = mix(first_row, part.shape[0], ROW_SEED, device)
    total = torch.zeros((), dtype=torch.int64, device=device)
    rows_at_once = max(1, SLICE_LEN // max(1, part.shape[1]))
    for piece, factors in zip(torch.split(part, rows_at_once), torch.split(rows, rows_at_once), strict=True):
        total += ((_unsigned(bits_of(piece)) * columns).sum(1) * factors).sum()
    return total


def sum_of_changes(positions: Tensor, before: Tensor, after: Tensor, num_columns: int) -> Tensor:
    """What a change of elements' bits, at flat positions of the whole tensor, adds to its sum."""
    rows, columns = positions // num_columns, positions % num_columns
    factors = _mix(rows ^ ROW_SEED) * _mix(columns ^ COLUMN_SEED)
    return (factors * (_unsigned(after) - _unsigned(before))).sum()


def mixed(first: int, count: int, seed: int, device: torch.device) -> Tensor:
    """The odd numbers of `count` indices from `first` on."""
    return _mix(torch.arange(first, first + count, device=device) ^ seed)


def as_hex(total: int) -> str:
    """A sum as headers have it."""
    return f"{total % 2**64:016x}"


def _mix(indices: Tensor) -> Tensor:
    for factor in MIXING_FACTORS:
        indices = indices * factor
        # The shift of signed words brings ones along.
        indices = indices ^ (indices >> 32 & LOW_32_BITS)
    return indices | 1


def _unsigned(bits: Tensor) -> Tensor:
    wide = bits.to(torch.int64)
    size = bits.dtype.itemsize
    return wide if size == 8 else wide & ((1 << 8 * size) - 1)
