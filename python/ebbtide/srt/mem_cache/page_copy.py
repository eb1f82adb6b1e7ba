"""The kernel that moves pages of the KV pool to other pages: all planes of many pages in one launch."""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

# Numbers of 8 bytes that a program copies at a time.
_STEP = 2048


def copy_blocks(
    blocks: torch.Tensor, sources: Sequence[int], targets: Sequence[int], num_planes: int, chunk_pages: int
) -> None:
    """Copy pages `sources` to `targets`, which have none of those pages among them.

    Args:
        blocks: all blocks of all planes in the order of the arena, [blocks, words of a block]. A block is
            a multiple of 8 bytes.
        num_planes: of a page; its block of the next plane lies `chunk_pages` further on.
    """
    words = blocks.view(torch.int64)
    pages = torch.tensor([list(sources), list(targets)], dtype=torch.int32, device=blocks.device)
    if sources:
        _copy[(len(sources), num_planes)](
            words, pages, len(sources), NUM_WORDS=words.shape[1], CHUNK_PAGES=chunk_pages, STEP=_STEP
        )


@triton.jit(do_not_specialize=["num_pages"])
def _copy(  # type: ignore[no-untyped-def]
    words, pages, num_pages, NUM_WORDS: tl.constexpr, CHUNK_PAGES: tl.constexpr, STEP: tl.constexpr
) -> None:
    """A program copies one plane's block of one page."""
    page, plane = tl.program_id(0), tl.program_id(1)
    # A pool has more numbers than 32 bits count.
    source = (tl.load(pages + page) + plane * CHUNK_PAGES).to(tl.int64) * NUM_WORDS
    target = (tl.load(pages + num_pages + page) + plane * CHUNK_PAGES).to(tl.int64) * NUM_WORDS
    for start in range(0, NUM_WORDS, STEP):
        places = start + tl.arange(0, STEP)
        inside = places < NUM_WORDS
        tl.store(words + target + places, tl.load(words + source + places, mask=inside), mask=inside)
