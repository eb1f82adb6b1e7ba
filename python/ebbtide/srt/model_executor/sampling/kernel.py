"""Choosing tokens on a CUDA device: one pass over the scores, then one small draw per row.

The draw inverts the cumulative distribution, as `choosing.HostChooser` does, but in two levels: the
vocabulary is cut into tiles, one tile is drawn by the tiles' sums, then a token within it. So the scores are
read once, at memory speed, and one number of 53 random bits per row is all the noise there is. The token is
the one that `HostChooser` takes, up to rounding of the sums.

Imported on CUDA only: a CPU installation has no Triton. Nothing here makes the host wait.

Shapes: S rows that sample, F of them filtered, V vocabulary, J tiles of a row, P the power of two from J on.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from ebbtide.srt.model_executor.sampling.choosing import Chosen, temperature_of
from ebbtide.srt.model_executor.sampling.filters import has_top_k, is_filtered
from ebbtide.srt.model_executor.sampling.logprobs import LOWEST
from ebbtide.srt.model_executor.transfers import upload
from ebbtide.srt.sampling_params import SamplingParams

_TILE = 2048
# The search for a cut reads one row by one program: many loads in flight hide their latency.
_CHUNK = 8192

# Planes of the workspace [S, planes, P]: what is known of each tile, then of each row.
_MAXIMA = tl.constexpr(0)
_SUMS = tl.constexpr(1)  # of exp(score − the tile's largest)
_KEPT_SUMS = tl.constexpr(2)  # of what the filters leave
_BEST_IDS = tl.constexpr(3)  # int32
_CUT = tl.constexpr(4)  # [0]: the least score that stays
_LAST_ID = tl.constexpr(5)  # [0], int32: the last id that stays at that score
_NUM_PLANES = tl.constexpr(6)
# Columns of the row parameters [S, 4] float32.
_SCALE = tl.constexpr(0)
_TOP_K = tl.constexpr(1)  # 0 is off
_TOP_P = tl.constexpr(2)  # 1 is off
_MIN_P = tl.constexpr(3)  # 0 is off
_NUM_PARAMS = tl.constexpr(4)

_NO_ID = tl.constexpr(2**31 - 1)
_LOWEST = tl.constexpr(LOWEST)


class KernelChooser:
    """Chooses tokens for rows with these parameters; see `choosing.Chooser`."""

    def __init__(self, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._num_tiles = triton.cdiv(vocab_size, _TILE)
        self._num_tiles_padded = triton.next_power_of_2(self._num_tiles)
        columns = [
            (1.0 / temperature_of(each), _top_k_of(each, vocab_size), each.top_p, each.min_p)
            for each in params
        ]
        self._params_S4 = upload(np.array(columns, dtype=np.float32), device)
        filtered = [
            row for row, each in enumerate(params) if not each.is_greedy and is_filtered(each, vocab_size)
        ]
        self._filtered_F = upload(np.array(filtered, dtype=np.int32), device) if filtered else None
        self._is_all_greedy = all(each.is_greedy for each in params)
        self._no_noise_S = upload(np.full(len(params), -1.0), device)

    def choose(self, scores_SV: Tensor, noise_S: NDArray[np.float64]) -> Chosen:
        """Launch the kernels. The scores may have any float type, in contiguous rows; they are only read."""
        num_rows, device = len(scores_SV), scores_SV.device
        noise_dev_S = self._no_noise_S if self._is_all_greedy else upload(noise_S, device)
        # The workspace and what leaves it are laid out so that every pointer keeps its alignment whatever
        # the batch: Triton compiles once more for pointers that are aligned differently.
        work = torch.empty(
            (num_rows, _NUM_PLANES.value, self._num_tiles_padded), dtype=torch.float32, device=device
        )
        packed = torch.empty(Chosen.packed_size(num_rows), dtype=torch.int64, device=device)
        norm_S = torch.empty(num_rows, dtype=torch.float32, device=device)
        chosen = Chosen(packed, num_rows, norm_S.unsqueeze(1), self._params_S4[:, :1])
        common: dict[str, Any] = {
            "scores": scores_SV,
            "row_stride": scores_SV.stride(0),
            "settings": self._params_S4,
            "work": work,
            "work_int": work.view(torch.int32),
            "V": self._vocab_size,
            "J": self._num_tiles,
            "P": self._num_tiles_padded,
            "TILE": _TILE,
            # A product that is rounded in one place and not in another would make the largest score
            # differ from the maximum.
            "enable_fp_fusion": False,
        }
        _tiles_kernel[(self._num_tiles, num_rows)](**common, num_warps=4)
        if self._filtered_F is not None:
            _cut_kernel[(len(self._filtered_F),)](
                **common,
                rows=self._filtered_F,
                CHUNK=min(_CHUNK, _TILE * self._num_tiles_padded),
                num_warps=32,
            )
        _draw_kernel[(num_rows,)](
            **common,
            noise=noise_dev_S,
            tokens=chosen.tokens_S,
            logprobs=chosen.logprobs_S,
            norms=norm_S,
            num_warps=4,
        )
        return chosen


def _top_k_of(params: SamplingParams, vocab_size: int) -> int:
    return params.top_k if has_top_k(params, vocab_size) else 0


@triton.jit
def _tiles_kernel(
    scores,
    row_stride,
    settings,
    work,
    work_int,
    V: tl.constexpr,
    J: tl.constexpr,
    P: tl.constexpr,
    TILE: tl.constexpr,
):
    """Largest score, its lowest id, and the sum of exponentials of one tile of one row."""
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    ids = tile * TILE + tl.arange(0, TILE)
    x = _load_scores(scores + row * row_stride, ids, tl.load(settings + row * _NUM_PARAMS + _SCALE), V)
    largest = tl.max(_or_lowest(x))
    best = tl.min(tl.where(_or_lowest(x) == largest, ids, _NO_ID))
    # What is not a number stays in the sum, so that the row's logprobs tell.
    total = tl.sum(tl.exp(x - _base(largest)))
    at = row * _NUM_PLANES * P + tile
    tl.store(work + at + _MAXIMA * P, largest)
    tl.store(work + at + _SUMS * P, total)
    tl.store(work_int + at + _BEST_IDS * P, best)


@triton.jit
def _cut_kernel(
    scores,
    row_stride,
    settings,
    work,
    work_int,
    rows,
    V: tl.constexpr,
    J: tl.constexpr,
    P: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Where the filters cut one row: the least score that stays, and the last id that stays at that score.

    Each filter keeps the first tokens by descending score, so together they keep the fewest any of them
    keeps; see `filters.Filters`.
    """
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    scale = tl.load(settings + row * _NUM_PARAMS + _SCALE)
    top_k = tl.load(settings + row * _NUM_PARAMS + _TOP_K)
    top_p = tl.load(settings + row * _NUM_PARAMS + _TOP_P)
    min_p = tl.load(settings + row * _NUM_PARAMS + _MIN_P)
    scores += row * row_stride
    work += row * _NUM_PLANES * P
    work_int += row * _NUM_PLANES * P
    tiles = tl.arange(0, P)
    maxima = tl.load(work + _MAXIMA * P + tiles, mask=tiles < J, other=float("-inf"))
    sums = tl.load(work + _SUMS * P + tiles, mask=tiles < J, other=0.0)
    largest = tl.max(maxima)
    base = _base(largest)
    total = tl.sum(tl.exp(maxima - base) * sums)
    # `room` is how many of the scores equal to the cut stay.
    cut = tl.full([], float("-inf"), tl.float32)
    room = tl.full([], 0.0, tl.float32) + V
    if top_k > 0:
        cut = _least_kept(scores, scale, base, cut, largest, top_k, V, False, CHUNK)
        above = _above(scores, scale, base, cut, cut, cut, V, False, CHUNK)[0]
        room = top_k - above
        mass_above = _above(scores, scale, base, cut, cut, cut, V, True, CHUNK)[0]
        total = mass_above + room * tl.exp(cut - base)
    if top_p < 1:
        goal = top_p * total
        nucleus = _least_kept(scores, scale, base, cut, largest, goal, V, True, CHUNK)
        above = _above(scores, scale, base, nucleus, nucleus, nucleus, V, True, CHUNK)[0]
        each = tl.exp(nucleus - base)
        reached = tl.where(each > 0, tl.ceil((goal - above) / each), V)
        reached = tl.minimum(tl.maximum(reached, 1.0), V)
        room = tl.where(nucleus > cut, reached, tl.minimum(room, reached))
        cut = nucleus
    if min_p > 0:
        least = base + tl.log(min_p)
        room = tl.where(least > cut, tl.full([], 0.0, tl.float32) + V, room)
        cut = tl.maximum(cut, least)
    last_id = _store_kept_sums(scores, scale, cut, room, work, V, J, P, TILE)
    tl.store(work + _CUT * P, cut)
    tl.store(work_int + _LAST_ID * P, last_id)


