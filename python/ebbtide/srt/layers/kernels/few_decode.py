"""Attention of few requests with one new token each, and everything between two products, in one kernel.

A program handles one request's queries that share a KV head, and a split of the keys. It rotates the queries
itself. The program of the first split also rotates and stores the new key and value, which no program reads
from the pool. The last program of a request to finish adds up all splits, always in the same order. The first
tile of keys is loaded while the projection before still runs.

Shapes: T tokens, one of each request, N query heads, K KV heads, H head_dim, P pages, S page_size, C parts.
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ebbtide.srt.layers.heads import AttentionKind, HeadNorms, Pages, Rope
from ebbtide.srt.layers.kernels.instructions import announce, capped, wait
from ebbtide.srt.layers.kernels.launch import num_multiprocessors, overlap_options
from ebbtide.srt.layers.kernels.paged_attention import room_for_parts

# The rows of a tensor-core product, and so the most query heads that may share a KV head.
MAX_GROUP = 16
_MAX_SPLITS = 16
_WARPS = 4
_UNALIGNED = ["kv_indptr", "kv_indices", "last_page_len"]


@dataclass(frozen=True)
class Cut:
    """How the keys of requests are split.

    Attributes:
        splits: the most parts of a request's keys, a power of two.
        least: the fewest keys of a part; parts are rounded up to whole tiles.
        keys: of a tile.
    """

    splits: int
    least: int
    keys: int


def choose_cut(num_requests: int, num_kv_heads: int, group: int, device: torch.device) -> Cut:
    """Choose as many splits as fill the device. These were the best of those tried on an H200.

    A multiprocessor runs two programs with tiles of 64 keys, or three with tiles of 32. Wide tiles are
    faster, unless narrow ones allow twice as many programs.
    """

    def splits(programs_per_sm: int) -> int:
        programs = programs_per_sm * num_multiprocessors(device) // (num_requests * num_kv_heads)
        return min(_MAX_SPLITS, 1 << max(0, programs.bit_length() - 1))

    # With more query heads per KV head, each further part costs more to add up.
    least = 64 if group <= 4 else 128
    wide, narrow = splits(2), splits(3)
    return Cut(narrow, least, keys=32) if narrow > wide else Cut(wide, least, keys=64)


def attend_few(
    qkv_TNH: Tensor,
    rope: Rope,
    head_norms: HeadNorms | None,
    slots_T: Tensor,
    k_PSKH: Tensor,
    v_PSKH: Tensor,
    pages: Pages,
    arrivals: Tensor,
    kind: AttentionKind,
    *,
    sinks_N: Tensor | None = None,
    cut: Cut | None = None,
) -> Tensor:
    """Do what `rotate_and_store` does, and attend to everything up to the new token. Returns [T, N, H].

    Args:
        qkv_TNH: [T, N + 2K, H], contiguous.
        slots_T: where new tokens are stored in the pool; −1: nowhere.
        k_PSKH, v_PSKH: one layer of the pool, in the queries' dtype; H is a power of two.
        pages: including the new tokens; they must not change while kernels of a step run.
        arrivals: int32 zeros, one for each KV head of each request, which the kernel resets to zero.
        sinks_N: as in `LayerAttention`.
        cut: None: chosen by the number of requests.
    """
    num_requests, num_heads, head_dim = qkv_TNH.shape
    num_kv_heads = k_PSKH.shape[2]
    num_q_heads = num_heads - 2 * num_kv_heads
    cut = cut or choose_cut(num_requests, num_kv_heads, num_q_heads // num_kv_heads, qkv_TNH.device)
    out_TNH = qkv_TNH.new_empty((num_requests, num_q_heads, head_dim))
    parts_CTNH, sums_CTN = room_for_parts(out_TNH, cut.splits)
    _attend_few[(num_requests, num_kv_heads * cut.splits)](
        qkv_TNH,
        rope.cos_T1H,
        rope.sin_T1H,
        slots_T,
        head_norms.q_weight if head_norms is not None else qkv_TNH,
        head_norms.k_weight if head_norms is not None else qkv_TNH,
        k_PSKH,
        v_PSKH,
        out_TNH,
        parts_CTNH,
        sums_CTN,
        arrivals,
        pages.kv_indptr_R1,
        pages.kv_indices,
        pages.last_page_len_R,
        sinks_N,
        num_requests,
        kind.scale,
        kind.soft_cap if kind.soft_cap is not None else 1.0,
        head_norms.eps if head_norms is not None else 0.0,
        NUM_Q_HEADS=num_q_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        PAGE_SIZE=k_PSKH.shape[1],
        WINDOW=kind.window if kind.window is not None else 0,
        CAPPED=kind.soft_cap is not None,
        NORM=head_norms is not None,
        NORM_OFFSET=head_norms.offset if head_norms is not None else 0.0,
        SPLITS=cut.splits,
        BLOCK_ROWS=MAX_GROUP,
        MERGED_ROWS=triton.next_power_of_2(num_q_heads // num_kv_heads),
        BLOCK_KEYS=cut.keys,
        LEAST_KEYS=cut.least,
        num_warps=_WARPS,
        num_stages=1,
        **overlap_options(qkv_TNH),
    )
    return out_TNH


@triton.jit
def _rotated(  # type: ignore[no-untyped-def]
    first,
    second,
    weight_ptr,
    pair,
    cos,
    sin,
    eps,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """Normalise and rotate heads, given as two halves [.., HALF]."""
    if NORM:
        squares = tl.sum(first * first + second * second, axis=1)[:, None]
        inverse = 1.0 / tl.sqrt(squares / (2 * HALF) + eps)
        first = first * inverse * (tl.load(weight_ptr + pair).to(tl.float32) + OFFSET)
        second = second * inverse * (tl.load(weight_ptr + HALF + pair).to(tl.float32) + OFFSET)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _tile(  # type: ignore[no-untyped-def]
    k_ptr,
    v_ptr,
    kv_indices,
    start,
    end,
    pair,
    dim,
    row_size: tl.constexpr,
    HALF: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """Load some keys, as two halves, and their values."""
    key = start + tl.arange(0, BLOCK_KEYS)
    seen = key < end
    page = tl.load(kv_indices + key // PAGE_SIZE, mask=seen, other=0).to(tl.int64)
    places = (page * PAGE_SIZE + key % PAGE_SIZE) * row_size
    keys = k_ptr + places[:, None] + pair
    first = tl.load(keys, mask=seen[:, None], other=0.0)
    second = tl.load(keys + HALF, mask=seen[:, None], other=0.0)
    return first, second, tl.load(v_ptr + places[:, None] + dim, mask=seen[:, None], other=0.0)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=_UNALIGNED)
def _attend_few(  # type: ignore[no-untyped-def]
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    q_weight_ptr,
    k_weight_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    part_ptr,
    sum_ptr,
    arrivals_ptr,
    kv_indptr,
    kv_indices,
    last_page_len,
    sinks_ptr,
    num_tokens,
    scale,
    soft_cap,
    eps,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    NORM: tl.constexpr,
    NORM_OFFSET: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    MERGED_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    LEAST_KEYS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
) -> None:
    GROUP: tl.constexpr = NUM_Q_HEADS // NUM_KV_HEADS
    HEAD_DIM: tl.constexpr = 2 * HALF
    announce(OVERLAPPED)
    request = tl.program_id(0)
    kv_head, split = tl.program_id(1) // SPLITS, tl.program_id(1) % SPLITS
    first_page = tl.load(kv_indptr + request)
    num_pages = tl.load(kv_indptr + request + 1) - first_page
    length = (num_pages - 1) * PAGE_SIZE + tl.load(last_page_len + request)
    begin = length - length
    if WINDOW > 0:
        begin = tl.maximum(length - WINDOW, 0)
    # The new key is not in the pool yet: the program of the first split computes it.
    num_old = tl.maximum(length - 1 - begin, 0)
    part = tl.cdiv(tl.maximum(tl.cdiv(num_old, SPLITS), LEAST_KEYS), BLOCK_KEYS) * BLOCK_KEYS
    num_parts = tl.maximum(tl.cdiv(num_old, part), 1)
    if split >= num_parts:
        return
    end = begin + tl.minimum(num_old, (split + 1) * part)
    begin += split * part
    row_size: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    pair = tl.arange(0, HALF)[None, :]
    dim = tl.arange(0, HEAD_DIM)[None, :]
    kv_indices += first_page
    k_ptr += kv_head * HEAD_DIM
    v_ptr += kv_head * HEAD_DIM
    # The next tile is loaded into registers ahead of its use, the first one before the projection has ended.
    next_1, next_2, next_value = _tile(
        k_ptr, v_ptr, kv_indices, begin, end, pair, dim, row_size, HALF, PAGE_SIZE, BLOCK_KEYS
    )
    wait(OVERLAPPED)

    row = tl.arange(0, BLOCK_ROWS)
    present = row < GROUP
    token = request.to(tl.int64)
    cos = tl.load(cos_ptr + token * HEAD_DIM + pair).to(tl.float32)
    sin = tl.load(sin_ptr + token * HALF + pair).to(tl.float32)
    qkv_ptr += token * ((NUM_Q_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
    q_at = qkv_ptr + (kv_head * GROUP + row)[:, None] * HEAD_DIM + pair
    q_first = tl.load(q_at, mask=present[:, None], other=0.0).to(tl.float32)
    q_second = tl.load(q_at + HALF, mask=present[:, None], other=0.0).to(tl.float32)
    q_first, q_second = _rotated(
        q_first, q_second, q_weight_ptr, pair, cos, sin, eps, HALF, NORM, NORM_OFFSET
    )
    # Rounded like queries and keys that are stored.
    q_first, q_second = q_first.to(k_ptr.dtype.element_ty), q_second.to(k_ptr.dtype.element_ty)

    best = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_ROWS,), tl.float32)
    out = tl.zeros((BLOCK_ROWS, HEAD_DIM), tl.float32)
    if split == 0:
        k_at = qkv_ptr + (NUM_Q_HEADS + kv_head) * HEAD_DIM + pair
        k_first, k_second = _rotated(
            tl.load(k_at).to(tl.float32),
            tl.load(k_at + HALF).to(tl.float32),
            k_weight_ptr,
            pair,
            cos,
            sin,
            eps,
            HALF,
            NORM,
            NORM_OFFSET,
        )
        k_first, k_second = k_first.to(k_ptr.dtype.element_ty), k_second.to(k_ptr.dtype.element_ty)
        value = tl.load(qkv_ptr + (NUM_Q_HEADS + NUM_KV_HEADS + kv_head) * HEAD_DIM + dim)
        slot = tl.load(slots_ptr + token)
        place = slot * row_size
        # `tl.where`, since `&` with a scalar becomes an integer in the interpreter.
        stored = tl.where(slot >= 0, pair < HALF, False)
        tl.store(k_ptr + place + pair, k_first, mask=stored)
        tl.store(k_ptr + place + HALF + pair, k_second, mask=stored)
        tl.store(v_ptr + place + dim, value, mask=tl.where(slot >= 0, dim < HEAD_DIM, False))
        products = q_first.to(tl.float32) * k_first.to(tl.float32)
        products += q_second.to(tl.float32) * k_second.to(tl.float32)
        best = capped(tl.sum(products, axis=1) * scale, soft_cap, CAPPED)
        total += 1.0
        out += value.to(tl.float32)
        if sinks_ptr is not None:
            # A sink is one more key, without a value.
            sink_at = sinks_ptr + kv_head * GROUP + row
            sink = tl.load(sink_at, mask=present, other=float("-inf")).to(tl.float32)
            new_best = tl.maximum(best, sink)
            shrink = tl.exp(best - new_best)
            total = shrink + tl.exp(sink - new_best)
            out = out * shrink[:, None]
            best = new_best
    for start in range(begin, end, BLOCK_KEYS):
        seen = start + tl.arange(0, BLOCK_KEYS) < end
        k_first, k_second, value = next_1, next_2, next_value
        following = start + BLOCK_KEYS
        next_1, next_2, next_value = _tile(
            k_ptr, v_ptr, kv_indices, following, end, pair, dim, row_size, HALF, PAGE_SIZE, BLOCK_KEYS
        )
        score = tl.dot(q_first, tl.trans(k_first), input_precision="ieee")
        score = tl.dot(q_second, tl.trans(k_second), score, input_precision="ieee") * scale
        score = tl.where(seen[None, :], capped(score, soft_cap, CAPPED), float("-inf"))
        new_best = tl.maximum(best, tl.max(score, axis=1))
        weight = tl.exp(score - new_best[:, None])
        shrink = tl.exp(best - new_best)
        total = total * shrink + tl.sum(weight, axis=1)
        out = tl.dot(weight.to(value.dtype), value, out * shrink[:, None], input_precision="ieee")
        best = new_best
    out = out / total[:, None]
    q_row = token * NUM_Q_HEADS + kv_head * GROUP + row
    if num_parts == 1:
        tl.store(out_ptr + q_row[:, None] * HEAD_DIM + dim, out, mask=present[:, None])
    elif SPLITS > 1:
        distance = num_tokens * NUM_Q_HEADS
        mine = q_row + split.to(tl.int64) * distance
        tl.store(sum_ptr + mine, best + tl.log(total), mask=present)
        tl.store(part_ptr + mine[:, None] * HEAD_DIM + dim, out, mask=present[:, None])
        # All threads must have stored their results before the program is counted.
        tl.debug_barrier()
        arrival = arrivals_ptr + request * NUM_KV_HEADS + kv_head
        if tl.atomic_add(arrival, 1, sem="acq_rel") == num_parts - 1:
            tl.store(arrival, 0)
            head = tl.arange(0, MERGED_ROWS)
            inside = head < GROUP
            merged = token * NUM_Q_HEADS + kv_head * GROUP + head
            parts = tl.arange(0, SPLITS)
            sums = tl.load(
                sum_ptr + merged[:, None] + parts[None, :] * distance,
                mask=inside[:, None] & (parts < num_parts)[None, :],
                other=float("-inf"),
                cache_modifier=".cg",
            )
            most = tl.max(sums, axis=1)
            divisor = tl.sum(tl.exp(sums - most[:, None]), axis=1)
            result = tl.zeros((MERGED_ROWS, HEAD_DIM), tl.float32)
            for number in tl.static_range(SPLITS):
                is_there = inside & (head * 0 + number < num_parts)
                at = merged + number * distance
                sum = tl.load(sum_ptr + at, mask=is_there, other=float("-inf"), cache_modifier=".cg")
                value = tl.load(
                    part_ptr + at[:, None] * HEAD_DIM + dim,
                    mask=is_there[:, None],
                    other=0.0,
                    cache_modifier=".cg",
                )
                result += value * (tl.exp(sum - most) / divisor)[:, None]
            tl.store(out_ptr + merged[:, None] * HEAD_DIM + dim, result, mask=inside[:, None])
