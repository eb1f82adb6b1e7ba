"""From logits to tokens: penalties, bias, masks, temperature, filters, and one draw per request.

Shapes: S requests that sample, G of them by chance (not greedy), V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ebbtide.srt.model_executor.batch_plan import PositionLogprobs, SampleSpec
from ebbtide.srt.model_executor.filters import Filters, is_filtered
from ebbtide.srt.model_executor.logprobs import position_logprobs
from ebbtide.srt.model_executor.noise import uniforms
from ebbtide.srt.model_executor.penalties import Penalties, is_penalised

# Temperatures and biases beyond these say nothing more, and their products with scores stay finite.
_MAX_TEMPERATURE = 1e30
_MAX_BIAS = 1e30


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token per request; logprobs are None for requests that want none, or if nobody does."""

    token_ids: list[int]
    logprobs: list[PositionLogprobs | None] | None


class Sampler:
    """Samples a batch of requests; what does not change between steps is kept while the batch is the same.

    A token depends on the request's scores, its seed and its number of output tokens, and on nothing else.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._batch = _Batch([], vocab_size, None)

    def sample(self, logits_SV: Tensor, specs: list[SampleSpec]) -> Sampled:
        """Choose a token per row. `logits_SV` may be overwritten.

        Rows whose scores are all −∞ or not a number give some token, with a logprob of the lowest float.
        """
        if self._batch.specs != specs:
            self._batch = _Batch(specs, self._vocab_size, self._batch)
        batch = self._batch
        scores_SV = logits_SV.float()
        batch.adjust(scores_SV)
        tokens_S = batch.choose(scores_SV)
        return Sampled(tokens_S.tolist(), batch.logprobs(scores_SV, tokens_S))


class _Batch:
    """One composition of the batch and what follows from it alone."""

    def __init__(self, specs: list[SampleSpec], vocab_size: int, previous: _Batch | None) -> None:
        self.specs = list(specs)
        self._vocab_size = vocab_size
        penalised = [row for row, spec in enumerate(specs) if is_penalised(spec)]
        known = previous._penalties if previous is not None else None
        self._penalties: Penalties | None = (
            Penalties(penalised, [specs[row] for row in penalised], vocab_size, known) if penalised else None
        )
        self._bias = _bias_entries(specs)
        self._rows_with_minimum = [row for row, spec in enumerate(specs) if spec.params.min_new_tokens > 0]
        temperatures = [
            1.0 if spec.params.is_greedy else min(spec.params.temperature, _MAX_TEMPERATURE) for spec in specs
        ]
        self._temperature_S1 = (
            torch.tensor(temperatures).unsqueeze(1) if any(each != 1.0 for each in temperatures) else None
        )
        random = [row for row, spec in enumerate(specs) if not spec.params.is_greedy]
        self._random_specs = [specs[row] for row in random]
        self._random_G = torch.tensor(random, dtype=torch.int64)
        filtered = [
            index for index, spec in enumerate(self._random_specs) if is_filtered(spec.params, vocab_size)
        ]
        self._filtered = torch.tensor(filtered, dtype=torch.int64)
        self._filters = (
            Filters([self._random_specs[index].params for index in filtered], vocab_size)
            if filtered
            else None
        )
        self._logprob_rows = [row for row, spec in enumerate(specs) if spec.logprobs is not None]

    def adjust(self, scores_SV: Tensor) -> None:
        """Penalties, bias, masks and temperature, in place: what reported logprobs are taken from."""
        if self._penalties is not None:
            self._penalties.apply(scores_SV)
        if self._bias is not None:
            where, values = self._bias
            scores_SV.index_put_(where, values, accumulate=True)
        if self._rows_with_minimum:
            self._mask_stop_ids(scores_SV)
        if self._temperature_S1 is not None:
            scores_SV /= self._temperature_S1

    def choose(self, scores_SV: Tensor) -> Tensor:
        """Token ids [S] int64."""
        if not self._random_specs:
            return scores_SV.argmax(-1)
        if len(self._random_specs) == len(self.specs):
            return self._draw(scores_SV)
        tokens_S = scores_SV.argmax(-1)
        tokens_S[self._random_G] = self._draw(scores_SV[self._random_G])
        return tokens_S

    def logprobs(self, scores_SV: Tensor, tokens_S: Tensor) -> list[PositionLogprobs | None] | None:
        """Of the chosen tokens and what else was asked for."""
        if not self._logprob_rows:
            return None
        if len(self._logprob_rows) < len(self.specs):
            rows = torch.tensor(self._logprob_rows)
            scores_SV, tokens_S = scores_SV[rows], tokens_S[rows]
        wanted = [spec.logprobs for spec in self.specs if spec.logprobs is not None]
        results: list[PositionLogprobs | None] = [None] * len(self.specs)
        for row, result in zip(
            self._logprob_rows, position_logprobs(scores_SV, tokens_S, wanted), strict=True
        ):
            results[row] = result
        return results

    def _mask_stop_ids(self, scores_SV: Tensor) -> None:
        rows: list[int] = []
        token_ids: list[int] = []
        for row in self._rows_with_minimum:
            spec = self.specs[row]
            if len(spec.output_ids) < spec.params.min_new_tokens:
                rows += [row] * len(spec.stop_ids)
                token_ids += spec.stop_ids
        if rows:
            scores_SV[torch.tensor(rows), torch.tensor(token_ids)] = float("-inf")

    def _draw(self, scores_GV: Tensor) -> Tensor:
        """Invert the cumulative distribution at each request's noise."""
        probs_GV = scores_GV.softmax(-1)
        if self._filters is not None:
            if len(self._filtered) == len(probs_GV):
                probs_GV = self._filters.apply(probs_GV)
            else:
                probs_GV[self._filtered] = self._filters.apply(probs_GV[self._filtered])
        noise_G = uniforms(
            [spec.seed for spec in self._random_specs], [len(spec.output_ids) for spec in self._random_specs]
        )
        return invert_cdf(probs_GV, torch.from_numpy(noise_G))


def invert_cdf(probs_GV: Tensor, noise_G: Tensor) -> Tensor:
    """The token at which the running sum of a row's probabilities passes noise · total; int64 [G].

    Args:
        probs_GV: ≥ 0, with any positive sum; a token of probability zero is never chosen.
        noise_G: float64 in [0, 1).
    """
    sums_GV = probs_GV.cumsum(-1, dtype=torch.float64)
    total_G1 = sums_GV[:, -1:]
    # The product may round up to the total, which no sum passes.
    goal_G1 = torch.minimum(noise_G.unsqueeze(1) * total_G1, total_G1.nextafter(torch.zeros(())))
    found_G1 = torch.searchsorted(sums_GV, goal_G1, right=True)
    # Sums that are not numbers lead past the end.
    return found_G1.squeeze(1).clamp_(max=probs_GV.shape[1] - 1)


def _bias_entries(specs: list[SampleSpec]) -> tuple[tuple[Tensor, Tensor], Tensor] | None:
    """logit_bias of all rows as ((rows, ids), values)."""
    entries = [
        (row, token_id, max(-_MAX_BIAS, min(bias, _MAX_BIAS)))
        for row, spec in enumerate(specs)
        for token_id, bias in (spec.params.logit_bias or {}).items()
    ]
    if not entries:
        return None
    rows, token_ids, values = zip(*entries, strict=True)
    return (torch.tensor(rows), torch.tensor(token_ids)), torch.tensor(values)