@triton.jit
def _draw_kernel(
    scores,
    row_stride,
    settings,
    work,
    work_int,
    noise,
    tokens,
    logprobs,
    norms,
    V: tl.constexpr,
    J: tl.constexpr,
    P: tl.constexpr,
    TILE: tl.constexpr,
):
    """One row's token, its logprob before the filters, and the row's logsumexp."""
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(settings + row * _NUM_PARAMS + _SCALE)
    row_noise = tl.load(noise + row)
    scores += row * row_stride
    work += row * _NUM_PLANES * P
    work_int += row * _NUM_PLANES * P
    tiles = tl.arange(0, P)
    inside = tiles < J
    maxima = tl.load(work + _MAXIMA * P + tiles, mask=inside, other=float("-inf"))
    sums = tl.load(work + _SUMS * P + tiles, mask=inside, other=0.0)
    best_ids = tl.load(work_int + _BEST_IDS * P + tiles, mask=inside, other=_NO_ID)
    largest = tl.max(maxima)
    base = _base(largest)
    weights = tl.exp(maxima - base)
    norm = base + tl.log(tl.sum(weights * sums))
    token = tl.min(tl.where(maxima == largest, best_ids, _NO_ID))
    # The comparison is false for what is not a number: such a row keeps the token it has.
    if (row_noise >= 0) & (norm < float("inf")) & (norm > float("-inf")):
        # Nothing is written for rows without filters; what is loaded there is not used.
        is_filtered = _is_filtered(settings + row * _NUM_PARAMS)
        kept_sums = tl.load(work + _KEPT_SUMS * P + tiles, mask=inside, other=0.0)
        masses = (weights * tl.where(is_filtered, kept_sums, sums)).to(tl.float64)
        cut = tl.where(is_filtered, tl.load(work + _CUT * P), float("-inf"))
        last_id = tl.where(is_filtered, tl.load(work_int + _LAST_ID * P), _NO_ID)
        up_to = tl.cumsum(masses)
        tile, rest = _invert(masses, up_to, tiles, row_noise)
        tile_base = _base(tl.max(tl.where(tiles == tile, maxima, float("-inf"))))
        ids = tile * TILE + tl.arange(0, TILE)
        x = _load_scores(scores, ids, scale, V)
        kept = (x > cut) | ((x == cut) & (ids <= last_id))
        probs = tl.where(kept, tl.exp(x - tile_base), 0.0).to(tl.float64)
        token = _invert(probs, tl.cumsum(probs), ids, rest)[0]
    logprob = tl.load(scores + token).to(tl.float32) * scale - norm
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, tl.where(logprob >= _LOWEST, logprob, _LOWEST))
    tl.store(norms + row, norm)


