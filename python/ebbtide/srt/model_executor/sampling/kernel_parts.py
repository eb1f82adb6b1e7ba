"""What the sampling kernels share: where numbers lie in their workspaces, and small functions.

Imported on CUDA only, as `kernel` is.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

# Scores of a tile, and of a strip of it.
TILE = tl.constexpr(2048)
STRIP = tl.constexpr(128)
# Planes of the workspace [S, planes, P]: what is known of each tile, then of each row.
MAXIMA = tl.constexpr(0)
SUMS = tl.constexpr(1)  # of exp(score − the tile's largest)
BEST_IDS = tl.constexpr(2)  # int32
CUT = tl.constexpr(3)  # [0]: the least score that stays
LAST_ID = tl.constexpr(4)  # [0], int32: the last id that stays at that score
NUM_PLANES = tl.constexpr(5)
# Planes of the workspace [S, planes, Q], for rows with filters: what is known of each strip.
STRIP_MAXIMA = tl.constexpr(0)  # of the scores before the temperature
STRIP_SUMS = tl.constexpr(1)  # of exp(score − the row's largest), over what the filters leave
STRIP_LIST = tl.constexpr(2)  # int32: the strips that a pass reads
NUM_STRIP_PLANES = tl.constexpr(3)
# Columns of the row parameters [S, 4] float32.
SCALE = tl.constexpr(0)
TOP_K = tl.constexpr(1)  # 0 is off
TOP_P = tl.constexpr(2)  # 1 is off
MIN_P = tl.constexpr(3)  # 0 is off
NUM_PARAMS = tl.constexpr(4)

NO_ID = tl.constexpr(2**31 - 1)


@triton.jit
def load_scores(scores, ids, scale, V: tl.constexpr):
    """Scores over the temperature; −∞ beyond the vocabulary."""
    return tl.load(scores + ids, mask=ids < V, other=float("-inf")).to(tl.float32) * scale


@triton.jit
def or_lowest(x):
    """What is not a number counts as −∞."""
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def base_of(largest):
    """What is subtracted before exp: nothing where all scores are −∞."""
    return tl.where(largest == float("-inf"), 0.0, largest)
