"""Experts for so few tokens that hardly two share an expert: each token reads its experts' weights by itself.

Partial sums stay per column, in float32, until the end, and the next tile is loaded while one is multiplied.
The second kernel includes the weighted sum over a token's experts, and the residual. `fp8.moe` has the
kernels for 8-bit weights.

Shapes: T tokens, D hidden, K experts per token, I an expert's inner size, S = T·K slots, R rows of a weight.
"""

# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl
from torch import Tensor

from ebbtide.srt.layers.heads import RoutedTokens
from ebbtide.srt.layers.kernels.instructions import follow
from ebbtide.srt.layers.kernels.launch import overlap_options
from ebbtide.srt.layers.kernels.tiles import Plan, Tile


def few_tokens_(
    out_TD: Tensor, tokens: RoutedTokens, gate_up_RD: Tensor, down_RI: Tensor, plan: Plan, *, add: bool
) -> None:
    """Write the weighted sum of each token's experts into `out_TD`, or add it. Arguments: see `fused_moe`."""
    x_TD, _, experts_TK = tokens
    hidden, inner, top_k = x_TD.shape[1], down_RI.shape[1], experts_TK.shape[1]
    inner_SI = x_TD.new_empty((experts_TK.numel(), inner))
    gate_up = plan.gate_up
    _gate_up_kernel[(triton.cdiv(inner, gate_up.rows), experts_TK.numel())](
        x_TD,
        gate_up_RD,
        inner_SI,
        experts_TK,
        HIDDEN=hidden,
        INNER=inner,
        GATED=len(gate_up_RD) * hidden > inner * len(down_RI),
        TOP_K=top_k,
        ROWS=gate_up.rows,
        STEP=gate_up.step,
        num_warps=gate_up.num_warps,
        **overlap_options(x_TD),
    )
    down_few_(out_TD, inner_SI, down_RI, None, tokens, plan.down, add=add)


def down_few_(
    out_TD: Tensor,
    inner_SI: Tensor,
    down: Tensor,
    bias_R: Tensor | None,
    tokens: RoutedTokens,
    tile: Tile,
    *,
    add: bool,
    is_transposed: bool = False,
) -> None:
    """Compute the second product of `few_tokens_`. `down`: [E·D, I], or [E, I, D] if it is transposed."""
    (num_tokens, hidden), inner = out_TD.shape, inner_SI.shape[1]
    _down_kernel[(triton.cdiv(hidden, tile.rows), num_tokens)](
        inner_SI,
        down,
        bias_R,
        out_TD,
        tokens.weights_TK,
        tokens.experts_TK,
        HIDDEN=hidden,
        INNER=inner,
        ROW_STEP=1 if is_transposed else inner,
        COLUMN_STEP=hidden if is_transposed else 1,
        TOP_K=tokens.experts_TK.shape[1],
        ROWS=tile.rows,
        STEP=tile.step,
        ADD=add,
        num_warps=tile.num_warps,
        **overlap_options(inner_SI),
    )


