"""Chooses tokens from adjusted scores: filters and noise. On the host here; on CUDA in `kernel`.

Shapes: S rows that sample, G of them by chance (not greedy) or filtered, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ebbtide.srt.model_executor.host_copies import upload
from ebbtide.srt.model_executor.sampling.logprobs import marked_nonfinite
from ebbtide.srt.sampling_params import SamplingParams

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)

# Larger temperatures make no difference, and with this one products with its inverse stay normal numbers.
_MAX_TEMPERATURE = 1e30
# Rows are padded to a multiple of this, so that the logprobs behind the tokens are aligned like them.
_ROWS_ALIGNED = 2


@dataclass(frozen=True, slots=True)
class CutRows:
    """The rows after the kernels have applied the filters, in the layout of `cut_kernel`.

    Attributes:
        settings_S4, work, strips: of all rows; those without filters have no cut.
    """

    settings_S4: Tensor
    work: Tensor
    strips: Tensor


@dataclass(frozen=True, slots=True)
class Chosen:
    """The chosen tokens, on the device.

    Attributes:
        packed: int64, for one copy to the host: the tokens, then their logprobs as float32.
        num_rows: S.
        norm_S1: float32, logsumexp of the scores over the temperature; None: it was not computed, and the
            logprobs only tell which rows are not finite.
        scale_S1: float32, a factor that the scores still need; None: they need none.
        cut_rows: where filters cut the rows; None: the chooser does not tell, or no row has filters.
    """

    packed: Tensor
    num_rows: int
    norm_S1: Tensor | None = None
    scale_S1: Tensor | None = None
    cut_rows: CutRows | None = None

    @staticmethod
    def packed_size(num_rows: int) -> int:
        """Length of `packed`."""
        return 2 * -(-num_rows // _ROWS_ALIGNED) * _ROWS_ALIGNED

    @property
    def tokens_S(self) -> Tensor:
        """int64."""
        return self.packed[: self.num_rows]

    @property
    def logprobs_S(self) -> Tensor:
        """float32, before the filters, as `logprobs.marked_nonfinite` has them."""
        first = self.packed_size(self.num_rows) // 2
        return self.packed[first:].view(torch.float32)[: self.num_rows]


class Chooser(Protocol):
    """Chooses a token per row of one batch. It is made anew when the batch changes.

    A token depends on its row's scores and noise alone, not on other rows. A row whose scores are all −∞ or
    NaN gives some valid token.
    """

    def choose(self, scores_SV: Tensor, noise_S: NDArray[np.float64]) -> Chosen:
        """Launch the choice.

        Args:
            scores_SV: before the temperature; may be overwritten by the scores over the temperature
                (then `Chosen.scale_S1` is None).
            noise_S: in [0, 1): where the cumulative distribution is inverted; −1 takes the most likely token.
        """
        ...


MakeChooser = Callable[[Sequence[SamplingParams], int, torch.device], Chooser]


class Filters:
    """The filters of some requests, in the order top-k, top-p, min-p.

    Each filter keeps the most likely tokens, so together they keep as many as the strictest of them. Top-p
    counts within what top-k left, renormalised; min-p is relative to the largest probability. Among equal
    probabilities at the cut, lower ids stay, so that a choice never depends on the rest of the batch.

    Args:
        device: where the probabilities are; None: the CPU.
    """

    def __init__(
        self, params: Sequence[SamplingParams], vocab_size: int, device: torch.device | None = None
    ) -> None:
        device = torch.device("cpu") if device is None else device
        top_k = [each.top_k if has_top_k(each, vocab_size) else vocab_size for each in params]
        # Infinity, not 1: rounding may carry the sum past 1 before the last token.
        top_p = [each.top_p if each.top_p < 1.0 else float("inf") for each in params]
        self._top_k_G1 = upload(top_k, device).unsqueeze(1)
        self._top_p_G1 = upload(np.array(top_p, dtype=np.float64), device).unsqueeze(1)
        self._min_p_G1 = upload([each.min_p for each in params], device).unsqueeze(1)

    def support(self, probs_GV: Tensor) -> Tensor:
        """Which tokens are kept, as booleans, at least one per row. The host does not wait for the device."""
        sorted_GV, order_GV = probs_GV.sort(dim=-1, descending=True, stable=True)
        places_V = torch.arange(probs_GV.shape[1], device=probs_GV.device)
        in_top_k_GV = places_V < self._top_k_G1
        mass_GV = sorted_GV.double() * in_top_k_GV
        sums_GV = mass_GV.cumsum(-1)
        in_top_p_GV = sums_GV - mass_GV < self._top_p_G1 * sums_GV[:, -1:]
        in_min_p_GV = sorted_GV >= self._min_p_G1 * sorted_GV[:, :1]
        num_kept_G1 = (in_top_k_GV & in_top_p_GV & in_min_p_GV).sum(-1, keepdim=True).clamp_(min=1)
        return torch.empty_like(in_top_k_GV).scatter_(1, order_GV, places_V < num_kept_G1)


def has_top_k(params: SamplingParams, vocab_size: int) -> bool:
    """Whether top-k can drop a token. −1 turns it off, and so does the vocabulary's size."""
    return 0 < params.top_k < vocab_size


