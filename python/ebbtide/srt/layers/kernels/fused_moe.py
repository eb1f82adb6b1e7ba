"""Experts as two grouped products, in Triton: only the weights of chosen experts are read.

A *slot* is one of the T·K pairs of a token and an expert; slot s belongs to token s // K. Products run over
blocks: a block is one expert and up to `block_tokens` of its slots. With few tokens each block finds its
slots by itself (`_matching_slots`); with many they are listed first (`_count_kernel`, `_list_kernel`).
Shapes and grids depend on the number of tokens alone and nothing waits for the device, so a CUDA graph can
hold all of it. Nothing is added atomically: equal inputs give equal bits.

Imported on CUDA only: a CPU installation has no Triton.

Shapes: T tokens, D hidden, E experts, K experts per token, I an expert's inner size, S = T·K slots, R rows of
a weight. Kernels call D and I `HIDDEN` and `INNER`.
"""

# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LIST_CHUNK = 1024
# Lower than any score a router gives, and finite.
LOWEST_SCORE = -3e38


@dataclass(frozen=True)
class Tile:
    """How one product is cut.

    Attributes:
        rows: weight rows of a program (for gate and up: of each).
        step: columns taken at once along the summed dimension.
    """

    rows: int
    step: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Plan:
    """How a batch is cut.

    Attributes:
        block_tokens: slots of a block, a power of two ≥ 16.
        lists_slots: whether slots are listed by expert first; otherwise `block_tokens` must be ≥ T.
    """

    block_tokens: int
    lists_slots: bool
    gate_up: Tile
    down: Tile


# Up to so many tokens, blocks find their slots by themselves.
FEW_TOKENS = 32
# Tiles for each number of slots in a block. With few, all the time goes into reading weights: then there
# are many small programs.
TILES = {
    16: (Tile(32, 128, 4, 4), Tile(64, 128, 4, 4)),
    32: (Tile(32, 128, 4, 4), Tile(64, 128, 4, 4)),
    64: (Tile(64, 64, 4, 4), Tile(128, 64, 4, 4)),
    128: (Tile(128, 64, 8, 3), Tile(128, 64, 8, 4)),
}


# float32 has no tensor cores and takes twice the room: it has to work, not to be quick.
WIDE_TILE = Tile(32, 32, 4, 2)


def choose_plan(num_tokens: int, num_slots: int, num_experts: int, dtype: torch.dtype) -> Plan:
    """The plan for a batch: a block has room for half as much again as an expert's share of the slots."""
    lists_slots = num_tokens > FEW_TOKENS
    if dtype == torch.float32:
        return Plan(32, lists_slots, WIDE_TILE, WIDE_TILE)
    room = 3 * num_slots // (2 * num_experts) if lists_slots else num_tokens
    block_tokens = min(128, max(16, triton.next_power_of_2(room)))
    return Plan(block_tokens, lists_slots, *TILES[block_tokens])


