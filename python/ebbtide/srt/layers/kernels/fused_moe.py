"""Experts as two grouped products, in Triton, which read only the weights of chosen experts.

With more than a few tokens, products run over the blocks of `moe_routing`, and a separate kernel sums the
outputs of each token's experts. Few tokens have kernels of their own (`few_token_moe`).

8-bit weights with a scale for each row are widened here; those with a scale for each block have kernels in
`fp8.moe`.

Imported on CUDA only, since a CPU installation has no Triton.

Shapes: T tokens, D hidden, E experts, K experts per token, I an expert's inner size, S = T·K slots, R rows of
a weight. Kernels call D and I `HIDDEN` and `INNER`.
"""

# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ebbtide.srt.layers.heads import RoutedTokens
from ebbtide.srt.layers.kernels.few_token_moe import few_tokens_, inner_of
from ebbtide.srt.layers.kernels.instructions import follow
from ebbtide.srt.layers.kernels.launch import overlap_options
from ebbtide.srt.layers.kernels.lora import ExpertFactors, expand, shrink
from ebbtide.srt.layers.kernels.moe_routing import list_slots
from ebbtide.srt.layers.kernels.tiles import DEFAULTS, Layer, Plan, Tile, choose_plan

_SUMMED_COLUMNS = 1024


