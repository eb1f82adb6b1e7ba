"""What may not come next becomes −∞, where it stands: half precision stays what it is.

Imported on CUDA only, as `kernel` is. Shapes: S rows, M of them with a mask, V vocabulary, W words of 32
tokens.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_WORDS_AT_ONCE = 64
_WORD = tl.constexpr(32)


def forbid(scores_SV: Tensor, words_MW: Tensor, rows_M: Tensor) -> None:
    """Launch it.

    Args:
        scores_SV: of any float type, in contiguous rows.
        words_MW: int32; bit i % 32 of word i // 32 is set for each token i that may come next.
        rows_M: int32.
    """
    num_masked, num_words = words_MW.shape
    _forbid_kernel[(triton.cdiv(num_words, _WORDS_AT_ONCE), num_masked)](
        scores_SV,
        scores_SV.stride(0),
        words_MW,
        num_words,
        rows_M,
        V=scores_SV.shape[1],
        AT_ONCE=_WORDS_AT_ONCE,
        num_warps=4,
    )


@triton.jit
def _forbid_kernel(scores, row_stride, words, num_words, rows, V: tl.constexpr, AT_ONCE: tl.constexpr):
    """So many words of one mask."""
    masked = tl.program_id(1).to(tl.int64)
    row = tl.load(rows + masked).to(tl.int64)
    word = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    packed = tl.load(words + masked * num_words + word, mask=word < num_words, other=0)
    bit = tl.arange(0, _WORD)[None, :]
    ids = word[:, None] * _WORD + bit
    is_forbidden = ((packed[:, None] >> bit) & 1) == 0
    tl.store(scores + row * row_stride + ids, float("-inf"), mask=is_forbidden & (ids < V))
