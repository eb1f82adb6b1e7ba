"""Experts with biases and a clamped gate, as gpt-oss has them, in Triton: see `fused_moe`.

Weights lie as in its checkpoints: inputs are rows and outputs columns, gate and up of each inner number side
by side. A tile of the first product has both; they are told apart when the product is done. The second one
is for few tokens that of `few_token_moe`, read the other way.

Shapes: T tokens, D hidden, E experts, K experts per token, I an expert's inner size, S = T·K slots, R = 2·I.
Kernels call D and I `HIDDEN` and `INNER`.
"""

# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import grouped_mm

from ebbtide.srt.layers.kernels.few_token_moe import down_few_
from ebbtide.srt.layers.kernels.fused_moe import add_up_, tile_options
from ebbtide.srt.layers.kernels.launch import overlap_options
from ebbtide.srt.layers.kernels.moe_routing import follow, list_slots
from ebbtide.srt.layers.kernels.tiles import Layer, Plan, choose_plan

# Blocks of one expert that read a part of its weights one after another, while it is in the cache; blocks of
# so few tokens have none of their kind.
_GROUP, _GROUPED_FROM = 8, 64
_COLUMNS = 1024


def fused_biased_experts(
    x_TD: Tensor,
    gate_up_EDR: Tensor,
    gate_up_bias_ER: Tensor,
    down_EID: Tensor,
    down_bias_ED: Tensor | None,
    weights_TK: Tensor,
    experts_TK: Tensor,
    slope: float,
    limit: float,
    plan: Plan | None = None,
    residual_TD: Tensor | None = None,
) -> Tensor:
    """The weighted sum [T, D] of each token's experts.

    Args:
        x_TD: contiguous; no two of a token's experts may be the same one.
        gate_up_EDR, gate_up_bias_ER, down_EID, down_bias_ED: as `BiasedWeights` has them.
        weights_TK, experts_TK: from `route`.
        slope, limit: of the gate, see `Clamp`.
        plan: None for `choose_plan`'s.
        residual_TD: what the sum is added to, in place, and returned; None for a tensor of its own.
    """
    num_experts, inner, hidden = down_EID.shape
    num_slots, top_k = experts_TK.numel(), experts_TK.shape[1]
    layer = Layer(num_experts, top_k, hidden, inner, is_transposed=True)
    plan = plan or choose_plan(len(x_TD), layer, x_TD.dtype, x_TD.device)
    out_TD = x_TD.new_empty(x_TD.shape) if residual_TD is None else residual_TD
    inner_SI, tile, add = x_TD.new_empty((num_slots, inner)), plan.gate_up, residual_TD is not None
    if plan.block_tokens == 1:
        _gate_up_few_kernel[(triton.cdiv(inner, tile.rows), num_slots)](
            x_TD,
            gate_up_EDR,
            gate_up_bias_ER,
            inner_SI,
            experts_TK,
            slope,
            limit,
            HIDDEN=hidden,
            INNER=inner,
            TOP_K=top_k,
            **tile_options(tile),
            **overlap_options(x_TD),
        )
        chosen = (weights_TK, experts_TK)
        down_few_(out_TD, inner_SI, down_EID, down_bias_ED, *chosen, plan.down, add=add, is_transposed=True)
        return out_TD
    out_SD = _by_blocks(
        x_TD,
        (gate_up_EDR, gate_up_bias_ER, down_EID, down_bias_ED),
        inner_SI,
        weights_TK,
        experts_TK,
        slope,
        limit,
        plan,
    )
    add_up_(out_TD, out_SD, add=add)
    return out_TD