@triton.jit
def _invert(masses, up_to, ids, noise):
    """The id at which the running sum passes noise · total, and how far into its mass that is: [0, 1].

    A mass of zero is never chosen, even where sums of a scan differ in their last digit.
    """
    goal = noise * tl.max(up_to)
    found = tl.min(tl.where((up_to > goal) & (masses > 0), ids, _NO_ID))
    last = tl.max(tl.where(masses > 0, ids, 0))
    found = tl.where(found == _NO_ID, last, found)
    mass = tl.sum(tl.where(ids == found, masses, 0.0))
    before = tl.sum(tl.where(ids == found, up_to, 0.0)) - mass
    return found, tl.minimum(tl.maximum((goal - before) / mass, 0.0), 1.0)


@triton.jit
def _least_kept(
    scores, scale, base, least, largest, goal, V: tl.constexpr, BY_MASS: tl.constexpr, CHUNK: tl.constexpr
):
    """The least score in [least, largest] above which there is less than `goal`: of mass, or of tokens.

    Found by bisection over the float32 numbers, by three thresholds at a time. What is above a threshold
    never grows with the threshold, rounding included: the sums always add in the same order.
    """
    low, high = _order_of(least), _order_of(largest)
    while low < high:
        at_1 = low + (high - low) // 4
        at_2 = low + (high - low) // 2
        at_3 = low + (high - low) * 3 // 4
        above_1, above_2, above_3 = _above(
            scores,
            scale,
            base,
            _float_of(at_1),
            _float_of(at_2),
            _float_of(at_3),
            V,
            BY_MASS,
            CHUNK,
        )
        new_low = tl.where(above_3 < goal, at_2 + 1, at_3 + 1)
        new_high = tl.where(above_3 < goal, at_3, high)
        new_low = tl.where(above_2 < goal, at_1 + 1, new_low)
        new_high = tl.where(above_2 < goal, at_2, new_high)
        low = tl.where(above_1 < goal, low, new_low)
        high = tl.where(above_1 < goal, at_1, new_high)
    return _float_of(low)


