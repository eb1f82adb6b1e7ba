"""The two products of low-rank adapters, for any mix of adapters in a batch, in Triton.

`shrink` computes x Aᵀ, and `expand` adds (x Aᵀ) Bᵀ. Rows are listed by group, that is by an adapter's slot
and an expert, in the blocks of `moe_routing`, so that A and B are read once per block. Sums over columns use
split-K, and `expand` adds up the splits in a fixed order, without atomic additions. Grids depend only on the
number of rows, so a CUDA graph can capture everything.

A and B are loaded before the previous kernel has ended, since no kernel of a pass writes them. So are the
lists of tokens, since `list_groups` waits until they are written; the lists of experts are made just before.

Shapes: N rows, D inputs, O outputs, S slots, E experts, G = S·E groups, P fused tensors, R the largest rank.
"""

# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from ebbtide.srt.layers.kernels.instructions import announce, wait
from ebbtide.srt.layers.kernels.launch import num_multiprocessors, overlap_options
from ebbtide.srt.layers.kernels.moe_routing import Blocks, list_slots

# Rows of a block, for up to FEW_ROWS rows and for more. Decode steps have few rows per group.
FEW_ROWS, FEW_BLOCK, LARGE_BLOCK = 1024, 16, 64
# Columns per step of a product, programs per multiprocessor, and how many splits a sum may have.
_STEP, _PROGRAMS = 128, 2
_SPLITS = (16, 8, 4, 2, 1)
_MOST_RANKS_AT_ONCE = 64
_OUTPUTS_AT_ONCE = 128

