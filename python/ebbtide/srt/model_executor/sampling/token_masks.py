"""Tokens that may not come next: those that a list leaves out, and those that a mask does, by one bit each.

Shapes: S requests that sample, A of them with a list, M with a mask, V vocabulary, W words of 32 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ebbtide.srt.model_executor.batch_plan import SampleSpec
from ebbtide.srt.model_executor.host_copies import upload

WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """The `allowed_token_ids` of A of the rows. Unlike masks they never change, and stay on the device."""

    rows_A: Tensor
    forbidden_AV: Tensor

    @staticmethod
    def of(specs: list[SampleSpec], vocab_size: int, device: torch.device) -> AllowedTokens | None:
        """None: every row may choose anything."""
        rows = [row for row, spec in enumerate(specs) if spec.params.allowed_token_ids is not None]
        if not rows:
            return None
        entries = [
            (place, token_id)
            for place, row in enumerate(rows)
            for token_id in specs[row].params.allowed_token_ids or ()
        ]
        places, token_ids = (list(column) for column in zip(*entries, strict=True))
        forbidden_AV = torch.ones((len(rows), vocab_size), dtype=torch.bool, device=device)
        where = (upload(places, device), upload(token_ids, device))
        forbidden_AV.index_put_(where, forbidden_AV.new_zeros(()))
        return AllowedTokens(upload(rows, device), forbidden_AV)

    def apply(self, scores_SV: Tensor) -> None:
        """Set the scores of forbidden tokens to minus infinity, in place."""
        allowed_AV = scores_SV[self.rows_A].masked_fill(self.forbidden_AV, float("-inf"))
        scores_SV.index_copy_(0, self.rows_A, allowed_AV)


class TokenMasks:
    """The masked requests of a batch, kept while the batch stays the same.

    Args:
        specs: of the whole batch.
        device: where the scores are.
    """

    def __init__(self, specs: Sequence[SampleSpec], vocab_size: int, device: torch.device) -> None:
        self._masks = [spec.mask for spec in specs if spec.mask is not None]
        rows = [row for row, spec in enumerate(specs) if spec.mask is not None]
        self._rows_M = upload(np.array(rows, dtype=np.int32), device)
        self._num_words = -(-vocab_size // WORD_BITS)
        self._device = device

    def apply(self, scores_SV: Tensor) -> None:
        """Set what may not come next to −∞, in place."""
        words_MW = np.empty((len(self._masks), self._num_words), dtype=np.int32)
        self._masks[0].fill(self._masks[1:], words_MW)
        if scores_SV.is_cuda:
            # Triton is there on CUDA machines alone.
            from ebbtide.srt.model_executor.sampling.mask_kernel import forbid

            forbid(scores_SV, upload(words_MW, self._device), self._rows_M)
            return
        bits = np.unpackbits(words_MW.view(np.uint8), axis=-1, bitorder="little")
        forbidden_MV = torch.from_numpy(bits[:, : scores_SV.shape[1]] == 0)
        masked_MV = scores_SV[self._rows_M].masked_fill_(forbidden_MV, float("-inf"))
        scores_SV.index_copy_(0, self._rows_M.long(), masked_MV)
