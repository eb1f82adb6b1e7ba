"""Triton kernels for an all-reduce through peer memory: memory that each rank opens to the others.

Each rank's memory has a slot for every (block, parity, source rank), a flag for every (block, source rank),
and a counter for every block. Blocks are independent: block b of a rank exchanges data with blocks b of the
other ranks only. One exchange is a step, numbered by the counter, which grows by one over all calls. A block

- pushes its part into its slots at the other ranks, then the step's number into its flags there;
- waits until its own flags have reached that number, and reads what the others have pushed.

The flag must be visible after the data, and this ordering takes as long as the transfer itself. `words`, for
the shortest messages, needs no flags: in its own slots, every four bytes are followed by the step's number.

Slots are neither cleared nor acknowledged. Steps alternate between the two parities, and a rank that pushes
for step n+2 has seen everybody's flag of step n+1, which a block sets after it has read the data of step n.
The next call on the same stream runs after this one, so this holds across calls too.

All ranks add in the order of ranks in float32 and round once, so the result has the same bits on every rank.

Names in capitals are compile-time constants. SIZE: number of ranks. LANES: the smallest power of two ≥ SIZE.
TILE: elements per slot. ADD: out += the sum; otherwise out is overwritten and may be x. OVERLAPPED: the
kernel is launched with programmatic dependent launch, so it may start before the kernel in front of it has
ended.
"""

# Triton kernels have no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped,import-not-found"

from typing import Any, Final

import triton
import triton.language as tl

# The most blocks of a kernel, and the bytes of a slot: 16 for each of a block's 512 threads.
NUM_BLOCKS: Final = 256
SLOT_BYTES: Final = 8192
NUM_WARPS: Final = 16
# The most blocks of `words`, and the 8-byte words in a slot: one per thread. With several per thread, the
# compiler would use two layouts and read every word twice.
NUM_WORD_BLOCKS: Final = 64
SLOT_WORDS: Final = 512
_NUM_BLOCKS: Any = tl.constexpr(NUM_BLOCKS)
_NUM_WORD_BLOCKS: Any = tl.constexpr(NUM_WORD_BLOCKS)
_SLOT_BYTES: Any = tl.constexpr(SLOT_BYTES)


def flags_bytes(size: int) -> int:
    """The bytes of flags and counters, which come first. The slots of `words` follow, then the others."""
    return NUM_BLOCKS * (size + 1) * 8


def num_bytes(size: int) -> int:
    """The bytes of memory that each of `size` ranks needs."""
    return flags_bytes(size) + (NUM_WORD_BLOCKS + NUM_BLOCKS) * 2 * size * SLOT_BYTES


@triton.jit
def _await_predecessor(OVERLAPPED: tl.constexpr) -> None:
    """Let the next kernel's blocks start, and wait until the kernel before this one has ended."""
    if OVERLAPPED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def _slot_number(step, source, SIZE: tl.constexpr):
    """The number of the slot into which `source` pushes data for this block in this step."""
    return ((tl.program_id(0) * 2 + (step & 1).to(tl.int32)) * SIZE + source).to(tl.int64)


@triton.jit
def _slot(memory, step, source, type_ptr, SIZE: tl.constexpr):
    """A pointer to the slot of `source` for this block and step, in the rank's memory at address `memory`."""
    slots = memory + _NUM_BLOCKS * (SIZE + 1) * 8 + _NUM_WORD_BLOCKS * 2 * SIZE * _SLOT_BYTES
    first = slots + _slot_number(step, source, SIZE) * _SLOT_BYTES
    return tl.multiple_of(first.to(type_ptr.dtype), 16)


@triton.jit
def _word_slot(memory, step, source, SIZE: tl.constexpr):
    """The address of the slot of `words` for `source`, this block and this step."""
    return memory + _NUM_BLOCKS * (SIZE + 1) * 8 + _slot_number(step, source, SIZE) * _SLOT_BYTES


@triton.jit
def _counter(memories_ptr, rank, SIZE: tl.constexpr):
    """A pointer to this block's counter, the number of its last step."""
    mine = tl.load(memories_ptr + rank)
    return (mine + (_NUM_BLOCKS * SIZE + tl.program_id(0)) * 8).to(tl.pointer_type(tl.int64))


@triton.jit
def _flags(memories_ptr, rank, SIZE: tl.constexpr, LANES: tl.constexpr):
    """Addresses [LANES], for this block: of this rank's flag at each rank, and of each rank's flag here."""
    lanes = tl.arange(0, LANES)
    others = tl.where(lanes < SIZE, lanes, 0)
    block = tl.program_id(0) * SIZE
    there = tl.load(memories_ptr + others) + (block + rank) * 8
    here = tl.load(memories_ptr + rank) + (block + others) * 8
    return there.to(tl.pointer_type(tl.int64)), here


