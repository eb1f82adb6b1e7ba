"""Logprobs of given tokens on a CUDA device, by one pass over scores of any float type.

Imported on CUDA only: a CPU installation has no Triton. Shapes: M positions, V vocabulary.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ebbtide.srt.layers.kernels.instructions import exp2_or_0
from ebbtide.srt.model_executor.sampling.cut_kernel import base_of

# Scores that a program reads at a time: neighbours by each of its lanes.
_LANES, _PER_LANE = 1024, 8

LOG2_E = tl.constexpr(1.4426950408889634)


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
        LANES=min(_LANES, triton.next_power_of_2(triton.cdiv(vocab_size, _PER_LANE))),
        PER_LANE=_PER_LANE,
        ASM=scores_MV.is_cuda,
        num_warps=8,
    )
    return logprobs_M, norm_M1


@triton.jit
def _token_logprobs_kernel(
    scores,
    row_stride,
    token_ids,
    logprobs,
    norms,
    V: tl.constexpr,
    LANES: tl.constexpr,
    PER_LANE: tl.constexpr,
    ASM: tl.constexpr,
):
    """One row. Its numbers are added in the same order whatever the other rows are.

    Each lane has a sum of its own up to the end: threads that met for every block would wait for one another
    for longer than the block takes to be read.
    """
    row = tl.program_id(0).to(tl.int64)
    scores += row * row_stride
    largest_L = tl.full([LANES], float("-inf"), tl.float32)
    total_L = tl.full([LANES], 0.0, tl.float32)
    ids_LP = tl.arange(0, LANES)[:, None] * PER_LANE + tl.arange(0, PER_LANE)[None, :]
    ahead_LP = tl.load(scores + ids_LP, mask=ids_LP < V, other=float("-inf"))
    for first in range(0, V, LANES * PER_LANE):
        x_LP = ahead_LP.to(tl.float32)
        # The next block is on its way while this one is added up.
        following_LP = first + LANES * PER_LANE + ids_LP
        ahead_LP = tl.load(scores + following_LP, mask=following_LP < V, other=float("-inf"))
        new_largest_L = tl.maximum(largest_L, tl.max(x_LP, axis=1))
        base_L = base_of(new_largest_L)
        # What is not a number stays in the sum, so that the logprob tells, whatever a maximum makes of it.
        e_LP = exp2_or_0((x_LP - base_L[:, None]) * LOG2_E, ASM)
        total_L = total_L * exp2_or_0((largest_L - base_L) * LOG2_E, ASM) + tl.sum(e_LP, axis=1)
        largest_L = new_largest_L
    largest = tl.max(largest_L)
    base = base_of(largest)
    norm = base + tl.log(tl.sum(total_L * tl.exp(largest_L - base)))
    tl.store(logprobs + row, tl.load(scores + tl.load(token_ids + row)).to(tl.float32) - norm)
    tl.store(norms + row, norm)
