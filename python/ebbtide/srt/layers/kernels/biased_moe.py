"""Experts with biases and a clamped gate, as gpt-oss has them, in Triton: see `fused_moe`.

Weights lie as in its checkpoints: inputs are rows and outputs columns, gate and up of each inner number side
by side. A tile of the first product has both; they are told apart when the product is done. The second one is
that of `fused_moe` or `few_token_moe`, read the other way.

Shapes: T tokens, D hidden, E experts, K experts per token, I an expert's inner size, S = T·K slots, R = 2·I.
Kernels call D and I `HIDDEN` and `INNER`.
"""

# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ebbtide.srt.layers.kernels.few_token_moe import down_few_
from ebbtide.srt.layers.kernels.fused_moe import add_up_, down_by_blocks, tile_options
from ebbtide.srt.layers.kernels.launch import overlap_options
from ebbtide.srt.layers.kernels.moe_routing import follow, list_slots
from ebbtide.srt.layers.kernels.tiles import Layer, Plan, choose_plan


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
    blocks = list_slots(experts_TK, num_experts, plan.block_tokens)
    _gate_up_kernel[(blocks.number * triton.cdiv(inner, tile.rows),)](
        x_TD,
        gate_up_EDR,
        gate_up_bias_ER,
        inner_SI,
        blocks.experts,
        blocks.slots,
        num_slots,
        slope,
        limit,
        HIDDEN=hidden,
        INNER=inner,
        TOP_K=top_k,
        BLOCK_T=plan.block_tokens,
        **tile_options(tile),
        **overlap_options(x_TD),
    )
    out_SD = down_by_blocks(
        inner_SI, down_EID, None, down_bias_ED, weights_TK, blocks, plan, hidden, is_transposed=True
    )
    add_up_(out_TD, out_SD, add=add)
    return out_TD


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


@triton.jit(do_not_specialize=["num_slots"])
def _gate_up_kernel(  # type: ignore[no-untyped-def]
    x_TD,
    gate_up_EDR,
    bias_ER,
    inner_SI,
    block_experts,
    block_slots,
    num_slots,
    slope,
    limit,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """The gated product of one block, ROWS inner numbers of it."""
    follow(OVERLAPPED)
    num_parts = tl.cdiv(INNER, ROWS)
    # Programs of one block follow each other, so that its tokens stay in the cache.
    block, part = tl.program_id(0) // num_parts, tl.program_id(0) % num_parts
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
    pointers = gate_up_EDR + expert * (2 * INNER * HIDDEN) + places[:, None] + steps[None, :] * (2 * INNER)
    x_pointers = x_TD + tokens[None, :] * HIDDEN + steps[:, None]
    product = tl.zeros([2 * ROWS, BLOCK_T], dtype=tl.float32)
    for first in range(0, HIDDEN, STEP):
        if HIDDEN % STEP == 0:
            x = tl.load(x_pointers + first)
            weight = tl.load(pointers + first * (2 * INNER))
        else:
            real = steps < HIDDEN - first
            x = tl.load(x_pointers + first, mask=real[:, None], other=0.0)
            weight = tl.load(pointers + first * (2 * INNER), mask=real[None, :], other=0.0)
        product = tl.dot(weight.to(x.dtype), x, product, input_precision="ieee")
    product += tl.load(bias_ER + expert * (2 * INNER) + places)[:, None].to(tl.float32)
    gate, up = tl.split(tl.permute(tl.reshape(product, (ROWS, 2, BLOCK_T)), (0, 2, 1)))
    rows = part * ROWS + tl.arange(0, ROWS)
    value = _gated(gate, up, slope, limit)
    mask = filled[None, :] & (rows < INNER)[:, None]
    tl.store(
        inner_SI + slots.to(tl.int64)[None, :] * INNER + rows[:, None],
        value.to(inner_SI.dtype.element_ty),
        mask=mask,
    )
