"""The format of deltas: positions of changed elements, and checksums of the changed tensors.

**Positions** take about one byte per changed element. Flat positions in ascending order are encoded as gaps:
the number of unchanged elements since the position before (-1 before the first). A gap is one code. The
largest code, E, is an escape: it stands for E - 1 elements, and the gap goes on in the next code. Codes are
uint8, or int16 (read as unsigned) if that is shorter since changes are far apart.

**The checksum** of a tensor is a sum, so that ranks can add the sums of their shards, and a delta can update
it. The bits of the tensor are a matrix W of unsigned integers, whose columns are the last dimension. The
checksum is the sum of row(i) · W[i, j] · column(j) modulo 2^64, where row(i) and column(j) are odd numbers
that depend on every bit of the index. A change of elements adds the sum of the differences. The result is the
same on every device and in every order, since integers wrap around.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

# SplitMix64's factors (Steele, Lea, Flood, 2014).
MIXING_FACTORS: Final = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
LOW_32_BITS: Final = 0xFFFFFFFF
# Different seeds, so that row(i) and column(i) differ.
ROW_SEED: Final = 0x51_7CC1_B727_220A_95
COLUMN_SEED: Final = 0x1B_8735_93CC_9E2D_51
# Elements that are widened to int64 at once, which bounds the memory.
SLICE_LEN: Final = 1 << 22

BITS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Positions are int32; larger tensors are sent whole.
MAX_ELEMENTS: Final = (1 << 31) - 1
# The escape of each dtype of codes. Codes of two bytes are unsigned numbers in the bits of an int16.
ESCAPES: Final = {torch.uint8: 0xFF, torch.int16: 0xFFFF}


def encode_positions(positions: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """Encode the positions of several tensors; returns all codes, 1-D, and the number of each tensor's.

    Args:
        positions: flat positions in each tensor, int32 or int64, strictly ascending; all on one device.
    """
    # One tensor at a time, to bound the memory of intermediate results.
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
    """Decode the positions of one tensor, int64. Escapes at the end without a last code are ignored."""
    escape = ESCAPES[codes.dtype]
    wide = codes.to(torch.int64) & escape
    is_end = wide != escape
    positions = torch.cumsum(torch.where(is_end, wide + 1, escape - 1), 0) - 1
    return positions[is_end]


def bits_of(tensor: Tensor) -> Tensor:
    """A view of the elements as integers of the same size."""
    return tensor.view(BITS[tensor.dtype.itemsize])


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a tensor as a matrix, whose columns are the last dimension."""
    num_columns = shape[-1] if shape else 1
    return torch.Size(shape[:-1]).numel(), num_columns


def state_sum(
    part: Tensor,
    first_row: int = 0,
    first_column: int = 0,
    mix: Callable[[int, int, int, torch.device], Tensor] | None = None,
) -> Tensor:
    """The checksum of a part of a matrix: int64, shape [], on the part's device.

    Args:
        part: [rows, columns], of any dtype; rows are contiguous.
        first_row, first_column: index of its first element in the whole matrix.
        mix: called instead of `mixed`, for example with a cache; None: `mixed`.
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
    """What changed elements add to the checksum: int64, shape [].

    Args:
        positions: flat positions in the whole tensor.
        before, after: bits of the old and new elements, as of `bits_of`.
        num_columns: of the whole tensor's matrix.
    """
    rows, columns = positions // num_columns, positions % num_columns
    factors = _mix(rows ^ ROW_SEED) * _mix(columns ^ COLUMN_SEED)
    return (factors * (_unsigned(after) - _unsigned(before))).sum()


def mixed(first: int, count: int, seed: int, device: torch.device) -> Tensor:
    """row(i) or column(i), by the seed, for `count` indices from `first` on: int64 [count]."""
    return _mix(torch.arange(first, first + count, device=device) ^ seed)


def as_hex(total: int) -> str:
    """A checksum as headers contain it: 16 hexadecimal digits."""
    return f"{total % 2**64:016x}"


def _mix(indices: Tensor) -> Tensor:
    for factor in MIXING_FACTORS:
        indices = indices * factor
        # The mask makes the shift of negative numbers a logical one.
        indices = indices ^ (indices >> 32 & LOW_32_BITS)
    return indices | 1


def _unsigned(bits: Tensor) -> Tensor:
    wide = bits.to(torch.int64)
    size = bits.dtype.itemsize
    return wide if size == 8 else wide & ((1 << 8 * size) - 1)
