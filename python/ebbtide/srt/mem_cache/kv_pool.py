"""The paged pool of keys and values: views into the `kv_cache` arena."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ebbtide.srt.mem_cache.cache_spec import WHOLE, CacheGroups, Latent
from ebbtide.srt.mem_cache.kv_layout import KVLayout
from ebbtide.srt.mem_cache.kv_scales import HeadScales, KVScales
from ebbtide.srt.mem_cache.state_pool import StatePool
from ebbtide.srt.memory_saver.arena import Arena

# Pages that no kernel moves go through a buffer of this size.
MOVED_AT_ONCE_BYTES = 64 << 20


class KVPool:
    """Keys and values of all layers in one arena.

    Shapes: B blocks, S tokens of a page, N KV heads, H head_dim. A page's id says which block of each plane
    is its own; blocks of other planes lie in between.

    Args:
        arena: at least `layout.arena_bytes(num_pages)` bytes; it may be released, now and later.
        layout: what is stored, and where.
        num_pages: pages that may be used.
        groups: whose pages these are; None: all layers are one.
        scales: of keys and values in FP8; None: what is stored is what it stands for.
        states: what layers without keys and values keep of requests; their pages can be read and written.

    Raises:
        ValueError: the arena is too small.
    """

    def __init__(
        self,
        arena: Arena,
        layout: KVLayout,
        num_pages: int,
        groups: CacheGroups | None = None,
        scales: KVScales | None = None,
        states: StatePool | None = None,
    ) -> None:
        self.arena = arena
        self.layout = layout
        self.scales, self.states = scales, states
        self.num_pages = num_pages
        self.page_size = layout.page_size
        if groups is None:
            places = tuple((0, layer) for layer in range(layout.num_layers))
            groups = CacheGroups(layout.num_layers, WHOLE, places)
        self.groups = groups
        numbers = [number for _, number in groups.places]
        self._k_BSNH = [layout.plane(arena, num_pages, number, 0) for number in numbers]
        if isinstance(layout.spec, Latent):
            self._v_BSNH = [latents[..., layout.spec.rope :] for latents in self._k_BSNH]
        else:
            self._v_BSNH = [layout.plane(arena, num_pages, number, 1) for number in numbers]
        self._blocks = layout.blocks(arena, num_pages)

    @property
    def device(self) -> torch.device:
        return self._blocks.device

    def read(self, pages: Sequence[int]) -> torch.Tensor:
        """A copy of these pages, all planes of a page together: [pages, words of a page]."""
        if not any(is_state := self._are_states(pages)):
            return self._blocks[self._rows(pages)].view(len(pages), -1)
        assert self.states is not None
        contents = torch.empty(
            (len(pages), self.layout.page_bytes // self.layout.word.itemsize),
            dtype=self.layout.word,
            device=self.device,
        )
        for kind, read in ((False, self.read), (True, self.states.read)):
            places = [place for place, is_one in enumerate(is_state) if is_one is kind]
            if places:
                contents[places] = read([pages[place] for place in places]).view(contents.dtype)
        return contents

    def write(self, pages: Sequence[int], contents: torch.Tensor) -> None:
        """What `read` returned, back into the pool."""
        if not any(is_state := self._are_states(pages)):
            self._blocks[self._rows(pages)] = contents.view(-1, self._blocks.shape[1])
            return
        assert self.states is not None
        for kind, write in ((False, self.write), (True, self.states.write)):
            places = [place for place, is_one in enumerate(is_state) if is_one is kind]
            if places:
                write([pages[place] for place in places], contents[places])

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

    def _are_states(self, pages: Sequence[int]) -> list[bool]:
        first = math.inf if self.states is None else self.states.slots.first_page
        return [page >= first for page in pages]

    def _rows(self, pages: Sequence[int]) -> torch.Tensor:
        """The blocks of these pages in all planes, page after page."""
        first = torch.tensor(pages, device=self.device)
        planes = torch.arange(self.layout.num_planes, device=self.device) * self.layout.chunk_pages
        return (first[:, None] + planes).flatten()

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
