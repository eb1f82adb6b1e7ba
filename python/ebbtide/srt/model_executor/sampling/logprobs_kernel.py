"""Logprobs of given tokens on a CUDA device, in one pass over scores of any float type.

Imported on CUDA only: a CPU installation has no Triton. Shapes: M positions, V vocabulary.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ebbtide.srt.model_executor.sampling.kernel_parts import base_of, or_lowest

_BLOCK = 8192


def token_logprobs(scores_MV: Tensor, token_ids_M: Tensor) -> tuple[Tensor, Tensor]:
    """Log-softmax of each row at its token, and the row's logsumexp [M, 1]; both float32.

    Args:
        scores_MV: of any float type, in contiguous rows; only read.
        token_ids_M: int64.
    """
    num_rows, vocab_size = scores_MV.shape
    logprobs_M = torch.empty(num_rows, dtype=torch.float32, device=scores_MV.device)
    norm_M1 = torch.empty((num_rows, 1), dtype=torch.float32, device=scores_MV.device)
    _token_logprobs_kernel[(num_rows,)](
        scores_MV,
        scores_MV.stride(0),
        token_ids_M,
        logprobs_M,
        norm_M1,
        V=vocab_size,
        BLOCK=min(_BLOCK, triton.next_power_of_2(vocab_size)),
        num_warps=8,
    )
    return logprobs_M, norm_M1


@triton.jit
def _token_logprobs_kernel(
    scores, row_stride, token_ids, logprobs, norms, V: tl.constexpr, BLOCK: tl.constexpr
):
    """One row. Its numbers are added in the same order whatever the other rows are."""
    row = tl.program_id(0).to(tl.int64)
    scores += row * row_stride
    largest = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    ids = tl.arange(0, BLOCK)
    ahead = tl.load(scores + ids, mask=ids < V, other=float("-inf"))
    for first in range(0, V, BLOCK):
        x = ahead.to(tl.float32)
        # The next block is on its way while this one is added up.
        following = first + BLOCK + ids
        ahead = tl.load(scores + following, mask=following < V, other=float("-inf"))
        new_largest = tl.maximum(largest, tl.max(or_lowest(x)))
        base = base_of(new_largest)
        # What is not a number stays in the sum, so that the logprob tells.
        total = total * tl.exp(largest - base) + tl.sum(tl.exp(x - base))
        largest = new_largest
    norm = base_of(largest) + tl.log(total)
    tl.store(logprobs + row, tl.load(scores + tl.load(token_ids + row)).to(tl.float32) - norm)
    tl.store(norms + row, norm)
