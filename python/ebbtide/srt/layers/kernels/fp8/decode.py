"""Attention of one new token per request to an FP8 KV cache, as fast as it can be read.

Also widens pages for the kernels of prompts, which cannot read FP8.

A program handles one request's queries that share a KV head, and all keys or a split of them. 16-bit words of
two FP8 numbers go from memory to the registers for tensor cores, where each becomes two float16 numbers.
Therefore even and odd dimensions of heads are multiplied separately. float16 represents every FP8 number, and
every bfloat16 query of ordinary size; only the softmax weights are rounded, to 11 bits.

Shapes: T tokens, one of each request, N query heads, K KV heads, H head_dim, P pages, M pages of
a step, S page_size, C parts.
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ebbtide.srt.layers.heads import AttentionKind, Pages
from ebbtide.srt.layers.kernels.instructions import capped, exp2_or_0, lead
from ebbtide.srt.layers.kernels.launch import num_multiprocessors, overlap_options
from ebbtide.srt.layers.kernels.paged_attention import combine, room_for_parts

# The best of those tried on an H200. With this many registers a multiprocessor can run four programs; the
# most common head sizes need no more.
_KEYS, _WARPS, _STAGES, _REGISTERS = 128, 4, 3, 128
# The fewest columns of a tensor-core product.
_FEWEST_QUERIES = 8
_PROGRAMS_PER_SM, _MAX_SPLITS = 4, 32
# How many numbers of a page a program widens.
_WIDENED = 2048
_UNALIGNED = ["kv_indptr", "kv_indices", "last_page_len"]


def attend_fp8(
    q_TNH: Tensor,
    k_PSKH: Tensor,
    v_PSKH: Tensor,
    pages: Pages,
    out_TNH: Tensor,
    kind: AttentionKind,
) -> None:
    """Attend to everything up to each request's new token; write outputs to `out_TNH`.

    Args:
        q_TNH, out_TNH: contiguous, one row for each request.
        k_PSKH, v_PSKH: one layer of the pool in FP8, contiguous; H is a power of two.
    """
    num_requests, num_q_heads, head_dim = q_TNH.shape
    num_kv_heads = k_PSKH.shape[2]
    queries = max(_FEWEST_QUERIES, triton.next_power_of_2(num_q_heads // num_kv_heads))
    splits = _num_splits(num_requests * num_kv_heads, q_TNH.device)
    parts_CTNH, sums_CTN = room_for_parts(out_TNH, splits)
    _attend[(num_kv_heads, num_requests * splits)](
        q_TNH,
        k_PSKH.view(torch.int16),
        v_PSKH.view(torch.int16),
        parts_CTNH,
        sums_CTN,
        pages.kv_indptr_R1,
        pages.kv_indices,
        pages.last_page_len_R,
        num_requests,
        kind.scale,
        kind.soft_cap if kind.soft_cap is not None else 1.0,
        NUM_Q_HEADS=num_q_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        PAGE_SIZE=k_PSKH.shape[1],
        WINDOW=kind.window if kind.window is not None else 0,
        CAPPED=kind.soft_cap is not None,
        SPLITS=splits,
        BLOCK_QUERIES=queries,
        BLOCK_KEYS=_KEYS,
        ASM=q_TNH.is_cuda,
        num_warps=_WARPS,
        num_stages=_STAGES,
        maxnreg=_REGISTERS if head_dim <= 128 and queries == _FEWEST_QUERIES else None,
        **overlap_options(q_TNH),
    )
    if splits > 1:
        combine(parts_CTNH, sums_CTN, out_TNH, None, **overlap_options(q_TNH))


def _num_splits(num_programs: int, device: torch.device) -> int:
    """The number of splits, a power of two, that gives every multiprocessor a few programs."""
    wanted = _PROGRAMS_PER_SM * num_multiprocessors(device) // num_programs
    return min(_MAX_SPLITS, 1 << max(0, wanted.bit_length() - 1))


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=_UNALIGNED)
def _attend(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    sum_ptr,
    kv_indptr,
    kv_indices,
    last_page_len,
    num_tokens,
    scale,
    soft_cap,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    ASM: tl.constexpr,
    OVERLAPPED: tl.constexpr,
) -> None:
    """Write the output; with splits, each one's output and the logarithm of its sum of weights.

    Keys are rows of products and queries columns, since a tile has at least 16 rows but only 8 columns.
    """
    GROUP: tl.constexpr = NUM_Q_HEADS // NUM_KV_HEADS
    LOG2_E: tl.constexpr = 1.4426950408889634
    lead(OVERLAPPED)
    # Neighbouring programs read the heads of one request, which are neighbours in memory.
    kv_head = tl.program_id(0)
    request, split = tl.program_id(1) // SPLITS, tl.program_id(1) % SPLITS
    first_page = tl.load(kv_indptr + request)
    num_pages = tl.load(kv_indptr + request + 1) - first_page
    end = (num_pages - 1) * PAGE_SIZE + tl.load(last_page_len + request)
    query = tl.arange(0, BLOCK_QUERIES)
    present = query < GROUP
    q_row = request.to(tl.int64) * NUM_Q_HEADS + kv_head * GROUP + query
    pair = tl.arange(0, HALF)
    q_at = q_ptr + q_row[None, :] * (2 * HALF) + 2 * pair[:, None]
    q_even = tl.load(q_at, mask=present[None, :], other=0.0).to(tl.float16)
    q_odd = tl.load(q_at + 1, mask=present[None, :], other=0.0).to(tl.float16)

    begin = end - end
    if WINDOW > 0:
        begin = tl.maximum(end - WINDOW, 0)
    if SPLITS > 1:
        part = tl.cdiv(tl.cdiv(end - begin, SPLITS), BLOCK_KEYS) * BLOCK_KEYS
        begin += split * part
        end = tl.minimum(end, begin + part)
    factor = scale if CAPPED else scale * LOG2_E
    best = tl.full((BLOCK_QUERIES,), float("-inf"), tl.float32)
    # Kept per key until the end, since a sum over keys would make threads wait for each other in every step.
    total = tl.zeros((BLOCK_KEYS, BLOCK_QUERIES), tl.float32)
    out_even = tl.zeros((HALF, BLOCK_QUERIES), tl.float32)
    out_odd = tl.zeros((HALF, BLOCK_QUERIES), tl.float32)
    for start in range(begin, end, BLOCK_KEYS):
        key = start + tl.arange(0, BLOCK_KEYS)
        seen = key < end
        page = tl.load(kv_indices + first_page + key // PAGE_SIZE, mask=seen, other=0).to(tl.int64)
        at = ((page * PAGE_SIZE + key % PAGE_SIZE) * NUM_KV_HEADS + kv_head) * HALF
        # Values are loaded as columns: as rows, Triton would not load them ahead of the products before them.
        k_words = tl.load(k_ptr + (at[:, None] + pair[None, :]), mask=seen[:, None], other=0)
        v_words = tl.load(v_ptr + (at[None, :] + pair[:, None]), mask=seen[None, :], other=0)
        k_even, k_odd = _both(k_words, ASM)
        v_even, v_odd = _both(v_words, ASM)
        score = tl.dot(k_even, q_even)
        score = tl.dot(k_odd, q_odd, score) * factor
        if CAPPED:
            score = capped(score, soft_cap, CAPPED) * LOG2_E
        score = tl.where(seen[:, None], score, float("-inf"))
        new_best = tl.maximum(best, tl.max(score, axis=0))
        weight = exp2_or_0(score - new_best[None, :], ASM)
        shrink = exp2_or_0(best - new_best, ASM)[None, :]
        total = total * shrink + weight
        weight_half = weight.to(tl.float16)
        out_even = tl.dot(v_even, weight_half, out_even * shrink)
        out_odd = tl.dot(v_odd, weight_half, out_odd * shrink)
        best = new_best
    sum_of_weights = tl.sum(total, axis=0)
    divisor = tl.where(sum_of_weights > 0.0, sum_of_weights, 1.0)
    if SPLITS > 1:
        q_row += split.to(tl.int64) * num_tokens * NUM_Q_HEADS
        tl.store(sum_ptr + q_row, best / LOG2_E + tl.log(divisor), mask=present)
    out = tl.interleave(tl.trans(out_even), tl.trans(out_odd)) / divisor[:, None]
    dim = tl.arange(0, 2 * HALF)[None, :]
    tl.store(out_ptr + q_row[:, None] * (2 * HALF) + dim, out, mask=present[:, None])


@triton.jit
def _both(words, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """The numbers in the lower and in the upper halves of 16-bit words, in float16."""
    if ASM:
        # Converts two words at a time, after putting their bytes in order. Triton's own conversion would
        # first split words into bytes, one by one.
        return tl.inline_asm_elementwise(
            """{
                .reg .b32 a;
                .reg .b16 lower, upper;
                prmt.b32 a, $2, 0, 0x3120;
                mov.b32 {lower, upper}, a;
                cvt.rn.f16x2.e4m3x2 $0, lower;
                cvt.rn.f16x2.e4m3x2 $1, upper;
            }""",
            "=r,=r,r",
            [words],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    lower = words.to(tl.int8).to(tl.float8e4nv, bitcast=True)
    upper = (words >> 8).to(tl.int8).to(tl.float8e4nv, bitcast=True)
    return lower.to(tl.float16), upper.to(tl.float16)


def widen_pages(k_PSKH: Tensor, v_PSKH: Tensor, page_ids_M: Tensor, k_MSKH: Tensor, v_MSKH: Tensor) -> None:
    """Copy pages, in the order of their ids, to pages of a wider dtype, which represents every FP8 number.

    Args:
        k_PSKH, v_PSKH: one layer of the pool in FP8, contiguous.
        page_ids_M: int32.
        k_MSKH, v_MSKH: at least as many pages, contiguous.
    """
    num_values = k_PSKH[0].numel()
    _widen[(len(page_ids_M), triton.cdiv(num_values, _WIDENED), 2)](
        k_PSKH, v_PSKH, page_ids_M, k_MSKH, v_MSKH, NUM_VALUES=num_values, STEP=_WIDENED
    )


@triton.jit(do_not_specialize_on_alignment=["page_ids"])
def _widen(  # type: ignore[no-untyped-def]
    k_ptr, v_ptr, page_ids, k_out_ptr, v_out_ptr, NUM_VALUES: tl.constexpr, STEP: tl.constexpr
) -> None:
    """Each program widens a piece of one page's keys, or of its values."""
    page = tl.program_id(0)
    source = tl.load(page_ids + page).to(tl.int64) * NUM_VALUES
    target = page.to(tl.int64) * NUM_VALUES
    place = tl.program_id(1) * STEP + tl.arange(0, STEP)
    inside = place < NUM_VALUES
    if tl.program_id(2) == 0:
        numbers = tl.load(k_ptr + source + place, mask=inside)
        tl.store(k_out_ptr + target + place, numbers.to(k_out_ptr.dtype.element_ty), mask=inside)
    else:
        numbers = tl.load(v_ptr + source + place, mask=inside)
        tl.store(v_out_ptr + target + place, numbers.to(v_out_ptr.dtype.element_ty), mask=inside)
