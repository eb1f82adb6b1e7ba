"""Operations between a layer's projections and its attention to latents.

Shapes: T tokens, N query heads, H length of a head and of a cached row, O of a projected query, C of a
latent, P pages, S page_size.
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

import triton
import triton.language as tl
from torch import Tensor

from ebbtide.srt.layers.heads import Rope
from ebbtide.srt.layers.kernels.instructions import follow
from ebbtide.srt.layers.kernels.launch import overlap_options


def fill_heads(
    q_TNO: Tensor,
    latents_TH: Tensor,
    weight_C: Tensor,
    eps: float,
    heads_TNH: Tensor,
    *,
    is_interleaved: bool,
) -> None:
    """Write rotated parts of queries and latents first in each head, normalised latents after, in one launch.

    Args:
        q_TNO: the last numbers of each query are its rotated part; rows may have a stride.
        latents_TH: latents, each followed by its rotated part; rows may have a stride.
        weight_C, eps: of the norm.
        heads_TNH: [T, N + 1, H], contiguous. The rest of the query heads is not written.
        is_interleaved: whether the numbers of a pair are neighbours; they are separated then.
    """
    num_tokens, num_queries, query_dim = q_TNO.shape
    rank, head_dim = len(weight_C), heads_TNH.shape[2]
    num_pairs = (head_dim - rank) // 2
    _fill_heads[(num_tokens,)](
        q_TNO,
        latents_TH,
        weight_C,
        heads_TNH,
        eps,
        q_TNO.stride(0),
        latents_TH.stride(0),
        NUM_QUERIES=num_queries,
        QUERY_DIM=query_dim,
        RANK=rank,
        PAIRS=num_pairs,
        IS_INTERLEAVED=is_interleaved,
        HEADS=triton.next_power_of_2(num_queries + 1),
        BLOCK=triton.next_power_of_2(num_pairs),
        BLOCK_C=triton.next_power_of_2(rank),
        num_warps=4,
        **overlap_options(heads_TNH),
    )


@triton.jit
def _fill_heads(  # type: ignore[no-untyped-def]
    q_ptr,
    latents_ptr,
    weight_ptr,
    heads_ptr,
    eps,
    q_step,
    latents_step,
    NUM_QUERIES: tl.constexpr,
    QUERY_DIM: tl.constexpr,
    RANK: tl.constexpr,
    PAIRS: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    OVERLAPPED: tl.constexpr,
) -> None:
    """Each program handles one token."""
    follow(OVERLAPPED)
    HEAD_DIM: tl.constexpr = RANK + 2 * PAIRS
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, BLOCK)[None, :]
    is_query = (head < NUM_QUERIES) & (pair < PAIRS)
    is_latent = (head == NUM_QUERIES) & (pair < PAIRS)
    first, second = pair, pair + PAIRS
    if IS_INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    queries = q_ptr + token * q_step + head * QUERY_DIM + QUERY_DIM - 2 * PAIRS
    latent = latents_ptr + token * latents_step
    to = heads_ptr + (token * (NUM_QUERIES + 1) + head) * HEAD_DIM + pair
    tl.store(to, tl.load(queries + first, mask=is_query, other=0.0), mask=is_query)
    tl.store(to + PAIRS, tl.load(queries + second, mask=is_query, other=0.0), mask=is_query)
    rotated = latent + RANK + 0 * head
    tl.store(to, tl.load(rotated + first, mask=is_latent, other=0.0), mask=is_latent)
    tl.store(to + PAIRS, tl.load(rotated + second, mask=is_latent, other=0.0), mask=is_latent)

    lanes = tl.arange(0, BLOCK_C)
    inside = lanes < RANK
    x = tl.load(latent + lanes, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + lanes, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / RANK + eps)
    row = heads_ptr + (token * (NUM_QUERIES + 1) + NUM_QUERIES) * HEAD_DIM + 2 * PAIRS
    tl.store(row + lanes, x * scale * weight, mask=inside)


def rotate_and_store_latents(heads_TNH: Tensor, rope: Rope, slots_T: Tensor, latents_PS1H: Tensor) -> Tensor:
    """Rotate queries in place, and store latents, their first numbers rotated, in their slots, in one launch.

    Args:
        heads_TNH: [T, N + 1, H], contiguous: queries, followed by the latent.
        slots_T: int64; a token with slot −1 is not stored.
        latents_PS1H: one layer of the pool, contiguous.

    Returns:
        The queries [T, N, H], a view.
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
    """Each program handles one token. The last head is the latent."""
    follow(OVERLAPPED)
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
    # Not `& (slot >= 0)`, which becomes an integer in the interpreter of Triton 3.9.
    is_stored = tl.where(slot >= 0, inside & (head == NUM_HEADS - 1), False)
    tl.store(row + pair + 0 * head, first, mask=is_stored)
    tl.store(row + PAIRS + pair + 0 * head, second, mask=is_stored)
    rest = 2 * PAIRS + tl.arange(0, REST)
    latent = tl.load(heads_ptr + (token * NUM_HEADS + NUM_HEADS - 1) * HEAD_DIM + rest, mask=rest < HEAD_DIM)
    tl.store(row + rest, latent, mask=tl.where(slot >= 0, rest < HEAD_DIM, False))
