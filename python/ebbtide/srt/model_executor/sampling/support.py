"""Which tokens could have been sampled, for requests that ask: what the filters left of a step's scores.

Shapes: S requests that sample, G of them that ask and are not greedy, K ids of one that are listed at most,
V vocabulary, W words of 32 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ebbtide.srt.model_executor.batch_plan import SampleSpec, Supports
from ebbtide.srt.model_executor.host_copies import download, upload
from ebbtide.srt.model_executor.sampling.choosing import Chosen, Filters, has_top_k
from ebbtide.srt.model_executor.sampling.logprobs import LOWEST

# Rows with more than these are given by one bit for each token of the vocabulary instead.
MAX_LISTED = 1024
# Pointers keep their alignment.
_LISTED_STEP = 16
# Columns ahead of them: how many there are, and a logprob.
_NUM_HEADS = 2


@dataclass(frozen=True, slots=True)
class LaunchedSupports:
    """Supports on their way to the host.

    Attributes:
        random: rows in the order of what follows.
        greedy: rows that have their token alone.
        listed_GK: int32, as `support_kernel.listed` lays them out; None: `kept_GV` and `logprobs_G` instead.
        words_GW: as `support_kernel.bits` does; None: every row has room for all its ids.
    """

    random: list[int]
    greedy: list[int]
    listed_GK: Tensor | None = None
    words_GW: Tensor | None = None
    kept_GV: Tensor | None = None
    logprobs_G: Tensor | None = None

    def result(self, token_ids_S: NDArray[np.int64]) -> Supports:
        """Once the device has run what was launched."""
        counts_G = np.zeros(0, dtype=np.int64)
        ids, logprobs_G = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32)
        if self.listed_GK is not None:
            listed_GK = self.listed_GK.numpy()
            counts_G = listed_GK[:, 0].astype(np.int64)
            logprobs_G = listed_GK[:, 1].copy().view(np.float32)
            ids = self._ids(listed_GK[:, _NUM_HEADS:], counts_G)
        elif self.kept_GV is not None and self.logprobs_G is not None:
            kept_GV = self.kept_GV.numpy()
            counts_G, logprobs_G = kept_GV.sum(-1), self.logprobs_G.numpy()
            ids = kept_GV.nonzero()[1].astype(np.int32)
        num_greedy = len(self.greedy)
        return Supports(
            rows=self.random + self.greedy,
            ids=np.concatenate([ids, token_ids_S[self.greedy].astype(np.int32)]),
            ends_G=np.concatenate([counts_G, np.ones(num_greedy, dtype=np.int64)]).cumsum(),
            logprobs_G=np.concatenate(
                [np.nan_to_num(logprobs_G, nan=LOWEST), np.zeros(num_greedy, dtype=np.float32)]
            ),
        )

    def _ids(self, ids_GK: NDArray[np.int32], counts_G: NDArray[np.int64]) -> NDArray[np.int32]:
        num_listed = ids_GK.shape[1]
        if counts_G.max() <= num_listed:
            return ids_GK[np.arange(num_listed) < counts_G[:, None]]
        assert self.words_GW is not None, "there are rows without a bound"
        words_GW = self.words_GW.numpy()
        return np.concatenate(
            [
                ids_GK[row, :count] if count <= num_listed else _ids_of(words_GW[row])
                for row, count in enumerate(counts_G.tolist())
            ]
        )


def _ids_of(words_W: NDArray[np.int32]) -> NDArray[np.int32]:
    return np.flatnonzero(np.unpackbits(words_W.view(np.uint8), bitorder="little")).astype(np.int32)


class SupportReader:
    """The requests of a batch that ask, kept while the batch stays the same."""

    def __init__(self, specs: Sequence[SampleSpec], vocab_size: int, device: torch.device) -> None:
        rows = [row for row, spec in enumerate(specs) if spec.returns_support]
        self._greedy = [row for row in rows if specs[row].params.is_greedy]
        self._random = [row for row in rows if not specs[row].params.is_greedy]
        params = [specs[row].params for row in self._random]
        self._filters = Filters(params, vocab_size, device)
        self._rows_G = upload(np.array(self._random, dtype=np.int32), device)
        bounds = [each.top_k if has_top_k(each, vocab_size) else vocab_size for each in params]
        self._is_bounded = max(bounds, default=0) <= MAX_LISTED
        num_listed = min(max(bounds, default=0), MAX_LISTED)
        self._num_listed = -(-num_listed // _LISTED_STEP) * _LISTED_STEP

    def read(self, scores_SV: Tensor, chosen: Chosen) -> LaunchedSupports:
        """Launch it. The scores are those that the choice was made of."""
        if not self._random:
            return LaunchedSupports([], self._greedy)
        if chosen.cut_rows is None:
            return self._sorted(scores_SV, chosen)
        # Rows are cut by Triton kernels only, so Triton can be imported here.
        from ebbtide.srt.model_executor.sampling import support_kernel

        listed_GK = support_kernel.listed(scores_SV, chosen, self._rows_G, self._num_listed)
        words_GW = None if self._is_bounded else support_kernel.bits(scores_SV, chosen, self._rows_G)
        return LaunchedSupports(
            self._random,
            self._greedy,
            listed_GK=download(listed_GK),
            words_GW=None if words_GW is None else download(words_GW),
        )

    def _sorted(self, scores_SV: Tensor, chosen: Chosen) -> LaunchedSupports:
        scores_GV = scores_SV[self._rows_G].float()
        if chosen.scale_S1 is not None:
            scores_GV = scores_GV * chosen.scale_S1[self._rows_G]
        probs_GV = scores_GV.softmax(-1)
        tokens_G1 = chosen.tokens_S[self._rows_G].unsqueeze(1)
        # What was chosen belongs to it, whatever sums were rounded to.
        kept_GV = (self._filters.support(probs_GV) & (probs_GV > 0)).scatter_(1, tokens_G1, value=True)
        left_GV = scores_GV.masked_fill(~kept_GV, float("-inf"))
        logprobs_G = (left_GV.gather(1, tokens_G1) - left_GV.logsumexp(-1, keepdim=True)).squeeze(1)
        return LaunchedSupports(
            self._random, self._greedy, kept_GV=download(kept_GV), logprobs_G=download(logprobs_G)
        )
