"""What lies between a layer's projections and its attention to latents.

Shapes: T tokens, N query heads, H numbers of a head and of a stored row, P pages, S page_size.
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

import triton
import triton.language as tl
from torch import Tensor

from ebbtide.srt.layers.heads import Rope
from ebbtide.srt.layers.kernels.launch import overlap_options


def rotate_and_store_latents(heads_TNH: Tensor, rope: Rope, slots_T: Tensor, latents_PS1H: Tensor) -> Tensor:
    """Rotate queries in place, and write latents, their first numbers rotated, to their slots: one launch.

    Args:
        heads_TNH: [T, N + 1, H], contiguous: queries, and behind them the latent.
        slots_T: int64; a token of slot −1 is not stored.
        latents_PS1H: one layer of the pool, contiguous.

    Returns:
        The queries, [T, N, H], a view.
    """
    num_tokens, num_heads, head_dim = heads_TNH.shape
    num_pairs = rope.sin_T1H.shape[-1]
    _rotate_and_store[(num_tokens,)](
        heads_TNH,
        rope.cos_T1H,
        rope.sin_T1H,
        slots_T,
        latents_PS1H,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        PAIRS=num_pairs,
        HEADS=triton.next_power_of_2(num_heads),
        BLOCK=triton.next_power_of_2(num_pairs),
        REST=triton.next_power_of_2(head_dim - 2 * num_pairs),
        num_warps=4,
        **overlap_options(heads_TNH),
    )
    return heads_TNH[:, :-1]


@triton.jit
def _rotate_and_store(  # type: ignore[no-untyped-def]
    heads_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    latents_ptr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    OVERLAPPED: tl.constexpr,
) -> None:
    """A program has one token. The last head is the latent."""
    if OVERLAPPED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, BLOCK)[None, :]
    inside = (head < NUM_HEADS) & (pair < PAIRS)
    at = heads_ptr + (token * NUM_HEADS + head) * HEAD_DIM + pair
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(at + PAIRS, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + token * (2 * PAIRS) + pair, mask=pair < PAIRS, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * PAIRS + pair, mask=pair < PAIRS, other=0.0).to(tl.float32)
    first, second = x * cos - y * sin, y * cos + x * sin
    is_query = inside & (head < NUM_HEADS - 1)
    tl.store(at, first, mask=is_query)
    tl.store(at + PAIRS, second, mask=is_query)

    slot = tl.load(slots_ptr + token)
    row = latents_ptr + slot * HEAD_DIM
    # Not `& (slot >= 0)`: the interpreter of Triton 3.9 makes integers of that.
    is_stored = tl.where(slot >= 0, inside & (head == NUM_HEADS - 1), False)
    tl.store(row + pair + 0 * head, first, mask=is_stored)
    tl.store(row + PAIRS + pair + 0 * head, second, mask=is_stored)
    rest = 2 * PAIRS + tl.arange(0, REST)
    latent = tl.load(heads_ptr + (token * NUM_HEADS + NUM_HEADS - 1) * HEAD_DIM + rest, mask=rest < HEAD_DIM)
    tl.store(row + rest, latent, mask=tl.where(slot >= 0, rest < HEAD_DIM, False))
