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
        positions: for each tensor int64, ascending and different, from 0; all on one device.
    """
    gaps = torch.cat([torch.diff(one, prepend=one.new_full((1,), -1)) - 1 for one in positions])
    sizes = {
        dtype: dtype.itemsize * int((gaps // (escape - 1) + 1).sum()) for dtype, escape in ESCAPES.items()
    }
    dtype = min(sizes, key=lambda one: sizes[one])
    escape = ESCAPES[dtype]
    ends = torch.cumsum(gaps // (escape - 1) + 1, 0) - 1
    codes = torch.full((sizes[dtype] // dtype.itemsize,), -1, dtype=torch.int16, device=gaps.device).to(dtype)
    codes[ends] = (gaps % (escape - 1)).to(torch.int32).to(dtype)
    lasts = torch.cumsum(torch.tensor([len(one) for one in positions]), 0)
    padded = torch.cat([ends.new_full((1,), -1), ends])
    bounds = padded[lasts.to(padded.device)].tolist()
    starts = [-1, *bounds[:-1]]
    return codes, [end - start for start, end in zip(starts, bounds, strict=True)]


def decode_positions(codes: Tensor) -> Tensor:
    """The positions of one tensor, int64. A gap that does not end is left out."""
    escape = ESCAPES[codes.dtype]
    wide = codes.to(torch.int64) & escape
    is_end = wide != escape
    positions = torch.cumsum(torch.where(is_end, wide + 1, escape - 1), 0) - 1
    return positions[is_end]