def _by_blocks(
    x_TD: Tensor,
    experts: tuple[Tensor, Tensor, Tensor, Tensor | None],
    inner_SI: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    slope: float,
    limit: float,
    plan: Plan,
) -> Tensor:
    """The weighted outputs of each token's experts, [S, D]."""
    gate_up_EDR, gate_up_bias_ER, down_EID, down_bias_ED = experts
    num_experts, inner, hidden = down_EID.shape
    blocks = list_slots(experts_TK, num_experts, plan.block_tokens)
    listed = (blocks.experts, blocks.slots, experts_TK.numel(), blocks.number)
    constants: dict[str, Any] = {"HIDDEN": hidden, "INNER": inner, "BLOCK_T": plan.block_tokens}
    constants |= {"GROUP": _GROUP if plan.block_tokens >= _GROUPED_FROM else 1} | overlap_options(x_TD)
    groups = triton.cdiv(blocks.number, constants["GROUP"]) * constants["GROUP"]
    _gate_up_kernel[(groups * triton.cdiv(inner, plan.gate_up.rows),)](
        x_TD,
        gate_up_EDR,
        gate_up_bias_ER,
        inner_SI,
        *listed,
        slope,
        limit,
        TOP_K=experts_TK.shape[1],
        **constants,
        **tile_options(plan.gate_up),
    )
    out_SD = x_TD.new_empty((len(inner_SI), hidden))
    _down_kernel[(groups * triton.cdiv(hidden, plan.down.rows),)](
        inner_SI,
        down_EID,
        down_bias_ED,
        out_SD,
        weights_TK,
        *listed,
        **constants,
        **tile_options(plan.down),
    )
    return out_SD


