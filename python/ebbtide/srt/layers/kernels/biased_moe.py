"""Experts with biases and a clamped gate, as in gpt-oss.

Weights are in the layout of its checkpoints: inputs are rows, outputs are columns, and gate and up of each
inner number are neighbours. Few tokens use Triton kernels, the second of which is that of `few_token_moe`
with a transposed weight. More tokens use torch's grouped products of slots, sorted by expert.

Shapes: T tokens, D hidden, E experts, K experts per token, I an expert's inner size, S = T·K slots, R = 2·I.
Kernels call D and I `HIDDEN` and `INNER`.
"""

# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import grouped_mm

from ebbtide.srt.layers.heads import BiasedWeights, Clamp, RoutedTokens
from ebbtide.srt.layers.kernels.few_token_moe import down_few_
from ebbtide.srt.layers.kernels.instructions import follow
from ebbtide.srt.layers.kernels.launch import compute_capability, overlap_options
from ebbtide.srt.layers.kernels.tiles import FEW_TOKENS, Tile

# The best of those tried on an H100.
_GATE_UP, _DOWN = Tile(32, 128, 8, 1), Tile(16, 512, 8, 1)
_COLUMNS = 1024
# The largest second dimension of a grid.
_MAX_SLOTS = 65_535
# The first generation on which torch's grouped products do not wait for the host.
_HOPPER = (9, 0)


def fused_biased_experts(
    tokens: RoutedTokens, weights: BiasedWeights, clamp: Clamp, residual_TD: Tensor | None = None
) -> Tensor:
    """The weighted sum [T, D] of each token's experts.

    Args:
        residual_TD: the sum is added to it in place, and it is returned; None: a new tensor is returned.
    """
    x_TD = tokens.x_TD
    is_grouped = x_TD.dtype == torch.bfloat16 and compute_capability(x_TD.device) >= _HOPPER
    run = by_groups if len(x_TD) > FEW_TOKENS and is_grouped else one_by_one
    return run(tokens, weights, clamp, residual_TD)


def one_by_one(
    tokens: RoutedTokens, weights: BiasedWeights, clamp: Clamp, residual_TD: Tensor | None = None
) -> Tensor:
    """Compute it with kernels in which each token reads its experts' weights; for any dtype, on any GPU."""
    x_TD, weights_TK, experts_TK = tokens
    gate_up_EDR, gate_up_bias_ER, down_EID, down_bias_ED = weights
    inner, hidden = down_EID.shape[1:]
    top_k = experts_TK.shape[1]
    out_TD = x_TD.new_empty(x_TD.shape) if residual_TD is None else residual_TD
    num_rows = _MAX_SLOTS // top_k
    pieces = (torch.split(each, num_rows) for each in (x_TD, out_TD, weights_TK, experts_TK))
    for x, out, of_x, experts in zip(*pieces, strict=True):
        inner_SI = x.new_empty((experts.numel(), inner))
        _gate_up_kernel[(triton.cdiv(inner, _GATE_UP.rows), experts.numel())](
            x,
            gate_up_EDR,
            gate_up_bias_ER,
            inner_SI,
            experts,
            *clamp,
            HIDDEN=hidden,
            INNER=inner,
            TOP_K=top_k,
            ROWS=_GATE_UP.rows,
            STEP=_GATE_UP.step,
            num_warps=_GATE_UP.num_warps,
            **overlap_options(x),
        )
        piece, add = RoutedTokens(x, of_x, experts), residual_TD is not None
        down_few_(out, inner_SI, down_EID, down_bias_ED, piece, _DOWN, add=add, is_transposed=True)
    return out_TD