def fused_experts(
    tokens: RoutedTokens,
    gate_up_RD: Tensor,
    down_RI: Tensor,
    plan: Plan | None = None,
    residual_TD: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
    adapted: ExpertFactors | None = None,
) -> Tensor:
    """The weighted sum [T, D] of each token's experts.

    Args:
        gate_up_RD, down_RI: in the layout of `Experts`, contiguous.
        plan: None: chosen by `choose_plan`.
        residual_TD: the sum is added to it in place, and it is returned; None: a new tensor is returned.
        scales: of both weights, float32, one for each row; None: the weights are not in 8 bits.
        adapted: adapters; None: no token has any.
    """
    x_TD, add = tokens.x_TD, residual_TD is not None
    hidden, inner = x_TD.shape[1], down_RI.shape[1]
    layer = Layer(len(down_RI) // hidden, tokens.experts_TK.shape[1], hidden, inner)
    plan = plan or choose_plan(len(x_TD), layer, x_TD.dtype, x_TD.device)
    out_TD = x_TD.new_empty(x_TD.shape) if residual_TD is None else residual_TD
    if plan.block_tokens > 1 or scales is not None or adapted is not None:
        # The kernels for few tokens support neither scales nor adapters.
        plan = plan if plan.block_tokens > 1 else DEFAULTS[16]
        out_SD = _by_blocks(tokens, gate_up_RD, down_RI, plan, scales or (None, None), adapted)
        add_up_(out_TD, out_SD, add=add)
    else:
        few_tokens_(out_TD, tokens, gate_up_RD, down_RI, plan, add=add)
    return out_TD


def _by_blocks(
    tokens: RoutedTokens,
    gate_up_RD: Tensor,
    down_RI: Tensor,
    plan: Plan,
    scales: tuple[Tensor | None, Tensor | None],
    adapted: ExpertFactors | None,
) -> Tensor:
    """The weighted outputs [S, D] of each token's experts."""
    x_TD, weights_TK, experts_TK = tokens
    hidden, inner = x_TD.shape[1], down_RI.shape[1]
    num_slots, top_k = experts_TK.numel(), experts_TK.shape[1]
    num_rows = len(gate_up_RD) * hidden // len(down_RI)
    blocks = list_slots(experts_TK, len(down_RI) // hidden, plan.block_tokens)
    inner_SI = x_TD.new_empty((num_slots, inner))
    delta_SR = None
    if adapted is not None and adapted.gate_up is not None:
        delta_SR = x_TD.new_zeros((num_slots, num_rows))
        shrunk = shrink(x_TD, adapted.gate_up, adapted.groups, top_k=top_k)
        expand(shrunk, adapted.gate_up, adapted.groups, delta_SR, add=False)
    _gate_up_kernel[(blocks.number * triton.cdiv(inner, plan.gate_up.rows),)](
        x_TD,
        gate_up_RD,
        scales[0],
        delta_SR,
        inner_SI,
        blocks.experts,
        blocks.slots,
        num_slots,
        HIDDEN=hidden,
        INNER=inner,
        GATED=num_rows > inner,
        TOP_K=top_k,
        BLOCK_T=plan.block_tokens,
        **tile_options(plan.gate_up),
        **overlap_options(x_TD),
    )
    out_SD = x_TD.new_empty((num_slots, hidden))
    _down_kernel[(blocks.number * triton.cdiv(hidden, plan.down.rows),)](
        inner_SI,
        down_RI,
        scales[1],
        out_SD,
        weights_TK,
        blocks.experts,
        blocks.slots,
        num_slots,
        HIDDEN=hidden,
        INNER=inner,
        BLOCK_T=plan.block_tokens,
        **tile_options(plan.down),
        **overlap_options(x_TD),
    )
    if adapted is not None and adapted.down is not None:
        shrunk = shrink(inner_SI, adapted.down, adapted.groups)
        expand(shrunk, adapted.down, adapted.groups, out_SD, weights_N=weights_TK)
    return out_SD


def add_up_(out_TD: Tensor, out_SD: Tensor, *, add: bool) -> None:
    """Sum the outputs of each token's experts, and write the sum into `out_TD` or add it to that."""
    num_tokens, hidden = out_TD.shape
    _sum_kernel[(num_tokens, triton.cdiv(hidden, _SUMMED_COLUMNS))](
        out_SD,
        out_TD,
        HIDDEN=hidden,
        TOP_K=len(out_SD) // num_tokens,
        COLUMNS=_SUMMED_COLUMNS,
        ADD=add,
        num_warps=4,
        **overlap_options(out_TD),
    )


def tile_options(tile: Tile) -> dict[str, int]:
    """The launch options of a tile."""
    return {
        "ROWS": tile.rows,
        "STEP": tile.step,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


@triton.jit(do_not_specialize=["num_slots"])
def _gate_up_kernel(  # type: ignore[no-untyped-def]
    x_TD,
    gate_up_RD,
    scales_R,
    delta_SR,
    inner_SI,
    block_experts,
    block_slots,
    num_slots,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    GATED: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Each program computes some columns of `inner_of` for one block.

    Weights are the left operand, so that a block of few tokens fills the narrow side of tensor-core tiles.
    """
    follow(OVERLAPPED)
    PER_INNER: tl.constexpr = 2 if GATED else 1
    num_parts = tl.cdiv(INNER, ROWS)
    # Programs of the same block are neighbours, so that its tokens stay in the cache.
    block, part = tl.program_id(0) // num_parts, tl.program_id(0) % num_parts
    expert = tl.load(block_experts + block)
    slots = tl.load(block_slots + block * BLOCK_T + tl.arange(0, BLOCK_T))
    if expert < 0:
        return
    filled = slots < num_slots
    rows = part * ROWS + tl.arange(0, ROWS)
    # Lanes out of range read a valid place and are not stored, since loads without masks are faster.
    row_places = tl.where(rows < INNER, rows, 0)
    tokens = tl.where(filled, slots // TOP_K, 0).to(tl.int64)
    columns = tl.arange(0, STEP)
    first_row = expert.to(tl.int64) * (PER_INNER * INNER)
    gate_pointers = gate_up_RD + first_row * HIDDEN + row_places[:, None] * HIDDEN + columns[None, :]
    up_pointers = gate_pointers + (PER_INNER - 1) * INNER * HIDDEN
    x_pointers = x_TD + tokens[None, :] * HIDDEN + columns[:, None]
    gate = tl.zeros([ROWS, BLOCK_T], dtype=tl.float32)
    up = tl.zeros([ROWS, BLOCK_T], dtype=tl.float32)
    for first in range(0, HIDDEN, STEP):
        if HIDDEN % STEP == 0:
            x = tl.load(x_pointers + first)
            if GATED:
                gate_weight = tl.load(gate_pointers + first)
            up_weight = tl.load(up_pointers + first)
        else:
            real = columns < HIDDEN - first
            x = tl.load(x_pointers + first, mask=real[:, None], other=0.0)
            if GATED:
                gate_weight = tl.load(gate_pointers + first, mask=real[None, :], other=0.0)
            up_weight = tl.load(up_pointers + first, mask=real[None, :], other=0.0)
        if GATED:
            gate = tl.dot(gate_weight.to(x.dtype), x, gate, input_precision="ieee")
        up = tl.dot(up_weight.to(x.dtype), x, up, input_precision="ieee")
    if scales_R is not None:
        gate_scales = scales_R + first_row + row_places
        gate *= tl.load(gate_scales)[:, None]
        up *= tl.load(gate_scales + (PER_INNER - 1) * INNER)[:, None]
    if delta_SR is not None:
        mask = filled[None, :] & (rows < INNER)[:, None]
        deltas = delta_SR + slots.to(tl.int64)[None, :] * (PER_INNER * INNER) + rows[:, None]
        gate += tl.load(deltas, mask=mask, other=0.0).to(tl.float32)
        up += tl.load(deltas + (PER_INNER - 1) * INNER, mask=mask, other=0.0).to(tl.float32)
    value = inner_of(gate, up, GATED)
    places = slots.to(tl.int64)[None, :] * INNER + rows[:, None]
    mask = filled[None, :] & (rows < INNER)[:, None]
    tl.store(inner_SI + places, value.to(inner_SI.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_slots"])
def _down_kernel(  # type: ignore[no-untyped-def]
    inner_SI,
    down_RI,
    scales_R,
    out_SD,
    weights_S,
    block_experts,
    block_slots,
    num_slots,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_T: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Each program computes some columns of one block's weighted outputs."""
    num_parts = tl.cdiv(HIDDEN, ROWS)
    block, part = tl.program_id(0) // num_parts, tl.program_id(0) % num_parts
    # These may be read early: blocks were listed before the previous kernel, which only computes `inner_SI`.
    expert = tl.load(block_experts + block)
    slots = tl.load(block_slots + block * BLOCK_T + tl.arange(0, BLOCK_T))
    # A block without an expert has no slots.
    filled = (slots < num_slots) & (tl.zeros_like(slots) <= expert)
    sources = tl.where(filled, slots, 0).to(tl.int64)
    weights = tl.load(weights_S + sources)
    follow(OVERLAPPED)
    if expert < 0:
        return
    rows = part * ROWS + tl.arange(0, ROWS)
    row_places = tl.where(rows < HIDDEN, rows, 0)
    columns = tl.arange(0, STEP)
    down_places = expert.to(tl.int64) * (HIDDEN * INNER) + row_places[:, None] * INNER + columns[None, :]
    down_pointers = down_RI + down_places
    value_pointers = inner_SI + sources[None, :] * INNER + columns[:, None]
    out = tl.zeros([ROWS, BLOCK_T], dtype=tl.float32)
    for first in range(0, INNER, STEP):
        if INNER % STEP == 0:
            value = tl.load(value_pointers + first)
            weight = tl.load(down_pointers + first)
        else:
            real = columns < INNER - first
            value = tl.load(value_pointers + first, mask=real[:, None], other=0.0)
            weight = tl.load(down_pointers + first, mask=real[None, :], other=0.0)
        out = tl.dot(weight.to(value.dtype), value, out, input_precision="ieee")
    if scales_R is not None:
        out *= tl.load(scales_R + expert.to(tl.int64) * HIDDEN + row_places)[:, None]
    out *= weights[None, :]
    places = slots.to(tl.int64)[None, :] * HIDDEN + rows[:, None]
    mask = filled[None, :] & (rows < HIDDEN)[:, None]
    tl.store(out_SD + places, out.to(out_SD.dtype.element_ty), mask=mask)


@triton.jit
def _sum_kernel(  # type: ignore[no-untyped-def]
    out_SD,
    out_TD,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    ADD: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Each program sums some columns of the outputs of one token's experts, and of the residual."""
    follow(OVERLAPPED)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < HIDDEN
    total = tl.zeros((COLUMNS,), tl.float32)
    for pick in tl.static_range(TOP_K):
        place = (token * TOP_K + pick) * HIDDEN + columns
        total += tl.load(out_SD + place, mask=inside, other=0.0).to(tl.float32)
    at = out_TD + token * HIDDEN + columns
    if ADD:
        total += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, total.to(out_TD.dtype.element_ty), mask=inside)