def by_groups(
    x_TD: Tensor,
    gate_up_EDR: Tensor,
    gate_up_bias_ER: Tensor,
    down_EID: Tensor,
    down_bias_ED: Tensor | None,
    weights_TK: Tensor,
    experts_TK: Tensor,
    slope: float,
    limit: float,
    residual_TD: Tensor | None = None,
) -> Tensor:
    """What `fused_biased_experts` computes, by torch's grouped products of sorted slots."""
    num_experts, inner, hidden = down_EID.shape
    num_slots, top_k = experts_TK.numel(), experts_TK.shape[1]
    sorted_S, order_S = experts_TK.flatten().sort(stable=True)
    numbers_E = torch.arange(num_experts, dtype=sorted_S.dtype, device=x_TD.device)
    ends_E = torch.searchsorted(sorted_S, numbers_E, right=True, out_int32=True)
    place_S = torch.empty_like(order_S)
    place_S[order_S] = torch.arange(num_slots, device=x_TD.device)
    gate_up_SR = grouped_mm(x_TD[order_S // top_k], gate_up_EDR, offs=ends_E)
    inner_SI = x_TD.new_empty((num_slots, inner))
    columns = min(_COLUMNS, triton.next_power_of_2(inner))
    _gate_kernel[(num_slots, triton.cdiv(inner, columns))](
        gate_up_SR,
        gate_up_bias_ER,
        sorted_S,
        inner_SI,
        slope,
        limit,
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
    """COLUMNS inner numbers of one slot."""
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
    """Some columns of one token: its experts' outputs with their biases, weighted."""
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


@triton.jit
def _gated(gate, up, slope, limit):  # type: ignore[no-untyped-def]
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    return gate * tl.sigmoid(slope * gate) * (up + 1.0)


@triton.jit
def _gate_up_few_kernel(  # type: ignore[no-untyped-def]
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
    """The gated product of one slot, ROWS inner numbers of it; the next tile is read ahead."""
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
def _place(num_parts, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """The block of a program, and the part of its outputs; programs of neighbours read a part together."""
    program = tl.program_id(0)
    in_group = program % (GROUP * num_parts)
    return program // (GROUP * num_parts) * GROUP + in_group % GROUP, in_group // GROUP


@triton.jit(do_not_specialize=["num_slots", "num_blocks"])
def _gate_up_kernel(  # type: ignore[no-untyped-def]
    x_TD,
    gate_up_EDR,
    bias_ER,
    inner_SI,
    block_experts,
    block_slots,
    num_slots,
    num_blocks,
    slope,
    limit,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """The gated product of one block, ROWS inner numbers of it."""
    follow(OVERLAPPED)
    block, part = _place(tl.cdiv(INNER, ROWS), GROUP)
    if block >= num_blocks:
        return
    expert = tl.load(block_experts + block).to(tl.int64)
    slots = tl.load(block_slots + block * BLOCK_T + tl.arange(0, BLOCK_T))
    if expert < 0:
        return
    filled = slots < num_slots
    outputs = part * (2 * ROWS) + tl.arange(0, 2 * ROWS)
    # What is out of range reads something valid and is not stored: loads without masks are quicker.
    places = tl.where(outputs < 2 * INNER, outputs, 0)
    tokens = tl.where(filled, slots // TOP_K, 0).to(tl.int64)
    steps = tl.arange(0, STEP)
    x_at = x_TD + tokens[:, None] * HIDDEN + steps[None, :]
    weight_at = gate_up_EDR + expert * (2 * INNER * HIDDEN) + steps[:, None] * (2 * INNER) + places[None, :]
    product = _product(x_at, weight_at, steps, BLOCK_T, 2 * ROWS, HIDDEN, 2 * INNER, STEP)
    product += tl.load(bias_ER + expert * (2 * INNER) + places)[None, :].to(tl.float32)
    gate, up = tl.split(tl.reshape(product, (BLOCK_T, ROWS, 2)))
    rows = part * ROWS + tl.arange(0, ROWS)
    value = _gated(gate, up, slope, limit)
    at = inner_SI + slots.to(tl.int64)[:, None] * INNER + rows[None, :]
    mask = filled[:, None] & (rows < INNER)[None, :]
    tl.store(at, value.to(inner_SI.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_slots", "num_blocks"])
def _down_kernel(  # type: ignore[no-untyped-def]
    inner_SI,
    down_EID,
    bias_ED,
    out_SD,
    weights_S,
    block_experts,
    block_slots,
    num_slots,
    num_blocks,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_T: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """The weighted outputs of one block, ROWS of them."""
    block, part = _place(tl.cdiv(HIDDEN, ROWS), GROUP)
    if block >= num_blocks:
        follow(OVERLAPPED)
        return
    # The predecessor computes only what is multiplied here: the blocks were listed before it.
    expert = tl.load(block_experts + block).to(tl.int64)
    slots = tl.load(block_slots + block * BLOCK_T + tl.arange(0, BLOCK_T))
    # A block without an expert lists no slots.
    filled = (slots < num_slots) & (tl.zeros_like(slots) <= expert)
    sources = tl.where(filled, slots, 0).to(tl.int64)
    weights = tl.load(weights_S + sources)
    follow(OVERLAPPED)
    if expert < 0:
        return
    rows = part * ROWS + tl.arange(0, ROWS)
    places = tl.where(rows < HIDDEN, rows, 0)
    steps = tl.arange(0, STEP)
    value_at = inner_SI + sources[:, None] * INNER + steps[None, :]
    weight_at = down_EID + expert * (HIDDEN * INNER) + steps[:, None] * HIDDEN + places[None, :]
    out = _product(value_at, weight_at, steps, BLOCK_T, ROWS, INNER, HIDDEN, STEP)
    if bias_ED is not None:
        out += tl.load(bias_ED + expert * HIDDEN + places)[None, :].to(tl.float32)
    out *= weights[:, None]
    at = out_SD + slots.to(tl.int64)[:, None] * HIDDEN + rows[None, :]
    tl.store(at, out.to(out_SD.dtype.element_ty), mask=filled[:, None] & (rows < HIDDEN)[None, :])


@triton.jit
def _product(  # type: ignore[no-untyped-def]
    x_at,
    weight_at,
    steps,
    BLOCK_T: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROW: tl.constexpr,
    STEP: tl.constexpr,
):
    """[BLOCK_T, OUTPUTS] of rows that begin at `x_at` and a weight whose rows have ROW numbers."""
    product = tl.zeros([BLOCK_T, OUTPUTS], dtype=tl.float32)
    for first in range(0, INPUTS, STEP):
        if INPUTS % STEP == 0:
            x = tl.load(x_at + first)
            weight = tl.load(weight_at + first * ROW)
        else:
            real = steps < INPUTS - first
            x = tl.load(x_at + first, mask=real[None, :], other=0.0)
            weight = tl.load(weight_at + first * ROW, mask=real[:, None], other=0.0)
        product = tl.dot(x, weight.to(x.dtype), product, input_precision="ieee")
    return product
