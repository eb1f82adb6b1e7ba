"""Merges partial results of attention over parts of the keys, and adds sinks to softmaxes.

Shapes: B rows, T tokens, C parts, N query heads, H head_dim.
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

import triton
import triton.language as tl
from torch import Tensor

from ebbtide.srt.layers.kernels.instructions import lead
from ebbtide.srt.layers.kernels.launch import overlap_options

_HEADS = 8


def merge_parts(
    parts_CBNH: Tensor,
    sums_CBN: Tensor,
    num_parts_B: Tensor,
    out_BNH: Tensor,
    sums_BN: Tensor | None = None,
) -> None:
    """Write the mean of each row's parts, weighted by their sums of softmax weights, into `out_BNH`.

    Args:
        parts_CBNH: the attention of each part to its own keys; parts that a row does not have are not read.
        sums_CBN: float32, log2 of the sums of softmax weights.
        num_parts_B: int32, how many parts each row has, ≥ 1.
        sums_BN: receives log2 of the total sums; None: they are not wanted.
    """
    _, num_rows, num_heads, head_dim = parts_CBNH.shape
    heads = min(_HEADS, triton.next_power_of_2(num_heads))
    _merge_parts[(num_rows, triton.cdiv(num_heads, heads))](
        parts_CBNH,
        sums_CBN,
        num_parts_B,
        out_BNH,
        sums_BN,
        num_rows,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        HEADS=heads,
        BLOCK=triton.next_power_of_2(head_dim),
        num_warps=2,
        **overlap_options(parts_CBNH),
    )


@triton.jit(do_not_specialize=["num_rows"])
def _merge_parts(  # type: ignore[no-untyped-def]
    parts_ptr,
    sums_ptr,
    num_parts_ptr,
    out_ptr,
    merged_sums_ptr,
    num_rows,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
) -> None:
    """Each program merges some heads of one row."""
    lead(OVERLAPPED)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, BLOCK)[None, :]
    real = head < NUM_HEADS
    inside = real[:, None] & (dim < HEAD_DIM)
    num_parts = tl.load(num_parts_ptr + row)
    best = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    out = tl.zeros((HEADS, BLOCK), tl.float32)
    part = 0
    while part < num_parts:
        at = (part * num_rows + row) * NUM_HEADS + head
        score = tl.load(sums_ptr + at, mask=real, other=0.0)
        new_best = tl.maximum(best, score)
        shrink, weight = tl.exp2(best - new_best), tl.exp2(score - new_best)
        values = tl.load(parts_ptr + at[:, None] * HEAD_DIM + dim, mask=inside, other=0.0).to(tl.float32)
        out = out * shrink[:, None] + values * weight[:, None]
        total = total * shrink + weight
        best = new_best
        part += 1
    at = row * NUM_HEADS + head
    tl.store(out_ptr + at[:, None] * HEAD_DIM + dim, out / total[:, None], mask=inside)
    if merged_sums_ptr is not None:
        tl.store(merged_sums_ptr + at, best + tl.log2(total), mask=real)


def count_sinks_(out_TNH: Tensor, sums_TN: Tensor, sinks_N: Tensor) -> None:
    """Include sinks in softmaxes that were computed without them, which scales outputs down, in place.

    Args:
        sums_TN: float32, log2 of the sums of softmax weights.
        sinks_N: as in `LayerAttention`.
    """
    num_tokens, num_heads, head_dim = out_TNH.shape
    heads = min(_HEADS, triton.next_power_of_2(num_heads))
    _count_sinks[(num_tokens, triton.cdiv(num_heads, heads))](
        out_TNH,
        sums_TN,
        sinks_N,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        HEADS=heads,
        BLOCK=triton.next_power_of_2(head_dim),
        num_warps=2,
        **overlap_options(out_TNH),
    )


@triton.jit
def _count_sinks(  # type: ignore[no-untyped-def]
    out_ptr,
    sums_ptr,
    sinks_ptr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
) -> None:
    """Each program handles some heads of one token."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dim = tl.arange(0, BLOCK)[None, :]
    real = head < NUM_HEADS
    inside = real[:, None] & (dim < HEAD_DIM)
    sink = tl.load(sinks_ptr + head, mask=real, other=0.0).to(tl.float32) * LOG2_E
    lead(OVERLAPPED)
    at = tl.program_id(0).to(tl.int64) * NUM_HEADS + head
    share = 1.0 / (1.0 + tl.exp2(sink - tl.load(sums_ptr + at, mask=real, other=0.0)))
    out_at = out_ptr + at[:, None] * HEAD_DIM + dim
    out = tl.load(out_at, mask=inside, other=0.0).to(tl.float32) * share[:, None]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=inside)
