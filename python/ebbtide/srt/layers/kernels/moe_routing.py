"""Routes tokens to experts, and lists each expert's tokens in blocks.

A *slot* is one of the T·K pairs of a token and one of its experts; slot s belongs to token s // K. A *block*
is one expert and up to `block_tokens` of its slots. Grids depend only on the number of tokens, and nothing
waits for the device, so a CUDA graph can capture everything. There are no atomic additions, so equal inputs
give equal bits.

Every kernel waits for the previous one before it lets the next one start (`follow`), so that the next one can
read what the previous one wrote.

Shapes: T tokens, E experts, K experts per token, S = T·K slots.
"""

# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ebbtide.srt.layers.heads import MoeConfig
from ebbtide.srt.layers.kernels.instructions import follow
from ebbtide.srt.layers.kernels.launch import overlap_options

LIST_CHUNK, LONG_LIST_CHUNK = 1024, 4096
# Up to this many slots, every program counts all slots itself.
FEW_SLOTS = 4096
# A finite number below any score of a router.
LOWEST_SCORE = -3e38


# How many tokens a program of `score` handles.
_SCORED_TOKENS = 16


def score(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """x Wᵀ [T, E] in float32, for few tokens. The weight is float32, tokens have any dtype."""
    num_tokens, hidden = x_TD.shape
    num_experts = len(weight_ED)
    scores_TE = torch.empty((num_tokens, num_experts), dtype=torch.float32, device=x_TD.device)
    block_tokens = min(_SCORED_TOKENS, triton.next_power_of_2(num_tokens))
    _score_kernel[(num_experts, triton.cdiv(num_tokens, block_tokens))](
        x_TD,
        weight_ED,
        scores_TE,
        num_tokens,
        NUM_EXPERTS=num_experts,
        HIDDEN=hidden,
        BLOCK_T=block_tokens,
        BLOCK_D=512,
        **overlap_options(x_TD),
    )
    return scores_TE


def route(logits_TE: Tensor, config: MoeConfig, bias_E: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`layers.moe.route` in one kernel, if `MoeConfig.routes_at_once`. Numbers of experts are int32."""
    top_k, is_grouped = config.num_experts_per_token, config.is_grouped
    num_tokens, num_experts = logits_TE.shape
    weights_TK = torch.empty((num_tokens, top_k), dtype=torch.float32, device=logits_TE.device)
    experts_TK = torch.empty((num_tokens, top_k), dtype=torch.int32, device=logits_TE.device)
    _route_kernel[(num_tokens,)](
        logits_TE,
        logits_TE if bias_E is None else bias_E,
        weights_TK,
        experts_TK,
        NUM_EXPERTS=num_experts,
        TOP_K=top_k,
        RENORMALIZE=config.renormalize,
        BY_SIGMOID=config.scoring == "sigmoid",
        HAS_BIAS=bias_E is not None,
        SCALE=config.scale,
        GROUPS=config.num_groups if is_grouped else 1,
        KEPT_GROUPS=config.num_kept_groups if is_grouped else 1,
        GROUP_SCORES=config.num_group_scores if is_grouped else 1,
        LOWEST=LOWEST_SCORE,
        BLOCK_E=triton.next_power_of_2(num_experts),
        BLOCK_K=triton.next_power_of_2(top_k),
        num_warps=1,
        **overlap_options(logits_TE),
    )
    return weights_TK, experts_TK


@dataclass(frozen=True)
class Blocks:
    """The blocks of a batch.

    Attributes:
        number: the largest possible number of blocks.
        experts: int32, the expert of each block; −1: the block is not used.
        slots: int32, `block_tokens` slots of each block, padded with S.
    """

    number: int
    experts: Tensor
    slots: Tensor


def list_slots(experts_TK: Tensor, num_experts: int, block_tokens: int) -> Blocks:
    """List the blocks of a batch; every slot is in one of them."""
    num_slots = experts_TK.numel()
    num_chosen = min(num_slots, num_experts)
    # Each chosen expert has at most one block that is not full.
    num_blocks = num_chosen + (num_slots - num_chosen) // block_tokens
    counts_E, block_experts, block_slots = (
        torch.empty(size, dtype=torch.int32, device=experts_TK.device)
        for size in (num_experts, num_blocks, num_blocks * block_tokens)
    )
    options = overlap_options(experts_TK)
    is_counted = num_slots > FEW_SLOTS
    if is_counted:
        _count_kernel[(num_experts,)](experts_TK, counts_E, num_slots, CHUNK=LONG_LIST_CHUNK, **options)
    _list_kernel[(num_experts,)](
        experts_TK,
        counts_E,
        block_experts,
        block_slots,
        num_slots,
        num_blocks,
        NUM_EXPERTS=num_experts,
        BLOCK_E=triton.next_power_of_2(num_experts),
        BLOCK_S=max(16, triton.next_power_of_2(min(num_slots, FEW_SLOTS))),
        BLOCK_T=block_tokens,
        IS_COUNTED=is_counted,
        CHUNK=LONG_LIST_CHUNK if is_counted else min(LIST_CHUNK, max(16, triton.next_power_of_2(num_slots))),
        **options,
    )
    return Blocks(num_blocks, block_experts, block_slots)


@triton.jit(do_not_specialize=["num_tokens"])
def _score_kernel(  # type: ignore[no-untyped-def]
    x_TD,
    weight_ED,
    scores_TE,
    num_tokens,
    NUM_EXPERTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Each program scores some tokens for one expert."""
    follow(OVERLAPPED)
    expert = tl.program_id(0)
    tokens = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    sums = tl.zeros([BLOCK_T, BLOCK_D], dtype=tl.float32)
    for start in range(0, HIDDEN, BLOCK_D):
        columns = start + tl.arange(0, BLOCK_D)
        inside = columns < HIDDEN
        weight = tl.load(weight_ED + expert * HIDDEN + columns, mask=inside, other=0.0)
        at = tokens[:, None] * HIDDEN + columns[None, :]
        x = tl.load(x_TD + at, mask=(tokens[:, None] < num_tokens) & inside[None, :], other=0.0)
        sums += x.to(tl.float32) * weight[None, :]
    at = scores_TE + tokens * NUM_EXPERTS + expert
    tl.store(at, tl.sum(sums, axis=1), mask=tokens < num_tokens)


@triton.jit
def _route_kernel(  # type: ignore[no-untyped-def]
    logits_TE,
    bias_E,
    weights_TK,
    experts_TK,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BY_SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCALE: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT_GROUPS: tl.constexpr,
    GROUP_SCORES: tl.constexpr,
    LOWEST: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Each program computes the weights of all experts for one token, and picks the best ones."""
    follow(OVERLAPPED)
    token = tl.program_id(0)
    lanes_E, lanes_K = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    real = lanes_E < NUM_EXPERTS
    scores = tl.load(logits_TE + token * NUM_EXPERTS + lanes_E, mask=real, other=0.0).to(tl.float32)
    # NaN becomes the lowest score, so that no expert that does not exist is chosen and its weights read.
    scores = tl.where(scores > LOWEST, scores, LOWEST)
    scores = tl.where(real, scores, float("-inf"))
    if BY_SIGMOID:
        powers = 1.0 / (1.0 + tl.exp(-scores))
        total = 1.0
    else:
        powers = tl.exp(scores - tl.max(scores, axis=0))
        total = tl.sum(powers, axis=0)
    if HAS_BIAS:
        # With a bias, the choice is by weight plus bias. Without one, logits have the same order as weights.
        bias = tl.load(bias_E + lanes_E, mask=real, other=0.0)
        choice = powers / total + bias
        scores = tl.where(real, tl.where(choice > LOWEST, choice, LOWEST), float("-inf"))
    if GROUPS > KEPT_GROUPS:
        if not HAS_BIAS:
            scores = powers / total
        scores = _of_best_groups(scores, GROUPS, KEPT_GROUPS, GROUP_SCORES, BLOCK_E)
    weights = tl.zeros([BLOCK_K], dtype=tl.float32)
    experts = tl.zeros([BLOCK_K], dtype=tl.int32)
    for rank in tl.static_range(TOP_K):
        best = tl.argmax(scores, axis=0)
        power = tl.sum(tl.where(lanes_E == best, powers, 0.0), axis=0)
        weights = tl.where(lanes_K == rank, power, weights)
        experts = tl.where(lanes_K == rank, best, experts)
        scores = tl.where(lanes_E == best, float("-inf"), scores)
    if RENORMALIZE:
        # The small number avoids a division by zero, since sigmoids may all be zero.
        total = tl.sum(weights, axis=0) + (1e-20 if BY_SIGMOID else 0.0)
    places = token * TOP_K + lanes_K
    tl.store(weights_TK + places, weights / total * SCALE, mask=lanes_K < TOP_K)
    tl.store(experts_TK + places, experts, mask=lanes_K < TOP_K)


@triton.jit
def _of_best_groups(  # type: ignore[no-untyped-def]
    scores,
    GROUPS: tl.constexpr,
    KEPT_GROUPS: tl.constexpr,
    GROUP_SCORES: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Keep the scores of experts in the best groups, and set the others to −∞."""
    in_groups = tl.reshape(scores, (GROUPS, BLOCK_E // GROUPS))
    lanes_N, lanes_G = tl.arange(0, BLOCK_E // GROUPS)[None, :], tl.arange(0, GROUPS)
    left = in_groups
    sums = tl.zeros([GROUPS], dtype=tl.float32)
    for _ in tl.static_range(GROUP_SCORES):
        sums += tl.max(left, axis=1)
        left = tl.where(lanes_N == tl.argmax(left, axis=1)[:, None], float("-inf"), left)
    kept = tl.zeros([GROUPS], dtype=tl.int32)
    for _ in tl.static_range(KEPT_GROUPS):
        best = lanes_G == tl.argmax(sums, axis=0)
        kept = tl.where(best, 1, kept)
        sums = tl.where(best, float("-inf"), sums)
    return tl.reshape(tl.where(kept[:, None] == 1, in_groups, float("-inf")), (BLOCK_E,))


@triton.jit(do_not_specialize=["num_slots"])
def _count_kernel(  # type: ignore[no-untyped-def]
    experts_S, counts_E, num_slots, CHUNK: tl.constexpr, OVERLAPPED: tl.constexpr
):
    """Each program counts the slots of one expert."""
    follow(OVERLAPPED)
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
    BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr,
    IS_COUNTED: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Each program lists the blocks of one expert, which follow those of lower experts."""
    follow(OVERLAPPED)
    expert = tl.program_id(0)
    if IS_COUNTED:
        lanes_E = tl.arange(0, BLOCK_E)
        counts = tl.load(counts_E + lanes_E, mask=lanes_E < NUM_EXPERTS, other=0)
    else:
        # Lanes without a slot count in bin BLOCK_E. The number of bins must be a power of two.
        lanes_E = tl.arange(0, 2 * BLOCK_E)
        all_slots = tl.arange(0, BLOCK_S)
        counts = tl.histogram(
            tl.load(experts_S + all_slots, mask=all_slots < num_slots, other=BLOCK_E), 2 * BLOCK_E
        )
    blocks = tl.cdiv(counts, BLOCK_T)
    first_block = tl.sum(tl.where(lanes_E < expert, blocks, 0), axis=0)
    own_blocks = tl.sum(tl.where(lanes_E == expert, blocks, 0), axis=0)
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
    # The last expert's program also marks the unused blocks.
    while (expert == NUM_EXPERTS - 1) & (block < num_blocks):
        tl.store(block_experts + block, -1)
        block += 1
