"""Triton kernels that read every weight once, for so few tokens that only this takes time.

All use programmatic dependent launch in the same way: let the next kernel start at once, load or prefetch
weights, which no kernel writes, and only then wait for the previous kernel. So memory stays busy across the
boundary of two kernels, and the next one's blocks are in place when the last one ends. A kernel waits before
it first accesses anything that kernels write; since all do so, it also waits for all earlier kernels.

For one token the norm is folded into the product: (x / rms(x) · n) Wᵀ = (x · n) Wᵀ / rms(x), and the squares
are summed in the same loop.

Names in capitals are compile-time constants. FOLD_NORM: scale x by the norm's weight, and the product by
1 / rms(x). GATED: the weight has 2 · num_rows rows, gates first. GELU: the gates' activation; otherwise silu.
ADD: out += product. EVEN: blocks divide rows and columns evenly. OVERLAPPED: see `kernels.instructions`.
"""

# Triton kernels have no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,import-not-found"

from typing import Any

import triton
import triton.language as tl

from ebbtide.srt.layers.kernels.instructions import announce, prefetch, wait
from ebbtide.srt.layers.kernels.norm import activate

# Bits of a cache line.
_LINE_BITS: Any = tl.constexpr(1024)
# A program of `_shrink` computes this many ranks, with this many columns per step.
SHRUNK_RANKS: Any = tl.constexpr(32)
SHRUNK_STEP: Any = tl.constexpr(64)


