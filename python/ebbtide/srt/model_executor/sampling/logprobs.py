"""Log-probabilities at single positions, taken from scores.

Shapes: M positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ebbtide.srt.model_executor.batch_plan import LogprobArrays, LogprobSpec
from ebbtide.srt.model_executor.host_copies import download, upload

# What −∞ is written as (wire_api section 1): JSON has no infinities.
LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True, slots=True)
class LaunchedLogprobs:
    """Logprobs on their way to the host; `tokens_M`, of the tokens at the positions, may come separately."""

    tokens_M: Tensor | None
    top: tuple[Tensor, Tensor] | None
    chosen: Tensor | None

    def result(
        self,
        tokens_M: NDArray[np.float32] | None = None,
        token_ids_M: NDArray[np.int64] | None = None,
    ) -> LogprobArrays:
        """The logprobs. Call it after the launched work has run.

        Args:
            tokens_M: logprobs of the tokens at the positions, if they come separately.
            token_ids_M: the chosen tokens: each is put first among tokens of equal score.
        """
        if tokens_M is None:
            assert self.tokens_M is not None
            tokens_M = self.tokens_M.numpy()
        top_MK = top_ids_MK = None
        if self.top is not None:
            top_MK, top_ids_MK = self.top[0].numpy(), self.top[1].numpy().astype(np.int32)
            if token_ids_M is not None:
                _put_first_among_equals(top_MK, top_ids_MK, tokens_M, token_ids_M)
        return LogprobArrays(
            tokens_M, top_MK, top_ids_MK, None if self.chosen is None else self.chosen.numpy()
        )


def position_logprobs(
    scores_MV: Tensor, token_ids_M: Tensor, specs: Sequence[LogprobSpec]
) -> LaunchedLogprobs:
    """Log-softmax of each row at its token, at its most likely tokens, and at the ids that the request named.

    Args:
        scores_MV: of any float type, in contiguous rows.
        token_ids_M: int64, the token at each position, on the scores' device.
        specs: what is wanted at each position.
    """
    tokens_M, norm_M1 = token_logprobs(scores_MV, token_ids_M)
    return alternatives(scores_MV, norm_M1, specs, tokens_M=download(finite(tokens_M)))


def token_logprobs(scores_MV: Tensor, token_ids_M: Tensor) -> tuple[Tensor, Tensor]:
    """Log-softmax of each row at its token, which may not be finite, and the row's logsumexp [M, 1].

    Both are float32 and on the scores' device. Arguments are those of `position_logprobs`.
    """
    # The full log-softmax is never computed: subtracting one number per row turns scores into logprobs.
    if scores_MV.is_cuda:
        # Triton is only installed on CUDA machines.
        from ebbtide.srt.model_executor.sampling import score_kernels

        return score_kernels.token_logprobs(scores_MV, token_ids_M)
    scores_MV = scores_MV.float()
    norm_M1 = scores_MV.logsumexp(-1, keepdim=True)
    return (scores_MV.gather(1, token_ids_M.unsqueeze(1)) - norm_M1).squeeze(1), norm_M1


def alternatives(
    scores_MV: Tensor,
    norm_M1: Tensor,
    specs: Sequence[LogprobSpec],
    *,
    scale_M1: Tensor | None = None,
    tokens_M: Tensor | None = None,
) -> LaunchedLogprobs:
    """Logprobs of the most likely tokens and of the ids that the requests named.

    Args:
        scores_MV: of any float type.
        norm_M1: float32, logsumexp of the scaled scores.
        scale_M1: positive factor of the scores; None: 1.
        tokens_M: logprobs of the tokens themselves, on the host; None: they come separately.
    """

    def logprobs_of(scores: Tensor) -> Tensor:
        scores = scores.float()
        return download(finite((scores if scale_M1 is None else scores * scale_M1) - norm_M1))

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
    return LaunchedLogprobs(tokens_M, top, chosen)


def _put_first_among_equals(
    top_MK: NDArray[np.float32],
    top_ids_MK: NDArray[np.int32],
    tokens_M: NDArray[np.float32],
    token_ids_M: NDArray[np.int64],
) -> None:
    """Put the chosen token first among those of its score, and order other equals by token id.

    `topk` and the chooser may prefer different tokens of the same score.
    """
    is_token_MK = top_ids_MK == token_ids_M[:, None]
    is_missing_M = (top_MK[:, -1] == tokens_M) & ~is_token_MK.any(1)
    top_ids_MK[is_missing_M, -1] = token_ids_M[is_missing_M]
    rows = np.flatnonzero((top_MK[:, 1:] == top_MK[:, :-1]).any(1))
    if len(rows):
        ids, is_other = top_ids_MK[rows], top_ids_MK[rows] != token_ids_M[rows, None]
        order = np.lexsort((ids, is_other, -top_MK[rows]), axis=1)
        top_ids_MK[rows] = np.take_along_axis(ids, order, 1)


def marked_nonfinite(logprobs_M: Tensor, norm_M1: Tensor) -> Tensor:
    """Logprobs of tokens, with the lowest float32 for −∞, and NaN for rows with NaN or +∞ in their scores.

    The logsumexp and the maximum of such a row are NaN or +∞; those of any other row are less than +∞. A row
    of −∞ alone was fully masked, which is no numerical fault.

    Args:
        norm_M1: logsumexp of each row, or its maximum.
    """
    return finite(logprobs_M).masked_fill(~(norm_M1.squeeze(1) < float("inf")), float("nan"))


def finite(logprobs: Tensor) -> Tensor:
    """The same, with the lowest float32 for −∞ and for NaN."""
    return logprobs.nan_to_num(nan=LOWEST, neginf=LOWEST)
