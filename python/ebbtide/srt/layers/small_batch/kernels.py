"""Triton kernels that read every weight once, for so few tokens that nothing else costs time.

All of them follow one pattern of programmatic dependent launch: say at once that the next kernel may start,
ask for weights, which no kernel writes, and only then wait for the predecessor. The memory is busy across
the boundary of two kernels, and the next one's blocks are in place when the last one ends. Every kernel
waits before its first access to anything that a kernel writes: so it also waits for all earlier ones.

The norm is folded into the product: x/rms(x)·n Wᵀ = (x·n Wᵀ)/rms(x), and the squares are summed on the way.

The names in capitals are compile-time constants. FOLD_NORM: scale x by the norm's weight, and the product by
1/rms(x). GATED: the weight holds twice num_rows rows, gates first. GELU: the gates' activation, else silu.
ADD: out += product. EVEN: the blocks divide rows and columns. SCALED: the weight has 8 bits and each block of
128 × 128 a scale; a tile of rows, or of the columns of a dot, lies in one block. OVERLAPPED: launched as a
dependent; the interpreter does not know the instructions.
"""

# Triton has no types, and a kernel is not Python.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,import-not-found"

from typing import Any

import triton
import triton.language as tl

from ebbtide.srt.layers.kernels.activation import activate

# Bits of a cache line.
_LINE_BITS: Any = tl.constexpr(1024)
# Rows and columns of a weight that share a scale.
_SCALED: Any = tl.constexpr(128)


@triton.jit
def _announce(OVERLAPPED: tl.constexpr) -> None:
    """Let the next kernel's blocks start where there is room."""
    if OVERLAPPED:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _await(OVERLAPPED: tl.constexpr) -> None:
    """Wait until the kernel before has ended and what it wrote can be read."""
    if OVERLAPPED:
        tl.extra.cuda.gdc_wait()


