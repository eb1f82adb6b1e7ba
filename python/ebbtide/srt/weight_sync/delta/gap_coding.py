"""Where a delta changes a tensor, in about one byte per changed element.

Flat positions in ascending order become gaps: how many elements lie between one and the one before it (the
first against -1). A gap is one code; the largest code is an escape: it stands for as many elements as it
says, less one, and the gap goes on. Codes are bytes, or two bytes where changes are far between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

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
