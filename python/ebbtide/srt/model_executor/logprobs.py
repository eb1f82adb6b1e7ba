"""Log-probabilities at single positions, taken from scores.

Shapes: M positions, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ebbtide.srt.model_executor.batch_plan import LogprobSpec, PositionLogprobs

# What −∞ is written as (wire_api section 1): JSON has no infinities.
LOWEST = torch.finfo(torch.float32).min


def position_logprobs(
    scores_MV: Tensor, token_ids_M: Tensor, specs: Sequence[LogprobSpec]
) -> list[PositionLogprobs]:
    """Log-softmax of each row at its token, at its most likely tokens, and at the ids that were asked for.

    Args:
        scores_MV: float32.
        token_ids_M: int64, the token at each position.
        specs: what is wanted at each position.
    """
    # The whole log-softmax is never made: one number per row turns scores into logprobs.
    norm_M1 = scores_MV.logsumexp(-1, keepdim=True)
    tokens = _finite(scores_MV.gather(1, token_ids_M.unsqueeze(1)) - norm_M1)
    results = [PositionLogprobs(row[0]) for row in tokens]
    num_top = max(spec.top for spec in specs)
    if num_top:
        top_scores, top_ids = scores_MV.topk(num_top)
        for result, spec, values, ids in zip(
            results, specs, _finite(top_scores - norm_M1), top_ids.tolist(), strict=True
        ):
            result.top = list(zip(values[: spec.top], ids[: spec.top], strict=True))
    num_chosen = max(len(spec.token_ids) for spec in specs)
    if num_chosen:
        padded = [[*spec.token_ids, *[0] * (num_chosen - len(spec.token_ids))] for spec in specs]
        chosen = _finite(scores_MV.gather(1, torch.tensor(padded)) - norm_M1)
        for result, spec, values in zip(results, specs, chosen, strict=True):
            result.chosen = values[: len(spec.token_ids)]
    return results


def _finite(logprobs: Tensor) -> list[list[float]]:
    rows: list[list[float]] = logprobs.nan_to_num(nan=LOWEST, neginf=LOWEST).tolist()
    return rows