@triton.jit
def _meet(flags_there, flags_here, step, SIZE: tl.constexpr, LANES: tl.constexpr) -> None:
    """Tell all ranks that this rank has pushed its data of this step, and wait until all have told so."""
    # All threads must have pushed before one of them sets a flag.
    tl.debug_barrier()
    steps = tl.zeros((LANES,), tl.int64) + step
    tl.atomic_xchg(flags_there, steps, mask=tl.arange(0, LANES) < SIZE, sem="release", scope="sys")
    # Assembly, since the compiler might move the load out of the loop. Every thread polls.
    tl.inline_asm_elementwise(
        """
        {
            .reg .b64 seen;
            .reg .pred has_come;
        look:
            ld.acquire.sys.global.b64 seen, [$1];
            setp.ge.s64 has_come, seen, $2;
            @!has_come bra look;
            mov.u32 $0, 0;
        }
        """,
        "=r,l,l",
        [flags_here, steps],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    # Each thread has waited for one rank's flag, but reads the data of all ranks.
    tl.debug_barrier()


@triton.jit
def _pushed(memories_ptr, rank, step, type_ptr, at, inside, SIZE: tl.constexpr, TILE: tl.constexpr):
    """The sum [TILE], in float32, of what all ranks have pushed to this block."""
    mine = tl.load(memories_ptr + rank)
    total = tl.zeros((TILE,), tl.float32)
    for source in tl.static_range(SIZE):
        part = _slot(mine, step, source, type_ptr, SIZE)
        total += tl.load(part + at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    return total


@triton.jit
def one_shot(
    x_ptr,
    out_ptr,
    memories_ptr,
    count,
    rank,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
    ADD: tl.constexpr,
    OVERLAPPED: tl.constexpr,
) -> None:
    """out = the sum of all ranks' x, both [count]. Each rank pushes all of x to all, and adds up all."""
    at = tl.arange(0, TILE)
    counter = _counter(memories_ptr, rank, SIZE)
    flags_there, flags_here = _flags(memories_ptr, rank, SIZE, LANES)
    _await_predecessor(OVERLAPPED)
    step = tl.load(counter)
    first = tl.program_id(0) * TILE
    while first < count:
        step += 1
        here = first + at
        inside = here < count
        x = tl.load(x_ptr + here, mask=inside)
        for other in tl.static_range(SIZE):
            tl.store(_slot(tl.load(memories_ptr + other), step, rank, x_ptr, SIZE) + at, x, mask=inside)
        if ADD:
            before = tl.load(out_ptr + here, mask=inside).to(tl.float32)
        _meet(flags_there, flags_here, step, SIZE, LANES)
        total = _pushed(memories_ptr, rank, step, x_ptr, at, inside, SIZE, TILE)
        if ADD:
            total += before
        tl.store(out_ptr + here, total.to(x.dtype), mask=inside)
        first += tl.num_programs(0) * TILE
    tl.store(counter, step)


@triton.jit
def two_shot(
    x_ptr,
    out_ptr,
    memories_ptr,
    count,
    rank,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
    ADD: tl.constexpr,
    OVERLAPPED: tl.constexpr,
) -> None:
    """As `one_shot`, but a rank adds up only its share of each block's part, and pushes the sums to all."""
    at = tl.arange(0, TILE)
    counter = _counter(memories_ptr, rank, SIZE)
    flags_there, flags_here = _flags(memories_ptr, rank, SIZE, LANES)
    mine = tl.load(memories_ptr + rank)
    _await_predecessor(OVERLAPPED)
    step = tl.load(counter)
    first = tl.program_id(0) * SIZE * TILE
    while first < count:
        step += 1
        for other in tl.static_range(SIZE):
            here = first + other * TILE + at
            x = tl.load(x_ptr + here, mask=here < count)
            slot = _slot(tl.load(memories_ptr + other), step, rank, x_ptr, SIZE)
            tl.store(slot + at, x, mask=here < count)
        own = first + rank * TILE + at
        if ADD:
            before = tl.load(out_ptr + own, mask=own < count).to(tl.float32)
        _meet(flags_there, flags_here, step, SIZE, LANES)
        total = _pushed(memories_ptr, rank, step, x_ptr, at, own < count, SIZE, TILE)
        if ADD:
            total += before
        step += 1
        for other in tl.static_range(SIZE):
            slot = _slot(tl.load(memories_ptr + other), step, rank, x_ptr, SIZE)
            tl.store(slot + at, total.to(x_ptr.dtype.element_ty), mask=own < count)
        _meet(flags_there, flags_here, step, SIZE, LANES)
        for source in tl.static_range(SIZE):
            here = first + source * TILE + at
            part = _slot(mine, step, source, x_ptr, SIZE)
            total_there = tl.load(part + at, mask=here < count, cache_modifier=".cg")
            tl.store(out_ptr + here, total_there, mask=here < count)
        first += tl.num_programs(0) * SIZE * TILE
    tl.store(counter, step)


@triton.jit
def _push_words(addresses, words, step) -> None:
    """Store each 8-byte word as two halves, each with the step's number behind it, in one 16-byte store."""
    tl.inline_asm_elementwise(
        """
        {
            .reg .b32 low, high;
            .reg .b64 first, second;
            mov.b64 {low, high}, $2;
            mov.b64 first, {low, $3};
            mov.b64 second, {high, $3};
            st.relaxed.sys.global.v2.b64 [$1], {first, second};
            mov.u32 $0, 0;
        }
        """,
        "=r,l,l,r",
        [addresses, words, step.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _pushed_words(addresses, step, flag):
    """Wait until the step's number is behind both halves of each word at these addresses; return the words.

    Also returns when the flag at address `flag` is beyond any step, as `PeerMemory.let_go` leaves it.
    """
    return tl.inline_asm_elementwise(
        """
        {
            .reg .b32 low, high, beside_low, beside_high;
            .reg .b64 first, second, seen;
            .reg .pred waits;
        look:
            ld.relaxed.sys.global.v2.b64 {first, second}, [$1];
            ld.relaxed.sys.global.b64 seen, [$3];
            mov.b64 {low, beside_low}, first;
            mov.b64 {high, beside_high}, second;
            setp.ne.b32 waits, beside_low, $2;
            setp.ne.or.b32 waits, beside_high, $2, waits;
            setp.lt.and.s64 waits, seen, 0x4000000000000000, waits;
            @waits bra look;
            mov.b64 $0, {low, high};
        }
        """,
        "=l,l,r,l",
        [addresses, step.to(tl.int32), flag],
        dtype=tl.int64,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _quarter(words, number: tl.constexpr, type_ptr):
    """The number at position `number`, of the four 16-bit numbers in each word, in float32."""
    bits = ((words >> (16 * number)) & 0xFFFF).to(tl.int16)
    return bits.to(type_ptr.dtype.element_ty, bitcast=True).to(tl.float32)


@triton.jit
def _as_quarter(total, number: tl.constexpr, type_ptr):
    """Words with `total`, rounded to 16 bits, at position `number`, and zeros elsewhere."""
    bits = total.to(type_ptr.dtype.element_ty).to(tl.int16, bitcast=True)
    return (bits.to(tl.int64) & 0xFFFF) << (16 * number)


@triton.jit
def words(
    x_ptr,
    out_ptr,
    memories_ptr,
    count,
    rank,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    ADD: tl.constexpr,
    OVERLAPPED: tl.constexpr,
) -> None:
    """As `one_shot`, for 2-byte types. x and out are [count] words of four numbers each."""
    at = tl.arange(0, TILE)
    here = tl.program_id(0) * TILE + at
    inside = here < count
    x_words = x_ptr.to(tl.pointer_type(tl.int64)) + here
    out_words = out_ptr.to(tl.pointer_type(tl.int64)) + here
    mine = tl.load(memories_ptr + rank)
    counter = _counter(memories_ptr, rank, SIZE)
    flag = mine + tl.program_id(0) * SIZE * 8
    _await_predecessor(OVERLAPPED)
    step = tl.load(counter) + 1
    x = tl.load(x_words, mask=inside, other=0)
    # Words beyond the end are pushed too, since every thread of the receiver waits for its word.
    for other in tl.static_range(SIZE):
        _push_words(_word_slot(tl.load(memories_ptr + other), step, rank, SIZE) + at * 16, x, step)
    total_0 = tl.zeros((TILE,), tl.float32)
    total_1, total_2, total_3 = total_0, total_0, total_0
    for source in tl.static_range(SIZE):
        part = _pushed_words(_word_slot(mine, step, source, SIZE) + at * 16, step, flag)
        total_0 += _quarter(part, 0, x_ptr)
        total_1 += _quarter(part, 1, x_ptr)
        total_2 += _quarter(part, 2, x_ptr)
        total_3 += _quarter(part, 3, x_ptr)
    if ADD:
        before = tl.load(out_words, mask=inside, other=0)
        total_0 += _quarter(before, 0, x_ptr)
        total_1 += _quarter(before, 1, x_ptr)
        total_2 += _quarter(before, 2, x_ptr)
        total_3 += _quarter(before, 3, x_ptr)
    low = _as_quarter(total_0, 0, x_ptr) | _as_quarter(total_1, 1, x_ptr)
    high = _as_quarter(total_2, 2, x_ptr) | _as_quarter(total_3, 3, x_ptr)
    # Slower warps may not have read the counter yet.
    tl.debug_barrier()
    tl.store(out_words, low | high, mask=inside)
    tl.store(counter, step)
