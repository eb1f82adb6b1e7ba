"""Attention to paged keys and values for any head size, group, window and soft cap.

One kernel serves prompts and decode steps. A program handles a tile of one request's query rows that share a
KV head: row r is new token r // group, and query head r % group of those that share the KV head. If requests
and heads are too few to fill the device, programs split the keys, and a second kernel adds up the splits.

Nothing is planned: shapes and grids depend only on numbers of requests and tokens, so a CUDA graph can
capture a decode step. There are no atomic additions, so equal inputs give equal bits.

Shapes: T tokens, R requests, N query heads, K KV heads, H head_dim, P pages, S page_size, C parts.
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ebbtide.srt.layers.heads import AttentionKind, Pages
from ebbtide.srt.layers.kernels.instructions import capped, lead
from ebbtide.srt.layers.kernels.launch import num_multiprocessors

MAX_SPLITS = 16
# Parts of a batch have any alignment, and one kernel shall serve them all.
_UNALIGNED = ["q_indptr", "kv_indptr", "kv_indices", "last_page_len"]
# Rows of a tile: the fewest that a tensor-core product takes, and those for prompts. No sizes in between,
# since each would be compiled when a step first needs it.
_FEW_ROWS, _MANY_ROWS = 16, 64


def attend(
    q_TNH: Tensor,
    k_PSKH: Tensor,
    v_PSKH: Tensor,
    pages: Pages,
    out_TNH: Tensor,
    kind: AttentionKind,
    *,
    sinks_N: Tensor | None = None,
) -> None:
    """Attend to everything up to each new token; write each output to its row of `out_TNH`.

    Args:
        q_TNH, out_TNH: contiguous; rows of other requests are not changed.
        k_PSKH, v_PSKH: one layer of the pool, contiguous.
        sinks_N: as in `LayerAttention`.
    """
    num_tokens, num_q_heads, head_dim = q_TNH.shape
    num_requests, num_kv_heads = len(pages.last_page_len_R), k_PSKH.shape[2]
    num_rows = pages.most_new * (num_q_heads // num_kv_heads)
    block_rows = _FEW_ROWS if num_rows <= _FEW_ROWS else _MANY_ROWS
    block_dims = max(16, triton.next_power_of_2(head_dim))
    splits = _num_splits(num_requests * num_kv_heads, q_TNH.device) if pages.most_new == 1 else 1
    parts_CTNH, sums_CTN = room_for_parts(out_TNH, splits)
    _attend[(triton.cdiv(num_rows, block_rows), num_requests, num_kv_heads * splits)](
        q_TNH,
        k_PSKH,
        v_PSKH,
        parts_CTNH,
        sums_CTN,
        pages.q_indptr_R1,
        pages.kv_indptr_R1,
        pages.kv_indices,
        pages.last_page_len_R,
        sinks_N,
        num_tokens,
        kind.scale,
        kind.soft_cap if kind.soft_cap is not None else 1.0,
        NUM_Q_HEADS=num_q_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=k_PSKH.shape[1],
        WINDOW=kind.window if kind.window is not None else 0,
        CAPPED=kind.soft_cap is not None,
        SPLITS=splits,
        BLOCK_ROWS=block_rows,
        # Two stages of 64 keys and values fit into shared memory if heads have at most 256 bytes.
        BLOCK_KEYS=64 if block_dims * q_TNH.element_size() <= 256 else 32,
        BLOCK_DIMS=block_dims,
        num_warps=4,
        num_stages=2,
    )
    if splits > 1:
        combine(parts_CTNH, sums_CTN, out_TNH, pages.q_indptr_R1, OVERLAPPED=False)


def combine(
    parts_CTNH: Tensor, sums_CTN: Tensor, out_TNH: Tensor, q_indptr_R1: Tensor | None, **options: Any
) -> None:
    """Add up the splits of requests with one new token each, into each one's row of `out_TNH`.

    Args:
        q_indptr_R1: the first row of each request, and the end; None: every row is a request.
    """
    splits, num_tokens, num_q_heads, head_dim = parts_CTNH.shape
    num_requests = num_tokens if q_indptr_R1 is None else len(q_indptr_R1) - 1
    _combine[(num_requests, num_q_heads)](
        parts_CTNH,
        sums_CTN,
        out_TNH,
        q_indptr_R1,
        num_tokens,
        NUM_Q_HEADS=num_q_heads,
        HEAD_DIM=head_dim,
        SPLITS=splits,
        BLOCK_DIMS=max(16, triton.next_power_of_2(head_dim)),
        num_warps=1,
        **options,
    )


def room_for_parts(out_TNH: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    """Allocate each split's output, and the logarithm of its sum of weights, both float32.

    With one split, both are the output itself; no sum is written then.
    """
    if splits == 1:
        return out_TNH, out_TNH
    device = out_TNH.device
    parts_CTNH = torch.empty((splits, *out_TNH.shape), dtype=torch.float32, device=device)
    sums_CTN = torch.empty((splits, *out_TNH.shape[:2]), dtype=torch.float32, device=device)
    return parts_CTNH, sums_CTN


def _num_splits(num_programs: int, device: torch.device) -> int:
    """The number of splits, a power of two, that gives about two programs for each multiprocessor."""
    wanted = -(-2 * num_multiprocessors(device) // num_programs)
    return min(MAX_SPLITS, 1 << (wanted - 1).bit_length())


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=_UNALIGNED)
def _attend(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    sum_ptr,
    q_indptr,
    kv_indptr,
    kv_indices,
    last_page_len,
    sinks_ptr,
    num_tokens,
    scale,
    soft_cap,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIMS: tl.constexpr,
) -> None:
    """Write the output; with splits, each one's output and the logarithm of its sum of weights."""
    GROUP: tl.constexpr = NUM_Q_HEADS // NUM_KV_HEADS
    tile, request = tl.program_id(0), tl.program_id(1)
    kv_head, split = tl.program_id(2) // SPLITS, tl.program_id(2) % SPLITS
    q_start = tl.load(q_indptr + request)
    num_new = tl.load(q_indptr + request + 1) - q_start
    if tile * BLOCK_ROWS >= num_new * GROUP:
        return
    first_page = tl.load(kv_indptr + request)
    num_pages = tl.load(kv_indptr + request + 1) - first_page
    length = (num_pages - 1) * PAGE_SIZE + tl.load(last_page_len + request)
    row = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    present = row < num_new * GROUP
    position = length - num_new + row // GROUP
    q_row = (q_start + row // GROUP).to(tl.int64) * NUM_Q_HEADS + kv_head * GROUP + row % GROUP
    dim = tl.arange(0, BLOCK_DIMS)[None, :]
    in_head = dim < HEAD_DIM
    q = tl.load(q_ptr + q_row[:, None] * HEAD_DIM + dim, mask=present[:, None] & in_head, other=0.0)

    # From the first key that the tile's first row attends to, up to the last one of its last row.
    begin = length - length
    if WINDOW > 0:
        begin = tl.maximum(length - num_new + tile * BLOCK_ROWS // GROUP + 1 - WINDOW, 0)
    end = length - num_new + tl.minimum((tile * BLOCK_ROWS + BLOCK_ROWS - 1) // GROUP, num_new - 1) + 1
    if SPLITS > 1:
        part = tl.cdiv(tl.cdiv(end - begin, SPLITS), BLOCK_KEYS) * BLOCK_KEYS
        begin += split * part
        end = tl.minimum(end, begin + part)
    best = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_ROWS,), tl.float32)
    out = tl.zeros((BLOCK_ROWS, BLOCK_DIMS), tl.float32)
    if sinks_ptr is not None:
        # A sink is a key without a value, which only the first split counts.
        mine = present & (row * 0 == split)
        sink_at = sinks_ptr + kv_head * GROUP + row % GROUP
        best = tl.load(sink_at, mask=mine, other=float("-inf")).to(tl.float32)
        total = tl.where(mine, 1.0, 0.0)
    for start in range(begin, end, BLOCK_KEYS):
        key = start + tl.arange(0, BLOCK_KEYS)
        page = tl.load(kv_indices + first_page + key // PAGE_SIZE, mask=key < end, other=0).to(tl.int64)
        slot = page * PAGE_SIZE + key % PAGE_SIZE
        at = (slot * NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + dim
        readable = (key < end)[:, None] & in_head
        k = tl.load(k_ptr + at, mask=readable, other=0.0).to(q.dtype)
        v = tl.load(v_ptr + at, mask=readable, other=0.0).to(q.dtype)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        score = capped(score, soft_cap, CAPPED)
        seen = (key < end)[None, :] & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            seen &= key[None, :] > position[:, None] - WINDOW
        score = tl.where(seen, score, float("-inf"))
        new_best = tl.maximum(best, tl.max(score, axis=1))
        # A row may see none of these keys, which would make −∞ minus −∞.
        base = tl.where(new_best == float("-inf"), 0.0, new_best)
        weight = tl.exp(score - base[:, None])
        shrink = tl.exp(best - base)
        total = total * shrink + tl.sum(weight, axis=1)
        out = out * shrink[:, None] + tl.dot(weight.to(q.dtype), v, input_precision="ieee")
        best = new_best
    divisor = tl.where(total > 0.0, total, 1.0)
    out = out / divisor[:, None]
    if SPLITS > 1:
        q_row += split.to(tl.int64) * num_tokens * NUM_Q_HEADS
        tl.store(sum_ptr + q_row, best + tl.log(divisor), mask=present)
    tl.store(out_ptr + q_row[:, None] * HEAD_DIM + dim, out, mask=present[:, None] & in_head)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["q_indptr"])
def _combine(  # type: ignore[no-untyped-def]
    part_ptr,
    sum_ptr,
    out_ptr,
    q_indptr,
    num_tokens,
    NUM_Q_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_DIMS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
) -> None:
    """Each program merges one head of a request's only new token. At least one split has keys."""
    lead(OVERLAPPED)
    token = tl.program_id(0)
    if q_indptr is not None:
        token = tl.load(q_indptr + token)
    q_row = token.to(tl.int64) * NUM_Q_HEADS + tl.program_id(1)
    rows = q_row + tl.arange(0, SPLITS).to(tl.int64) * num_tokens * NUM_Q_HEADS
    sums = tl.load(sum_ptr + rows)
    weight = tl.exp(sums - tl.max(sums, axis=0))
    weight = weight / tl.sum(weight, axis=0)
    dim = tl.arange(0, BLOCK_DIMS)
    parts = tl.load(
        part_ptr + rows[:, None] * HEAD_DIM + dim[None, :], mask=(dim < HEAD_DIM)[None, :], other=0.0
    )
    tl.store(out_ptr + q_row * HEAD_DIM + dim, tl.sum(parts * weight[:, None], axis=0), mask=dim < HEAD_DIM)
