"""Repetition, frequency and presence penalties of a batch, by token counts that grow with the outputs.

Shapes: P penalised requests, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ebbtide.srt.model_executor.batch_plan import SampleSpec

# Below this a repetition penalty would take scores out of float32's range.
_LEAST_REPETITION_PENALTY = 1e-30


def is_penalised(spec: SampleSpec) -> bool:
    """Whether any penalty changes this request's scores."""
    params = spec.params
    return (
        params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
    )


class Penalties:
    """What the penalised requests of a batch have seen, kept while the batch stays the same.

    Args:
        rows: their rows in the batch's scores, ascending.
        specs: of these rows.
        previous: the state of the batch before; counts of requests that are still there are taken over.
    """

    def __init__(
        self, rows: Sequence[int], specs: Sequence[SampleSpec], vocab_size: int, previous: Penalties | None
    ) -> None:
        self._specs = list(specs)
        self._rows_P = torch.tensor(rows)
        # Tokens of the prompt and the output, and how often each is in the output.
        self._seen_PV = torch.zeros((len(rows), vocab_size), dtype=torch.bool)
        self._counts_PV = torch.zeros((len(rows), vocab_size))
        self._num_counted = [0] * len(rows)
        params = [spec.params for spec in specs]
        repetition = [max(each.repetition_penalty, _LEAST_REPETITION_PENALTY) for each in params]
        self._repetition_P1 = torch.tensor(repetition).unsqueeze(1)
        self._frequency_P1 = torch.tensor([each.frequency_penalty for each in params]).unsqueeze(1)
        self._presence_P1 = torch.tensor([each.presence_penalty for each in params]).unsqueeze(1)
        self._has_repetition = any(each.repetition_penalty != 1.0 for each in params)
        self._has_counts = any(each.frequency_penalty or each.presence_penalty for each in params)
        known = {spec: row for row, spec in enumerate(previous._specs)} if previous is not None else {}
        for row, spec in enumerate(self._specs):
            if previous is not None and spec in known:
                self._seen_PV[row] = previous._seen_PV[known[spec]]
                self._counts_PV[row] = previous._counts_PV[known[spec]]
                self._num_counted[row] = previous._num_counted[known[spec]]
            else:
                self._seen_PV[row, torch.tensor(spec.prompt_ids)] = True

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
            scores_SV[self._rows_P] = scores_PV

    def _count_new_tokens(self) -> None:
        rows, token_ids = [], []
        for row, spec in enumerate(self._specs):
            new = spec.output_ids[self._num_counted[row] :]
            self._num_counted[row] += len(new)
            rows += [row] * len(new)
            token_ids += new
        if rows:
            where = (torch.tensor(rows), torch.tensor(token_ids))
            self._counts_PV.index_put_(where, torch.ones(()), accumulate=True)
            self._seen_PV[where] = True
