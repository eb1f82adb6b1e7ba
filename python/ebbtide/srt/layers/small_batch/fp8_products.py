"""Products of few tokens with 8-bit weights, as fast as the weights can be read.

`stationary` is for one token, which keeps its dtype. It converts 32-bit words to four weights with as few
instructions as possible, and keeps the token in registers for all rows. A weight takes 3.8 instructions, of
the 8 that there is time for; in the kernel for bfloat16 it would take 6.6.

`quantized` is for up to 64 tokens that `fp8.product.quantize_tokens` has converted to 8 bits. It loads the
scales of the next columns one tile ahead: they are too small for an asynchronous copy, and waiting for them
would take longer than everything else.

See `kernels` for the names of constants.
"""

# Triton kernels have no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,import-not-found"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ebbtide.srt.layers.kernels.fp8.quantize import four_of, fours, in_eight_bits, row_sums
from ebbtide.srt.layers.kernels.instructions import announce, prefetch, wait
from ebbtide.srt.layers.kernels.launch import overlap_options
from ebbtide.srt.layers.kernels.norm import activate
from ebbtide.srt.layers.kernels.tiles import (
    PassingConfig,
    QuantizedConfig,
    StationaryConfig,
    choose_one,
    choose_quantized,
)
from ebbtide.srt.layers.norm import Activation

_GROUP: Any = tl.constexpr(128)
_COMBINED_ROWS = 512