@triton.jit
def _read(pointers, inside, EVEN: tl.constexpr):
    """Load weights. They are read only once, so they must not evict activations from the caches."""
    if EVEN:
        return tl.load(pointers, eviction_policy="evict_first")
    return tl.load(pointers, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _by_eights(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Add up eight neighbours, which are in one thread, so that totals take an eighth of the registers."""
    return tl.sum(tl.reshape(tile, (ROWS, COLUMNS // 8, 8)), axis=2)


@triton.jit
def _shrink(
    index,
    x_ptr,
    a_ptr,
    slots_ptr,
    inner_ptr,
    num_tokens,
    slot_stride,
    NUM_COLUMNS: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    RANK_SPLITS: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
) -> None:
    """Compute some ranks of x Aᵀ, summed over one split of the columns, for one adapter: see `Shrinking`.

    The first programs of a product do this instead of rows. If no token has the adapter, they end at once.
    """
    TILES: tl.constexpr = (NUM_RANKS + SHRUNK_RANKS - 1) // SHRUNK_RANKS
    STEPS: tl.constexpr = (NUM_COLUMNS + RANK_SPLITS * SHRUNK_STEP - 1) // (RANK_SPLITS * SHRUNK_STEP)
    SPLIT: tl.constexpr = STEPS * SHRUNK_STEP
    split, tile, place = index % RANK_SPLITS, index // RANK_SPLITS % TILES, index // (RANK_SPLITS * TILES)
    tokens = tl.arange(0, BLOCK_TOKENS)
    # The slots are inputs of the pass, which no kernel writes, so they are read before waiting.
    slots = tl.load(slots_ptr + tokens, mask=tokens < num_tokens, other=-1)
    slot = place
    num_before = 0
    if BY_TOKEN:
        # Only the first token of each adapter does the work of all its tokens.
        slot = tl.load(slots_ptr + place, mask=place < num_tokens, other=-1)
        num_before = tl.sum(((slots == slot) & (tokens < place)).to(tl.int32), axis=0)
    mine = slots == slot
    if (slot >= 0) & (num_before == 0) & (tl.sum(mine.to(tl.int32), axis=0) > 0):
        ranks = tile * SHRUNK_RANKS + tl.arange(0, SHRUNK_RANKS)
        inside = ranks < NUM_RANKS
        columns = split * SPLIT + tl.arange(0, SHRUNK_STEP)
        a_pointers = a_ptr + slot.to(tl.int64) * slot_stride + ranks[:, None] * NUM_COLUMNS
        x_pointers = x_ptr + tokens[:, None] * NUM_COLUMNS
        wait(OVERLAPPED)
        total = tl.zeros((BLOCK_TOKENS, SHRUNK_RANKS), tl.float32)
        for start in tl.range(0, SPLIT, SHRUNK_STEP, num_stages=3):
            here = start + columns
            real = (here < NUM_COLUMNS)[None, :]
            a = tl.load(a_pointers + here[None, :], mask=inside[:, None] & real, other=0.0)
            x = tl.load(x_pointers + here[None, :], mask=mine[:, None] & real, other=0.0)
            total = tl.dot(x, tl.trans(a), total)
        places = inner_ptr + (split * num_tokens + tokens[:, None]) * NUM_RANKS + ranks[None, :]
        tl.store(places, total, mask=mine[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["num_shrinking"])
def matvec(
    x_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    a_ptr,
    slots_ptr,
    inner_ptr,
    slot_stride,
    num_shrinking,
    num_rows,
    eps,
    NUM_COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    FOLD_NORM: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    EVEN: tl.constexpr,
    OVERLAPPED: tl.constexpr,
    SHRINKING: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    RANK_SPLITS: tl.constexpr,
    BY_TOKEN: tl.constexpr,
) -> None:
    """One token; each program computes some rows. Partial sums stay per column, in float32, until the end."""
    announce(OVERLAPPED)
    if SHRINKING:  # noqa: SIM102 (a constant: without any there is nothing to compile)
        if tl.program_id(0) < num_shrinking:
            _shrink(
                tl.program_id(0),
                x_ptr,
                a_ptr,
                slots_ptr,
                inner_ptr,
                1,
                slot_stride,
                NUM_COLUMNS,
                NUM_RANKS,
                RANK_SPLITS,
                BY_TOKEN,
                16,
                OVERLAPPED,
            )
            return
    row_block = tl.program_id(0)
    if SHRINKING:
        row_block -= num_shrinking
    first_row = row_block * BLOCK_ROWS
    rows = first_row + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_COLUMNS)
    inside = (rows < num_rows)[:, None]
    tile = weight_ptr + rows.to(tl.int64)[:, None] * NUM_COLUMNS + columns[None, :]
    up_distance = tl.cast(num_rows, tl.int64) * NUM_COLUMNS
    ahead = _read(tile, inside & (columns < NUM_COLUMNS)[None, :], EVEN)
    if GATED:
        ahead_up = _read(tile + up_distance, inside & (columns < NUM_COLUMNS)[None, :], EVEN)
    if BIAS:
        bias = tl.load(bias_ptr + rows, mask=rows < num_rows, other=0.0).to(tl.float32)
    wait(OVERLAPPED)
    if ADD:
        residual = tl.load(out_ptr + rows, mask=rows < num_rows, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS // 8), tl.float32)
    total_up = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS // 8), tl.float32)
    squares = tl.zeros((BLOCK_COLUMNS,), tl.float32)
    for start in range(0, NUM_COLUMNS, BLOCK_COLUMNS):
        weight = ahead
        following = start + BLOCK_COLUMNS + columns
        wanted = inside & (following < NUM_COLUMNS)[None, :]
        # The next tile is loaded into registers ahead of its use. After the last tile nothing is read.
        ahead = tl.load(tile + start + BLOCK_COLUMNS, mask=wanted, other=0.0, eviction_policy="evict_first")
        if GATED:
            weight_up = ahead_up
            ahead_up = tl.load(
                tile + up_distance + start + BLOCK_COLUMNS,
                mask=wanted,
                other=0.0,
                eviction_policy="evict_first",
            )
        here = start + columns
        x = tl.load(x_ptr + here, mask=here < NUM_COLUMNS, other=0.0).to(tl.float32)
        if FOLD_NORM:
            squares += x * x
            x *= tl.load(norm_ptr + here, mask=here < NUM_COLUMNS, other=0.0).to(tl.float32)
        total += _by_eights(weight.to(tl.float32) * x[None, :], BLOCK_ROWS, BLOCK_COLUMNS)
        if GATED:
            total_up += _by_eights(weight_up.to(tl.float32) * x[None, :], BLOCK_ROWS, BLOCK_COLUMNS)
    product = tl.sum(total, axis=1)
    if FOLD_NORM:
        scale = tl.rsqrt(tl.sum(squares, axis=0) / NUM_COLUMNS + eps)
        product *= scale
    if GATED:
        up = tl.sum(total_up, axis=1)
        if FOLD_NORM:
            up *= scale
        product = activate(product, GELU) * up
    if BIAS:
        product += bias
    if ADD:
        product += residual
    tl.store(out_ptr + rows, product.to(out_ptr.dtype.element_ty), mask=rows < num_rows)


@triton.jit(do_not_specialize=["num_shrinking", "num_tokens"])
def product(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    arrivals_ptr,
    a_ptr,
    slots_ptr,
    inner_ptr,
    slot_stride,
    num_shrinking,
    num_tokens,
    num_rows,
    NUM_COLUMNS: tl.constexpr,
    SPLIT_COLUMNS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    PREFETCHED_COLUMNS: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    EVEN: tl.constexpr,
    OVERLAPPED: tl.constexpr,
    SHRINKING: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    RANK_SPLITS: tl.constexpr,
    BY_TOKEN: tl.constexpr,
) -> None:
    """Several tokens, on tensor cores. In the tile, rows of the weight are rows, and tokens are columns.

    A program computes BLOCK_ROWS rows over SPLIT_COLUMNS columns. With split-K, its result goes to `partial`
    [splits, T, rows] (gates, then ups), and the last program of each block of rows adds up all splits, always
    in the same order. `arrivals` counts these programs for each block of rows, and is reset to zero.
    """
    announce(OVERLAPPED)
    split = tl.program_id(1)
    if SHRINKING:  # noqa: SIM102 (a constant: without any there is nothing to compile)
        if tl.program_id(0) < num_shrinking:
            _shrink(
                tl.program_id(0) * tl.num_programs(1) + split,
                x_ptr,
                a_ptr,
                slots_ptr,
                inner_ptr,
                num_tokens,
                slot_stride,
                NUM_COLUMNS,
                NUM_RANKS,
                RANK_SPLITS,
                BY_TOKEN,
                BLOCK_TOKENS,
                OVERLAPPED,
            )
            return
    row_block = tl.program_id(0)
    if SHRINKING:
        row_block -= num_shrinking
    begin = split * SPLIT_COLUMNS
    rows = row_block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    tokens = tl.arange(0, BLOCK_TOKENS)
    columns = tl.arange(0, BLOCK_COLUMNS)
    inside = (rows < num_rows)[:, None]
    up_distance = tl.cast(num_rows, tl.int64) * NUM_COLUMNS
    row_starts = weight_ptr + rows.to(tl.int64)[:, None] * NUM_COLUMNS
    if OVERLAPPED:
        LINE: tl.constexpr = _LINE_BITS // weight_ptr.dtype.element_ty.primitive_bitwidth
        lines = begin + tl.arange(0, PREFETCHED_COLUMNS // LINE) * LINE
        # Addresses outside of the weight are replaced by those of its last row or column.
        first = weight_ptr + tl.minimum(rows, num_rows - 1).to(tl.int64)[:, None] * NUM_COLUMNS
        first += tl.minimum(lines, NUM_COLUMNS - 1)[None, :]
        prefetch(first)
        if GATED:
            prefetch(first + up_distance)
    wait(OVERLAPPED)
    total = tl.zeros((BLOCK_ROWS, BLOCK_TOKENS), tl.float32)
    total_up = tl.zeros((BLOCK_ROWS, BLOCK_TOKENS), tl.float32)
    x_starts = x_ptr + tokens[:, None] * NUM_COLUMNS
    present = (tokens < num_tokens)[:, None]
    for start in range(0, SPLIT_COLUMNS, BLOCK_COLUMNS):
        here = begin + start + columns
        weight = _read(row_starts + here[None, :], inside & (here < NUM_COLUMNS)[None, :], EVEN)
        if EVEN:
            x = tl.load(x_starts + here[None, :], mask=present, other=0.0)
        else:
            x = tl.load(x_starts + here[None, :], mask=present & (here < NUM_COLUMNS)[None, :], other=0.0)
        total = tl.dot(weight, tl.trans(x), total)
        if GATED:
            weight_up = _read(
                row_starts + up_distance + here[None, :], inside & (here < NUM_COLUMNS)[None, :], EVEN
            )
            total_up = tl.dot(weight_up, tl.trans(x), total_up)
    # Transposed, so that neighbouring threads write neighbouring elements.
    result = tl.trans(total)
    result_up = tl.trans(total_up)
    stored = (tokens < num_tokens)[:, None] & (rows < num_rows)[None, :]
    is_last = True
    if SPLIT_COLUMNS < NUM_COLUMNS:
        NUM_SPLITS: tl.constexpr = (NUM_COLUMNS + SPLIT_COLUMNS - 1) // SPLIT_COLUMNS
        stride = num_rows * 2 if GATED else num_rows
        partials = partial_ptr + tokens[:, None] * stride + rows[None, :]
        mine = partials + split * num_tokens * stride
        tl.store(mine, result, mask=stored)
        if GATED:
            tl.store(mine + num_rows, result_up, mask=stored)
        # All threads must have stored their results before the program is counted.
        tl.debug_barrier()
        is_last = tl.atomic_add(arrivals_ptr + row_block, 1, sem="acq_rel") == NUM_SPLITS - 1
        if is_last:
            tl.store(arrivals_ptr + row_block, 0)
            result = tl.zeros((BLOCK_TOKENS, BLOCK_ROWS), tl.float32)
            result_up = tl.zeros((BLOCK_TOKENS, BLOCK_ROWS), tl.float32)
            for part in tl.static_range(NUM_SPLITS):
                theirs = partials + part * num_tokens * stride
                result += tl.load(theirs, mask=stored, other=0.0, cache_modifier=".cg")
                if GATED:
                    result_up += tl.load(theirs + num_rows, mask=stored, other=0.0, cache_modifier=".cg")
    if is_last:
        if GATED:
            result = activate(result, GELU) * result_up
        if BIAS:
            result += tl.load(bias_ptr + rows, mask=rows < num_rows, other=0.0).to(tl.float32)[None, :]
        outs = out_ptr + tokens[:, None] * num_rows + rows[None, :]
        if ADD:
            result += tl.load(outs, mask=stored, other=0.0).to(tl.float32)
        tl.store(outs, result.to(out_ptr.dtype.element_ty), mask=stored)
