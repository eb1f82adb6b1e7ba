"""Rotary embedding: the angles of a pass, and the operations between a layer's projection and its attention.

Shapes: T tokens, N query heads, K KV heads, H head_dim, P pages, S page_size.
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl
from torch import Tensor

from ebbtide.srt.layers.heads import HeadNorms, Rope
from ebbtide.srt.layers.kernels.instructions import lead
from ebbtide.srt.layers.kernels.launch import overlap_options
from ebbtide.srt.mem_cache.kv_scales import FP8, FP8_MAX, HeadScales

# With at least this many tokens the grid is large enough for several heads per program.
MANY_TOKENS = 64


def rope_angles(positions_T: Tensor, inv_freq: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Rope:
    """Cosines and sines of position · frequency, in one launch.

    Args:
        positions_T: integers.
        inv_freq: float32 [H / 2].
        dtype: of the result.
        scale: a factor for the result.
    """
    num_tokens, half = len(positions_T), len(inv_freq)
    cos_T1H = torch.empty((num_tokens, 1, 2 * half), dtype=dtype, device=positions_T.device)
    sin_T1H = torch.empty((num_tokens, 1, half), dtype=dtype, device=positions_T.device)
    _angles[(num_tokens,)](
        positions_T,
        inv_freq,
        cos_T1H,
        sin_T1H,
        HALF=half,
        BLOCK=triton.next_power_of_2(half),
        SCALE=scale,
        num_warps=1,
    )
    return Rope(cos_T1H, sin_T1H)


def rotate_and_store(
    qkv_TNH: Tensor,
    rope: Rope,
    head_norms: HeadNorms | None,
    slots_T: Tensor,
    k_PSKH: Tensor,
    v_PSKH: Tensor,
    scales: HeadScales | None = None,
) -> Tensor:
    """Normalise and rotate queries and keys, and store keys and values in their slots, in one launch.

    Args:
        qkv_TNH: [T, N + 2K, H], contiguous; not changed.
        slots_T: int64; a token with slot −1 is not stored.
        k_PSKH, v_PSKH: one layer of the pool, contiguous.
        scales: keys and values are divided by their scales, and queries multiplied by the scales of their
            keys; None: all scales are 1.

    Returns:
        The queries [T, N, H].
    """
    num_tokens, num_heads, head_dim = qkv_TNH.shape
    num_kv_heads = k_PSKH.shape[2]
    num_q_heads = num_heads - 2 * num_kv_heads
    q_TNH = qkv_TNH.new_empty((num_tokens, num_q_heads, head_dim))
    heads_per_program = 8 if num_tokens >= MANY_TOKENS else 1
    _rotate_and_store[(num_tokens, triton.cdiv(num_heads, heads_per_program))](
        qkv_TNH,
        rope.cos_T1H,
        rope.sin_T1H,
        slots_T,
        head_norms.q_weight if head_norms is not None else qkv_TNH,
        head_norms.k_weight if head_norms is not None else qkv_TNH,
        q_TNH,
        k_PSKH,
        v_PSKH,
        scales.scales_2K if scales is not None else qkv_TNH,
        scales.inverses_2K if scales is not None else qkv_TNH,
        head_norms.eps if head_norms is not None else 0.0,
        NUM_Q_HEADS=num_q_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        PAIRS=rope.sin_T1H.shape[-1],
        HEADS=heads_per_program,
        BLOCK=triton.next_power_of_2(head_dim // 2),
        NORM=head_norms is not None,
        NORM_OFFSET=head_norms.offset if head_norms is not None else 0.0,
        SCALED=scales is not None,
        MAX=FP8_MAX if k_PSKH.dtype == FP8 else 0.0,
        num_warps=4 if heads_per_program > 1 else 1,
        **overlap_options(qkv_TNH),
    )
    return q_TNH


@triton.jit
def _angles(  # type: ignore[no-untyped-def]
    positions_ptr,
    inv_freq_ptr,
    cos_ptr,
    sin_ptr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALE: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK)
    inside = pair < HALF
    position = tl.load(positions_ptr + token).to(tl.float32)
    angle = position * tl.load(inv_freq_ptr + pair, mask=inside, other=0.0)
    cos = tl.cos(angle) * SCALE
    tl.store(cos_ptr + token * (2 * HALF) + pair, cos, mask=inside)
    tl.store(cos_ptr + token * (2 * HALF) + HALF + pair, cos, mask=inside)
    tl.store(sin_ptr + token * HALF + pair, tl.sin(angle) * SCALE, mask=inside)


@triton.jit
def _store(pointer, first_at, second_at, first, second, inside) -> None:  # type: ignore[no-untyped-def]
    """Store both numbers of the pairs of some heads."""
    tl.store(pointer + first_at, first, mask=inside)
    tl.store(pointer + second_at, second, mask=inside)


@triton.jit
def _rotate_and_store(  # type: ignore[no-untyped-def]
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    q_weight_ptr,
    k_weight_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    scales_ptr,
    inverses_ptr,
    eps,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    NORM_OFFSET: tl.constexpr,
    SCALED: tl.constexpr,
    MAX: tl.constexpr,
    OVERLAPPED: tl.constexpr,
) -> None:
    """Each program handles HEADS heads of a token. Tiles [HEADS, HALF] have first or second numbers of pairs.

    PAIRS: how many pairs (i, i + PAIRS) are rotated; the others form pairs that are not.
    MAX: stored numbers are clamped to ±MAX, if converting them would not do so; 0: no limit.
    """
    NUM_HEADS: tl.constexpr = NUM_Q_HEADS + 2 * NUM_KV_HEADS
    HEAD_DIM: tl.constexpr = 2 * HALF
    # Wait first: everything but the slots was written by earlier kernels.
    lead(OVERLAPPED)
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    pair = tl.arange(0, BLOCK)[None, :]
    inside = (head < NUM_HEADS) & (pair < HALF)
    is_q = head < NUM_Q_HEADS
    is_k = (head >= NUM_Q_HEADS) & (head < NUM_Q_HEADS + NUM_KV_HEADS)
    is_v = head >= NUM_Q_HEADS + NUM_KV_HEADS

    if PAIRS == HALF:
        first_at, second_at = pair, pair + HALF
    else:
        first_at = tl.where(pair < PAIRS, pair, pair + PAIRS)
        second_at = tl.where(pair < PAIRS, pair + PAIRS, pair + HALF)

    source = qkv_ptr + token * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM
    first = tl.load(source + first_at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + second_at, mask=inside, other=0.0).to(tl.float32)
    slot = tl.load(slots_ptr + token)
    x, y = first, second
    if NORM:
        squares = tl.sum(first * first + second * second, axis=1)[:, None]
        scale = 1.0 / tl.sqrt(squares / HEAD_DIM + eps)
        real = pair < HALF
        weight_1 = _weight(is_q, q_weight_ptr + first_at, k_weight_ptr + first_at, real)
        weight_2 = _weight(is_q, q_weight_ptr + second_at, k_weight_ptr + second_at, real)
        if NORM_OFFSET != 0.0:
            weight_1 += NORM_OFFSET
            weight_2 += NORM_OFFSET
        x, y = first * scale * weight_1, second * scale * weight_2
    cos = tl.load(cos_ptr + token * (2 * PAIRS) + pair, mask=pair < PAIRS, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * PAIRS + pair, mask=pair < PAIRS, other=0.0).to(tl.float32)
    rotated_1, rotated_2 = x * cos - y * sin, y * cos + x * sin

    if SCALED:
        group: tl.constexpr = NUM_Q_HEADS // NUM_KV_HEADS
        q_scale = tl.load(scales_ptr + head // group, mask=is_q, other=1.0)
        # The scales of values follow those of keys, in the order of heads.
        inverse = tl.load(
            inverses_ptr + head - NUM_Q_HEADS, mask=(is_k | is_v) & (head < NUM_HEADS), other=1.0
        )
        rotated_1, rotated_2 = rotated_1 * q_scale * inverse, rotated_2 * q_scale * inverse
        first, second = first * inverse, second * inverse
    q_at = q_ptr + token * (NUM_Q_HEADS * HEAD_DIM) + head * HEAD_DIM
    _store(q_at, first_at, second_at, rotated_1, rotated_2, inside & is_q)
    row = slot * (NUM_KV_HEADS * HEAD_DIM)
    # Not `inside & (slot >= 0)`, which becomes an integer in the interpreter of Triton 3.9.
    stored = tl.where(slot >= 0, inside, False)
    k_at = k_ptr + row + (head - NUM_Q_HEADS) * HEAD_DIM
    _store(k_at, first_at, second_at, _within(rotated_1, MAX), _within(rotated_2, MAX), stored & is_k)
    v_at = v_ptr + row + (head - NUM_Q_HEADS - NUM_KV_HEADS) * HEAD_DIM
    _store(v_at, first_at, second_at, _within(first, MAX), _within(second, MAX), stored & is_v)


@triton.jit
def _within(x, MAX: tl.constexpr):  # type: ignore[no-untyped-def]
    """Clamp to ±MAX; NaN stays NaN. MAX 0: no limit."""
    if MAX == 0.0:
        return x
    return tl.where(x > MAX, MAX, tl.where(x < -MAX, -MAX, x))


@triton.jit
def _weight(is_q, q_weight, k_weight, real):  # type: ignore[no-untyped-def]
    q = tl.load(q_weight, mask=real, other=0.0).to(tl.float32)
    return tl.where(is_q, q, tl.load(k_weight, mask=real, other=0.0).to(tl.float32))
