"""The paged pool of keys and values: views into chunks of the `kv_cache` arena.

A chunk holds some pages of all layers of a group: it is `[layer][keys, values][page]`; in pages of other
groups, other layers are in their places. The keys of a layer, and its values, are a *plane* each, and so
are the latents of a layer that keeps those; the part of a page in one plane is a *block*. Blocks are all
alike, so a plane is the whole arena as a flat run of blocks, from its own first block on. With P planes and
C pages in a chunk, page i of chunk c is block c * stride + i of every plane's view. The stride is P * C, or
a little more where chunks would not end on a multiple of the granularity. That number is the id of the
page: what page tables hold.

**States** of requests are tensors of fixed size for each layer that keeps no keys and values. They lie in
slots behind the pages of the arena, so they are released and resumed with these. A running request has the
slot of its row in the page table; one more is for padding and for passes of nobody's request; the slots
behind it hold checkpoints, states of prefixes that the prefix cache may hand out. To whoever saves and
restores pages a slot is a run of pages of its own, with ids behind those of the pool.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ebbtide.srt.mem_cache import CacheGroups, Latent, State, TokenSpec
from ebbtide.srt.mem_cache.kv_scales import HeadScales, KVScales
from ebbtide.srt.mem_cache.page_allocator import PageIds
from ebbtide.srt.mem_cache.state_slots import StateSlots
from ebbtide.srt.memory_saver.arena import Arena, round_up

# Tensors of a slot begin at multiples of this: kernels read 16 bytes at a time.
ALIGNMENT_BYTES = 256
# Pages that no kernel moves go through a buffer of this size.
MOVED_AT_ONCE_BYTES = 64 << 20
# A kernel reads one plane after the other. With runs of this size, a page of the driver's, it touches no more
# pages of addresses than if each plane lay in one piece.
CUDA_MIN_RUN_BYTES = 2 << 20
# 100 GiB in chunks of 1 GiB go back to the driver in 36 ms, in chunks of 256 MiB in 82 ms; they are taken in
# 31 and 65 ms. Attention does not notice (an H200: docs/performance.md).
CUDA_CHUNK_BYTES = (2 << 20, 1 << 30)
# Smaller chunks mean more of them: this many are to be in a device's memory, and in a pool of a given size.
CHUNKS_OF_DEVICE, CHUNKS_OF_POOL = 128, 32
# What is left over between the last page of a chunk and its end is less than a page: at most 1/32 of a pool.
MIN_CHUNK_PAGES = 32


def cuda_chunk_bytes(device_bytes: int, pool_bytes: int | None) -> int:
    """The least size of a chunk on a device of this size: a power of two.

    Args:
        pool_bytes: of the KV cache; None: it takes what the device has.
    """
    wanted = device_bytes // CHUNKS_OF_DEVICE
    if pool_bytes is not None:
        wanted = min(wanted, pool_bytes // CHUNKS_OF_POOL)
    least, most = CUDA_CHUNK_BYTES
    return min(max(1 << max(0, wanted.bit_length() - 1), least), most)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What layers keep, in chunks.

    Attributes:
        num_layers: of a group.
        page_size: tokens of a page.
        spec: what a layer keeps on this rank.
        dtype: of what is kept.
        granularity: bytes; a chunk is a multiple of it.
        min_chunk_bytes, min_chunk_pages: the least size of a chunk.
        min_run_bytes: the least size of a chunk's part in one plane.
    """

    num_layers: int
    page_size: int
    spec: TokenSpec
    dtype: torch.dtype
    granularity: int = 1
    min_chunk_bytes: int = 1
    min_chunk_pages: int = 1
    min_run_bytes: int = 1

    @property
    def num_planes(self) -> int:
        return self.spec.num_planes * self.num_layers

    @property
    def block_bytes(self) -> int:
        """Bytes of one page in one plane."""
        return self.page_size * math.prod(self.spec.token_shape) * self.dtype.itemsize

    @property
    def word(self) -> torch.dtype:
        """The largest integer that blocks are made of: what copies move, whatever the numbers in it."""
        return torch.int64 if self.block_bytes % torch.int64.itemsize == 0 else torch.uint8

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all planes."""
        return self.num_planes * self.block_bytes

    @property
    def chunk_blocks(self) -> int:
        """Blocks that a chunk has room for: the distance from a page's id to that of its like in the next."""
        least_bytes = max(
            self.min_chunk_bytes,
            self.num_planes * self.min_run_bytes,
            self.min_chunk_pages * self.page_bytes,
        )
        step = self.granularity // math.gcd(self.granularity, self.block_bytes)
        return round_up(-(-least_bytes // self.block_bytes), step)

    @property
    def chunk_bytes(self) -> int:
        return self.chunk_blocks * self.block_bytes

    @property
    def chunk_pages(self) -> int:
        """Pages of a chunk."""
        return self.chunk_blocks // self.num_planes

    @property
    def page_ids(self) -> PageIds:
        return PageIds(self.chunk_pages, self.chunk_blocks)

    def num_chunks(self, num_pages: int) -> int:
        """Chunks that hold `num_pages`."""
        return -(-num_pages // self.chunk_pages)

    def arena_bytes(self, num_pages: int) -> int:
        """Bytes of arena that `num_pages` take."""
        return self.num_chunks(num_pages) * self.chunk_bytes

    def plane(self, arena: Arena, num_pages: int, layer: int, side: int) -> torch.Tensor:
        """The keys or latents (side 0) or the values (1) of a layer: [blocks, page_size, heads, head_dim].

        Args:
            layer: its number in its group.

        Raises:
            ValueError: the arena is too small.
        """
        first = (self.spec.num_planes * layer + side) * self.chunk_pages
        num_blocks = (self.num_chunks(num_pages) - 1) * self.chunk_blocks + self.chunk_pages
        shape = (num_blocks, self.page_size, *self.spec.token_shape)
        return arena.view(first * self.block_bytes, shape, self.dtype)

    def blocks(self, arena: Arena) -> torch.Tensor:
        """The whole arena in blocks, those of all planes in their order: [blocks, words of a block]."""
        num_blocks = arena.num_bytes // self.block_bytes
        return arena.view(0, (num_blocks, self.block_bytes // self.word.itemsize), self.word)


@dataclass(frozen=True, slots=True)
class StateLayout:
    """What a slot holds.

    Attributes:
        parts: of each layer with a state, the shape and dtype of each tensor on this rank.
        page_bytes: a slot is a multiple of it.
    """

    parts: tuple[tuple[tuple[tuple[int, ...], torch.dtype], ...], ...]
    page_bytes: int

    @classmethod
    def of(cls, specs: Sequence[State], num_ranks: int, page_bytes: int) -> StateLayout:
        """The layout of a rank; `specs` have the sizes of all ranks."""
        return cls(
            tuple(
                tuple(
                    ((shape[0] // num_ranks, *shape[1:]), getattr(torch, dtype))
                    for shape, dtype in spec.parts
                )
                for spec in specs
            ),
            page_bytes,
        )

    @property
    def slot_pages(self) -> int:
        """The pages that a slot takes the place of."""
        num_bytes = sum(_part_bytes(*part) for layer in self.parts for part in layer)
        return -(-num_bytes // self.page_bytes)

    @property
    def slot_bytes(self) -> int:
        return self.slot_pages * self.page_bytes


def _part_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return round_up(math.prod(shape) * dtype.itemsize, ALIGNMENT_BYTES)


class StatePool:
    """States of all layers in the arena of the KV pool.

    Args:
        arena: has room for the slots from `offset` on.
        slots: which there are, and the ids of their pages.

    Attributes:
        layers: of each layer with a state its tensors, [slots, *shape].
    """

    def __init__(self, arena: Arena, offset: int, layout: StateLayout, slots: StateSlots) -> None:
        self.slots = slots
        self._slots = flat = arena.view(offset, (slots.num_slots, layout.slot_bytes), torch.uint8)
        self.layers: list[tuple[torch.Tensor, ...]] = []
        start = 0
        for parts in layout.parts:
            tensors = []
            for shape, dtype in parts:
                end = start + math.prod(shape) * dtype.itemsize
                tensors.append(torch.unflatten(flat[:, start:end].view(dtype), 1, shape))
                start += _part_bytes(shape, dtype)
            self.layers.append(tuple(tensors))

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy slots to others, one pair after the other, behind what was launched before."""
        for source, target in pairs:
            self._slots[target].copy_(self._slots[source])


@dataclass(eq=False)
class KVPool:
    """Keys and values of all layers in one arena.

    Shapes: B blocks, S tokens of a page, N KV heads, H head_dim. A page's id says which block of each plane
    is its own; blocks of other planes lie in between.

    Args:
        arena: at least `layout.arena_bytes(num_pages)` bytes; it may be released, now and later.
        layout: what is stored, and where.
        num_pages: pages that may be used.
        groups: whose pages these are.
        scales: of keys and values in FP8; None: what is stored is what it stands for.
        states: what layers without keys and values keep of requests; their pages can be read and written.

    Raises:
        ValueError: the arena is too small.
    """

    arena: Arena
    layout: KVLayout
    num_pages: int
    groups: CacheGroups
    scales: KVScales | None = None
    states: StatePool | None = None

    def __post_init__(self) -> None:
        arena, layout, num_pages = self.arena, self.layout, self.num_pages
        self.page_size = layout.page_size
        numbers = [number for _, number in self.groups.places]
        self._k_BSNH = [layout.plane(arena, num_pages, number, 0) for number in numbers]
        if isinstance(layout.spec, Latent):
            self._v_BSNH = [latents[..., layout.spec.rope :] for latents in self._k_BSNH]
        else:
            self._v_BSNH = [layout.plane(arena, num_pages, number, 1) for number in numbers]
        self._blocks = layout.blocks(arena)

    @property
    def device(self) -> torch.device:
        return self._blocks.device

    def read(self, pages: Sequence[int]) -> torch.Tensor:
        """A copy of these pages, all planes of a page together: [pages, words of a page]."""
        return self._blocks[self._rows(pages)].view(len(pages), -1)

    def write(self, pages: Sequence[int], contents: torch.Tensor) -> None:
        """What `read` returned, back into the pool."""
        self._blocks[self._rows(pages)] = contents.view(-1, self._blocks.shape[1])

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy these pages to others, behind what was launched before.

        Raises:
            AssertionError: a page is copied to while it is read, or twice.
        """
        assert len(set(sources) | set(targets)) == len(sources) + len(targets), "pages overlap"
        if self.device.type == "cuda":
            from ebbtide.srt.mem_cache.page_copy import copy_blocks

            copy_blocks(self._blocks, sources, targets, self.layout.num_planes, self.layout.chunk_pages)
            return
        step = max(1, MOVED_AT_ONCE_BYTES // self.layout.page_bytes)
        for start in range(0, len(sources), step):
            part = slice(start, start + step)
            self.write(targets[part], self.read(sources[part]))

    def warm_up(self) -> None:
        """Have the kernel that moves pages compiled. Nothing is in the pool yet."""
        if self.num_pages > 1:
            self.move([0], [1])

    def _rows(self, pages: Sequence[int]) -> torch.Tensor:
        """The blocks of these pages in all planes, page after page. Those of states lie side by side."""
        pages_P1 = torch.tensor(pages, dtype=torch.int64, device=self.device)[:, None]
        planes_N = torch.arange(self.layout.num_planes, device=self.device)
        rows_PN = pages_P1 + planes_N * self.layout.chunk_pages
        if self.states is not None:
            first = self.states.slots.first_page
            of_states_PN = first + (pages_P1 - first) * self.layout.num_planes + planes_N
            rows_PN = torch.where(pages_P1 < first, rows_PN, of_states_PN)
        return rows_PN.flatten()

    def group(self, layer: int) -> int:
        """Whose pages hold the layer's keys and values."""
        return self.groups.places[layer][0]

    def k(self, layer: int) -> torch.Tensor:
        """The layer's keys, [B, S, N, H]; of latents all, with N = 1."""
        return self._k_BSNH[layer]

    def head_scales(self, layer: int) -> HeadScales | None:
        """What the layer's stored numbers are multiplied by; None: by 1."""
        return self.scales.of(layer) if self.scales is not None else None

    def v(self, layer: int) -> torch.Tensor:
        """The layer's values, [B, S, N, H]; of latents what is not rotated."""
        return self._v_BSNH[layer]
