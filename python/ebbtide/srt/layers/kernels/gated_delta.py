"""The gated delta rule, and its norm. `layers.state` defines what each computes.

For one token, a program reads some columns of a request's matrix, updates them and writes them back. For
prompts, pieces of `PIECE_TOKENS` tokens are prepared in parallel: the updates of all tokens of a piece, which
depend on one another, are solved for at once. What remains to be done one piece after the other is matrix
products.

Shapes: T tokens, R requests, P pieces, L tokens of a piece, V value heads, H head_dim.
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl
from torch import Tensor

from ebbtide.srt.layers.kernels.convolution import OF_PROMPTS
from ebbtide.srt.layers.state import KEY_EPS, PIECE_TOKENS, StateStep

# Columns of a matrix per program, few enough to stay in registers. One token reads longer runs of memory with
# more columns; with few prompts, whose pieces run one after the other, fewer columns give more programs.
COLUMNS, PIECE_COLUMNS = 64, 32
NORM_ROWS = 16


def delta_rule(
    qkv_TC: Tensor,
    rates_TV: Tensor,
    decays_TV: Tensor,
    decay_log_V: Tensor,
    rate_bias_V: Tensor,
    matrices: Tensor,
    positions_T: Tensor,
    states: StateStep,
) -> Tensor:
    num_tokens, channels = qkv_TC.shape
    num_heads, k_dim, v_dim = matrices.shape[1:]
    k_size = (channels - num_heads * v_dim) // 2
    rates = (rates_TV, rates_TV.stride(0), decays_TV, decays_TV.stride(0), decay_log_V, rate_bias_V)
    held = (matrices, matrices.stride(0), states.slots_R, positions_T)
    out_TVH = torch.empty((num_tokens, num_heads, v_dim), dtype=qkv_TC.dtype, device=qkv_TC.device)
    sizes = {
        "K_SIZE": k_size,
        "HEADS": num_heads,
        "PER_KEY": num_heads * k_dim // k_size,
        "K_DIM": k_dim,
        "V_DIM": v_dim,
        "BLOCK_K": max(16, triton.next_power_of_2(k_dim)),
        "EPS": KEY_EPS,
    }
    if states.num_decoding:
        grid = (states.num_decoding, num_heads, triton.cdiv(v_dim, COLUMNS))
        _one_token[grid](qkv_TC, *rates, *held, out_TVH, BLOCK_V=COLUMNS, **sizes)
    if states.pieces_P3 is not None:
        assert states.indptr_P1 is not None
        keys_TVH = torch.empty((num_tokens, num_heads, k_dim), dtype=qkv_TC.dtype, device=qkv_TC.device)
        updates_TVH = torch.empty_like(out_TVH)
        totals_TV = torch.empty((num_tokens, num_heads), dtype=torch.float32, device=qkv_TC.device)
        precision = "ieee" if qkv_TC.dtype == torch.float32 else "tf32"
        _prepare_piece[(len(states.pieces_P3), num_heads)](
            qkv_TC,
            *rates,
            states.pieces_P3,
            keys_TVH,
            updates_TVH,
            totals_TV,
            TOKENS=PIECE_TOKENS,
            LEVELS=PIECE_TOKENS.bit_length() - 1,
            BLOCK_V=max(16, triton.next_power_of_2(v_dim)),
            PRECISION=precision,
            INVERSE_PRECISION="ieee" if precision == "ieee" else "tf32x3",
            num_warps=4,
            **sizes,
        )
        _pieces_in_order[(len(states.lens_P), num_heads, triton.cdiv(v_dim, PIECE_COLUMNS))](
            qkv_TC,
            keys_TVH,
            updates_TVH,
            totals_TV,
            *held,
            states.indptr_P1,
            states.num_decoding,
            out_TVH,
            TOKENS=PIECE_TOKENS,
            BLOCK_V=PIECE_COLUMNS,
            PRECISION=precision,
            num_warps=8,
            num_stages=1,
            **sizes,
        )
    return out_TVH


def gated_norm(heads_TVH: Tensor, gates_TVH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    num_tokens, num_heads, head_dim = heads_TVH.shape
    out_TVH = torch.empty_like(heads_TVH)
    num_rows = num_tokens * num_heads
    _gated_norm[(triton.cdiv(num_rows, NORM_ROWS),)](
        heads_TVH,
        gates_TVH,
        gates_TVH.stride(0),
        weight_H,
        out_TVH,
        num_rows,
        eps,
        HEADS=num_heads,
        DIM=head_dim,
        ROWS=NORM_ROWS,
        BLOCK=triton.next_power_of_2(head_dim),
    )
    return out_TVH


@triton.jit
def _rates(rate, decay, head, decay_log_ptr, rate_bias_ptr):  # type: ignore[no-untyped-def]
    """Compute β and g from their projections."""
    decay = decay.to(tl.float32) + tl.load(rate_bias_ptr + head)
    # Above 20, softplus(x) equals x in float32.
    decay = tl.where(decay > 20.0, decay, tl.log(1.0 + tl.exp(tl.minimum(decay, 20.0))))
    return tl.sigmoid(rate.to(tl.float32)), -tl.exp(tl.load(decay_log_ptr + head)) * decay


@triton.jit
def _one_token(  # type: ignore[no-untyped-def]
    qkv_ptr,
    rates_ptr,
    rates_stride,
    decays_ptr,
    decays_stride,
    decay_log_ptr,
    rate_bias_ptr,
    matrices_ptr,
    matrices_stride,
    slots_ptr,
    positions_ptr,
    out_ptr,
    K_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    PER_KEY: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    EPS: tl.constexpr,
) -> None:
    """Each program updates some columns of one head's matrix of one request, and computes their outputs."""
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = tl.arange(0, BLOCK_K)
    column = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_row, is_column = row < K_DIM, column < V_DIM
    token_ptr = qkv_ptr + request * (2 * K_SIZE + HEADS * V_DIM)
    key_ptr = token_ptr + head // PER_KEY * K_DIM + row
    q = tl.load(key_ptr, mask=is_row, other=0.0).to(tl.float32)
    k = tl.load(key_ptr + K_SIZE, mask=is_row, other=0.0).to(tl.float32)
    v = tl.load(token_ptr + 2 * K_SIZE + head * V_DIM + column, mask=is_column, other=0.0).to(tl.float32)
    q *= 1.0 / tl.sqrt((tl.sum(q * q) + EPS) * K_DIM)
    k *= 1.0 / tl.sqrt(tl.sum(k * k) + EPS)
    rate = tl.load(rates_ptr + request * rates_stride + head)
    decay = tl.load(decays_ptr + request * decays_stride + head)
    rate, decay = _rates(rate, decay, head, decay_log_ptr, rate_bias_ptr)
    matrix_ptr = matrices_ptr + tl.load(slots_ptr + request) * matrices_stride + head * K_DIM * V_DIM
    matrix_ptr += row[:, None] * V_DIM + column[None, :]
    inside = is_row[:, None] & is_column[None, :]
    held_rows = tl.where(tl.load(positions_ptr + request) > 0, K_DIM, 0)
    is_held = (row < held_rows)[:, None] & is_column[None, :]
    matrix = tl.load(matrix_ptr, mask=is_held, other=0.0) * tl.exp(decay)
    update = rate * (v - tl.sum(matrix * k[:, None], axis=0))
    matrix += k[:, None] * update[None, :]
    tl.store(matrix_ptr, matrix, mask=inside)
    out = tl.sum(matrix * q[:, None], axis=0)
    tl.store(out_ptr + (request * HEADS + head) * V_DIM + column, out, mask=is_column)