@triton.jit
def inner_of(gate, up, GATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """silu(gate) · up, or without gates relu(up)²."""
    if GATED:
        return gate * tl.sigmoid(gate) * up
    up = tl.maximum(up, 0.0)
    return up * up


@triton.jit
def _gate_up_kernel(  # type: ignore[no-untyped-def]
    x_TD,
    gate_up_RD,
    inner_SI,
    experts_S,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    GATED: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Each program computes some columns of `inner_of` for one slot."""
    follow(OVERLAPPED)
    PER_INNER: tl.constexpr = 2 if GATED else 1
    slot = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, STEP)
    expert = tl.load(experts_S + slot).to(tl.int64)
    tile = gate_up_RD + expert * (PER_INNER * INNER * HIDDEN) + rows[:, None] * HIDDEN + columns[None, :]
    up_tile = tile + (PER_INNER - 1) * INNER * HIDDEN
    x_at = x_TD + (slot // TOP_K).to(tl.int64) * HIDDEN + columns
    inside = (rows < INNER)[:, None]
    wanted = inside & (columns < HIDDEN)[None, :]
    up_next = tl.load(up_tile, mask=wanted, other=0.0)
    gate_next = up_next
    if GATED:
        gate_next = tl.load(tile, mask=wanted, other=0.0)
    gate = tl.zeros((ROWS, STEP), tl.float32)
    up = tl.zeros((ROWS, STEP), tl.float32)
    for start in range(0, HIDDEN, STEP):
        gate_weight, up_weight = gate_next, up_next
        wanted = inside & (start + STEP + columns < HIDDEN)[None, :]
        if GATED:
            gate_next = tl.load(tile + start + STEP, mask=wanted, other=0.0)
        up_next = tl.load(up_tile + start + STEP, mask=wanted, other=0.0)
        x = tl.load(x_at + start, mask=start + columns < HIDDEN, other=0.0).to(tl.float32)[None, :]
        if GATED:
            gate += gate_weight.to(tl.float32) * x
        up += up_weight.to(tl.float32) * x
    value = inner_of(tl.sum(gate, axis=1), tl.sum(up, axis=1), GATED)
    at = inner_SI + slot.to(tl.int64) * INNER + rows
    tl.store(at, value.to(inner_SI.dtype.element_ty), mask=rows < INNER)


@triton.jit
def _down_kernel(  # type: ignore[no-untyped-def]
    inner_SI,
    down_RI,
    bias_R,
    out_TD,
    weights_S,
    experts_S,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    ROW_STEP: tl.constexpr,
    COLUMN_STEP: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    ADD: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Each program computes some columns of one token's output."""
    STEPS: tl.constexpr = (INNER + STEP - 1) // STEP
    token = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, STEP)
    inside = (rows < HIDDEN)[:, None]
    tile = down_RI + rows[:, None] * ROW_STEP + columns[None, :] * COLUMN_STEP
    first_slot = token * TOP_K
    # These may be read early: experts were chosen before the previous kernel, which only computes `inner_SI`.
    expert = tl.load(experts_S + first_slot).to(tl.int64)
    ahead = tl.load(tile + expert * (HIDDEN * INNER), mask=inside & (columns < INNER)[None, :], other=0.0)
    follow(OVERLAPPED)
    total = tl.zeros((ROWS, STEP), tl.float32)
    for number in range(TOP_K * STEPS):
        slot, start = first_slot + number // STEPS, number % STEPS * STEP
        weight = ahead
        after = number + 1
        next_start = after % STEPS * STEP
        is_there = after < TOP_K * STEPS
        next_expert = tl.load(experts_S + first_slot + after // STEPS, mask=is_there, other=0).to(tl.int64)
        # A comparison of tensors, since Triton's interpreter takes no Python number as a side of `&`.
        is_ahead = tl.zeros_like(columns) < TOP_K * STEPS - after
        wanted = inside & ((next_start + columns < INNER) & is_ahead)[None, :]
        next_tile = tile + next_expert * (HIDDEN * INNER) + next_start * COLUMN_STEP
        ahead = tl.load(next_tile, mask=wanted, other=0.0)
        value = tl.load(
            inner_SI + slot.to(tl.int64) * INNER + start + columns, mask=start + columns < INNER, other=0.0
        ).to(tl.float32)
        total += weight.to(tl.float32) * (value * tl.load(weights_S + slot))[None, :]
    product = tl.sum(total, axis=1)
    if bias_R is not None:
        for pick in tl.static_range(TOP_K):
            bias_at = bias_R + tl.load(experts_S + first_slot + pick).to(tl.int64) * HIDDEN + rows
            bias = tl.load(bias_at, mask=rows < HIDDEN, other=0.0).to(tl.float32)
            product += bias * tl.load(weights_S + first_slot + pick)
    at = out_TD + token.to(tl.int64) * HIDDEN + rows
    if ADD:
        product += tl.load(at, mask=rows < HIDDEN, other=0.0).to(tl.float32)
    tl.store(at, product.to(out_TD.dtype.element_ty), mask=rows < HIDDEN)
