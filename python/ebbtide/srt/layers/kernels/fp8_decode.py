"""Attention of one new token per request to keys and values in FP8, at the speed at which these are read.

A program takes one request's queries that share a KV head, and all of the keys or a part of them. Two
numbers of FP8 lie in a word of 16 bits. Words, and not bytes, go from memory to the registers of tensor
cores, where two float16 are made of each with shifts and masks: a number's bits, moved, are those of the
number times 2⁻⁸. So the even and the odd dimensions of heads are products of their own. Every number of FP8
is one of float16, and so is every query of bfloat16 of ordinary size: nothing is rounded but the weights, to
11 bits.

What is no number in FP8 is read as ±480.

Shapes: T tokens, one of each request, N query heads, K KV heads, H head_dim, P pages, S page_size, C parts.
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ebbtide.srt.layers.kernels.launch import num_multiprocessors, overlap_options
from ebbtide.srt.layers.kernels.paged_attention import Pages, room_for_parts

_ROWS = 16
# The best of those that were tried (bench/gpu_fp8_kv.py, on an H200).
_KEYS, _WARPS, _STAGES = 128, 4, 3
_PROGRAMS_PER_SM, _MAX_SPLITS = 4, 32
_UNALIGNED = ["kv_indptr", "kv_indices", "last_page_len"]


def attend_fp8(
    q_TNH: Tensor,
    k_PSKH: Tensor,
    v_PSKH: Tensor,
    pages: Pages,
    out_TNH: Tensor,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> None:
    """Attend to everything up to each request's new token, into `out_TNH`.

    Args:
        q_TNH, out_TNH: contiguous, one row of each request.
        k_PSKH, v_PSKH: one layer of the pool in FP8, contiguous; H a power of two.
        scale, window, soft_cap: as in `AttentionKind`.
    """
    num_requests, num_q_heads, head_dim = q_TNH.shape
    num_kv_heads = k_PSKH.shape[2]
    splits = _num_splits(num_requests * num_kv_heads, q_TNH.device)
    parts_CTNH, sums_CTN = room_for_parts(out_TNH, splits)
    _attend[(num_requests, num_kv_heads * splits)](
        q_TNH,
        k_PSKH.view(torch.int16),
        v_PSKH.view(torch.int16),
        parts_CTNH,
        sums_CTN,
        pages.kv_indptr_R1,
        pages.kv_indices,
        pages.last_page_len_R,
        num_requests,
        scale,
        soft_cap if soft_cap is not None else 1.0,
        NUM_Q_HEADS=num_q_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        PAGE_SIZE=k_PSKH.shape[1],
        WINDOW=window if window is not None else 0,
        CAPPED=soft_cap is not None,
        SPLITS=splits,
        BLOCK_ROWS=_ROWS,
        BLOCK_KEYS=_KEYS,
        ASM=q_TNH.is_cuda,
        num_warps=_WARPS,
        num_stages=_STAGES,
        **overlap_options(q_TNH),
    )
    if splits > 1:
        _combine[(num_requests, num_q_heads)](
            parts_CTNH,
            sums_CTN,
            out_TNH,
            num_requests,
            NUM_Q_HEADS=num_q_heads,
            HEAD_DIM=head_dim,
            SPLITS=splits,
            num_warps=1,
            **overlap_options(q_TNH),
        )


def _num_splits(num_programs: int, device: torch.device) -> int:
    """Parts of the keys, a power of two, so that every multiprocessor has some programs."""
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
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    ASM: tl.constexpr,
    OVERLAPPED: tl.constexpr,
) -> None:
    """Write the output; of several parts, each one's output and the logarithm of its sum of weights."""
    GROUP: tl.constexpr = NUM_Q_HEADS // NUM_KV_HEADS
    # What a float16 made of the bits of FP8 is to be multiplied by.
    UNIT: tl.constexpr = 256.0
    if OVERLAPPED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    request = tl.program_id(0)
    kv_head, split = tl.program_id(1) // SPLITS, tl.program_id(1) % SPLITS
    first_page = tl.load(kv_indptr + request)
    num_pages = tl.load(kv_indptr + request + 1) - first_page
    end = (num_pages - 1) * PAGE_SIZE + tl.load(last_page_len + request)
    row = tl.arange(0, BLOCK_ROWS)
    present = row < GROUP
    q_row = request.to(tl.int64) * NUM_Q_HEADS + kv_head * GROUP + row
    pair = tl.arange(0, HALF)[None, :]
    q_at = q_ptr + q_row[:, None] * (2 * HALF) + 2 * pair
    q_even = tl.load(q_at, mask=present[:, None], other=0.0).to(tl.float16)
    q_odd = tl.load(q_at + 1, mask=present[:, None], other=0.0).to(tl.float16)

    begin = end - end
    if WINDOW > 0:
        begin = tl.maximum(end - WINDOW, 0)
    if SPLITS > 1:
        part = tl.cdiv(tl.cdiv(end - begin, SPLITS), BLOCK_KEYS) * BLOCK_KEYS
        begin += split * part
        end = tl.minimum(end, begin + part)
    best = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_ROWS,), tl.float32)
    out_even = tl.zeros((BLOCK_ROWS, HALF), tl.float32)
    out_odd = tl.zeros((BLOCK_ROWS, HALF), tl.float32)
    for start in range(begin, end, BLOCK_KEYS):
        key = start + tl.arange(0, BLOCK_KEYS)
        seen = key < end
        page = tl.load(kv_indices + first_page + key // PAGE_SIZE, mask=seen, other=0).to(tl.int64)
        slot = page * PAGE_SIZE + key % PAGE_SIZE
        at = (slot * NUM_KV_HEADS + kv_head)[:, None] * HALF + pair
        k_even, k_odd = _both(tl.load(k_ptr + at, mask=seen[:, None], other=0), ASM)
        v_even, v_odd = _both(tl.load(v_ptr + at, mask=seen[:, None], other=0), ASM)
        score = tl.dot(q_even, tl.trans(k_even))
        score = tl.dot(q_odd, tl.trans(k_odd), score) * (scale * UNIT)
        if CAPPED:
            # tanh(z) = 1 − 2 / (1 + exp(2z))
            score = soft_cap - 2.0 * soft_cap / (1.0 + tl.exp(2.0 * score / soft_cap))
        score = tl.where(seen[None, :], score, float("-inf"))
        new_best = tl.maximum(best, tl.max(score, axis=1))
        weight = tl.exp(score - new_best[:, None])
        shrink = tl.exp(best - new_best)
        total = total * shrink + tl.sum(weight, axis=1)
        weight_half = weight.to(tl.float16)
        out_even = tl.dot(weight_half, v_even, out_even * shrink[:, None])
        out_odd = tl.dot(weight_half, v_odd, out_odd * shrink[:, None])
        best = new_best
    divisor = tl.where(total > 0.0, total, 1.0)
    if SPLITS > 1:
        q_row += split.to(tl.int64) * num_tokens * NUM_Q_HEADS
        tl.store(sum_ptr + q_row, best + tl.log(divisor), mask=present)
    out = tl.interleave(out_even, out_odd) * (UNIT / divisor)[:, None]
    dim = tl.arange(0, 2 * HALF)[None, :]
    tl.store(out_ptr + q_row[:, None] * (2 * HALF) + dim, out, mask=present[:, None])


@triton.jit
def _both(words, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """The numbers in the lower and in the upper halves of words, times 2⁻⁸."""
    if ASM:
        # Two words at a time.
        return tl.inline_asm_elementwise(
            """{
                .reg .b32 a, b;
                shl.b32 a, $2, 7;
                and.b32 a, a, 0x3f803f80;
                shl.b32 b, $2, 8;
                and.b32 b, b, 0x80008000;
                or.b32 $0, a, b;
                shr.u32 a, $2, 1;
                and.b32 a, a, 0x3f803f80;
                and.b32 b, $2, 0x80008000;
                or.b32 $1, a, b;
            }""",
            "=r,=r,r",
            [words],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    lower = ((words << 7) & 0x3F80) | ((words << 8) & -0x8000)
    upper = ((words >> 1) & 0x3F80) | (words & -0x8000)
    return (
        lower.to(tl.int16).to(tl.float16, bitcast=True),
        upper.to(tl.int16).to(tl.float16, bitcast=True),
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _combine(  # type: ignore[no-untyped-def]
    part_ptr,
    sum_ptr,
    out_ptr,
    num_tokens,
    NUM_Q_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
) -> None:
    """One head of a request; some part of its keys is never empty."""
    if OVERLAPPED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    q_row = tl.program_id(0).to(tl.int64) * NUM_Q_HEADS + tl.program_id(1)
    rows = q_row + tl.arange(0, SPLITS).to(tl.int64) * num_tokens * NUM_Q_HEADS
    sums = tl.load(sum_ptr + rows)
    weight = tl.exp(sums - tl.max(sums, axis=0))
    weight = weight / tl.sum(weight, axis=0)
    dim = tl.arange(0, HEAD_DIM)
    parts = tl.load(part_ptr + rows[:, None] * HEAD_DIM + dim[None, :])
    tl.store(out_ptr + q_row * HEAD_DIM + dim, tl.sum(parts * weight[:, None], axis=0))
