"""Top-k, top-p and min-p as one cut through the sorted probabilities.

Shapes: G filtered requests, K leading tokens, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ebbtide.srt.model_executor.host_copies import upload
from ebbtide.srt.sampling_params import SamplingParams

# Most distributions end their nucleus here; where one does not, eight times as many are sorted.
_FIRST_LEADERS = 64
_LEADERS_GROWTH = 8


class Filters:
    """The filters of some requests, applied in the order top-k, top-p, min-p; on the host by default.

    Each of them keeps the first tokens by descending probability, so together they keep the fewest that
    any of them keeps. Top-p counts within what top-k left, renormalised; min-p is relative to the largest.
    Among equal probabilities at the cut the lower ids stay: a request's choice never depends on its batch.
    """

    def __init__(
        self, params: Sequence[SamplingParams], vocab_size: int, device: torch.device | None = None
    ) -> None:
        self._vocab_size = vocab_size
        top_k = [each.top_k if has_top_k(each, vocab_size) else vocab_size for each in params]
        # Infinity, not 1: rounding may carry the sum past 1 before the last token.
        top_p = [each.top_p if each.top_p < 1.0 else float("inf") for each in params]
        device = torch.device("cpu") if device is None else device
        self._top_k_G1 = upload(top_k, device).unsqueeze(1)
        self._top_p_G1 = upload(np.array(top_p, dtype=np.float64), device).unsqueeze(1)
        self._min_p_G1 = upload([each.min_p for each in params], device).unsqueeze(1)
        self._has_top_k_G1 = self._top_k_G1 < vocab_size

    def apply(self, probs_GV: Tensor) -> Tensor:
        """The probabilities with everything dropped set to zero; not renormalised."""
        cut_G1, kept_G1 = self._cut(probs_GV)
        keep_GV = probs_GV >= cut_G1
        if bool((keep_GV.sum(-1, keepdim=True) != kept_G1).any()):
            above_GV = probs_GV > cut_G1
            room_G1 = kept_G1 - above_GV.sum(-1, keepdim=True)
            equal_GV = probs_GV == cut_G1
            keep_GV = above_GV | (equal_GV & (equal_GV.cumsum(-1) <= room_G1))
        return probs_GV.masked_fill(~keep_GV, 0.0)

    def support(self, probs_GV: Tensor) -> Tensor:
        """Which tokens are kept, as booleans. Sorts whole rows: the host waits for no device."""
        sorted_GV, order_GV = probs_GV.sort(dim=-1, descending=True, stable=True)
        places_V = torch.arange(self._vocab_size, device=probs_GV.device)
        return torch.empty_like(probs_GV, dtype=torch.bool).scatter_(
            1, order_GV, places_V < self._num_kept(sorted_GV)
        )

    def _cut(self, probs_GV: Tensor) -> tuple[Tensor, Tensor]:
        """The smallest probability kept, and how many tokens are kept: never fewer than one."""
        num_leaders = min(_FIRST_LEADERS, self._vocab_size)
        while True:
            leaders_GK = probs_GV.topk(num_leaders).values
            kept_G1 = self._num_kept(leaders_GK)
            # A cut before the last leader is final, unless top-p still waits for all of top-k.
            is_final = torch.where(self._has_top_k_G1, self._top_k_G1 <= num_leaders, kept_G1 < num_leaders)
            if num_leaders == self._vocab_size or bool(is_final.all()):
                return leaders_GK.gather(1, kept_G1 - 1), kept_G1
            num_leaders = min(num_leaders * _LEADERS_GROWTH, self._vocab_size)

    def _num_kept(self, leaders_GK: Tensor) -> Tensor:
        places_K = torch.arange(leaders_GK.shape[1], device=leaders_GK.device)
        in_top_k_GK = places_K < self._top_k_G1
        mass_GK = leaders_GK.double() * in_top_k_GK
        sum_GK = mass_GK.cumsum(-1)
        total_G1 = torch.where(self._has_top_k_G1, sum_GK[:, -1:], 1.0)
        in_top_p_GK = sum_GK - mass_GK < self._top_p_G1 * total_G1
        in_min_p_GK = leaders_GK >= self._min_p_G1 * leaders_GK[:, :1]
        return (in_top_k_GK & in_top_p_GK & in_min_p_GK).sum(-1, keepdim=True).clamp_(min=1)


def has_top_k(params: SamplingParams, vocab_size: int) -> bool:
    """Whether top-k drops anything: −1 is off, and so is as many as there are."""
    return 0 < params.top_k < vocab_size


def is_filtered(params: SamplingParams, vocab_size: int) -> bool:
    """Whether any filter is on."""
    return has_top_k(params, vocab_size) or params.top_p < 1.0 or params.min_p > 0.0