def is_filtered(params: SamplingParams, vocab_size: int) -> bool:
    """Whether any filter is on."""
    return has_top_k(params, vocab_size) or params.top_p < 1.0 or params.min_p > 0.0


class HostChooser:
    """Chooses with torch. It divides the scores by the temperature in place."""

    def __init__(self, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> None:
        self._temperature_S1 = torch.tensor([temperature_of(each) for each in params]).unsqueeze(1)
        random = [row for row, each in enumerate(params) if not each.is_greedy]
        self._random_G = torch.tensor(random, dtype=torch.int64)
        filtered = [index for index, row in enumerate(random) if is_filtered(params[row], vocab_size)]
        self._filtered = torch.tensor(filtered, dtype=torch.int64)
        self._filters = (
            Filters([params[random[index]] for index in filtered], vocab_size) if filtered else None
        )

    def choose(self, scores_SV: Tensor, noise_S: NDArray[np.float64]) -> Chosen:
        """See `Chooser`. The scores must be float32."""
        scores_SV /= self._temperature_S1
        tokens_S = scores_SV.argmax(-1)
        if len(self._random_G):
            noise_G = torch.from_numpy(noise_S)[self._random_G]
            tokens_S[self._random_G] = self._draw(scores_SV[self._random_G], noise_G)
        num_rows = len(scores_SV)
        chosen = Chosen(torch.empty(Chosen.packed_size(num_rows), dtype=torch.int64), num_rows)
        chosen.tokens_S.copy_(tokens_S)
        # To find rows that are not finite, the largest score does as well as the logsumexp, and is 8 times
        # faster.
        largest_S1 = scores_SV.amax(-1, keepdim=True)
        chosen.logprobs_S.copy_(marked_nonfinite(torch.zeros(num_rows), largest_S1))
        return chosen

    def _draw(self, scores_GV: Tensor, noise_G: Tensor) -> Tensor:
        probs_GV = scores_GV.softmax(-1)
        if self._filters is not None:
            probs_FV = probs_GV[self._filtered]
            probs_GV[self._filtered] = probs_FV.masked_fill_(~self._filters.support(probs_FV), 0.0)
        return invert_cdf(probs_GV, noise_G)


def invert_cdf(probs_GV: Tensor, noise_G: Tensor) -> Tensor:
    """The token at which the running sum of a row's probabilities passes noise · total; int64 [G].

    Args:
        probs_GV: ≥ 0, with any positive sum; a token of probability zero is never chosen.
        noise_G: float64 in [0, 1).
    """
    sums_GV = probs_GV.cumsum(-1, dtype=torch.float64)
    total_G1 = sums_GV[:, -1:]
    # The product may round up to the total, which no running sum exceeds: stay below it.
    goal_G1 = torch.minimum(noise_G.unsqueeze(1) * total_G1, total_G1.nextafter(torch.zeros(())))
    found_G1 = torch.searchsorted(sums_GV, goal_G1, right=True)
    # NaN sums would give an index past the end.
    return found_G1.squeeze(1).clamp_(max=probs_GV.shape[1] - 1)


def temperature_of(params: SamplingParams) -> float:
    """What the scores are divided by; greedy requests leave them as they are."""
    return 1.0 if params.is_greedy else min(params.temperature, _MAX_TEMPERATURE)


def mixed_seeds(seeds: Sequence[int]) -> NDArray[np.uint64]:
    """The part of `uniforms` that depends on the seeds alone: any integers, taken modulo 2**64."""
    # Mix the seed before the position is added: otherwise close seeds would give the same sequence, shifted.
    return _mix(np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64) + _GOLDEN)


def uniforms(mixed: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) per seed and position, with 53 random bits, whatever else is in the batch.

    Args:
        mixed: seeds after `mixed_seeds`.
        positions: ≥ 0.

    Source: the finalizer of splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
    Generators, 2014), applied to the seed and again to the position.
    """
    state = mixed + positions.astype(np.uint64) * _GOLDEN
    return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    return state ^ (state >> np.uint64(31))