def multiply_one(
    x_1K: Tensor,
    norm_weight_K: Tensor | None,
    eps: float,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    out_1O: Tensor,
    config: StationaryConfig | PassingConfig | None = None,
    *,
    gated: Activation | None = None,
    add: bool = False,
) -> None:
    """x Wᵀ (+ b) of one token. Arguments as in `small_batch.multiply`."""
    num_columns, num_rows = x_1K.shape[1], out_1O.shape[1]
    config = config or choose_one(num_columns, gated=gated is not None)
    words = torch.int64 if x_1K.is_cuda else x_1K.dtype
    operands = (
        x_1K.view(words),
        norm_weight_K.view(words) if norm_weight_K is not None else None,
        weight.view(torch.int32),
        scales,
        bias,
        out_1O,
        num_rows,
        eps,
    )
    switches = {
        "NUM_COLUMNS": num_columns,
        "BLOCK_ROWS": config.block_rows,
        "FOLD_NORM": norm_weight_K is not None,
        "GATED": gated is not None,
        "GELU": gated == "gelu_tanh",
        "BIAS": bias is not None,
        "ADD": add,
        "ASM": x_1K.is_cuda,
        "num_warps": config.num_warps,
        "num_stages": 1,
        **overlap_options(x_1K),
    }
    if isinstance(config, PassingConfig):
        grid = (num_rows // config.block_rows,)
        passing[grid](*operands, BLOCK_WORDS=config.block_words, **switches)
        return
    stationary[(num_rows // (config.block_rows * config.num_steps),)](
        *operands, BLOCK_WORDS=1 << (num_columns // 4 - 1).bit_length(), STEPS=config.num_steps, **switches
    )


def multiply_quantized(
    values_TK: Tensor,
    x_scales_TG: Tensor,
    weight: Tensor,
    scales: Tensor,
    out_TO: Tensor,
    config: QuantizedConfig | None = None,
    *,
    gated: Activation | None = None,
    add: bool = False,
    out_scales_TG: Tensor | None = None,
) -> None:
    """Write x Wᵀ, or activation(gate) · up, into `out_TO` [T, O], or add it. 1 ≤ T ≤ 64.

    Args:
        values_TK, x_scales_TG: from `quantize_tokens`. These and `out_scales_TG` have padding rows.
        weight, scales: an 8-bit weight with a scale for each block of 128 × 128.
        out_scales_TG: receives scales; the gated product is then quantised, as `quantize_tokens` would do,
            and its values go to `out_TO`. Not possible if columns are split: see `tiles.gates_at_once`.
    """
    num_columns, num_rows = values_TK.shape[1], out_TO.shape[1]
    num_tokens = len(out_TO)
    config = config or choose_quantized(num_tokens, num_rows, num_columns)
    partial = None
    if config.num_splits > 1:
        shape = config.num_splits, num_tokens, len(weight)
        partial = torch.empty(shape, dtype=torch.float32, device=weight.device)
    switches = {
        "GATED": gated is not None,
        "GELU": gated == "gelu_tanh",
        "ADD": add,
        **overlap_options(values_TK),
    }
    grid = (num_rows // config.block_rows, config.num_splits, -(-num_tokens // config.block_tokens))
    quantized[grid](
        values_TK,
        x_scales_TG,
        weight,
        scales,
        out_TO,
        out_scales_TG,
        partial,
        num_tokens,
        len(values_TK),
        num_rows,
        NUM_COLUMNS=num_columns,
        SPLIT_COLUMNS=num_columns // config.num_splits,
        BLOCK_TOKENS=config.block_tokens,
        BLOCK_ROWS=config.block_rows,
        QUANTIZED=out_scales_TG is not None,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **switches,
    )
    if partial is not None:
        combine[(-(-num_rows // _COMBINED_ROWS), num_tokens)](
            partial,
            out_TO,
            num_tokens,
            num_rows,
            NUM_SPLITS=config.num_splits,
            BLOCK_ROWS=_COMBINED_ROWS,
            num_warps=4,
            **switches,
        )


@triton.jit
def stationary(
    x_ptr,
    norm_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    eps,
    NUM_COLUMNS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    FOLD_NORM: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    OVERLAPPED: tl.constexpr,
    ASM: tl.constexpr,
) -> None:
    """One token, which stays in registers while the kernel loops over rows. x_ptr, norm_ptr: 64-bit words."""
    announce(OVERLAPPED)
    WORDS: tl.constexpr = NUM_COLUMNS // 4
    first_row = tl.program_id(0) * (BLOCK_ROWS * STEPS)
    row = tl.arange(0, BLOCK_ROWS)
    word = tl.arange(0, BLOCK_WORDS)
    inside = word < WORDS
    wanted = inside[None, :] & (row >= 0)[:, None]
    up_distance = tl.cast(num_rows, tl.int64) * WORDS
    tile = weight_ptr + (first_row + row).to(tl.int64)[:, None] * WORDS + word[None, :]
    words_up = tl.zeros((BLOCK_ROWS, BLOCK_WORDS), tl.int32)
    words = tl.load(tile, mask=wanted, other=0, eviction_policy="evict_first")
    if GATED:
        words_up = tl.load(tile + up_distance, mask=wanted, other=0, eviction_policy="evict_first")
    scales = scale_ptr + first_row // _GROUP * (NUM_COLUMNS // _GROUP) + word // 32
    scale = tl.load(scales, mask=inside, other=0.0)
    scale_up = scale
    if GATED:
        up_groups = num_rows // _GROUP * (NUM_COLUMNS // _GROUP)
        scale_up = tl.load(scales + up_groups, mask=inside, other=0.0)
    if FOLD_NORM:
        n0, n1, n2, n3 = four_of(norm_ptr, word, inside, ASM)
    wait(OVERLAPPED)
    x0, x1, x2, x3 = four_of(x_ptr, word, inside, ASM)
    inverse_norm = 1.0
    if FOLD_NORM:
        squares = tl.sum(x0 * x0 + x1 * x1 + x2 * x2 + x3 * x3, axis=0)
        inverse_norm = tl.rsqrt(squares / NUM_COLUMNS + eps)
        x0, x1, x2, x3 = x0 * n0, x1 * n1, x2 * n2, x3 * n3
    for step in range(STEPS):
        ahead_at = tile + (step + 1) * (BLOCK_ROWS * WORDS)
        more = wanted & (step + 1 < STEPS)
        ahead = tl.load(ahead_at, mask=more, other=0, eviction_policy="evict_first")
        ahead_up = words_up
        if GATED:
            ahead_up = tl.load(ahead_at + up_distance, mask=more, other=0, eviction_policy="evict_first")
        result = row_sums(words, x0, x1, x2, x3, scale, ASM) * inverse_norm
        if GATED:
            up = row_sums(words_up, x0, x1, x2, x3, scale_up, ASM) * inverse_norm
            result = activate(result, GELU) * up
        out_rows = first_row + step * BLOCK_ROWS + row
        if BIAS:
            result += tl.load(bias_ptr + out_rows).to(tl.float32)
        if ADD:
            result += tl.load(out_ptr + out_rows).to(tl.float32)
        tl.store(out_ptr + out_rows, result.to(out_ptr.dtype.element_ty))
        words, words_up = ahead, ahead_up


@triton.jit
def passing(
    x_ptr,
    norm_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    eps,
    NUM_COLUMNS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    FOLD_NORM: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    OVERLAPPED: tl.constexpr,
    ASM: tl.constexpr,
) -> None:
    """One token of many columns: programs keep their rows and loop over columns. Pointers as above."""
    announce(OVERLAPPED)
    WORDS: tl.constexpr = NUM_COLUMNS // 4
    first_row = tl.program_id(0) * BLOCK_ROWS
    row, word = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_WORDS)
    wanted = (word < WORDS)[None, :] & (row >= 0)[:, None]
    up_distance = tl.cast(num_rows, tl.int64) * WORDS
    tile = weight_ptr + (first_row + row).to(tl.int64)[:, None] * WORDS + word[None, :]
    scales = scale_ptr + first_row // _GROUP * (NUM_COLUMNS // _GROUP) + word // 32
    up_groups = num_rows // _GROUP * (NUM_COLUMNS // _GROUP)
    ahead = tl.load(tile, mask=wanted, other=0, eviction_policy="evict_first")
    scale_ahead = tl.load(scales, mask=word < WORDS, other=0.0)
    ahead_up, scale_up_ahead = ahead, scale_ahead
    if GATED:
        ahead_up = tl.load(tile + up_distance, mask=wanted, other=0, eviction_policy="evict_first")
        scale_up_ahead = tl.load(scales + up_groups, mask=word < WORDS, other=0.0)
    wait(OVERLAPPED)
    total = tl.zeros((BLOCK_ROWS, BLOCK_WORDS), tl.float32)
    total_up = tl.zeros((BLOCK_ROWS, BLOCK_WORDS), tl.float32)
    squares = tl.zeros((BLOCK_WORDS,), tl.float32)
    for start in range(0, WORDS, BLOCK_WORDS):
        words, words_up, scale, scale_up = ahead, ahead_up, scale_ahead, scale_up_ahead
        following = start + BLOCK_WORDS
        there = following + word < WORDS
        wanted = there[None, :] & (row >= 0)[:, None]
        ahead = tl.load(tile + following, mask=wanted, other=0, eviction_policy="evict_first")
        scale_ahead = tl.load(scales + following // 32, mask=there, other=0.0)
        if GATED:
            ahead_up = tl.load(
                tile + up_distance + following, mask=wanted, other=0, eviction_policy="evict_first"
            )
            scale_up_ahead = tl.load(scales + up_groups + following // 32, mask=there, other=0.0)
        inside = start + word < WORDS
        x0, x1, x2, x3 = four_of(x_ptr, start + word, inside, ASM)
        if FOLD_NORM:
            squares += x0 * x0 + x1 * x1 + x2 * x2 + x3 * x3
            n0, n1, n2, n3 = four_of(norm_ptr, start + word, inside, ASM)
            x0, x1, x2, x3 = x0 * n0, x1 * n1, x2 * n2, x3 * n3
        total += fours(words, x0, x1, x2, x3, ASM) * scale[None, :]
        if GATED:
            total_up += fours(words_up, x0, x1, x2, x3, ASM) * scale_up[None, :]
    result = tl.sum(total, axis=1)
    inverse_norm = 1.0
    if FOLD_NORM:
        inverse_norm = tl.rsqrt(tl.sum(squares, axis=0) / NUM_COLUMNS + eps)
    result *= inverse_norm
    if GATED:
        result = activate(result, GELU) * (tl.sum(total_up, axis=1) * inverse_norm)
    out_rows = first_row + row
    if BIAS:
        result += tl.load(bias_ptr + out_rows).to(tl.float32)
    if ADD:
        result += tl.load(out_ptr + out_rows).to(tl.float32)
    tl.store(out_ptr + out_rows, result.to(out_ptr.dtype.element_ty))


@triton.jit
def _finish(
    result,
    result_up,
    out_ptr,
    partial_ptr,
    split,
    tokens,
    rows,
    num_tokens,
    num_rows,
    SPLIT: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    ADD: tl.constexpr,
):
    stored = (tokens < num_tokens)[:, None] & (rows < num_rows)[None, :]
    if SPLIT:
        stride = num_rows * 2 if GATED else num_rows
        partials = partial_ptr + (split * num_tokens + tokens)[:, None] * stride + rows[None, :]
        tl.store(partials, result, mask=stored)
        if GATED:
            tl.store(partials + num_rows, result_up, mask=stored)
    else:
        if GATED:
            result = activate(result, GELU) * result_up
        outs = out_ptr + tokens[:, None] * num_rows + rows[None, :]
        if ADD:
            result += tl.load(outs, mask=stored, other=0.0).to(tl.float32)
        tl.store(outs, result.to(out_ptr.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["num_tokens", "padded_tokens"])
def quantized(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    scale_ptr,
    out_ptr,
    out_scale_ptr,
    partial_ptr,
    num_tokens,
    padded_tokens,
    num_rows,
    NUM_COLUMNS: tl.constexpr,
    SPLIT_COLUMNS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    ADD: tl.constexpr,
    QUANTIZED: tl.constexpr,
    OVERLAPPED: tl.constexpr,
) -> None:
    """Several tokens; weight and tokens are in 8 bits. x_scale_ptr: [G, padded_tokens].

    QUANTIZED: the gated product is quantised; BLOCK_ROWS is then one group of 128 of its columns.
    """
    announce(OVERLAPPED)
    split = tl.program_id(1)
    begin = split * SPLIT_COLUMNS
    first_row = tl.program_id(0) * BLOCK_ROWS
    rows = first_row + tl.arange(0, BLOCK_ROWS)
    tokens = tl.program_id(2) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    column = tl.arange(0, _GROUP)
    up_distance = tl.cast(num_rows, tl.int64) * NUM_COLUMNS
    row_starts = weight_ptr + rows.to(tl.int64)[:, None] * NUM_COLUMNS + begin + column[None, :]
    if OVERLAPPED:
        lines = tl.arange(0, 4) * 128
        first = weight_ptr + rows.to(tl.int64)[:, None] * NUM_COLUMNS + begin + lines[None, :]
        prefetch(first)
        if GATED:
            prefetch(first + up_distance)
    num_groups: tl.constexpr = SPLIT_COLUMNS // _GROUP
    first_group = split * num_groups
    # All rows of a program are in one block of 128 rows, so they share its scale.
    w_scales = scale_ptr + first_row // _GROUP * (NUM_COLUMNS // _GROUP) + first_group
    up_groups = num_rows // _GROUP * (NUM_COLUMNS // _GROUP)
    scale = tl.load(w_scales)
    scale_up = scale
    if GATED:
        scale_up = tl.load(w_scales + up_groups)
    wait(OVERLAPPED)
    known = tl.where(tokens < padded_tokens, tokens, 0)
    x_scales = x_scale_ptr + first_group * padded_tokens + known
    x_scale = tl.load(x_scales)
    x_starts = x_ptr + known[:, None] * NUM_COLUMNS + begin + column[None, :]
    total = tl.zeros((BLOCK_ROWS, BLOCK_TOKENS), tl.float32)
    total_up = tl.zeros((BLOCK_ROWS, BLOCK_TOKENS), tl.float32)
    for group in range(num_groups):
        ahead = tl.minimum(group + 1, num_groups - 1)
        scale_ahead = tl.load(w_scales + ahead)
        scale_up_ahead = scale_ahead
        if GATED:
            scale_up_ahead = tl.load(w_scales + up_groups + ahead)
        x_scale_ahead = tl.load(x_scales + ahead * padded_tokens)
        weight = tl.load(row_starts + group * _GROUP)
        x = tl.load(x_starts + group * _GROUP)
        total += tl.dot(weight, tl.trans(x)) * (x_scale * scale)[None, :]
        if GATED:
            weight_up = tl.load(row_starts + up_distance + group * _GROUP)
            total_up += tl.dot(weight_up, tl.trans(x)) * (x_scale * scale_up)[None, :]
        scale, scale_up, x_scale = scale_ahead, scale_up_ahead, x_scale_ahead
    if QUANTIZED:
        # Rounded first to bfloat16, as the gated product would be if it were not quantised here.
        x = (activate(total, GELU) * total_up).to(tl.bfloat16).to(tl.float32)
        values, x_scale = in_eight_bits(x, 0, BLOCK_TOKENS)
        places = out_ptr + tokens[:, None] * num_rows + rows[None, :]
        stored = (tokens < num_tokens)[:, None] & (rows < num_rows)[None, :]
        tl.store(places, tl.trans(values).to(tl.float8e4nv), mask=stored)
        group_scales = out_scale_ptr + tl.program_id(0) * padded_tokens + tokens
        tl.store(group_scales, x_scale, mask=tokens < num_tokens)
    else:
        _finish(
            tl.trans(total),
            tl.trans(total_up),
            out_ptr,
            partial_ptr,
            split,
            tokens,
            rows,
            num_tokens,
            num_rows,
            SPLIT_COLUMNS < NUM_COLUMNS,
            GATED,
            GELU,
            ADD,
        )


@triton.jit(do_not_specialize=["num_tokens"])
def combine(
    partial_ptr,
    out_ptr,
    num_tokens,
    num_rows,
    NUM_SPLITS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    ADD: tl.constexpr,
    OVERLAPPED: tl.constexpr,
) -> None:
    """Add up the splits of `quantized`, always in the same order, and apply gate and residual."""
    announce(OVERLAPPED)
    token = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inside = rows < num_rows
    stride = num_rows * 2 if GATED else num_rows
    wait(OVERLAPPED)
    result = tl.zeros((BLOCK_ROWS,), tl.float32)
    result_up = tl.zeros((BLOCK_ROWS,), tl.float32)
    if ADD:
        residual = tl.load(out_ptr + token * num_rows + rows, mask=inside, other=0.0).to(tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        partials = partial_ptr + (split * num_tokens + token) * stride + rows
        result += tl.load(partials, mask=inside, other=0.0)
        if GATED:
            result_up += tl.load(partials + num_rows, mask=inside, other=0.0)
    if GATED:
        result = activate(result, GELU) * result_up
    if ADD:
        result += residual
    tl.store(out_ptr + token * num_rows + rows, result.to(out_ptr.dtype.element_ty), mask=inside)
