"""Changes of scores before the choice: penalties, biases, allowed tokens and masks.

Shapes: S requests that sample, P of them penalised, A with a list of allowed tokens, M with a mask;
V vocabulary, W words of 32 tokens.
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
# Larger biases make no difference, and with this one sums with scores stay finite.
_MAX_BIAS = 1e30
# Below this a repetition penalty would take scores out of float32's range.
_LEAST_REPETITION_PENALTY = 1e-30


class Penalties:
    """Token counts of the requests with penalties, kept while the batch stays the same.

    Args:
        rows: their rows in the batch's scores, ascending.
        specs: of these rows.
        device: where the scores are.
        previous: of the previous batch, for the counts of requests that are still there; None: there is none.
    """

    def __init__(
        self,
        rows: Sequence[int],
        specs: Sequence[SampleSpec],
        vocab_size: int,
        device: torch.device,
        previous: Penalties | None,
    ) -> None:
        self._specs = list(specs)
        self._device = device
        self._rows_P = upload(list(rows), device)
        # Tokens of the prompt and the output, and how often each is in the output.
        self._seen_PV = torch.zeros((len(rows), vocab_size), dtype=torch.bool, device=device)
        self._counts_PV = torch.zeros((len(rows), vocab_size), device=device)
        self._num_counted = [0] * len(rows)
        params = [spec.params for spec in specs]
        repetition = [max(each.repetition_penalty, _LEAST_REPETITION_PENALTY) for each in params]
        self._repetition_P1 = upload(repetition, device).unsqueeze(1)
        self._frequency_P1 = upload([each.frequency_penalty for each in params], device).unsqueeze(1)
        self._presence_P1 = upload([each.presence_penalty for each in params], device).unsqueeze(1)
        self._has_repetition = any(each.repetition_penalty != 1.0 for each in params)
        self._has_counts = any(each.frequency_penalty or each.presence_penalty for each in params)
        self._take_over(previous)

    def apply(self, scores_SV: Tensor) -> None:
        """Change the scores of the penalised rows in place.

        Repetition divides positive and multiplies negative scores of every token seen (Keskar et al.,
        CTRL, 2019, as Hugging Face has it); then frequency · count and presence are subtracted for
        tokens of the output.
        """
        self._count_new_tokens()
        is_whole = len(self._specs) == len(scores_SV)
        scores_PV = scores_SV if is_whole else scores_SV[self._rows_P]
        if self._has_repetition:
            scaled = torch.where(
                scores_PV < 0, scores_PV * self._repetition_P1, scores_PV / self._repetition_P1
            )
            scores_PV.copy_(torch.where(self._seen_PV, scaled, scores_PV))
        if self._has_counts:
            scores_PV -= self._frequency_P1 * self._counts_PV
            scores_PV -= self._presence_P1 * (self._counts_PV > 0)
        if not is_whole:
            scores_SV.index_copy_(0, self._rows_P, scores_PV)

    def _take_over(self, previous: Penalties | None) -> None:
        """Copy the counts of requests that were there before; count the prompts of new ones."""
        known = {spec: row for row, spec in enumerate(previous._specs)} if previous is not None else {}
        kept = [row for row, spec in enumerate(self._specs) if spec in known]
        if previous is not None and kept:
            before = [known[self._specs[row]] for row in kept]
            rows, rows_before = upload(kept, self._device), upload(before, self._device)
            self._seen_PV.index_copy_(0, rows, previous._seen_PV[rows_before])
            self._counts_PV.index_copy_(0, rows, previous._counts_PV[rows_before])
            for row, row_before in zip(kept, before, strict=True):
                self._num_counted[row] = previous._num_counted[row_before]
        new_rows: list[int] = []
        prompt_ids: list[int] = []
        for row, spec in enumerate(self._specs):
            if spec not in known:
                new_rows += [row] * len(spec.prompt_ids)
                prompt_ids += spec.prompt_ids
        self._see(new_rows, prompt_ids)

    def _count_new_tokens(self) -> None:
        rows: list[int] = []
        token_ids: list[int] = []
        for row, spec in enumerate(self._specs):
            new = spec.output_ids[self._num_counted[row] :]
            self._num_counted[row] += len(new)
            rows += [row] * len(new)
            token_ids += new
        where = self._see(rows, token_ids)
        if where is not None:
            self._counts_PV.index_put_(where, self._counts_PV.new_ones(()), accumulate=True)

    def _see(self, rows: list[int], token_ids: list[int]) -> tuple[Tensor, Tensor] | None:
        if not rows:
            return None
        where = (upload(rows, self._device), upload(token_ids, self._device))
        self._seen_PV.index_put_(where, self._seen_PV.new_ones(()))
        return where


def bias_entries(
    specs: list[SampleSpec], rows_without_stop: Sequence[int], device: torch.device
) -> tuple[tuple[Tensor, Tensor], Tensor] | None:
    """What is added to scores, as ((rows, ids), values): logit_bias, and −∞ for masked stop ids."""
    entries = [
        (row, token_id, max(-_MAX_BIAS, min(bias, _MAX_BIAS)))
        for row, spec in enumerate(specs)
        for token_id, bias in (spec.params.logit_bias or {}).items()
    ]
    entries += [
        (row, token_id, float("-inf")) for row in rows_without_stop for token_id in specs[row].stop_ids
    ]
    if not entries:
        return None
    rows, token_ids, values = (list(column) for column in zip(*entries, strict=True))
    return (upload(rows, device), upload(token_ids, device)), upload(values, device)


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """The `allowed_token_ids` of A of the rows. Unlike masks they never change: they stay on the device."""

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
        self._rows_M = upload(rows, device)
        self._bits = upload(np.array([1 << bit for bit in range(8)], dtype=np.uint8), device)
        self._num_words = -(-vocab_size // WORD_BITS)
        self._device = device

    def apply(self, scores_SV: Tensor) -> None:
        """Set the scores of tokens that may not come next to −∞, in place."""
        words_MW = np.empty((len(self._masks), self._num_words), dtype=np.int32)
        self._masks[0].fill(self._masks[1:], words_MW)
        bytes_MB = upload(words_MW.view(np.uint8), self._device)
        forbidden_MV = ((bytes_MB.unsqueeze(-1) & self._bits) == 0).flatten(1)[:, : scores_SV.shape[1]]
        masked_MV = scores_SV[self._rows_M].masked_fill_(forbidden_MV, float("-inf"))
        scores_SV.index_copy_(0, self._rows_M, masked_MV)