# A, B, scalings and ends, as in `ProductAdapters`.
Factors: TypeAlias = tuple[Tensor, Tensor, Tensor, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class SlotGroups:
    """The rows of a pass by group.

    Attributes:
        blocks: `blocks.experts` are groups; S·E or more: the rows have no adapter.
        block_rows: rows of a block.
        num_rows: N.
        are_early: whether the lists may be read while the previous kernel still runs.
    """

    blocks: Blocks
    block_rows: int
    num_rows: int
    are_early: bool


@dataclass(frozen=True, slots=True)
class ExpertFactors:
    """The adapters of a layer's experts, for all slots (pairs of token and expert) of a pass; None: none."""

    groups: SlotGroups
    gate_up: Factors | None
    down: Factors | None


def list_groups(
    slots_T: Tensor, num_slots: int, experts_TK: Tensor | None = None, num_experts: int = 1
) -> SlotGroups:
    """List rows by group. Rows are tokens, or with `experts_TK` pairs of a token and an expert.

    Args:
        slots_T: int32; −1: the token has no adapter.
        experts_TK: int32.
    """
    num_groups = num_slots * num_experts
    if experts_TK is None:
        groups_N = torch.where(slots_T < 0, num_groups, slots_T).int()
    else:
        slots_T1 = slots_T[:, None]
        groups_TK = torch.where(slots_T1 < 0, num_groups, slots_T1 * num_experts + experts_TK)
        groups_N = groups_TK.flatten().int()
    block_rows = FEW_BLOCK if len(groups_N) <= FEW_ROWS else LARGE_BLOCK
    blocks = list_slots(groups_N, num_groups + 1, block_rows)
    if experts_TK is None:
        # This kernel waits until the lists are written, and later ones wait for it, so they may read early.
        groups_N.zero_()
    return SlotGroups(blocks, block_rows, len(groups_N), are_early=experts_TK is None)


def shrink(x_TD: Tensor, factors: Factors, groups: SlotGroups, *, top_k: int = 1) -> Tensor:
    """x Aᵀ as float32 partial sums [splits, N, P·R]; undefined in rows without adapter.

    Args:
        x_TD: contiguous. Row n of N belongs to token n // top_k.
    """
    a_SEPD, *_ = factors
    _, num_experts, num_ranks, num_columns = a_SEPD.shape
    is_few = groups.block_rows == FEW_BLOCK
    block_ranks = min(triton.next_power_of_2(num_ranks), 32 if is_few else 64)
    num_tiles = triton.cdiv(num_ranks, block_ranks)
    num_blocks = triton.cdiv(groups.num_rows, groups.block_rows)
    wanted = _PROGRAMS * num_multiprocessors(x_TD.device) // (num_tiles * num_blocks)
    # Few different numbers of splits, since a kernel is compiled for each.
    splits = next(each for each in _SPLITS if each <= max(1, min(wanted, num_columns // _STEP)))
    split_columns = triton.cdiv(triton.cdiv(num_columns, splits), _STEP) * _STEP
    num_splits = triton.cdiv(num_columns, split_columns)
    parts = torch.empty((num_splits, groups.num_rows, num_ranks), dtype=torch.float32, device=x_TD.device)
    _shrink_kernel[(groups.blocks.number, num_tiles, num_splits)](
        x_TD,
        a_SEPD,
        parts,
        groups.blocks.experts,
        groups.blocks.slots,
        groups.num_rows,
        a_SEPD.stride(0),
        NUM_GROUPS=len(a_SEPD) * num_experts,
        NUM_EXPERTS=num_experts,
        NUM_RANKS=num_ranks,
        NUM_COLUMNS=num_columns,
        SPLIT_COLUMNS=split_columns,
        TOP_K=top_k,
        BLOCK_N=groups.block_rows,
        BLOCK_R=block_ranks,
        STEP=_STEP,
        EARLY=groups.are_early,
        num_warps=4,
        num_stages=3,
        **overlap_options(x_TD),
    )
    return parts


def expand(
    inner: Tensor,
    factors: Factors,
    groups: SlotGroups,
    out_NO: Tensor,
    *,
    add: bool = True,
    weights_N: Tensor | None = None,
) -> None:
    """Write (x Aᵀ) Bᵀ times the adapters' scalings into `out_NO`, or add it, for rows with an adapter.

    Args:
        inner: from `shrink`.
        out_NO: contiguous.
        weights_N: float32 factors of rows; None: all are 1.
    """
    _, b_SEOR, scalings_SP, ends = factors
    num_slots, num_experts, num_outputs, rank = b_SEOR.shape
    assert len(ends) <= 3, "a product of more than three fused tensors"
    first, second = ends[0], ends[min(1, len(ends) - 1)]
    sizes = (first, second - first, num_outputs - second)
    block_outputs = min(_OUTPUTS_AT_ONCE, max(16, triton.next_power_of_2(max(sizes))))
    num_tiles = sum(triton.cdiv(size, block_outputs) for size in sizes)
    _expand_kernel[(groups.blocks.number, num_tiles)](
        inner,
        b_SEOR,
        scalings_SP,
        weights_N,
        out_NO,
        groups.blocks.experts,
        groups.blocks.slots,
        groups.num_rows,
        b_SEOR.stride(0),
        scalings_SP.stride(0),
        NUM_GROUPS=num_slots * num_experts,
        NUM_EXPERTS=num_experts,
        NUM_SPLITS=len(inner),
        NUM_RANKS=inner.shape[-1],
        RANK=rank,
        NUM_OUTPUTS=num_outputs,
        FIRST_END=first,
        SECOND_END=second,
        BLOCK_N=groups.block_rows,
        BLOCK_O=block_outputs,
        BLOCK_R=min(triton.next_power_of_2(rank), _MOST_RANKS_AT_ONCE),
        ADD=add,
        EARLY=groups.are_early,
        num_warps=4,
        num_stages=2,
        **overlap_options(inner),
    )


@triton.jit
def _start(EARLY: tl.constexpr, OVERLAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Let the next kernel start, but first wait for the previous one if that made this kernel's lists."""
    if not EARLY:
        wait(OVERLAPPED)
    announce(OVERLAPPED)


@triton.jit
def _follow_late(EARLY: tl.constexpr, OVERLAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait for the previous kernel, unless `_start` has done so."""
    if EARLY:
        wait(OVERLAPPED)


@triton.jit(do_not_specialize=["num_rows"])
def _shrink_kernel(  # type: ignore[no-untyped-def]
    x_TD,
    a_SEPD,
    parts,
    block_groups,
    block_slots,
    num_rows,
    slot_stride,
    NUM_GROUPS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    SPLIT_COLUMNS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    STEP: tl.constexpr,
    EARLY: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Each program computes some ranks of one block, summed over one split of the columns."""
    _start(EARLY, OVERLAPPED)
    block, split = tl.program_id(0), tl.program_id(2)
    group = tl.load(block_groups + block)
    if (group < 0) | (group >= NUM_GROUPS):
        # Wait even so: later kernels rely on all kernels before this one having ended.
        _follow_late(EARLY, OVERLAPPED)
        return
    rows = tl.load(block_slots + block * BLOCK_N + tl.arange(0, BLOCK_N))
    filled = rows < num_rows
    ranks = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = ranks < NUM_RANKS
    columns = tl.arange(0, STEP)
    first = split * SPLIT_COLUMNS
    a_start = (group // NUM_EXPERTS).to(tl.int64) * slot_stride
    a_start += (group % NUM_EXPERTS).to(tl.int64) * (NUM_RANKS * NUM_COLUMNS)
    a_pointers = a_SEPD + a_start + ranks[:, None] * NUM_COLUMNS + columns[None, :]
    tokens = tl.where(filled, rows // TOP_K, 0).to(tl.int64)
    x_pointers = x_TD + tokens[:, None] * NUM_COLUMNS + columns[None, :]
    real = (first + columns)[None, :] < NUM_COLUMNS
    ahead = tl.load(a_pointers + first, mask=inside[:, None] & real, other=0.0)
    _follow_late(EARLY, OVERLAPPED)
    total = tl.zeros([BLOCK_N, BLOCK_R], dtype=tl.float32)
    for start in range(0, SPLIT_COLUMNS, STEP):
        here = first + start
        real = (here + columns)[None, :] < NUM_COLUMNS
        x = tl.load(x_pointers + here, mask=filled[:, None] & real, other=0.0)
        a = ahead
        following = here + STEP
        wanted = (following + columns)[None, :] < NUM_COLUMNS
        wanted = inside[:, None] & wanted & (start + STEP < SPLIT_COLUMNS)
        ahead = tl.load(a_pointers + following, mask=wanted, other=0.0)
        total = tl.dot(x.to(a.dtype), tl.trans(a), total, input_precision="ieee")
    places = rows.to(tl.int64)[:, None] * NUM_RANKS + ranks[None, :]
    mask, distance = filled[:, None] & inside[None, :], num_rows.to(tl.int64) * NUM_RANKS
    tl.store(parts + split * distance + places, total, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _expand_kernel(  # type: ignore[no-untyped-def]
    inner,
    b_SEOR,
    scalings_SP,
    weights_N,
    out_NO,
    block_groups,
    block_slots,
    num_rows,
    slot_stride,
    scaling_stride,
    NUM_GROUPS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    RANK: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    FIRST_END: tl.constexpr,
    SECOND_END: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ADD: tl.constexpr,
    EARLY: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Each program computes some outputs of one block, all of the same fused tensor."""
    _start(EARLY, OVERLAPPED)
    block, tile = tl.program_id(0), tl.program_id(1)
    group = tl.load(block_groups + block)
    if (group < 0) | (group >= NUM_GROUPS):
        _follow_late(EARLY, OVERLAPPED)
        return
    rows = tl.load(block_slots + block * BLOCK_N + tl.arange(0, BLOCK_N))
    filled = rows < num_rows
    slot = group // NUM_EXPERTS
    # Find the fused tensor to which the outputs belong.
    first_tiles: tl.constexpr = (FIRST_END + BLOCK_O - 1) // BLOCK_O
    second_tiles: tl.constexpr = first_tiles + (SECOND_END - FIRST_END + BLOCK_O - 1) // BLOCK_O
    part, start, end = 0, tile * BLOCK_O, FIRST_END
    if tile >= second_tiles:
        part, start, end = 2, SECOND_END + (tile - second_tiles) * BLOCK_O, NUM_OUTPUTS
    elif tile >= first_tiles:
        part, start, end = 1, FIRST_END + (tile - first_tiles) * BLOCK_O, SECOND_END
    outputs = start + tl.arange(0, BLOCK_O)
    inside = outputs < end
    ranks = tl.arange(0, BLOCK_R)
    b_start = slot.to(tl.int64) * slot_stride
    b_start += (group % NUM_EXPERTS).to(tl.int64) * (NUM_OUTPUTS * RANK)
    b_pointers = b_SEOR + b_start + outputs[:, None] * RANK + ranks[None, :]
    b = tl.load(b_pointers, mask=inside[:, None] & (ranks < RANK)[None, :], other=0.0)
    scaling = tl.load(scalings_SP + slot * scaling_stride + part)
    row_places = rows.to(tl.int64)[:, None]
    at = out_NO + row_places * NUM_OUTPUTS + outputs[None, :]
    mask = filled[:, None] & inside[None, :]
    _follow_late(EARLY, OVERLAPPED)
    # Loaded first, so that it arrives while the product is computed.
    before = tl.zeros([BLOCK_N, BLOCK_O], dtype=out_NO.dtype.element_ty)
    if ADD:
        before = tl.load(at, mask=mask, other=0.0)
    total = tl.zeros([BLOCK_N, BLOCK_O], dtype=tl.float32)
    for first_rank in tl.static_range(0, RANK, BLOCK_R):
        real = first_rank + ranks < RANK
        if first_rank > 0:
            b = tl.load(b_pointers + first_rank, mask=inside[:, None] & real[None, :], other=0.0)
        places = inner + row_places * NUM_RANKS + part * RANK + (first_rank + ranks)[None, :]
        value = _added_up(places, filled[:, None] & real[None, :], num_rows * NUM_RANKS, NUM_SPLITS)
        total = tl.dot((value * scaling).to(b.dtype), tl.trans(b), total, input_precision="ieee")
    if weights_N is not None:
        total *= tl.load(weights_N + rows, mask=filled, other=0.0)[:, None]
    total += before.to(tl.float32)
    tl.store(at, total.to(out_NO.dtype.element_ty), mask=mask)


@triton.jit
def _added_up(places, mask, distance, NUM_SPLITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum the splits that `shrink` left."""
    value = tl.load(places, mask=mask, other=0.0)
    for split in tl.static_range(1, NUM_SPLITS):
        value += tl.load(places + split * distance, mask=mask, other=0.0)
    return value
