"""The paged pool of keys and values: views into the `kv_cache` arena."""

from __future__ import annotations

import torch

from ebbtide.srt.mem_cache.kv_layout import KVLayout
from ebbtide.srt.memory_saver.arena import Arena


class KVPool:
    """Keys and values of all layers in one arena.

    Shapes: B blocks, S tokens of a page, N KV heads, H head_dim. A page's id says which block of each plane
    is its own; blocks of other planes lie in between.

    Args:
        arena: at least `layout.arena_bytes(num_pages)` bytes; it may be released, now and later.
        layout: what is stored, and where.
        num_pages: pages that may be used.

    Raises:
        ValueError: the arena is too small.
    """

    def __init__(self, arena: Arena, layout: KVLayout, num_pages: int) -> None:
        self.arena = arena
        self.layout = layout
        self.num_pages = num_pages
        self.page_size = layout.page_size
        layers = range(layout.num_layers)
        self._k_BSNH = [layout.plane(arena, num_pages, layer, 0) for layer in layers]
        self._v_BSNH = [layout.plane(arena, num_pages, layer, 1) for layer in layers]

    def k(self, layer: int) -> torch.Tensor:
        """The layer's keys, [B, S, N, H]."""
        return self._k_BSNH[layer]

    def v(self, layer: int) -> torch.Tensor:
        """The layer's values, [B, S, N, H]."""
        return self._v_BSNH[layer]
