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

from ebbtide.srt.model_executor.host_copies import upload
from ebbtide.srt.model_executor.sampling.choosing import (
    Chosen,
    CutRows,
    has_top_k,
    is_filtered,
    temperature_of,
)
from ebbtide.srt.model_executor.sampling.cut_kernel import (
    BEST_IDS,
    CUT,
    LAST_ID,
    MAXIMA,
    MIN_P,
    NO_ID,
    NUM_PARAMS,
    NUM_PLANES,
    NUM_STRIP_PLANES,
    SCALE,
    STRIP,
    STRIP_MAXIMA,
    STRIP_SUMS,
    SUMS,
    TILE,
    TOP_K,
    TOP_P,
    base_of,
    cut_kernel,
    load_scores,
    or_lowest,
)
from ebbtide.srt.model_executor.sampling.logprobs import LOWEST
from ebbtide.srt.sampling_params import SamplingParams

_TILE, _STRIP = TILE.value, STRIP.value
_CUT_WARPS = 8
# Low bits of a float32 that hold nothing of a score of this type.
_UNUSED_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}

_LOWEST = tl.constexpr(LOWEST)


class KernelChooser:
    """Chooses tokens for rows with these parameters; see `choosing.Chooser`."""

    def __init__(self, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._num_tiles = triton.cdiv(vocab_size, _TILE)
        self._num_tiles_padded = triton.next_power_of_2(self._num_tiles)
        self._num_strips_padded = triton.next_power_of_2(self._num_tiles * (_TILE // _STRIP))
        columns = [
            (
                1.0 / temperature_of(each),
                each.top_k if has_top_k(each, vocab_size) else 0,
                each.top_p,
                each.min_p,
            )
            for each in params
        ]
        self._params_S4 = upload(np.array(columns, dtype=np.float32), device)
        filtered = [
            row for row, each in enumerate(params) if not each.is_greedy and is_filtered(each, vocab_size)
        ]
        self._filtered_F = upload(np.array(filtered, dtype=np.int32), device) if filtered else None

    def choose(self, scores_SV: Tensor, noise_S: NDArray[np.float64]) -> Chosen:
        """Launch the kernels. The scores may have any float type, in contiguous rows; they are only read."""
        num_rows, device = len(scores_SV), scores_SV.device
        # The workspace and what leaves it are laid out so that every pointer keeps its alignment whatever
        # the batch: Triton compiles once more for pointers that are aligned differently.
        work = torch.empty(
            (num_rows, NUM_PLANES.value, self._num_tiles_padded), dtype=torch.float32, device=device
        )
        packed = torch.empty(Chosen.packed_size(num_rows), dtype=torch.int64, device=device)
        norm_S = torch.empty(num_rows, dtype=torch.float32, device=device)
        has_filters = self._filtered_F is not None
        strips = work
        if has_filters:
            shape = (num_rows, NUM_STRIP_PLANES.value, self._num_strips_padded)
            strips = torch.empty(shape, dtype=torch.float32, device=device)
        cut_rows = CutRows(self._params_S4, work, strips) if has_filters else None
        chosen = Chosen(packed, num_rows, norm_S.unsqueeze(1), self._params_S4[:, :1], cut_rows)
        common: dict[str, Any] = {
            "scores": scores_SV,
            "row_stride": scores_SV.stride(0),
            "settings": self._params_S4,
            "work": work,
            "work_int": work.view(torch.int32),
            "strips": strips,
            "V": self._vocab_size,
            "J": self._num_tiles,
            "P": self._num_tiles_padded,
            "Q": self._num_strips_padded,
            # A product that is rounded in one place and not in another would make the largest score
            # differ from the maximum.
            "enable_fp_fusion": False,
        }
        whole: dict[str, Any] = {"HAS_FILTERS": has_filters, "num_warps": 4}
        _tiles_kernel[(self._num_tiles, num_rows)](**common, **whole)
        if self._filtered_F is not None:
            cut_kernel[(len(self._filtered_F),)](
                **common,
                strips_int=strips.view(torch.int32),
                rows=self._filtered_F,
                SHIFT=_UNUSED_BITS[scores_SV.dtype],
                num_warps=_CUT_WARPS,
            )
        _draw_kernel[(num_rows,)](
            **common,
            **whole,
            noise=upload(noise_S, device),
            tokens=chosen.tokens_S,
            logprobs=chosen.logprobs_S,
            norms=norm_S,
        )
        return chosen


@triton.jit
def _tiles_kernel(
    scores,
    row_stride,
    settings,
    work,
    work_int,
    strips,
    V: tl.constexpr,
    J: tl.constexpr,
    P: tl.constexpr,
    Q: tl.constexpr,
    HAS_FILTERS: tl.constexpr,
):
    """Largest score, its lowest id, and the sum of exponentials of one tile of one row.

    For filters, the largest score of each strip as well, as it came: not yet over the temperature.
    """
    num_strips: tl.constexpr = TILE // STRIP
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    strip = tile * num_strips + tl.arange(0, num_strips)
    ids = strip[:, None] * STRIP + tl.arange(0, STRIP)[None, :]
    scale = tl.load(settings + row * NUM_PARAMS + SCALE)
    raw = tl.load(scores + row * row_stride + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
    x = raw * scale
    maxima = tl.max(or_lowest(raw), 1)
    largest = tl.max(maxima) * scale
    best = tl.min(tl.where(or_lowest(x) == largest, ids, NO_ID))
    # What is not a number stays in the sum, so that the row's logprobs tell.
    total = tl.sum(tl.exp(x - base_of(largest)))
    at = row * NUM_PLANES * P + tile
    tl.store(work + at + MAXIMA * P, largest)
    tl.store(work + at + SUMS * P, total)
    tl.store(work_int + at + BEST_IDS * P, best)
    if HAS_FILTERS:
        tl.store(strips + row * NUM_STRIP_PLANES * Q + STRIP_MAXIMA * Q + strip, maxima)


@triton.jit
def _draw_kernel(
    scores,
    row_stride,
    settings,
    work,
    work_int,
    strips,
    noise,
    tokens,
    logprobs,
    norms,
    V: tl.constexpr,
    J: tl.constexpr,
    P: tl.constexpr,
    Q: tl.constexpr,
    HAS_FILTERS: tl.constexpr,
):
    """One row's token, its logprob before the filters, and the row's logsumexp."""
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(settings + row * NUM_PARAMS + SCALE)
    row_noise = tl.load(noise + row)
    scores += row * row_stride
    work += row * NUM_PLANES * P
    work_int += row * NUM_PLANES * P
    tiles = tl.arange(0, P)
    inside = tiles < J
    maxima = tl.load(work + MAXIMA * P + tiles, mask=inside, other=float("-inf"))
    sums = tl.load(work + SUMS * P + tiles, mask=inside, other=0.0)
    best_ids = tl.load(work_int + BEST_IDS * P + tiles, mask=inside, other=NO_ID)
    largest = tl.max(maxima)
    base = base_of(largest)
    masses = tl.exp(maxima - base) * sums
    norm = base + tl.log(tl.sum(masses))
    token = tl.min(tl.where(maxima == largest, best_ids, NO_ID))
    # The comparison is false for what is not a number: such a row keeps the token it has.
    if (row_noise >= 0) & (norm < float("inf")) & (norm > float("-inf")):
        is_filtered = False
        if HAS_FILTERS:
            is_filtered = _is_filtered(settings + row * NUM_PARAMS)
        if is_filtered:
            strip_sums = strips + (row * NUM_STRIP_PLANES + STRIP_SUMS) * Q
            cut, last_id = tl.load(work + CUT * P), tl.load(work_int + LAST_ID * P)
            token = _drawn(scores, scale, strip_sums, base, cut, last_id, row_noise, V, Q)
        else:
            tile_masses = masses.to(tl.float64)
            tile, rest = _invert(tile_masses, tl.cumsum(tile_masses), tiles, row_noise)
            tile_base = base_of(tl.max(tl.where(tiles == tile, maxima, float("-inf"))))
            ids = tile * TILE + tl.arange(0, TILE)
            probs = tl.exp(load_scores(scores, ids, scale, V) - tile_base).to(tl.float64)
            token = _invert(probs, tl.cumsum(probs), ids, rest)[0]
    logprob = tl.load(scores + token).to(tl.float32) * scale - norm
    tl.store(tokens + row, token.to(tl.int64))
    logprob = tl.where(logprob >= _LOWEST, logprob, _LOWEST)
    # NaN or +∞ anywhere in the row has made the sum that: see `logprobs.marked_nonfinite`.
    tl.store(logprobs + row, tl.where(norm < float("inf"), logprob, float("nan")))
    tl.store(norms + row, norm)


@triton.jit
def _drawn(scores, scale, strip_sums, base, cut, last_id, noise, V: tl.constexpr, Q: tl.constexpr):
    """The token of a row with filters, out of what they left."""
    strips = tl.arange(0, Q)
    masses = tl.load(strip_sums + strips).to(tl.float64)
    strip, rest = _invert(masses, tl.cumsum(masses), strips, noise)
    ids = strip * STRIP + tl.arange(0, STRIP)
    x = load_scores(scores, ids, scale, V)
    kept = (x > cut) | ((x == cut) & (ids <= last_id))
    probs = tl.where(kept, tl.exp(x - base), 0.0).to(tl.float64)
    return _invert(probs, tl.cumsum(probs), ids, rest)[0]


@triton.jit
def _invert(masses, up_to, ids, noise):
    """The id at which the running sum passes noise · total, and how far into its mass that is: [0, 1].

    A mass of zero is never chosen, even where sums of a scan differ in their last digit.
    """
    goal = noise * tl.max(up_to)
    found = tl.min(tl.where((up_to > goal) & (masses > 0), ids, NO_ID))
    last = tl.max(tl.where(masses > 0, ids, 0))
    found = tl.where(found == NO_ID, last, found)
    mass = tl.sum(tl.where(ids == found, masses, 0.0))
    before = tl.sum(tl.where(ids == found, up_to, 0.0)) - mass
    return found, tl.minimum(tl.maximum((goal - before) / mass, 0.0), 1.0)


@triton.jit
def _is_filtered(row_params):
    return (
        (tl.load(row_params + TOP_K) > 0)
        | (tl.load(row_params + TOP_P) < 1)
        | (tl.load(row_params + MIN_P) > 0)
    )
