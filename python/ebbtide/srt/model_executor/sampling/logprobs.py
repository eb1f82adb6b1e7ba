"""Log-probabilities at single positions, taken from scores.

Shapes: M positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ebbtide.srt.model_executor.batch_plan import LogprobSpec, PositionLogprobs
from ebbtide.srt.model_executor.transfers import download, upload

# What −∞ is written as (wire_api section 1): JSON has no infinities.
LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True, slots=True)
class LaunchedLogprobs:
    """Logprobs on their way to the host; `tokens_M`, of the tokens at the positions, may come separately."""

    specs: Sequence[LogprobSpec]
    tokens_M: Tensor | None
    top: tuple[Tensor, Tensor] | None
    chosen: Tensor | None

    def result(
        self, tokens_M: Sequence[float] | None = None, token_ids_M: Sequence[int] | None = None
    ) -> list[PositionLogprobs]:
        """What was launched, once the device has run it.

        Args:
            tokens_M: logprobs of the tokens at the positions, where they come separately.
            token_ids_M: the tokens that were chosen there: each is the first among equals.
        """
        if tokens_M is None:
            assert self.tokens_M is not None
            tokens_M = self.tokens_M.tolist()
        results = [PositionLogprobs(each) for each in tokens_M]
        if self.top is not None:
            values, ids = (each.tolist() for each in self.top)
            for result, spec, row_values, row_ids in zip(results, self.specs, values, ids, strict=True):
                result.top = list(zip(row_values[: spec.top], row_ids[: spec.top], strict=True))
            if token_ids_M is not None:
                for result, token_id in zip(results, token_ids_M, strict=True):
                    _put_first_among_equals(result, token_id)
        if self.chosen is not None:
            for result, spec, row_values in zip(results, self.specs, self.chosen.tolist(), strict=True):
                result.chosen = row_values[: len(spec.token_ids)]
        return results


def position_logprobs(
    scores_MV: Tensor, token_ids_M: Tensor, specs: Sequence[LogprobSpec]
) -> LaunchedLogprobs:
    """Log-softmax of each row at its token, at its most likely tokens, and at the ids that were asked for.

    Args:
        scores_MV: float32.
        token_ids_M: int64, the token at each position, on the scores' device.
        specs: what is wanted at each position.
    """
    # The whole log-softmax is never made: one number per row turns scores into logprobs.
    norm_M1 = scores_MV.logsumexp(-1, keepdim=True)
    tokens_M1 = _finite(scores_MV.gather(1, token_ids_M.unsqueeze(1)) - norm_M1)
    return alternatives(scores_MV, norm_M1, specs, tokens_M=download(tokens_M1.squeeze(1)))


def alternatives(
    scores_MV: Tensor,
    norm_M1: Tensor,
    specs: Sequence[LogprobSpec],
    *,
    scale_M1: Tensor | None = None,
    tokens_M: Tensor | None = None,
) -> LaunchedLogprobs:
    """Logprobs of the most likely tokens and of the ids that were asked for.

    Args:
        scores_MV: of any float type.
        norm_M1: float32, logsumexp of the scaled scores.
        scale_M1: positive; what the scores are multiplied by; None: 1.
        tokens_M: on the host, logprobs of the tokens themselves, if known by now.
    """

    def logprobs_of(scores: Tensor) -> Tensor:
        scores = scores.float()
        return download(_finite((scores if scale_M1 is None else scores * scale_M1) - norm_M1))

    top = chosen = None
    num_top = max(spec.top for spec in specs)
    if num_top:
        top_scores, top_ids = scores_MV.topk(num_top)
        top = logprobs_of(top_scores), download(top_ids)
    num_chosen = max(len(spec.token_ids) for spec in specs)
    if num_chosen:
        padded = [[*spec.token_ids, *[0] * (num_chosen - len(spec.token_ids))] for spec in specs]
        ids = upload(np.array(padded, dtype=np.int64), scores_MV.device)
        chosen = logprobs_of(scores_MV.gather(1, ids))
    return LaunchedLogprobs(specs, tokens_M, top, chosen)


def _put_first_among_equals(logprobs: PositionLogprobs, token_id: int) -> None:
    """Where scores are equal, `topk` and the choice may prefer different tokens. The others go by id."""
    top = logprobs.top
    if not top:
        return
    if top[-1][0] == logprobs.token and all(other != token_id for _, other in top):
        top[-1] = (top[-1][0], token_id)
    if any(value == following for (value, _), (following, _) in pairwise(top)):
        top.sort(key=lambda entry: (-entry[0], entry[1] != token_id, entry[1]))


def _finite(logprobs: Tensor) -> Tensor:
    return logprobs.nan_to_num(nan=LOWEST, neginf=LOWEST)
