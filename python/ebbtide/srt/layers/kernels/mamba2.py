"""The scan of Mamba-2, and its norm. `layers.state` defines what each computes.

For one token, a program reads some rows of a request's matrix, updates them and writes them back. For a
prompt, a program processes pieces of `PIECE_TOKENS` tokens one after the other: within a piece everything is
matrix products, and the matrix stays in registers between pieces.

Shapes: T tokens, R requests, C channels, L tokens of a piece, N heads, H head_dim, S state_size, G groups.
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl
from torch import Tensor

from ebbtide.srt.layers.kernels.convolution import OF_PROMPTS
from ebbtide.srt.layers.state import PIECE_TOKENS, StateStep

# Rows of a matrix per program: few enough to stay in registers, and for few requests to fill a GPU.
ROWS = 32


def selective_scan(
    xbc_TC: Tensor,
    steps_TN: Tensor,
    decay_log_N: Tensor,
    step_bias_N: Tensor,
    skip_N: Tensor,
    matrices: Tensor,
    positions_T: Tensor,
    states: StateStep,
) -> Tensor:
    num_heads, head_dim, state_size = matrices.shape[1:]
    num_tokens, channels = xbc_TC.shape
    of_groups = (channels - num_heads * head_dim) // 2
    out_TNH = torch.empty((num_tokens, num_heads, head_dim), dtype=xbc_TC.dtype, device=xbc_TC.device)
    steps = (steps_TN, steps_TN.stride(0), decay_log_N, step_bias_N, skip_N)
    held = (matrices, matrices.stride(0), states.slots_R, positions_T)
    sizes = {
        "CHANNELS": channels,
        "OF_GROUPS": of_groups,
        "HEADS": num_heads,
        "PER_GROUP": num_heads * state_size // of_groups,
        "HEAD_DIM": head_dim,
        "STATE": state_size,
        "BLOCK_H": ROWS,
        "BLOCK_S": max(16, triton.next_power_of_2(state_size)),
    }
    blocks = triton.cdiv(head_dim, ROWS)
    if states.num_decoding:
        _one_token[(states.num_decoding, num_heads, blocks)](xbc_TC, *steps, *held, out_TNH, **sizes)
    if states.indptr_P1 is not None and states.lens_P:
        _pieces_in_order[(len(states.lens_P), num_heads, blocks)](
            xbc_TC,
            *steps,
            *held,
            states.indptr_P1,
            states.num_decoding,
            out_TNH,
            TOKENS=PIECE_TOKENS,
            PRECISION="ieee" if xbc_TC.dtype == torch.float32 else "tf32",
            num_warps=8,
            num_stages=1,
            **sizes,
        )
    return out_TNH


def gated_group_norm(x_TC: Tensor, gates_TC: Tensor, weight_C: Tensor, num_groups: int, eps: float) -> Tensor:
    num_tokens, channels = x_TC.shape
    out_TC = torch.empty_like(x_TC)
    size = channels // num_groups
    _gated_group_norm[(num_tokens, num_groups)](
        x_TC,
        gates_TC,
        gates_TC.stride(0),
        weight_C,
        out_TC,
        eps,
        CHANNELS=channels,
        SIZE=size,
        BLOCK=triton.next_power_of_2(size),
        num_warps=4,
    )
    return out_TC


@triton.jit
def _time_step(step, head, step_bias_ptr):  # type: ignore[no-untyped-def]
    """The time step softplus(step + bias)."""
    step = step.to(tl.float32) + tl.load(step_bias_ptr + head)
    # Above 20, softplus(x) equals x in float32.
    return tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0))))


@triton.jit
def _one_token(  # type: ignore[no-untyped-def]
    xbc_ptr,
    steps_ptr,
    steps_stride,
    decay_log_ptr,
    step_bias_ptr,
    skip_ptr,
    matrices_ptr,
    matrices_stride,
    slots_ptr,
    positions_ptr,
    out_ptr,
    CHANNELS: tl.constexpr,
    OF_GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_S: tl.constexpr,
) -> None:
    """Each program updates some rows of one head's matrix of one request, and computes their outputs."""
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row, column = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_S)
    is_row, is_column = row < HEAD_DIM, column < STATE
    token_ptr = xbc_ptr + request * CHANNELS
    x = tl.load(token_ptr + head * HEAD_DIM + row, mask=is_row, other=0.0).to(tl.float32)
    vector_ptr = token_ptr + HEADS * HEAD_DIM + head // PER_GROUP * STATE + column
    b = tl.load(vector_ptr, mask=is_column, other=0.0).to(tl.float32)
    c = tl.load(vector_ptr + OF_GROUPS, mask=is_column, other=0.0).to(tl.float32)
    step = _time_step(tl.load(steps_ptr + request * steps_stride + head), head, step_bias_ptr)
    decay = tl.exp(-tl.exp(tl.load(decay_log_ptr + head)) * step)
    matrix_ptr = matrices_ptr + tl.load(slots_ptr + request) * matrices_stride + head * HEAD_DIM * STATE
    matrix_ptr += row[:, None] * STATE + column[None, :]
    held_rows = tl.where(tl.load(positions_ptr + request) > 0, HEAD_DIM, 0)
    is_held = (row < held_rows)[:, None] & is_column[None, :]
    matrix = tl.load(matrix_ptr, mask=is_held, other=0.0) * decay + (x * step)[:, None] * b[None, :]
    tl.store(matrix_ptr, matrix, mask=is_row[:, None] & is_column[None, :])
    out = tl.sum(matrix * c[None, :], axis=1) + tl.load(skip_ptr + head) * x
    tl.store(out_ptr + (request * HEADS + head) * HEAD_DIM + row, out, mask=is_row)


