"""`kernels.matvec` for weights of 8 bits, which are read and widened four at a time.

A weight's byte would otherwise take three instructions of its own to get out of its word, and a token's
products as long as these. See `kernels` for the pattern and the names of constants.
"""

# Triton has no types, and a kernel is not Python.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,import-not-found"

import triton
import triton.language as tl

from ebbtide.srt.layers.kernels.activation import activate
from ebbtide.srt.layers.small_batch.kernels import _announce, _await


@triton.jit
def _widened(words, OVERLAPPED: tl.constexpr):
    """The four e4m3 of each word, float32. The interpreter knows no instructions."""
    if OVERLAPPED:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high, a, b, c, d;
            .reg .b32 first, second;
            mov.b32 {low, high}, $4;
            cvt.rn.f16x2.e4m3x2 first, low;
            cvt.rn.f16x2.e4m3x2 second, high;
            mov.b32 {a, b}, first;
            mov.b32 {c, d}, second;
            cvt.f32.f16 $0, a;
            cvt.f32.f16 $1, b;
            cvt.f32.f16 $2, c;
            cvt.f32.f16 $3, d;
            }""",
            "=f,=f,=f,=f,r",
            [words],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    return (
        (words & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32),
        ((words >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32),
        ((words >> 16) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32),
        ((words >> 24) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32),
    )


@triton.jit
def _of_four(x_ptr, norm_ptr, here, inside, NUMBER: tl.constexpr, FOLD_NORM: tl.constexpr):
    """One of the four numbers of a token that belong to each word: times the norm's weight; and squared."""
    x = tl.load(x_ptr + 4 * here + NUMBER, mask=inside, other=0.0).to(tl.float32)
    square = x * x
    if FOLD_NORM:
        x *= tl.load(norm_ptr + 4 * here + NUMBER, mask=inside, other=0.0).to(tl.float32)
    return x, square


@triton.jit
def matvec(
    x_ptr,
    norm_ptr,
    words_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    eps,
    NUM_COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    FOLD_NORM: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    OVERLAPPED: tl.constexpr,
) -> None:
    """One token: each program owns some rows, all of them in one row of blocks of 128 × 128."""
    _announce(OVERLAPPED)
    NUM_WORDS: tl.constexpr = NUM_COLUMNS // 4
    BLOCK_WORDS: tl.constexpr = BLOCK_COLUMNS // 4
    first_row = tl.program_id(0) * BLOCK_ROWS
    rows = first_row + tl.arange(0, BLOCK_ROWS)
    places = tl.arange(0, BLOCK_WORDS)
    inside = (rows < num_rows)[:, None]
    tile = words_ptr + rows.to(tl.int64)[:, None] * NUM_WORDS + places[None, :]
    up_distance = num_rows.to(tl.int64) * NUM_WORDS
    scale_row = scale_ptr + first_row // 128 * (NUM_COLUMNS // 128)
    up_scale_distance = num_rows // 128 * (NUM_COLUMNS // 128)
    wanted = inside & (places < NUM_WORDS)[None, :]
    ahead = tl.load(tile, mask=wanted, other=0, eviction_policy="evict_first")
    if GATED:
        ahead_up = tl.load(tile + up_distance, mask=wanted, other=0, eviction_policy="evict_first")
    if BIAS:
        bias = tl.load(bias_ptr + rows, mask=rows < num_rows, other=0.0).to(tl.float32)
    _await(OVERLAPPED)
    if ADD:
        residual = tl.load(out_ptr + rows, mask=rows < num_rows, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK_ROWS, BLOCK_WORDS), tl.float32)
    total_up = tl.zeros((BLOCK_ROWS, BLOCK_WORDS), tl.float32)
    squares = tl.zeros((BLOCK_WORDS,), tl.float32)
    for start in range(0, NUM_WORDS, BLOCK_WORDS):
        words = ahead
        here = start + places
        following = here + BLOCK_WORDS
        wanted = inside & (following < NUM_WORDS)[None, :]
        # One tile ahead, in registers. Behind the last one nothing is read.
        ahead = tl.load(tile + start + BLOCK_WORDS, mask=wanted, other=0, eviction_policy="evict_first")
        there = here < NUM_WORDS
        x0, square0 = _of_four(x_ptr, norm_ptr, here, there, 0, FOLD_NORM)
        x1, square1 = _of_four(x_ptr, norm_ptr, here, there, 1, FOLD_NORM)
        x2, square2 = _of_four(x_ptr, norm_ptr, here, there, 2, FOLD_NORM)
        x3, square3 = _of_four(x_ptr, norm_ptr, here, there, 3, FOLD_NORM)
        squares += (square0 + square1) + (square2 + square3)
        scale = tl.load(scale_row + here // 32, mask=there, other=0.0)
        w0, w1, w2, w3 = _widened(words, OVERLAPPED)
        four = w0 * x0[None, :] + w1 * x1[None, :] + w2 * x2[None, :] + w3 * x3[None, :]
        total += four * scale[None, :]
        if GATED:
            words = ahead_up
            up = tile + up_distance + start + BLOCK_WORDS
            ahead_up = tl.load(up, mask=wanted, other=0, eviction_policy="evict_first")
            scale = tl.load(scale_row + up_scale_distance + here // 32, mask=there, other=0.0)
            w0, w1, w2, w3 = _widened(words, OVERLAPPED)
            four = w0 * x0[None, :] + w1 * x1[None, :] + w2 * x2[None, :] + w3 * x3[None, :]
            total_up += four * scale[None, :]
    product = tl.sum(total, axis=1)
    if FOLD_NORM:
        norm_scale = tl.rsqrt(tl.sum(squares, axis=0) / NUM_COLUMNS + eps)
        product *= norm_scale
    if GATED:
        product_up = tl.sum(total_up, axis=1)
        if FOLD_NORM:
            product_up *= norm_scale
        product = activate(product, GELU) * product_up
    if BIAS:
        product += bias
    if ADD:
        product += residual
    tl.store(out_ptr + rows, product.to(out_ptr.dtype.element_ty), mask=rows < num_rows)