@triton.jit
def _above(scores, scale, base, x_1, x_2, x_3, V: tl.constexpr, BY_MASS: tl.constexpr, CHUNK: tl.constexpr):
    """How much lies above each of three thresholds, float32: exp(score − base) summed, or tokens counted."""
    sum_1 = tl.zeros([CHUNK], tl.float32)
    sum_2 = tl.zeros([CHUNK], tl.float32)
    sum_3 = tl.zeros([CHUNK], tl.float32)
    for first in range(0, V, CHUNK):
        x = _load_scores(scores, first + tl.arange(0, CHUNK), scale, V)
        value = tl.exp(x - base) if BY_MASS else tl.full([CHUNK], 1.0, tl.float32)
        sum_1 += tl.where(x > x_1, value, 0.0)
        sum_2 += tl.where(x > x_2, value, 0.0)
        sum_3 += tl.where(x > x_3, value, 0.0)
    return tl.sum(sum_1), tl.sum(sum_2), tl.sum(sum_3)


@triton.jit
def _store_kept_sums(
    scores, scale, cut, room, work, V: tl.constexpr, J: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr
):
    """Write each tile's sum over what stays; returns the last id that stays at the cut."""
    num_equal = tl.full([], 0, tl.int32)
    last_id = tl.full([], -1, tl.int32)
    for tile in range(J):
        ids = tile * TILE + tl.arange(0, TILE)
        x = _load_scores(scores, ids, scale, V)
        equal = x == cut
        num_here = tl.sum(equal.to(tl.int32))
        if num_equal + num_here > room:
            # Lower ids stay.
            equal = equal & (num_equal + tl.cumsum(equal.to(tl.int32)) <= room)
        num_equal += num_here
        last_id = tl.maximum(last_id, tl.max(tl.where(equal, ids, -1)))
        tile_base = _base(tl.load(work + _MAXIMA * P + tile))
        kept = tl.sum(tl.where((x > cut) | equal, tl.exp(x - tile_base), 0.0))
        tl.store(work + _KEPT_SUMS * P + tile, kept)
    return last_id


@triton.jit
def _is_filtered(row_params):
    return (
        (tl.load(row_params + _TOP_K) > 0)
        | (tl.load(row_params + _TOP_P) < 1)
        | (tl.load(row_params + _MIN_P) > 0)
    )


@triton.jit
def _load_scores(scores, ids, scale, V: tl.constexpr):
    """Scores over the temperature; −∞ beyond the vocabulary."""
    return tl.load(scores + ids, mask=ids < V, other=float("-inf")).to(tl.float32) * scale


@triton.jit
def _or_lowest(x):
    """What is not a number counts as −∞."""
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def _base(largest):
    """What is subtracted before exp: nothing where all scores are −∞."""
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def _order_of(x):
    """A number's place among all float32 numbers, int64."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _float_of(order):
    """The number at a place of `_order_of`."""
    bits = order.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