@OF_PROMPTS
def _pieces_in_order(  # type: ignore[no-untyped-def]
    xbc_ptr,
    steps_ptr,
    steps_stride,
    decay_log_ptr,
    step_bias_ptr,
    skip_ptr,
    matrices_ptr,
    matrices_stride,
    slots_ptr,
    positions_ptr,
    indptr_ptr,
    num_decoding,
    out_ptr,
    CHANNELS: tl.constexpr,
    OF_GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_S: tl.constexpr,
    TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """Each program handles some rows of one head and one prompt: outputs of all pieces, and the last matrix.

    It holds the matrix transposed.
    """
    prompt = tl.program_id(0)
    head = tl.program_id(1)
    first, end = tl.load(indptr_ptr + prompt), tl.load(indptr_ptr + prompt + 1)
    row, column = tl.program_id(2) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_S)
    index = tl.arange(0, TOKENS)
    slot = tl.load(slots_ptr + num_decoding + prompt)
    matrix_ptr = matrices_ptr + slot * matrices_stride + head * HEAD_DIM * STATE
    matrix_ptr += column[:, None] + row[None, :] * STATE
    held_rows = tl.where(tl.load(positions_ptr + first) > 0, HEAD_DIM, 0)
    is_held = (column < STATE)[:, None] & (row < held_rows)[None, :]
    matrix = tl.load(matrix_ptr, mask=is_held, other=0.0)
    is_causal = index[:, None] >= index[None, :]
    rate, skip = -tl.exp(tl.load(decay_log_ptr + head)), tl.load(skip_ptr + head)
    # Products take this dtype and accumulate in float32, the dtype of the matrix.
    kind = xbc_ptr.dtype.element_ty
    for start in range(first, end, TOKENS):
        token = start + index.to(tl.int64)
        inside = token < end
        is_x = inside[:, None] & (row < HEAD_DIM)[None, :]
        is_vector = inside[:, None] & (column < STATE)[None, :]
        token_ptr = xbc_ptr + token[:, None] * CHANNELS
        x = tl.load(token_ptr + head * HEAD_DIM + row[None, :], mask=is_x, other=0.0)
        vector_ptr = token_ptr + HEADS * HEAD_DIM + head // PER_GROUP * STATE + column[None, :]
        b = tl.load(vector_ptr, mask=is_vector, other=0.0)
        c = tl.load(vector_ptr + OF_GROUPS, mask=is_vector, other=0.0)
        step = tl.load(steps_ptr + token * steps_stride + head, mask=inside, other=0.0)
        # A step of 0 leaves the matrix as it is, for lanes after the end of the prompt.
        step = tl.where(inside, _time_step(step, head, step_bias_ptr), 0.0)
        total = tl.cumsum(rate * step, axis=0)
        last = tl.sum(rate * step, axis=0)
        out = tl.dot(c, matrix.to(kind), input_precision=PRECISION) * tl.exp(total)[:, None]
        since = tl.exp(tl.where(is_causal, total[:, None] - total[None, :], 0.0)) * step[None, :]
        scores = tl.dot(c, tl.trans(b), input_precision=PRECISION)
        scores = tl.where(is_causal, scores * since, 0.0).to(kind)
        out += tl.dot(scores, x, input_precision=PRECISION) + skip * x.to(tl.float32)
        tl.store(out_ptr + (token[:, None] * HEADS + head) * HEAD_DIM + row[None, :], out, mask=is_x)
        # The share of each token's b that is left at the end of the piece.
        kept = (b.to(tl.float32) * (tl.exp(last - total) * step)[:, None]).to(kind)
        matrix = matrix * tl.exp(last) + tl.dot(tl.trans(kept), x, input_precision=PRECISION)
    tl.store(matrix_ptr, matrix, mask=(column < STATE)[:, None] & (row < HEAD_DIM)[None, :])


@triton.jit
def _gated_group_norm(  # type: ignore[no-untyped-def]
    x_ptr,
    gates_ptr,
    gates_stride,
    weight_ptr,
    out_ptr,
    eps,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * SIZE + tl.arange(0, BLOCK)
    inside = tl.arange(0, BLOCK) < SIZE
    x = tl.load(x_ptr + token * CHANNELS + channel, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gates_ptr + token * gates_stride + channel, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    x *= gate * tl.sigmoid(gate)
    x *= 1.0 / tl.sqrt(tl.sum(x * x) / SIZE + eps)
    tl.store(out_ptr + token * CHANNELS + channel, x * weight, mask=inside)
