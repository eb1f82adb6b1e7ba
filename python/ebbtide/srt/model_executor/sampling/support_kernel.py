"""What filters left of rows, from where they cut them: as ids, and as bits for rows that have too many.

Imported on CUDA only, as `kernel` is. Shapes: S rows that sample, G of them that ask, K ids of a row at
most, V vocabulary, J tiles of a row, P the power of two from J on, Q strips padded, W words of 32 tokens.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ebbtide.srt.model_executor.sampling.choosing import Chosen
from ebbtide.srt.model_executor.sampling.cut_kernel import (
    AT_ONCE,
    CUT,
    LAST_ID,
    MAXIMA,
    NUM_PARAMS,
    NUM_PLANES,
    NUM_STRIP_PLANES,
    SCALE,
    STRIP_LIST,
    STRIP_SUMS,
    TILE,
    base_of,
    list_strips,
    load_scores,
    load_strips,
)

# Columns before the ids of a row: how many there are, and the bits of the logprob of the one that was chosen.
COUNT, LOGPROB = tl.constexpr(0), tl.constexpr(1)
NUM_HEADS = tl.constexpr(2)
_WORD = tl.constexpr(32)


def listed(scores_SV: Tensor, chosen: Chosen, rows_G: Tensor, num_ids: int) -> Tensor:
    """Launch it; int32 [G, 2 + K]: how many ids each row has, the bits of its token's logprob, and the ids in
    ascending order, as many as there is room for.

    Args:
        rows_G: int32, filtered rows.
        num_ids: K.
    """
    listed_GK = torch.empty((len(rows_G), num_ids + NUM_HEADS.value), dtype=torch.int32, device=rows_G.device)
    _list_kernel[(len(rows_G),)](
        **_common(scores_SV, chosen, rows_G),
        tokens=chosen.tokens_S,
        listed=listed_GK,
        listed_floats=listed_GK.view(torch.float32),
        K=num_ids,
        num_warps=4,
    )
    return listed_GK


def bits(scores_SV: Tensor, chosen: Chosen, rows_G: Tensor) -> Tensor:
    """Launch it; int32 [G, W]: bit i % 32 of word i // 32 is set for each id i that a row has."""
    num_tiles = triton.cdiv(scores_SV.shape[1], TILE.value)
    shape = (len(rows_G), num_tiles * TILE.value // _WORD.value)
    words_GW = torch.empty(shape, dtype=torch.int32, device=rows_G.device)
    _bits_kernel[(num_tiles, len(rows_G))](
        **_common(scores_SV, chosen, rows_G), words=words_GW, W=shape[1], num_warps=4
    )
    return words_GW


def _common(scores_SV: Tensor, chosen: Chosen, rows_G: Tensor) -> dict[str, Any]:
    cut = chosen.cut_rows
    assert cut is not None, "rows with filters"
    return {
        "scores": scores_SV,
        "row_stride": scores_SV.stride(0),
        "settings": cut.settings_S4,
        "work": cut.work,
        "work_int": cut.work.view(torch.int32),
        "strips": cut.strips,
        "strips_int": cut.strips.view(torch.int32),
        "rows": rows_G,
        "V": scores_SV.shape[1],
        "J": triton.cdiv(scores_SV.shape[1], TILE.value),
        "P": cut.work.shape[2],
        "Q": cut.strips.shape[2],
        # The products must be those that the cut was made of.
        "enable_fp_fusion": False,
    }


@triton.jit
def _list_kernel(
    scores,
    row_stride,
    settings,
    work,
    work_int,
    strips,
    strips_int,
    rows,
    tokens,
    listed,
    listed_floats,
    K,
    V: tl.constexpr,
    J: tl.constexpr,
    P: tl.constexpr,
    Q: tl.constexpr,
):
    """One row; it reads the strips that have anything left, and no others."""
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place).to(tl.int64)
    scale = tl.load(settings + row * NUM_PARAMS + SCALE)
    scores += row * row_stride
    work += row * NUM_PLANES * P
    cut = tl.load(work + CUT * P)
    last_id = tl.load(work_int + row * NUM_PLANES * P + LAST_ID * P)
    strips += row * NUM_STRIP_PLANES * Q
    strip_list = strips_int + row * NUM_STRIP_PLANES * Q + STRIP_LIST * Q
    listed += place * (NUM_HEADS + K)
    listed_floats += place * (NUM_HEADS + K)
    tiles = tl.arange(0, P)
    base = base_of(tl.max(tl.load(work + MAXIMA * P + tiles, mask=tiles < J, other=float("-inf"))))
    num_strips = list_strips(strip_list, tl.load(strips + STRIP_SUMS * Q + tl.arange(0, Q)) > 0, Q)
    num_kept = tl.full([], 0, tl.int32)
    mass = tl.full([], 0.0, tl.float32)
    first = 0
    while first < num_strips:
        raw, ids, _ = load_strips(scores, strip_list, first, num_strips, V)
        x = raw * scale
        weight = tl.exp(x - base)
        kept = ((x > cut) | ((x == cut) & (ids <= last_id))) & (weight > 0)
        num_in_strip = tl.sum(kept.to(tl.int32), 1)
        before = num_kept + tl.cumsum(num_in_strip, 0) - num_in_strip
        places = before[:, None] + tl.cumsum(kept.to(tl.int32), 1) - 1
        tl.store(listed + NUM_HEADS + places, ids, mask=kept & (places < K))
        num_kept += tl.sum(num_in_strip)
        mass += tl.sum(tl.where(kept, weight, 0.0))
        first += AT_ONCE
    token = tl.load(tokens + row)
    own = tl.load(scores + token).to(tl.float32) * scale - base - tl.log(mass)
    if num_kept == 0:
        # Nothing but what is not a number: the row has some token nonetheless.
        tl.store(listed + NUM_HEADS, token.to(tl.int32))
        tl.store(listed + COUNT, 1)
        tl.store(listed_floats + LOGPROB, 0.0)
    else:
        tl.store(listed + COUNT, num_kept)
        tl.store(listed_floats + LOGPROB, own)


@triton.jit
def _bits_kernel(
    scores,
    row_stride,
    settings,
    work,
    work_int,
    strips,
    strips_int,
    rows,
    words,
    W,
    V: tl.constexpr,
    J: tl.constexpr,
    P: tl.constexpr,
    Q: tl.constexpr,
):
    """One tile of one row."""
    num_words: tl.constexpr = TILE // _WORD
    tile = tl.program_id(0)
    place = tl.program_id(1).to(tl.int64)
    row = tl.load(rows + place).to(tl.int64)
    scale = tl.load(settings + row * NUM_PARAMS + SCALE)
    cut = tl.load(work + row * NUM_PLANES * P + CUT * P)
    last_id = tl.load(work_int + row * NUM_PLANES * P + LAST_ID * P)
    tiles = tl.arange(0, P)
    maxima = tl.load(work + (row * NUM_PLANES + MAXIMA) * P + tiles, mask=tiles < J, other=float("-inf"))
    base = base_of(tl.max(maxima))
    word = tile * num_words + tl.arange(0, num_words)
    ids = word[:, None] * _WORD + tl.arange(0, _WORD)[None, :]
    x = load_scores(scores + row * row_stride, ids, scale, V)
    kept = ((x > cut) | ((x == cut) & (ids <= last_id))) & (tl.exp(x - base) > 0)
    packed = tl.sum(kept.to(tl.int32) << tl.arange(0, _WORD)[None, :], 1)
    tl.store(words + place * W + word, packed)