@triton.jit
def _unit_rows(ptr, inside, EPS: tl.constexpr, DIVISOR: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load rows, scaled to length 1 / sqrt(DIVISOR)."""
    x = tl.load(ptr, mask=inside, other=0.0).to(tl.float32)
    return x / tl.sqrt((tl.sum(x * x, axis=1) + EPS) * DIVISOR)[:, None]


@triton.jit
def _prepare_piece(  # type: ignore[no-untyped-def]
    qkv_ptr,
    rates_ptr,
    rates_stride,
    decays_ptr,
    decays_stride,
    decay_log_ptr,
    rate_bias_ptr,
    pieces_ptr,
    keys_ptr,
    updates_ptr,
    totals_ptr,
    K_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    PER_KEY: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TOKENS: tl.constexpr,
    LEVELS: tl.constexpr,
    EPS: tl.constexpr,
    PRECISION: tl.constexpr,
    INVERSE_PRECISION: tl.constexpr,
) -> None:
    """Each program solves one piece and head: the updates for a zero matrix, and keys' that correct them.

    With A as in the reference, the updates are (1 + A)⁻¹ β v, and keys' = (1 + A)⁻¹ β exp(g) k. For another
    matrix, keys' times it is subtracted. `totals` are the sums of g from the start of the piece.
    """
    piece_ptr = pieces_ptr + tl.program_id(0) * 3
    first, count = tl.load(piece_ptr).to(tl.int64), tl.load(piece_ptr + 1)
    head = tl.program_id(1)
    index = tl.arange(0, TOKENS)
    token, inside = first + index, index < count
    row, column = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    rate = tl.load(rates_ptr + token * rates_stride + head, mask=inside, other=0.0)
    decay = tl.load(decays_ptr + token * decays_stride + head, mask=inside, other=0.0)
    rate, decay = _rates(rate, decay, head, decay_log_ptr, rate_bias_ptr)
    total = tl.cumsum(tl.where(inside, decay, 0.0), axis=0)
    token_ptr = qkv_ptr + token[:, None] * (2 * K_SIZE + HEADS * V_DIM)
    is_key, is_value = inside[:, None] & (row < K_DIM)[None, :], inside[:, None] & (column < V_DIM)[None, :]
    k = _unit_rows(token_ptr + K_SIZE + head // PER_KEY * K_DIM + row[None, :], is_key, EPS, 1)
    v = tl.load(token_ptr + 2 * K_SIZE + head * V_DIM + column[None, :], mask=is_value, other=0.0)
    keys = k * rate[:, None]
    is_later = index[:, None] > index[None, :]
    since = tl.exp(tl.where(is_later, total[:, None] - total[None, :], 0.0))
    owed = tl.dot(keys, tl.trans(k), input_precision=PRECISION)
    owed = tl.where(is_later, owed * since, 0.0)
    # Compute (1 + A)⁻¹ by doubling the size of its blocks on the diagonal. Two neighbouring blocks become one
    # by filling in the part below the first and beside the second: −(second) A (first).
    solved = tl.where(index[:, None] == index[None, :], 1.0, 0.0)
    for level in range(LEVELS):
        below = tl.where((index[:, None] >> level) ^ (index[None, :] >> level) == 1, owed, 0.0)
        below = tl.dot(solved, below, input_precision=INVERSE_PRECISION)
        solved -= tl.dot(below, solved, input_precision=INVERSE_PRECISION)
    updates = tl.dot(solved, v.to(tl.float32) * rate[:, None], input_precision=PRECISION)
    keys = tl.dot(solved, keys * tl.exp(total)[:, None], input_precision=PRECISION)
    place = token[:, None] * HEADS + head
    tl.store(updates_ptr + place * V_DIM + column[None, :], updates, mask=is_value)
    tl.store(keys_ptr + place * K_DIM + row[None, :], keys, mask=is_key)
    tl.store(totals_ptr + token * HEADS + head, total, mask=inside)


@OF_PROMPTS
def _pieces_in_order(  # type: ignore[no-untyped-def]
    qkv_ptr,
    keys_ptr,
    updates_ptr,
    totals_ptr,
    matrices_ptr,
    matrices_stride,
    slots_ptr,
    positions_ptr,
    indptr_ptr,
    num_decoding,
    out_ptr,
    K_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    PER_KEY: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TOKENS: tl.constexpr,
    EPS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Each program handles some columns of one head and prompt: all outputs, and the last matrix."""
    prompt = tl.program_id(0)
    head = tl.program_id(1)
    first, end = tl.load(indptr_ptr + prompt), tl.load(indptr_ptr + prompt + 1)
    row = tl.arange(0, BLOCK_K)
    column = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    index = tl.arange(0, TOKENS)
    slot = tl.load(slots_ptr + num_decoding + prompt)
    matrix_ptr = matrices_ptr + slot * matrices_stride + head * K_DIM * V_DIM
    matrix_ptr += row[:, None] * V_DIM + column[None, :]
    held_rows = tl.where(tl.load(positions_ptr + first) > 0, K_DIM, 0)
    is_held = (row < held_rows)[:, None] & (column < V_DIM)[None, :]
    matrix = tl.load(matrix_ptr, mask=is_held, other=0.0)
    is_causal = index[:, None] >= index[None, :]
    # Products take this dtype and accumulate in float32, the dtype of the matrix.
    kind = qkv_ptr.dtype.element_ty
    for start in range(first, end, TOKENS):
        token = start + index.to(tl.int64)
        inside = token < end
        is_key, is_value = (
            inside[:, None] & (row < K_DIM)[None, :],
            inside[:, None] & (column < V_DIM)[None, :],
        )
        key_ptr = qkv_ptr + token[:, None] * (2 * K_SIZE + HEADS * V_DIM) + head // PER_KEY * K_DIM
        q = _unit_rows(key_ptr + row[None, :], is_key, EPS, K_DIM).to(kind)
        k = _unit_rows(key_ptr + K_SIZE + row[None, :], is_key, EPS, 1).to(kind)
        place = token[:, None] * HEADS + head
        keys = tl.load(keys_ptr + place * K_DIM + row[None, :], mask=is_key, other=0.0)
        updates = tl.load(updates_ptr + place * V_DIM + column[None, :], mask=is_value, other=0.0)
        total = tl.load(totals_ptr + token * HEADS + head, mask=inside, other=0.0)
        last = tl.load(totals_ptr + (tl.minimum(start + TOKENS, end) - 1) * HEADS + head)
        held = matrix.to(kind)
        updates = updates.to(tl.float32) - tl.dot(keys, held, input_precision=PRECISION)
        out = tl.dot(q, held, input_precision=PRECISION) * tl.exp(total)[:, None]
        since = tl.exp(tl.where(is_causal, total[:, None] - total[None, :], 0.0))
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        scores = tl.where(is_causal, scores * since, 0.0).to(kind)
        out += tl.dot(scores, updates.to(kind), input_precision=PRECISION)
        tl.store(out_ptr + place * V_DIM + column[None, :], out, mask=is_value)
        # The share of each update that is left at the end of the piece.
        updates *= tl.exp(tl.where(inside, last - total, 0.0))[:, None]
        matrix = matrix * tl.exp(last) + tl.dot(tl.trans(k), updates.to(kind), input_precision=PRECISION)
    tl.store(matrix_ptr, matrix, mask=(row < K_DIM)[:, None] & (column < V_DIM)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _gated_norm(  # type: ignore[no-untyped-def]
    x_ptr,
    gates_ptr,
    gates_stride,
    weight_ptr,
    out_ptr,
    num_rows,
    eps,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (column < DIM)[None, :]
    x = tl.load(x_ptr + row[:, None] * DIM + column[None, :], mask=inside, other=0.0).to(tl.float32)
    gate_ptr = gates_ptr + (row // HEADS)[:, None] * gates_stride + (row % HEADS)[:, None] * DIM
    gate = tl.load(gate_ptr + column[None, :], mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < DIM, other=0.0).to(tl.float32)
    x *= (1.0 / tl.sqrt(tl.sum(x * x, axis=1) / DIM + eps))[:, None] * weight[None, :]
    tl.store(out_ptr + row[:, None] * DIM + column[None, :], x * gate * tl.sigmoid(gate), mask=inside)
