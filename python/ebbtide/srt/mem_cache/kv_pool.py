"""The paged pool of keys and values: views into chunks of the `kv_cache` arena.

A chunk holds some pages of all layers of a group: it is `[layer][keys, values][page]`. Pages of other groups
have other layers in these places. The keys of a layer are a *plane*, and so are its values, or its latents.
The part of a page in one plane is a *block*. All blocks have the same size, so a plane is a view of the whole
arena as a flat run of blocks, beginning at its own first block. With P planes and C pages in a chunk, page i
of chunk c is block c * stride + i of every plane's view. The stride is P * C, or a little more to make chunks
end on a multiple of the granularity. That block number is the page's id in page tables.

**States**: layers without keys and values keep tensors of fixed size per request. These are in slots behind
the pages of the arena, so they are released and resumed together. A running request has the slot of its row
in the page table. One more slot is for padding and for passes without a request. The slots after it hold
checkpoints: states of cached prefixes. For saving and restoring pages, a slot is a run of pages with ids
behind those of the pool.
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

# Tensors of a slot begin at multiples of this, since kernels read 16 bytes at a time.
ALIGNMENT_BYTES = 256
# Without a kernel, pages are moved through a buffer of this size.
MOVED_AT_ONCE_BYTES = 64 << 20
# A kernel reads one plane after the other. With runs of this size, the driver's page size, it touches no more
# of the driver's pages than if each plane were contiguous.
CUDA_MIN_RUN_BYTES = 2 << 20
# 100 GiB in chunks of 1 GiB go back to the driver in 36 ms, in chunks of 256 MiB in 82 ms; they are taken in
# 31 and 65 ms. Attention does not notice (an H200: docs/performance.md).
CUDA_CHUNK_BYTES = (2 << 20, 1 << 30)
# Chunks are small enough that a device's memory, or a pool of a given size, has at least this many.
CHUNKS_OF_DEVICE, CHUNKS_OF_POOL = 128, 32
# A chunk may waste less than one page at its end: with this many pages, at most 1/32 of a pool.
MIN_CHUNK_PAGES = 32


def cuda_chunk_bytes(device_bytes: int, pool_bytes: int | None) -> int:
    """The smallest size of a chunk on a device of this size, a power of two.

    Args:
        pool_bytes: of the KV cache; None: it is sized by the device.
    """
    wanted = device_bytes // CHUNKS_OF_DEVICE
    if pool_bytes is not None:
        wanted = min(wanted, pool_bytes // CHUNKS_OF_POOL)
    least, most = CUDA_CHUNK_BYTES
    return min(max(1 << max(0, wanted.bit_length() - 1), least), most)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The layout of pages in chunks.

    Attributes:
        num_layers: layers of a group.
        page_size: tokens of a page.
        spec: what a layer stores per token on this rank.
        dtype: of the stored numbers.
        granularity: bytes that a chunk is a multiple of.
        min_chunk_bytes, min_chunk_pages: the smallest size of a chunk.
        min_run_bytes: the smallest size of a chunk's part in one plane.
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
        """The integer dtype that blocks are copied as: int64 if their size allows."""
        return torch.int64 if self.block_bytes % torch.int64.itemsize == 0 else torch.uint8

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all planes."""
        return self.num_planes * self.block_bytes

    @property
    def chunk_blocks(self) -> int:
        """Blocks of a chunk: also the distance between the ids of corresponding pages of two chunks."""
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
        """The whole arena as blocks, of all planes in order: [blocks, words of a block]."""
        num_blocks = arena.num_bytes // self.block_bytes
        return arena.view(0, (num_blocks, self.block_bytes // self.word.itemsize), self.word)


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The layout of a state slot.

    Attributes:
        parts: for each layer with a state, the shape and dtype of each tensor on this rank.
        page_bytes: a slot is a multiple of this.
    """

    parts: tuple[tuple[tuple[tuple[int, ...], torch.dtype], ...], ...]
    page_bytes: int

    @classmethod
    def of(cls, specs: Sequence[State], num_ranks: int, page_bytes: int) -> StateLayout:
        """The layout on one rank; `specs` have the sizes of all ranks together."""
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
        """How many pages a slot counts as."""
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
        slots: how many there are, and the ids of their pages.

    Attributes:
        layers: the tensors of each layer with a state, [slots, *shape].
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
        """Copy slots (source, target), pair by pair; queued behind earlier work."""
        for source, target in pairs:
            self._slots[target].copy_(self._slots[source])


@dataclass(eq=False)
class KVPool:
    """Keys and values of all layers in one arena.

    Shapes: B blocks, S tokens of a page, N KV heads, H head_dim. A page's id is the index of its block in
        each plane; in between are blocks of other planes.

    Args:
        arena: at least `layout.arena_bytes(num_pages)` bytes; it may be released, now and later.
        layout: of the pages.
        num_pages: pages that may be used.
        groups: the groups of layers that the pages belong to.
        scales: of keys and values in FP8; None: numbers are stored unscaled.
        states: recurrent states; their slots can be read and written as pages.

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
        """A copy of these pages, with all planes of a page together: [pages, words of a page]."""
        return self._blocks[self._rows(pages)].view(len(pages), -1)

    def write(self, pages: Sequence[int], contents: torch.Tensor) -> None:
        """Write contents that `read` returned to these pages."""
        self._blocks[self._rows(pages)] = contents.view(-1, self._blocks.shape[1])

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy pages to other pages; queued behind earlier work.

        Raises:
            AssertionError: a page is both source and target, or is given twice.
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
        """Compile the kernel that moves pages. Call it while the pool is empty."""
        if self.num_pages > 1:
            self.move([0], [1])

    def _rows(self, pages: Sequence[int]) -> torch.Tensor:
        """The blocks of these pages in all planes, page by page. Those of a state's page are contiguous."""
        pages_P1 = torch.tensor(pages, dtype=torch.int64, device=self.device)[:, None]
        planes_N = torch.arange(self.layout.num_planes, device=self.device)
        rows_PN = pages_P1 + planes_N * self.layout.chunk_pages
        if self.states is not None:
            first = self.states.slots.first_page
            of_states_PN = first + (pages_P1 - first) * self.layout.num_planes + planes_N
            rows_PN = torch.where(pages_P1 < first, rows_PN, of_states_PN)
        return rows_PN.flatten()

    def group(self, layer: int) -> int:
        """The group whose pages hold the layer's keys and values."""
        return self.groups.places[layer][0]

    def k(self, layer: int) -> torch.Tensor:
        """The layer's keys, [B, S, N, H]; for latents the whole row, with N = 1."""
        return self._k_BSNH[layer]

    def head_scales(self, layer: int) -> HeadScales | None:
        """The scales of the layer's stored numbers; None: all are 1."""
        return self.scales.of(layer) if self.scales is not None else None

    def v(self, layer: int) -> torch.Tensor:
        """The layer's values, [B, S, N, H]; for latents the part that is not rotated."""
        return self._v_BSNH[layer]
