"""Where top-k, top-p and min-p cut a row of scores, found by reading little more than what stays.

A row is cut into strips of 128 scores, whose largest are known. A pass that asks what lies above a threshold
reads the strips whose largest does, and no others: a handful, once the threshold is near the cut. The search
begins at bounds that cost no pass: what the maxima of the strips alone amount to above some score, all scores
amount to at least; and where the whole vocabulary would weigh less than 1 − top-p, no nucleus reaches.

One program serves one row, and everything that it adds up depends on that row alone. The kernels
before and after this one share its workspaces, whose planes are defined here.

Imported on CUDA only, as `kernel` is. Shapes: V vocabulary, P tiles padded, Q strips padded.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

# Scores of a tile, and of a strip of it.
TILE = tl.constexpr(2048)
STRIP = tl.constexpr(128)
# Strips that a program holds at a time.
AT_ONCE = tl.constexpr(32)
# Planes of the workspace [S, planes, P]: what is known of each tile, then of each row.
MAXIMA = tl.constexpr(0)
SUMS = tl.constexpr(1)  # of exp(score − the tile's largest)
BEST_IDS = tl.constexpr(2)  # int32
CUT = tl.constexpr(3)  # [0]: the least score that stays
LAST_ID = tl.constexpr(4)  # [0], int32: the last id that stays at that score
NUM_PLANES = tl.constexpr(5)
# Planes of the workspace [S, planes, Q], for rows with filters: what is known of each strip.
STRIP_MAXIMA = tl.constexpr(0)  # of the scores before the temperature
STRIP_SUMS = tl.constexpr(1)  # of exp(score − the row's largest), over what the filters leave
STRIP_LIST = tl.constexpr(2)  # int32: the strips that a pass reads
NUM_STRIP_PLANES = tl.constexpr(3)
# Columns of the row parameters [S, 4] float32.
SCALE = tl.constexpr(0)
TOP_K = tl.constexpr(1)  # 0 is off
TOP_P = tl.constexpr(2)  # 1 is off
MIN_P = tl.constexpr(3)  # 0 is off
NUM_PARAMS = tl.constexpr(4)

NO_ID = tl.constexpr(2**31 - 1)

# Beyond what sums in another order may differ by.
_ROUNDED = tl.constexpr(1.0001)
# exp of less than this is zero in float32.
_NO_MASS = tl.constexpr(-104.0)
# Thresholds are spread over the numbers first, and over their float representations then: the first comes
# near the cut quickly, the second comes to an end.
_NUM_EVEN_PASSES = tl.constexpr(4)


@triton.jit
def cut_kernel(
    scores,
    row_stride,
    settings,
    work,
    work_int,
    strips,
    strips_int,
    rows,
    V: tl.constexpr,
    J: tl.constexpr,
    P: tl.constexpr,
    Q: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """The least score of a row that stays, the last id that stays at that score, and the mass of each strip.

    Each filter keeps the first tokens by descending score, so together they keep the fewest any of them
    keeps; see `choosing.Filters`. `SHIFT`: low bits of a float32 that no score uses.
    """
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    scale = tl.load(settings + row * NUM_PARAMS + SCALE)
    top_k = tl.load(settings + row * NUM_PARAMS + TOP_K)
    top_p = tl.load(settings + row * NUM_PARAMS + TOP_P)
    min_p = tl.load(settings + row * NUM_PARAMS + MIN_P)
    scores += row * row_stride
    work += row * NUM_PLANES * P
    work_int += row * NUM_PLANES * P
    strips += row * NUM_STRIP_PLANES * Q
    strip_list = strips_int + row * NUM_STRIP_PLANES * Q + STRIP_LIST * Q
    tiles = tl.arange(0, P)
    tile_maxima = tl.load(work + MAXIMA * P + tiles, mask=tiles < J, other=float("-inf"))
    sums = tl.load(work + SUMS * P + tiles, mask=tiles < J, other=0.0)
    base = base_of(tl.max(tile_maxima))
    total = tl.sum(tl.exp(tile_maxima - base) * sums)
    places = tl.arange(0, Q)
    maxima = tl.load(strips + STRIP_MAXIMA * Q + places, mask=places * STRIP < V, other=float("-inf"))
    # From here on, scores and thresholds are those before the temperature wherever they are compared.
    largest = tl.max(maxima)
    cut = tl.minimum((base + _NO_MASS) / scale, largest)
    # `room` is how many of the scores equal to the cut stay.
    room = tl.full([], 0.0, tl.float32) + V
    if top_k > 0:
        ones = tl.full([Q], 1.0, tl.float32)
        cut = tl.maximum(cut, _least_of_maxima(maxima, ones, top_k, cut, largest, SHIFT))
        cut = _least_kept(scores, maxima, strip_list, scale, base, cut, largest, top_k, V, Q, SHIFT, False)
        above = _above(scores, maxima, strip_list, scale, base, cut, cut, cut, V, Q, False)[0]
        room = top_k - above
        mass_above = _above(scores, maxima, strip_list, scale, base, cut, cut, cut, V, Q, True)[0]
        total = mass_above + room * tl.exp(cut * scale - base)
    if top_p < 1:
        goal = top_p * total
        # Twice as far down as it must be: sums are rounded.
        bound = (base + tl.log(0.5 * (1 - top_p) * total / V)) / scale
        least = tl.maximum(cut, tl.minimum(bound, largest))
        masses = tl.exp(maxima * scale - base)
        least = tl.maximum(least, _least_of_maxima(maxima, masses, goal * _ROUNDED, least, largest, SHIFT))
        nucleus = _least_kept(
            scores, maxima, strip_list, scale, base, least, largest, goal, V, Q, SHIFT, True
        )
        nucleus = tl.maximum(nucleus, cut)
        above = _above(scores, maxima, strip_list, scale, base, nucleus, nucleus, nucleus, V, Q, True)[0]
        each = tl.exp(nucleus * scale - base)
        reached = tl.where(each > 0, tl.ceil((goal - above) / each), V)
        reached = tl.minimum(tl.maximum(reached, 1.0), V)
        room = tl.where(nucleus > cut, reached, tl.minimum(room, reached))
        cut = nucleus
    scaled_cut = cut * scale
    if min_p > 0:
        least = base + tl.log(min_p)
        room = tl.where(least > scaled_cut, tl.full([], 0.0, tl.float32) + V, room)
        scaled_cut = tl.maximum(scaled_cut, least)
    last_id = _store_strip_sums(scores, maxima, strips, strip_list, scale, base, scaled_cut, room, V, Q)
    tl.store(work + CUT * P, scaled_cut)
    tl.store(work_int + LAST_ID * P, last_id)


@triton.jit
def _least_of_maxima(maxima, weights, goal, least, largest, SHIFT: tl.constexpr):
    """The least score in [least, largest] above which the maxima alone weigh less than `goal`.

    The scores that a filter counts weigh no less: its cut is not below this.
    """
    orders = _order_of(maxima, SHIFT)
    low, high = _order_of(least, SHIFT), _order_of(largest, SHIFT)
    while low < high:
        at_1 = low + (high - low) // 4
        at_2 = low + (high - low) // 2
        at_3 = low + (high - low) * 3 // 4
        above_1 = tl.sum(tl.where(orders > at_1, weights, 0.0))
        above_2 = tl.sum(tl.where(orders > at_2, weights, 0.0))
        above_3 = tl.sum(tl.where(orders > at_3, weights, 0.0))
        low, high = _narrowed(low, high, at_1, at_2, at_3, above_1 < goal, above_2 < goal, above_3 < goal)
    return _float_of(low, SHIFT)


@triton.jit
def _least_kept(
    scores,
    maxima,
    strip_list,
    scale,
    base,
    least,
    largest,
    goal,
    V: tl.constexpr,
    Q: tl.constexpr,
    SHIFT: tl.constexpr,
    BY_MASS: tl.constexpr,
):
    """The least score in [least, largest] above which there is less than `goal`: of mass, or of tokens.

    Found by cutting the range into four, pass by pass.
    """
    low, high = _order_of(least, SHIFT), _order_of(largest, SHIFT)
    num_passes = 0
    while low < high:
        at_1 = low + (high - low) // 4
        at_2 = low + (high - low) // 2
        at_3 = low + (high - low) * 3 // 4
        if num_passes < _NUM_EVEN_PASSES:
            low_x, high_x = _float_of(low, SHIFT), _float_of(high, SHIFT)
            quarter = (high_x - low_x) * 0.25
            at_1 = tl.minimum(tl.maximum(_order_of(low_x + quarter, SHIFT), low), high - 1)
            at_2 = tl.minimum(tl.maximum(_order_of(low_x + 2 * quarter, SHIFT), at_1), high - 1)
            at_3 = tl.minimum(tl.maximum(_order_of(low_x + 3 * quarter, SHIFT), at_2), high - 1)
        above_1, above_2, above_3 = _above(
            scores,
            maxima,
            strip_list,
            scale,
            base,
            _float_of(at_1, SHIFT),
            _float_of(at_2, SHIFT),
            _float_of(at_3, SHIFT),
            V,
            Q,
            BY_MASS,
        )
        low, high = _narrowed(low, high, at_1, at_2, at_3, above_1 < goal, above_2 < goal, above_3 < goal)
        num_passes += 1
    return _float_of(low, SHIFT)


@triton.jit
def _narrowed(low, high, at_1, at_2, at_3, is_less_1, is_less_2, is_less_3):
    """The part of [low, high] that begins behind the last threshold above which there is enough."""
    new_low = tl.where(is_less_3, at_2 + 1, at_3 + 1)
    new_high = tl.where(is_less_3, at_3, high)
    new_low = tl.where(is_less_2, at_1 + 1, new_low)
    new_high = tl.where(is_less_2, at_2, new_high)
    return tl.where(is_less_1, low, new_low), tl.where(is_less_1, at_1, new_high)


@triton.jit
def _above(
    scores,
    maxima,
    strip_list,
    scale,
    base,
    x_1,
    x_2,
    x_3,
    V: tl.constexpr,
    Q: tl.constexpr,
    BY_MASS: tl.constexpr,
):
    """How much lies above each of three ascending thresholds, float32: exp(score − base) summed, or tokens
    counted."""
    count = list_strips(strip_list, maxima > x_1, Q)
    sum_1 = tl.zeros([AT_ONCE, STRIP], tl.float32)
    sum_2 = tl.zeros([AT_ONCE, STRIP], tl.float32)
    sum_3 = tl.zeros([AT_ONCE, STRIP], tl.float32)
    first = 0
    while first < count:
        x, _, _ = load_strips(scores, strip_list, first, count, V)
        value = tl.exp(x * scale - base) if BY_MASS else tl.full([AT_ONCE, STRIP], 1.0, tl.float32)
        sum_1 += tl.where(x > x_1, value, 0.0)
        sum_2 += tl.where(x > x_2, value, 0.0)
        sum_3 += tl.where(x > x_3, value, 0.0)
        first += AT_ONCE
    # The next list is written where this one was read.
    tl.debug_barrier()
    return tl.sum(sum_1), tl.sum(sum_2), tl.sum(sum_3)


@triton.jit
def _store_strip_sums(
    scores, maxima, strips, strip_list, scale, base, cut, room, V: tl.constexpr, Q: tl.constexpr
):
    """Write each strip's mass over what stays; returns the last id that stays at the cut, which is over the
    temperature here."""
    tl.store(strips + STRIP_SUMS * Q + tl.arange(0, Q), tl.zeros([Q], tl.float32))
    # Zeros first, sums over them.
    count = list_strips(strip_list, maxima * scale >= cut, Q)
    num_equal = tl.full([], 0, tl.int32)
    last_id = tl.full([], -1, tl.int32)
    first = 0
    while first < count:
        raw, ids, strip = load_strips(scores, strip_list, first, count, V)
        x = raw * scale
        equal = x == cut
        equal_in_strip = tl.sum(equal.to(tl.int32), 1)
        equal_before = num_equal + tl.cumsum(equal_in_strip, 0) - equal_in_strip
        # Lower ids stay.
        equal = equal & (equal_before[:, None] + tl.cumsum(equal.to(tl.int32), 1) <= room)
        num_equal += tl.sum(equal_in_strip)
        last_id = tl.maximum(last_id, tl.max(tl.where(equal, ids, -1)))
        kept = tl.sum(tl.where((x > cut) | equal, tl.exp(x - base), 0.0), 1)
        inside = first + tl.arange(0, AT_ONCE) < count
        tl.store(strips + STRIP_SUMS * Q + strip, kept, mask=inside)
        first += AT_ONCE
    return last_id


@triton.jit
def list_strips(strip_list, is_wanted, Q: tl.constexpr):
    """Write the numbers of the strips that are wanted, in their order; returns how many there are."""
    wanted = is_wanted.to(tl.int32)
    tl.store(strip_list + tl.cumsum(wanted, 0) - 1, tl.arange(0, Q), mask=is_wanted)
    tl.debug_barrier()
    return tl.sum(wanted)


@triton.jit
def load_strips(scores, strip_list, first, count, V: tl.constexpr):
    """Scores [AT_ONCE, STRIP] of listed strips from `first` on, −∞ beyond the end; their ids; the strips."""
    places = first + tl.arange(0, AT_ONCE)
    strip = tl.load(strip_list + places, mask=places < count, other=0)
    ids = strip[:, None] * STRIP + tl.arange(0, STRIP)[None, :]
    inside = (places < count)[:, None] & (ids < V)
    return tl.load(scores + ids, mask=inside, other=float("-inf")).to(tl.float32), ids, strip


@triton.jit
def _order_of(x, SHIFT: tl.constexpr):
    """A number's place among all float32 numbers that leave the lowest bits zero, int64; rounded down."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT).to(tl.int64)


@triton.jit
def _float_of(order, SHIFT: tl.constexpr):
    """The number at a place of `_order_of`."""
    low_bits: tl.constexpr = (1 << SHIFT) - 1
    bits = order.to(tl.int32) << SHIFT
    bits = tl.where(bits < 0, (bits | low_bits) ^ 0x7FFFFFFF, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def load_scores(scores, ids, scale, V: tl.constexpr):
    """Scores over the temperature; −∞ beyond the vocabulary."""
    return tl.load(scores + ids, mask=ids < V, other=float("-inf")).to(tl.float32) * scale


@triton.jit
def or_lowest(x):
    """What is not a number counts as −∞."""
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def base_of(largest):
    """What is subtracted before exp: nothing where all scores are −∞."""
    return tl.where(largest == float("-inf"), 0.0, largest)