def by_groups(
    tokens: RoutedTokens, weights: BiasedWeights, clamp: Clamp, residual_TD: Tensor | None = None
) -> Tensor:
    """Compute it with torch's grouped products of sorted slots."""
    x_TD, weights_TK, experts_TK = tokens
    gate_up_EDR, gate_up_bias_ER, down_EID, down_bias_ED = weights
    num_experts, inner, hidden = down_EID.shape
    num_slots, top_k = experts_TK.numel(), experts_TK.shape[1]
    sorted_S, order_S = experts_TK.flatten().sort(stable=True)
    numbers_E = torch.arange(num_experts, dtype=sorted_S.dtype, device=x_TD.device)
    ends_E = torch.searchsorted(sorted_S, numbers_E, right=True, out_int32=True)
    slots_S = torch.arange(num_slots, device=x_TD.device)
    place_S = torch.empty_like(slots_S).scatter_(0, order_S, slots_S)
    gate_up_SR = grouped_mm(x_TD[order_S // top_k], gate_up_EDR, offs=ends_E)
    inner_SI = x_TD.new_empty((num_slots, inner))
    columns = min(_COLUMNS, triton.next_power_of_2(inner))
    _gate_kernel[(num_slots, triton.cdiv(inner, columns))](
        gate_up_SR,
        gate_up_bias_ER,
        sorted_S,
        inner_SI,
        *clamp,
        INNER=inner,
        COLUMNS=columns,
        num_warps=4,
        **overlap_options(x_TD),
    )
    out_SD = grouped_mm(inner_SI, down_EID, offs=ends_E)
    out_TD = x_TD.new_empty(x_TD.shape) if residual_TD is None else residual_TD
    _sum_kernel[(len(x_TD), triton.cdiv(hidden, _COLUMNS))](
        out_SD,
        place_S,
        weights_TK,
        experts_TK,
        down_bias_ED,
        out_TD,
        HIDDEN=hidden,
        TOP_K=top_k,
        COLUMNS=_COLUMNS,
        ADD=residual_TD is not None,
        num_warps=4,
        **overlap_options(x_TD),
    )
    return out_TD


@triton.jit
def _gated(gate, up, slope, limit):  # type: ignore[no-untyped-def]
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    return gate * tl.sigmoid(slope * gate) * (up + 1.0)


@triton.jit
def _gate_up_kernel(  # type: ignore[no-untyped-def]
    x_TD,
    gate_up_EDR,
    bias_ER,
    inner_SI,
    experts_S,
    slope,
    limit,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Each program computes ROWS inner numbers of one slot. The next tile is loaded ahead."""
    follow(OVERLAPPED)
    slot = tl.program_id(1)
    outputs = tl.program_id(0) * (2 * ROWS) + tl.arange(0, 2 * ROWS)
    inside = outputs < 2 * INNER
    steps = tl.arange(0, STEP)
    expert = tl.load(experts_S + slot).to(tl.int64)
    tile = gate_up_EDR + expert * (2 * INNER * HIDDEN) + steps[:, None] * (2 * INNER) + outputs[None, :]
    x_at = x_TD + (slot // TOP_K).to(tl.int64) * HIDDEN + steps
    ahead = tl.load(tile, mask=(steps < HIDDEN)[:, None] & inside[None, :], other=0.0)
    total = tl.zeros((STEP, 2 * ROWS), tl.float32)
    for start in range(0, HIDDEN, STEP):
        weight = ahead
        wanted = (start + STEP + steps < HIDDEN)[:, None] & inside[None, :]
        ahead = tl.load(tile + (start + STEP) * (2 * INNER), mask=wanted, other=0.0)
        x = tl.load(x_at + start, mask=start + steps < HIDDEN, other=0.0).to(tl.float32)
        total += weight.to(tl.float32) * x[:, None]
    product = tl.sum(total, axis=0)
    product += tl.load(bias_ER + expert * (2 * INNER) + outputs, mask=inside, other=0.0).to(tl.float32)
    gate, up = tl.split(tl.reshape(product, (ROWS, 2)))
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    value = _gated(gate, up, slope, limit)
    tl.store(
        inner_SI + slot.to(tl.int64) * INNER + rows, value.to(inner_SI.dtype.element_ty), mask=rows < INNER
    )


@triton.jit
def _gate_kernel(  # type: ignore[no-untyped-def]
    gate_up_SR,
    bias_ER,
    experts_S,
    inner_SI,
    slope,
    limit,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Each program adds biases to and gates COLUMNS inner numbers of one slot."""
    follow(OVERLAPPED)
    slot = tl.program_id(0).to(tl.int64)
    outputs = tl.program_id(1) * (2 * COLUMNS) + tl.arange(0, 2 * COLUMNS)
    inside = outputs < 2 * INNER
    expert = tl.load(experts_S + slot).to(tl.int64)
    product = tl.load(gate_up_SR + slot * (2 * INNER) + outputs, mask=inside, other=0.0).to(tl.float32)
    product += tl.load(bias_ER + expert * (2 * INNER) + outputs, mask=inside, other=0.0).to(tl.float32)
    gate, up = tl.split(tl.reshape(product, (COLUMNS, 2)))
    rows = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    value = _gated(gate, up, slope, limit).to(inner_SI.dtype.element_ty)
    tl.store(inner_SI + slot * INNER + rows, value, mask=rows < INNER)


@triton.jit
def _sum_kernel(  # type: ignore[no-untyped-def]
    out_SD,
    place_S,
    weights_S,
    experts_S,
    bias_ED,
    out_TD,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    ADD: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Each program sums some columns of one token's weighted outputs, with their biases."""
    follow(OVERLAPPED)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < HIDDEN
    total = tl.zeros((COLUMNS,), tl.float32)
    for pick in tl.static_range(TOP_K):
        slot = token * TOP_K + pick
        place = tl.load(place_S + slot)
        value = tl.load(out_SD + place * HIDDEN + columns, mask=inside, other=0.0).to(tl.float32)
        if bias_ED is not None:
            bias_at = bias_ED + tl.load(experts_S + slot).to(tl.int64) * HIDDEN + columns
            value += tl.load(bias_at, mask=inside, other=0.0).to(tl.float32)
        total += value * tl.load(weights_S + slot)
    at = out_TD + token * HIDDEN + columns
    if ADD:
        total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, total.to(out_TD.dtype.element_ty), mask=inside)