@triton.jit
def _prefetch(pointers) -> None:
    """Bring the lines of these addresses into the second-level cache; nobody waits for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _read(pointers, inside, EVEN: tl.constexpr):
    """Weights are read once: they must not drive activations out of the caches."""
    if EVEN:
        return tl.load(pointers, eviction_policy="evict_first")
    return tl.load(pointers, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _by_eights(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Add up eight neighbours, which are in one thread: an eighth of the registers for the totals."""
    return tl.sum(tl.reshape(tile, (ROWS, COLUMNS // 8, 8)), axis=2)


@triton.jit
def matvec(
    x_ptr,
    norm_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
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
    SCALED: tl.constexpr,
    OVERLAPPED: tl.constexpr,
) -> None:
    """One token: each program owns some rows. Products stay per column, in float32, until the end."""
    _announce(OVERLAPPED)
    first_row = tl.program_id(0) * BLOCK_ROWS
    rows = first_row + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_COLUMNS)
    inside = (rows < num_rows)[:, None]
    tile = weight_ptr + rows.to(tl.int64)[:, None] * NUM_COLUMNS + columns[None, :]
    up_distance = num_rows.to(tl.int64) * NUM_COLUMNS
    ahead = _read(tile, inside & (columns < NUM_COLUMNS)[None, :], EVEN)
    if GATED:
        ahead_up = _read(tile + up_distance, inside & (columns < NUM_COLUMNS)[None, :], EVEN)
    if BIAS:
        bias = tl.load(bias_ptr + rows, mask=rows < num_rows, other=0.0).to(tl.float32)
    _await(OVERLAPPED)
    if ADD:
        residual = tl.load(out_ptr + rows, mask=rows < num_rows, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS // 8), tl.float32)
    total_up = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS // 8), tl.float32)
    squares = tl.zeros((BLOCK_COLUMNS,), tl.float32)
    for start in range(0, NUM_COLUMNS, BLOCK_COLUMNS):
        weight = ahead
        following = start + BLOCK_COLUMNS + columns
        wanted = inside & (following < NUM_COLUMNS)[None, :]
        # One tile ahead, in registers. Behind the last one nothing is read.
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
        x_up = x
        if SCALED:
            scales = scale_ptr + first_row // _SCALED * tl.cdiv(NUM_COLUMNS, _SCALED) + here // _SCALED
            x *= tl.load(scales, mask=here < NUM_COLUMNS, other=0.0)
            if GATED:
                scales += num_rows // _SCALED * tl.cdiv(NUM_COLUMNS, _SCALED)
                x_up *= tl.load(scales, mask=here < NUM_COLUMNS, other=0.0)
        total += _by_eights(weight.to(tl.float32) * x[None, :], BLOCK_ROWS, BLOCK_COLUMNS)
        if GATED:
            total_up += _by_eights(weight_up.to(tl.float32) * x_up[None, :], BLOCK_ROWS, BLOCK_COLUMNS)
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


@triton.jit(do_not_specialize=["num_tokens"])
def product(
    x_ptr,
    norm_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    squares_ptr,
    num_tokens,
    num_rows,
    eps,
    NUM_COLUMNS: tl.constexpr,
    SPLIT_COLUMNS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    PREFETCHED_COLUMNS: tl.constexpr,
    FOLD_NORM: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    EVEN: tl.constexpr,
    SCALED: tl.constexpr,
    OVERLAPPED: tl.constexpr,
) -> None:
    """Several tokens, on tensor cores: rows of the weight are the rows of the product, tokens its columns.

    A program owns BLOCK_ROWS rows and SPLIT_COLUMNS columns. With fewer columns than the weight has, what it
    computed goes to `partial` [splits, T, rows] (gates, then ups) and, of x², to `squares` [splits, T].
    """
    _announce(OVERLAPPED)
    split = tl.program_id(1)
    begin = split * SPLIT_COLUMNS
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    tokens = tl.arange(0, BLOCK_TOKENS)
    columns = tl.arange(0, BLOCK_COLUMNS)
    inside = (rows < num_rows)[:, None]
    up_distance = num_rows.to(tl.int64) * NUM_COLUMNS
    row_starts = weight_ptr + rows.to(tl.int64)[:, None] * NUM_COLUMNS
    if OVERLAPPED:
        LINE: tl.constexpr = _LINE_BITS // weight_ptr.dtype.element_ty.primitive_bitwidth
        lines = begin + tl.arange(0, PREFETCHED_COLUMNS // LINE) * LINE
        # Behind the last row or column the address of another line of this weight.
        first = weight_ptr + tl.minimum(rows, num_rows - 1).to(tl.int64)[:, None] * NUM_COLUMNS
        first += tl.minimum(lines, NUM_COLUMNS - 1)[None, :]
        _prefetch(first)
        if GATED:
            _prefetch(first + up_distance)
    if FOLD_NORM:
        norm_ahead = tl.load(norm_ptr + begin + columns, mask=begin + columns < NUM_COLUMNS, other=0.0)
    _await(OVERLAPPED)
    if SCALED:
        scale_row = scale_ptr + tl.program_id(0) * BLOCK_ROWS // _SCALED * tl.cdiv(NUM_COLUMNS, _SCALED)
        scale_distance = num_rows // _SCALED * tl.cdiv(NUM_COLUMNS, _SCALED)
    total = tl.zeros((BLOCK_ROWS, BLOCK_TOKENS), tl.float32)
    total_up = tl.zeros((BLOCK_ROWS, BLOCK_TOKENS), tl.float32)
    squares = tl.zeros((BLOCK_TOKENS,), tl.float32)
    x_starts = x_ptr + tokens[:, None] * NUM_COLUMNS
    present = (tokens < num_tokens)[:, None]
    for start in range(0, SPLIT_COLUMNS, BLOCK_COLUMNS):
        here = begin + start + columns
        weight = _read(row_starts + here[None, :], inside & (here < NUM_COLUMNS)[None, :], EVEN)
        if EVEN:
            x = tl.load(x_starts + here[None, :], mask=present, other=0.0)
        else:
            x = tl.load(x_starts + here[None, :], mask=present & (here < NUM_COLUMNS)[None, :], other=0.0)
        if FOLD_NORM:
            norm = norm_ahead.to(tl.float32)
            # Too small for an asynchronous copy: so it is loaded one tile ahead by hand.
            following = here + BLOCK_COLUMNS
            norm_ahead = tl.load(norm_ptr + following, mask=following < NUM_COLUMNS, other=0.0)
            x_float = x.to(tl.float32)
            squares += tl.sum(x_float * x_float, axis=1)
            x = (x_float * norm[None, :]).to(x.dtype)
        if SCALED:
            scale = tl.load(scale_row + (begin + start) // _SCALED)
            total += tl.dot(weight.to(x.dtype), tl.trans(x)) * scale
        else:
            total = tl.dot(weight, tl.trans(x), total)
        if GATED:
            weight_up = _read(
                row_starts + up_distance + here[None, :], inside & (here < NUM_COLUMNS)[None, :], EVEN
            )
            if SCALED:
                scale_up = tl.load(scale_row + scale_distance + (begin + start) // _SCALED)
                total_up += tl.dot(weight_up.to(x.dtype), tl.trans(x)) * scale_up
            else:
                total_up = tl.dot(weight_up, tl.trans(x), total_up)
    # Tokens first: then neighbouring threads write neighbouring elements.
    result = tl.trans(total)
    result_up = tl.trans(total_up)
    if SPLIT_COLUMNS < NUM_COLUMNS:
        stored = (tokens < num_tokens)[:, None] & (rows < num_rows)[None, :]
        stride = num_rows * 2 if GATED else num_rows
        partials = partial_ptr + (split * num_tokens + tokens)[:, None] * stride + rows[None, :]
        tl.store(partials, result, mask=stored)
        if GATED:
            tl.store(partials + num_rows, result_up, mask=stored)
        if FOLD_NORM and tl.program_id(0) == 0:
            tl.store(squares_ptr + split * num_tokens + tokens, squares, mask=tokens < num_tokens)
    else:
        if FOLD_NORM:
            scale = tl.rsqrt(squares / NUM_COLUMNS + eps)[:, None]
            result *= scale
            result_up *= scale
        if GATED:
            result = activate(result, GELU) * result_up
        if BIAS:
            result += tl.load(bias_ptr + rows, mask=rows < num_rows, other=0.0).to(tl.float32)[None, :]
        stored = (tokens < num_tokens)[:, None] & (rows < num_rows)[None, :]
        outs = out_ptr + tokens[:, None] * num_rows + rows[None, :]
        if ADD:
            result += tl.load(outs, mask=stored, other=0.0).to(tl.float32)
        tl.store(outs, result.to(out_ptr.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["num_tokens"])
def combine(
    partial_ptr,
    squares_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    num_rows,
    eps,
    NUM_COLUMNS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    FOLD_NORM: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    OVERLAPPED: tl.constexpr,
) -> None:
    """Add up what `product` left in parts, always in the same order, and finish as it would have done."""
    _announce(OVERLAPPED)
    token = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inside = rows < num_rows
    if BIAS:
        bias = tl.load(bias_ptr + rows, mask=inside, other=0.0).to(tl.float32)
    stride = num_rows * 2 if GATED else num_rows
    _await(OVERLAPPED)
    result = tl.zeros((BLOCK_ROWS,), tl.float32)
    result_up = tl.zeros((BLOCK_ROWS,), tl.float32)
    if ADD:
        residual = tl.load(out_ptr + token * num_rows + rows, mask=inside, other=0.0).to(tl.float32)
    if FOLD_NORM:
        squares = 0.0
    for split in tl.static_range(NUM_SPLITS):
        partials = partial_ptr + (split * num_tokens + token) * stride + rows
        result += tl.load(partials, mask=inside, other=0.0)
        if GATED:
            result_up += tl.load(partials + num_rows, mask=inside, other=0.0)
        if FOLD_NORM:
            squares += tl.load(squares_ptr + split * num_tokens + token)
    if FOLD_NORM:
        scale = tl.rsqrt(squares / NUM_COLUMNS + eps)
        result *= scale
        result_up *= scale
    if GATED:
        result = activate(result, GELU) * result_up
    if BIAS:
        result += bias
    if ADD:
        result += residual
    tl.store(out_ptr + token * num_rows + rows, result.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def normalise(
    x_ptr,
    norm_ptr,
    out_ptr,
    eps,
    NUM_COLUMNS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
) -> None:
    """rms_norm of one token per program, for products in which it is not folded."""
    _announce(OVERLAPPED)
    columns = tl.arange(0, BLOCK_COLUMNS)
    inside = columns < NUM_COLUMNS
    norm = tl.load(norm_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    _await(OVERLAPPED)
    start = tl.program_id(0) * NUM_COLUMNS
    x = tl.load(x_ptr + start + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / NUM_COLUMNS + eps)
    tl.store(out_ptr + start + columns, (x * scale * norm).to(out_ptr.dtype.element_ty), mask=inside)