def route(logits_TE: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """The weights (float32) and numbers (int32) of each token's experts, both [T, K], best first."""
    num_tokens, num_experts = logits_TE.shape
    weights_TK = torch.empty((num_tokens, top_k), dtype=torch.float32, device=logits_TE.device)
    experts_TK = torch.empty((num_tokens, top_k), dtype=torch.int32, device=logits_TE.device)
    _route_kernel[(num_tokens,)](
        logits_TE,
        weights_TK,
        experts_TK,
        NUM_EXPERTS=num_experts,
        TOP_K=top_k,
        RENORMALIZE=renormalize,
        LOWEST=LOWEST_SCORE,
        BLOCK_E=triton.next_power_of_2(num_experts),
        BLOCK_K=triton.next_power_of_2(top_k),
        num_warps=1,
    )
    return weights_TK, experts_TK


@dataclass(frozen=True)
class Blocks:
    """The blocks of a batch.

    Attributes:
        number: as many as there can be.
        tensors: the experts of all slots; the expert of each block (−1: none) and its slots, `block_tokens`
            per block, filled up with S. The last two hold nothing where slots are not listed.
    """

    number: int
    tensors: tuple[Tensor, Tensor, Tensor]


def list_slots(experts_TK: Tensor, num_experts: int, plan: Plan) -> Blocks:
    """Blocks of a batch; every slot is in one."""
    num_slots = experts_TK.numel()
    num_chosen = min(num_slots, num_experts)
    if not plan.lists_slots:
        return Blocks(num_chosen, (experts_TK, experts_TK, experts_TK))
    # A chosen expert has one block that may be partly filled; the others are full.
    num_blocks = num_chosen + (num_slots - num_chosen) // plan.block_tokens
    counts_E, block_experts, block_slots = (
        torch.empty(size, dtype=torch.int32, device=experts_TK.device)
        for size in (num_experts, num_blocks, num_blocks * plan.block_tokens)
    )
    _count_kernel[(num_experts,)](experts_TK, counts_E, num_slots, CHUNK=LIST_CHUNK)
    _list_kernel[(num_experts,)](
        experts_TK,
        counts_E,
        block_experts,
        block_slots,
        num_slots,
        num_blocks,
        NUM_EXPERTS=num_experts,
        BLOCK_E=triton.next_power_of_2(num_experts),
        BLOCK_T=plan.block_tokens,
        CHUNK=LIST_CHUNK,
    )
    return Blocks(num_blocks, (experts_TK, block_experts, block_slots))


def fused_experts(
    x_TD: Tensor,
    gate_up_RD: Tensor,
    down_RI: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    plan: Plan | None = None,
) -> Tensor:
    """The weighted sum [T, D] of each token's experts.

    Args:
        x_TD: contiguous; no two of a token's experts may be the same one.
        gate_up_RD, down_RI: as `Experts` holds them, contiguous.
        weights_TK, experts_TK: from `route`.
        plan: None for `choose_plan`'s.
    """
    (num_tokens, hidden), inner = x_TD.shape, down_RI.shape[1]
    num_slots, num_experts = experts_TK.numel(), len(down_RI) // hidden
    plan = plan or choose_plan(num_tokens, num_slots, num_experts, x_TD.dtype)
    blocks = list_slots(experts_TK, num_experts, plan)
    inner_SI = torch.empty((num_slots, inner), dtype=x_TD.dtype, device=x_TD.device)
    out_SD = torch.empty((num_slots, hidden), dtype=x_TD.dtype, device=x_TD.device)
    _gate_up_kernel[(blocks.number * triton.cdiv(inner, plan.gate_up.rows),)](
        x_TD,
        gate_up_RD,
        inner_SI,
        *blocks.tensors,
        num_slots,
        HIDDEN=hidden,
        INNER=inner,
        **_constants(experts_TK, num_experts, plan, plan.gate_up),
    )
    _down_kernel[(blocks.number * triton.cdiv(hidden, plan.down.rows),)](
        inner_SI,
        down_RI,
        out_SD,
        weights_TK,
        *blocks.tensors,
        num_slots,
        HIDDEN=hidden,
        INNER=inner,
        **_constants(experts_TK, num_experts, plan, plan.down),
    )
    return out_SD.view(num_tokens, -1, hidden).sum(dim=1)


def _constants(experts_TK: Tensor, num_experts: int, plan: Plan, tile: Tile) -> dict[str, Any]:
    """What a product is compiled for."""
    top_k = experts_TK.shape[1]
    return {
        "TOP_K": top_k,
        "BLOCK_K": triton.next_power_of_2(top_k),
        "LISTED": plan.lists_slots,
        "BY_SLOT": not plan.lists_slots and experts_TK.numel() <= num_experts,
        "BLOCK_T": plan.block_tokens,
        "ROWS": tile.rows,
        "STEP": tile.step,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


@triton.jit
def _route_kernel(  # type: ignore[no-untyped-def]
    logits_TE,
    weights_TK,
    experts_TK,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    LOWEST: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Softmax over the experts of one token, and the largest of it."""
    token = tl.program_id(0)
    lanes_E, lanes_K = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    real = lanes_E < NUM_EXPERTS
    scores = tl.load(logits_TE + token * NUM_EXPERTS + lanes_E, mask=real, other=0.0).to(tl.float32)
    # A score that is not a number must not lead to an expert that does not exist: its weights would be read.
    scores = tl.where(scores > LOWEST, scores, LOWEST)
    scores = tl.where(real, scores, float("-inf"))
    powers = tl.exp(scores - tl.max(scores, axis=0))
    total = tl.sum(powers, axis=0)
    weights = tl.zeros([BLOCK_K], dtype=tl.float32)
    experts = tl.zeros([BLOCK_K], dtype=tl.int32)
    for rank in tl.static_range(TOP_K):
        best = tl.argmax(scores, axis=0)
        power = tl.sum(tl.where(lanes_E == best, powers, 0.0), axis=0)
        weights = tl.where(lanes_K == rank, power, weights)
        experts = tl.where(lanes_K == rank, best, experts)
        scores = tl.where(lanes_E == best, float("-inf"), scores)
    if RENORMALIZE:
        total = tl.sum(weights, axis=0)
    places = token * TOP_K + lanes_K
    tl.store(weights_TK + places, weights / total, mask=lanes_K < TOP_K)
    tl.store(experts_TK + places, experts, mask=lanes_K < TOP_K)


@triton.jit(do_not_specialize=["num_slots"])
def _count_kernel(experts_S, counts_E, num_slots, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many slots one expert has."""
    expert = tl.program_id(0)
    hits = tl.zeros([CHUNK], dtype=tl.int32)
    first = 0
    while first < num_slots:
        slots = first + tl.arange(0, CHUNK)
        chosen = tl.load(experts_S + slots, mask=slots < num_slots, other=-1)
        hits += (chosen == expert).to(tl.int32)
        first += CHUNK
    tl.store(counts_E + expert, tl.sum(hits, axis=0))


@triton.jit(do_not_specialize=["num_slots", "num_blocks"])
def _list_kernel(  # type: ignore[no-untyped-def]
    experts_S,
    counts_E,
    block_experts,
    block_slots,
    num_slots,
    num_blocks,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The blocks of one expert, which follow those of the experts before it."""
    expert = tl.program_id(0)
    lanes_E = tl.arange(0, BLOCK_E)
    blocks_E = tl.cdiv(tl.load(counts_E + lanes_E, mask=lanes_E < NUM_EXPERTS, other=0), BLOCK_T)
    first_block = tl.sum(tl.where(lanes_E < expert, blocks_E, 0), axis=0)
    own_blocks = tl.sum(tl.where(lanes_E == expert, blocks_E, 0), axis=0)
    room = block_slots + first_block * BLOCK_T
    first, num_listed = 0, 0
    while first < num_slots:
        slots = first + tl.arange(0, CHUNK)
        hits = tl.load(experts_S + slots, mask=slots < num_slots, other=-1) == expert
        ranks = num_listed + tl.cumsum(hits.to(tl.int32), axis=0) - 1
        tl.store(room + ranks, slots, mask=hits)
        num_listed += tl.sum(hits.to(tl.int32), axis=0)
        first += CHUNK
    rest = num_listed + tl.arange(0, BLOCK_T)
    tl.store(room + rest, tl.zeros([BLOCK_T], dtype=tl.int32) + num_slots, mask=rest < own_blocks * BLOCK_T)
    block = first_block
    while block < first_block + own_blocks:
        tl.store(block_experts + block, expert)
        block += 1
    # The last expert also marks the blocks that nobody needs.
    while (expert == NUM_EXPERTS - 1) & (block < num_blocks):
        tl.store(block_experts + block, -1)
        block += 1


@triton.jit
def _matching_slots(  # type: ignore[no-untyped-def]
    experts_S,
    block,
    num_slots,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BY_SLOT: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """The expert of a block (−1: none), and per token its slot with that expert, or `num_slots`.

    There is a block per expert, or (BY_SLOT) a block per slot, of which the first with an expert counts.
    """
    tokens, picks = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_K)
    slots = tokens[:, None] * TOP_K + picks[None, :]
    real = (slots < num_slots) & (picks[None, :] < TOP_K)
    chosen = tl.load(experts_S + slots, mask=real, other=-1)
    expert = tl.load(experts_S + block) if BY_SLOT else block
    hits = real & (chosen == expert)
    slots_T = tl.min(tl.where(hits, slots, num_slots), axis=1)
    first = tl.min(slots_T, axis=0)
    counts = first == block if BY_SLOT else first < num_slots
    return tl.where(counts, expert, -1), slots_T


@triton.jit
def _block(  # type: ignore[no-untyped-def]
    experts_S,
    block_experts,
    block_slots,
    block,
    num_slots,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LISTED: tl.constexpr,
    BY_SLOT: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """The expert of a block (−1: none) and its slots, `num_slots` where there is none."""
    if LISTED:
        expert = tl.load(block_experts + block)
        slots_T = tl.load(block_slots + block * BLOCK_T + tl.arange(0, BLOCK_T))
    else:
        expert, slots_T = _matching_slots(experts_S, block, num_slots, TOP_K, BLOCK_K, BY_SLOT, BLOCK_T)
    return expert, slots_T


@triton.jit(do_not_specialize=["num_slots"])
def _gate_up_kernel(  # type: ignore[no-untyped-def]
    x_TD,
    gate_up_RD,
    inner_SI,
    experts_S,
    block_experts,
    block_slots,
    num_slots,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LISTED: tl.constexpr,
    BY_SLOT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
):
    """silu(gate) · up of one block, some columns of it.

    Weights are the left operand: a few tokens then fill the tensor cores' narrow side.
    """
    num_parts = tl.cdiv(INNER, ROWS)
    # Programs of one block follow each other, so that its tokens stay in the cache.
    block, part = tl.program_id(0) // num_parts, tl.program_id(0) % num_parts
    expert, slots = _block(
        experts_S, block_experts, block_slots, block, num_slots, TOP_K, BLOCK_K, LISTED, BY_SLOT, BLOCK_T
    )
    if expert < 0:
        return
    filled = slots < num_slots
    rows = part * ROWS + tl.arange(0, ROWS)
    # What is out of range reads something valid and is not stored: loads without masks are quicker.
    row_places = tl.where(rows < INNER, rows, 0)
    tokens = tl.where(filled, slots // TOP_K, 0).to(tl.int64)
    columns = tl.arange(0, STEP)
    gate_places = expert.to(tl.int64) * (2 * INNER * HIDDEN) + row_places[:, None] * HIDDEN + columns[None, :]
    gate_pointers = gate_up_RD + gate_places
    up_pointers = gate_pointers + INNER * HIDDEN
    x_pointers = x_TD + tokens[None, :] * HIDDEN + columns[:, None]
    gate = tl.zeros([ROWS, BLOCK_T], dtype=tl.float32)
    up = tl.zeros([ROWS, BLOCK_T], dtype=tl.float32)
    for first in range(0, HIDDEN, STEP):
        if HIDDEN % STEP == 0:
            x = tl.load(x_pointers + first)
            gate_weight = tl.load(gate_pointers + first)
            up_weight = tl.load(up_pointers + first)
        else:
            real = columns < HIDDEN - first
            x = tl.load(x_pointers + first, mask=real[:, None], other=0.0)
            gate_weight = tl.load(gate_pointers + first, mask=real[None, :], other=0.0)
            up_weight = tl.load(up_pointers + first, mask=real[None, :], other=0.0)
        gate = tl.dot(gate_weight, x, gate, input_precision="ieee")
        up = tl.dot(up_weight, x, up, input_precision="ieee")
    value = gate * tl.sigmoid(gate) * up
    places = slots.to(tl.int64)[None, :] * INNER + rows[:, None]
    mask = filled[None, :] & (rows < INNER)[:, None]
    tl.store(inner_SI + places, value.to(inner_SI.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_slots"])
def _down_kernel(  # type: ignore[no-untyped-def]
    inner_SI,
    down_RI,
    out_SD,
    weights_S,
    experts_S,
    block_experts,
    block_slots,
    num_slots,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LISTED: tl.constexpr,
    BY_SLOT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
):
    """The weighted outputs of one block, some columns of them."""
    num_parts = tl.cdiv(HIDDEN, ROWS)
    block, part = tl.program_id(0) // num_parts, tl.program_id(0) % num_parts
    expert, slots = _block(
        experts_S, block_experts, block_slots, block, num_slots, TOP_K, BLOCK_K, LISTED, BY_SLOT, BLOCK_T
    )
    if expert < 0:
        return
    filled = slots < num_slots
    rows = part * ROWS + tl.arange(0, ROWS)
    row_places = tl.where(rows < HIDDEN, rows, 0)
    sources = tl.where(filled, slots, 0).to(tl.int64)
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
        out = tl.dot(weight, value, out, input_precision="ieee")
    out *= tl.load(weights_S + sources)[None, :]
    places = slots.to(tl.int64)[None, :] * HIDDEN + rows[:, None]
    mask = filled[None, :] & (rows < HIDDEN)[:, None]
    tl.store(out_SD + places, out.to(out_SD.dtype.element_ty), mask=mask)
