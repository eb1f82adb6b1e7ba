"""Experts with 8-bit weights, as two grouped products.

If there are more than a few tokens, they are quantised too, in groups of 128 columns, and so is the input of
the second product. Tensor cores multiply 8 bits by 8 bits, and sums of 128 products are scaled and added up
in float32, as in `product`. Few tokens are not quantised: each reads its experts' weights word by word, as in
`small_batch.fp8_products`.

Shapes: T tokens, D hidden, E experts, K experts per token, I an expert's inner size, S = T·K slots, R rows of
a weight, G groups of 128 columns. Kernels call D and I `HIDDEN` and `INNER`.
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ebbtide.srt.layers.heads import RoutedTokens
from ebbtide.srt.layers.kernels.fp8.product import quantize_tokens, room_for_tokens
from ebbtide.srt.layers.kernels.fp8.quantize import four_of, fours, in_eight_bits, row_sums
from ebbtide.srt.layers.kernels.fused_moe import add_up_
from ebbtide.srt.layers.kernels.instructions import follow, prefetch
from ebbtide.srt.layers.kernels.launch import overlap_options
from ebbtide.srt.layers.kernels.moe_routing import list_slots
from ebbtide.srt.layers.kernels.tiles import FewPlan, choose_fp8_plan

GROUP = 128
# Warps of a program, and tiles in shared memory, of the two kernels for blocks.
_GATE_UP, _DOWN = (8, 3), (8, 4)
# The most words of a row of the second weight that are read per step.
_MOST_WORDS = 1024


def fused_quantized_experts(
    tokens: RoutedTokens,
    gate_up_RD: Tensor,
    down_RI: Tensor,
    scales: tuple[Tensor, Tensor],
    residual_TD: Tensor | None = None,
    plan: FewPlan | int | None = None,
) -> Tensor:
    """`fused_experts` for 8-bit weights. D and I must be multiples of 128.

    Args:
        scales: of both weights, one for each block of 128 × 128.
        plan: None: chosen by `choose_fp8_plan`.
    """
    x_TD, add = tokens.x_TD, residual_TD is not None
    plan = plan or choose_fp8_plan(len(x_TD), len(down_RI) // x_TD.shape[1], tokens.experts_TK.shape[1])
    out_TD = torch.empty_like(x_TD) if residual_TD is None else residual_TD
    operands = (tokens, gate_up_RD, down_RI, scales)
    if isinstance(plan, FewPlan):
        _one_by_one_(out_TD, *operands, plan, add=add)
    else:
        add_up_(out_TD, _by_blocks(*operands, plan), add=add)
    return out_TD


def _by_blocks(
    tokens: RoutedTokens,
    gate_up_RD: Tensor,
    down_RI: Tensor,
    scales: tuple[Tensor, Tensor],
    block_tokens: int,
) -> Tensor:
    """The weighted outputs [S, D] of each token's experts."""
    x_TD, weights_TK, experts_TK = tokens
    hidden, inner = x_TD.shape[1], down_RI.shape[1]
    num_slots, top_k = experts_TK.numel(), experts_TK.shape[1]
    blocks = list_slots(experts_TK, len(down_RI) // hidden, block_tokens)
    values_TD, x_scales_TG = quantize_tokens(x_TD)
    values_SI, inner_scales_SG = room_for_tokens(num_slots, inner, x_TD.device)
    out_SD = x_TD.new_empty((num_slots, hidden))
    _gate_up_kernel[(blocks.number * (inner // GROUP),)](
        values_TD,
        x_scales_TG,
        gate_up_RD,
        scales[0],
        values_SI,
        inner_scales_SG,
        blocks.experts,
        blocks.slots,
        num_slots,
        len(values_TD),
        len(values_SI),
        HIDDEN=hidden,
        INNER=inner,
        TOP_K=top_k,
        BLOCK_T=block_tokens,
        num_warps=_GATE_UP[0],
        num_stages=_GATE_UP[1],
        **overlap_options(x_TD),
    )
    _down_kernel[(blocks.number * (hidden // GROUP),)](
        values_SI,
        inner_scales_SG,
        down_RI,
        scales[1],
        out_SD,
        weights_TK,
        blocks.experts,
        blocks.slots,
        num_slots,
        len(values_SI),
        HIDDEN=hidden,
        INNER=inner,
        ROWS=GROUP,
        BLOCK_T=block_tokens,
        num_warps=_DOWN[0],
        num_stages=_DOWN[1],
        **overlap_options(x_TD),
    )
    return out_SD


@triton.jit(do_not_specialize=["num_slots", "padded_tokens", "padded_slots"])
def _gate_up_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    x_scales_ptr,
    weight_ptr,
    scales_ptr,
    out_ptr,
    out_scales_ptr,
    block_experts,
    block_slots,
    num_slots,
    padded_tokens,
    padded_slots,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Each program computes one group of columns of silu(gate) · up for one block, in 8 bits."""
    GROUPS: tl.constexpr = HIDDEN // 128
    follow(OVERLAPPED)
    num_parts: tl.constexpr = INNER // 128
    # Programs of the same block are neighbours, so that its tokens stay in the cache.
    block, part = tl.program_id(0) // num_parts, tl.program_id(0) % num_parts
    expert = tl.load(block_experts + block)
    slots = tl.load(block_slots + block * BLOCK_T + tl.arange(0, BLOCK_T))
    if expert < 0:
        return
    filled = slots < num_slots
    # Lanes out of range read a valid place and are not stored.
    tokens = tl.where(filled, slots // TOP_K, 0)
    rows, columns = tl.arange(0, 128), tl.arange(0, 128)
    first_row = expert.to(tl.int64) * (2 * INNER) + part * 128
    gates = weight_ptr + (first_row + rows)[:, None] * HIDDEN + columns[None, :]
    ups = gates + INNER * HIDDEN
    gate_scales = scales_ptr + first_row // 128 * GROUPS
    up_scales = gate_scales + INNER // 128 * GROUPS
    x_at = x_ptr + tokens.to(tl.int64)[:, None] * HIDDEN + columns[None, :]
    x_scales = x_scales_ptr + tokens
    # Scales are loaded one tile ahead, since they are too small for an asynchronous copy.
    gate_scale, up_scale, x_scale = tl.load(gate_scales), tl.load(up_scales), tl.load(x_scales)
    gate = tl.zeros((128, BLOCK_T), tl.float32)
    up = tl.zeros((128, BLOCK_T), tl.float32)
    for group in range(GROUPS):
        ahead = tl.minimum(group + 1, GROUPS - 1)
        next_gate_scale, next_up_scale = tl.load(gate_scales + ahead), tl.load(up_scales + ahead)
        next_x_scale = tl.load(x_scales + ahead * padded_tokens)
        x = tl.trans(tl.load(x_at + group * 128))
        gate += tl.dot(tl.load(gates + group * 128), x) * (x_scale * gate_scale)[None, :]
        up += tl.dot(tl.load(ups + group * 128), x) * (x_scale * up_scale)[None, :]
        gate_scale, up_scale, x_scale = next_gate_scale, next_up_scale, next_x_scale
    # Rounded first to bfloat16, as it would be without quantization.
    value = (gate * tl.sigmoid(gate) * up).to(tl.bfloat16).to(tl.float32)
    value, scale = in_eight_bits(value, 0, BLOCK_T)
    value = tl.trans(value).to(tl.float8e4nv)
    places = out_ptr + slots.to(tl.int64)[:, None] * INNER + part * 128 + rows[None, :]
    tl.store(places, value, mask=filled[:, None])
    tl.store(out_scales_ptr + part * padded_slots + slots, scale, mask=filled)


@triton.jit(do_not_specialize=["num_slots", "padded_slots"])
def _down_kernel(  # type: ignore[no-untyped-def]
    inner_ptr,
    inner_scales_ptr,
    weight_ptr,
    scales_ptr,
    out_ptr,
    weights_S,
    block_experts,
    block_slots,
    num_slots,
    padded_slots,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Each program computes some columns of one block's weighted outputs."""
    GROUPS: tl.constexpr = INNER // 128
    num_parts: tl.constexpr = HIDDEN // ROWS
    block, part = tl.program_id(0) // num_parts, tl.program_id(0) % num_parts
    # These may be read early: blocks were listed before the previous kernel, which only computes the input.
    expert = tl.load(block_experts + block)
    slots = tl.load(block_slots + block * BLOCK_T + tl.arange(0, BLOCK_T))
    # A block without an expert has no slots.
    filled = (slots < num_slots) & (tl.zeros_like(slots) <= expert)
    sources = tl.where(filled, slots, 0)
    weights = tl.load(weights_S + sources)
    rows, columns = tl.arange(0, ROWS), tl.arange(0, 128)
    first_row = tl.maximum(expert, 0).to(tl.int64) * HIDDEN + part * ROWS
    row_starts = weight_ptr + (first_row + rows)[:, None] * INNER
    scales = scales_ptr + first_row // 128 * GROUPS
    if OVERLAPPED:
        prefetch(row_starts + tl.arange(0, 2)[None, :] * 128)
    scale = tl.load(scales)
    follow(OVERLAPPED)
    if expert < 0:
        return
    tiles = row_starts + columns[None, :]
    values = inner_ptr + sources.to(tl.int64)[:, None] * INNER + columns[None, :]
    inner_scales = inner_scales_ptr + sources
    inner_scale = tl.load(inner_scales)
    out = tl.zeros((ROWS, BLOCK_T), tl.float32)
    for group in range(GROUPS):
        ahead = tl.minimum(group + 1, GROUPS - 1)
        next_scale = tl.load(scales + ahead)
        next_inner_scale = tl.load(inner_scales + ahead * padded_slots)
        value = tl.trans(tl.load(values + group * 128))
        out += tl.dot(tl.load(tiles + group * 128), value) * (inner_scale * scale)[None, :]
        scale, inner_scale = next_scale, next_inner_scale
    out = tl.trans(out * weights[None, :])
    places = out_ptr + slots.to(tl.int64)[:, None] * HIDDEN + part * ROWS + rows[None, :]
    tl.store(places, out.to(out_ptr.dtype.element_ty), mask=filled[:, None])


def _one_by_one_(
    out_TD: Tensor,
    tokens: RoutedTokens,
    gate_up_RD: Tensor,
    down_RI: Tensor,
    scales: tuple[Tensor, Tensor],
    plan: FewPlan,
    *,
    add: bool,
) -> None:
    """Write the weighted sum of each token's experts into `out_TD`, or add it, for few tokens."""
    x_TD, weights_TK, experts_TK = tokens
    (num_tokens, hidden), inner, top_k = x_TD.shape, down_RI.shape[1], experts_TK.shape[1]
    inner_SI = x_TD.new_empty((experts_TK.numel(), inner))
    words = torch.int64 if x_TD.is_cuda else x_TD.dtype
    options = overlap_options(x_TD) | {"ASM": x_TD.is_cuda, "num_warps": plan.num_warps, "num_stages": 1}
    _few_gate_up_kernel[(inner // (plan.rows * plan.steps), experts_TK.numel())](
        x_TD.view(words),
        gate_up_RD.view(torch.int32),
        scales[0],
        inner_SI,
        experts_TK,
        HIDDEN=hidden,
        INNER=inner,
        TOP_K=top_k,
        BLOCK_WORDS=triton.next_power_of_2(hidden // 4),
        ROWS=plan.rows,
        STEPS=plan.steps,
        **options,
    )
    _few_down_kernel[(hidden // plan.down_rows, num_tokens)](
        inner_SI.view(words),
        down_RI.view(torch.int32),
        scales[1],
        out_TD,
        weights_TK,
        experts_TK,
        HIDDEN=hidden,
        INNER=inner,
        TOP_K=top_k,
        BLOCK_WORDS=min(_MOST_WORDS, triton.next_power_of_2(inner // 4)),
        ROWS=plan.down_rows,
        ADD=add,
        **options,
    )


@triton.jit
def _few_gate_up_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    scales_ptr,
    out_ptr,
    experts_S,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    ASM: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Each program computes some columns of silu(gate) · up for one slot, whose token stays in registers."""
    WORDS: tl.constexpr = HIDDEN // 4
    GROUPS: tl.constexpr = HIDDEN // 128
    follow(OVERLAPPED)
    slot = tl.program_id(1)
    expert = tl.load(experts_S + slot).to(tl.int64)
    first_row = tl.program_id(0) * (ROWS * STEPS)
    row, word = tl.arange(0, ROWS), tl.arange(0, BLOCK_WORDS)
    inside = word < WORDS
    wanted = inside[None, :] & (row >= 0)[:, None]
    gates = weight_ptr + (expert * (2 * INNER) + first_row + row)[:, None] * WORDS + word[None, :]
    ups = gates + INNER * WORDS
    gate_words = tl.load(gates, mask=wanted, other=0, eviction_policy="evict_first")
    up_words = tl.load(ups, mask=wanted, other=0, eviction_policy="evict_first")
    # All rows of a program are in one row of blocks, so they share its scales.
    scale_at = scales_ptr + (expert * (2 * INNER) + first_row) // 128 * GROUPS + word // 32
    gate_scale = tl.load(scale_at, mask=inside, other=0.0)
    up_scale = tl.load(scale_at + INNER // 128 * GROUPS, mask=inside, other=0.0)
    # On a GPU, pointers are to 64-bit words of four numbers.
    x_at = x_ptr + (slot // TOP_K).to(tl.int64) * (WORDS if ASM else HIDDEN)
    x0, x1, x2, x3 = four_of(x_at, word, inside, ASM)
    for step in range(STEPS):
        more = wanted & (step + 1 < STEPS)
        ahead = (step + 1) * (ROWS * WORDS)
        next_gates = tl.load(gates + ahead, mask=more, other=0, eviction_policy="evict_first")
        next_ups = tl.load(ups + ahead, mask=more, other=0, eviction_policy="evict_first")
        gate = row_sums(gate_words, x0, x1, x2, x3, gate_scale, ASM)
        value = gate * tl.sigmoid(gate) * row_sums(up_words, x0, x1, x2, x3, up_scale, ASM)
        at = out_ptr + slot.to(tl.int64) * INNER + first_row + step * ROWS + row
        tl.store(at, value.to(out_ptr.dtype.element_ty))
        gate_words, up_words = next_gates, next_ups


@triton.jit
def _few_down_kernel(  # type: ignore[no-untyped-def]
    inner_ptr,
    weight_ptr,
    scales_ptr,
    out_ptr,
    weights_S,
    experts_S,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
    ASM: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Each program computes some columns of one token's output."""
    WORDS: tl.constexpr = INNER // 4
    GROUPS: tl.constexpr = INNER // 128
    STEPS: tl.constexpr = (WORDS + BLOCK_WORDS - 1) // BLOCK_WORDS
    token = tl.program_id(1)
    first_row = tl.program_id(0) * ROWS
    rows, word = first_row + tl.arange(0, ROWS), tl.arange(0, BLOCK_WORDS)
    tile = weight_ptr + rows[:, None] * WORDS + word[None, :]
    first_slot = token * TOP_K
    # These may be read early: experts were chosen before the previous kernel, which only computes the input.
    expert = tl.load(experts_S + first_slot).to(tl.int64)
    wanted = (word < WORDS)[None, :] & (rows < HIDDEN)[:, None]
    ahead = tl.load(tile + expert * (HIDDEN * WORDS), mask=wanted, other=0, eviction_policy="evict_first")
    follow(OVERLAPPED)
    total = tl.zeros((ROWS, BLOCK_WORDS), tl.float32)
    for number in range(TOP_K * STEPS):
        slot, start = first_slot + number // STEPS, number % STEPS * BLOCK_WORDS
        words, this_expert = ahead, expert
        after = number + 1
        is_there = after < TOP_K * STEPS
        next_start = after % STEPS * BLOCK_WORDS
        expert = tl.load(experts_S + first_slot + after // STEPS, mask=is_there, other=0).to(tl.int64)
        # A comparison of tensors, since Triton's interpreter takes no Python number as a side of `&`.
        is_ahead = tl.zeros_like(word) < TOP_K * STEPS - after
        wanted = ((next_start + word < WORDS) & is_ahead)[None, :] & (rows < HIDDEN)[:, None]
        at = tile + expert * (HIDDEN * WORDS) + next_start
        ahead = tl.load(at, mask=wanted, other=0, eviction_policy="evict_first")
        inside = start + word < WORDS
        scale_at = scales_ptr + (this_expert * HIDDEN + first_row) // 128 * GROUPS + (start + word) // 32
        scale = tl.load(scale_at, mask=inside, other=0.0) * tl.load(weights_S + slot)
        x_at = inner_ptr + slot.to(tl.int64) * (WORDS if ASM else INNER)
        x0, x1, x2, x3 = four_of(x_at, start + word, inside, ASM)
        total += fours(words, x0, x1, x2, x3, ASM) * scale[None, :]
    product = tl.sum(total, axis=1)
    out = out_ptr + token.to(tl.int64) * HIDDEN + rows
    if ADD:
        product += tl.load(out).to(tl.float32)
    tl.store(out, product.to(out_ptr.dtype.element_ty))
