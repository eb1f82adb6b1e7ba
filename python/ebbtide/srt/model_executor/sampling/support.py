"""Which tokens could have been sampled, for requests that ask: what the filters left of a step's scores.

Shapes: S requests that sample, G of them that ask and are not greedy, V vocabulary, W bytes of 8 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ebbtide.srt.model_executor.batch_plan import SampleSpec, Support
from ebbtide.srt.model_executor.sampling.choosing import Chosen
from ebbtide.srt.model_executor.sampling.filters import Filters
from ebbtide.srt.model_executor.transfers import download, upload

BYTE_BITS = 8


@dataclass(frozen=True, slots=True)
class LaunchedSupports:
    """Supports on their way to the host: `bits_GW` of `random_rows`; greedy rows have their token alone."""

    random_rows: list[int]
    greedy_rows: list[int]
    bits_GW: Tensor | None
    logprobs_G: Tensor | None

    def result(self, token_ids: Sequence[int]) -> dict[int, Support]:
        """By row, once the device has run what was launched."""
        found: dict[int, Support] = {row: ([token_ids[row]], 0.0) for row in self.greedy_rows}
        if self.bits_GW is not None and self.logprobs_G is not None:
            kept = np.unpackbits(self.bits_GW.numpy(), axis=-1, bitorder="little")
            for row, kept_V, logprob in zip(self.random_rows, kept, self.logprobs_G.tolist(), strict=True):
                found[row] = (np.flatnonzero(kept_V).tolist(), logprob)
        return found


class SupportReader:
    """The requests of a batch that ask, kept while the batch stays the same."""

    def __init__(self, specs: Sequence[SampleSpec], vocab_size: int, device: torch.device) -> None:
        rows = [row for row, spec in enumerate(specs) if spec.returns_support]
        self._greedy = [row for row in rows if specs[row].params.is_greedy]
        self._random = [row for row in rows if not specs[row].params.is_greedy]
        self._filters = Filters([specs[row].params for row in self._random], vocab_size, device)
        self._rows_G = upload(self._random, device)
        self._padding = -vocab_size % BYTE_BITS
        self._weights = (1 << torch.arange(BYTE_BITS, device=device)).to(torch.uint8)

    def read(self, scores_SV: Tensor, chosen: Chosen) -> LaunchedSupports:
        """Launch it. The scores are those that the choice was made of."""
        if not self._random:
            return LaunchedSupports([], self._greedy, None, None)
        scores_GV = scores_SV[self._rows_G].float()
        if chosen.scale_S1 is not None:
            scores_GV = scores_GV * chosen.scale_S1[self._rows_G]
        probs_GV = scores_GV.softmax(-1)
        tokens_G1 = chosen.tokens_S[self._rows_G].unsqueeze(1)
        # What was chosen belongs to it, whatever sums were rounded to.
        support_GV = (self._filters.support(probs_GV) & (probs_GV > 0)).scatter_(1, tokens_G1, value=True)
        kept_GV = scores_GV.masked_fill(~support_GV, float("-inf"))
        logprobs_G = (kept_GV.gather(1, tokens_G1) - kept_GV.logsumexp(-1, keepdim=True)).squeeze(1)
        padded = torch.nn.functional.pad(support_GV, (0, self._padding)).view(len(support_GV), -1, BYTE_BITS)
        bits_GW = (padded * self._weights).sum(-1, dtype=torch.uint8)
        return LaunchedSupports(self._random, self._greedy, download(bits_GW), download(logprobs_G))
