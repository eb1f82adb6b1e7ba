"""The paged pool of keys and values: views into the `kv_cache` arena.

Shape suffixes: P pages, S tokens of a page, N KV heads, H head_dim.
"""

from __future__ import annotations

import torch

from ebbtide.srt.memory_saver.arena import Arena

# Attention kernels load whole cache lines; a layer starts on one.
_ALIGNMENT = 256


class KVPool:
    """Keys and values of all layers, layer after layer, in one arena.

    Args:
        arena: at least `bytes_needed(...)` bytes; it may be released, now and later.
        num_layers, num_pages, page_size, num_kv_heads, head_dim: the shape; heads are those of this rank.
        dtype: of keys and values.

    Raises:
        ValueError: the arena is too small.
    """

    def __init__(
        self,
        arena: Arena,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
    ) -> None:
        self.arena = arena
        self.num_layers = num_layers
        self.num_pages = num_pages
        self.page_size = page_size
        shape_PSNH = (num_pages, page_size, num_kv_heads, head_dim)
        step = _slab_bytes(num_pages, page_size, num_kv_heads, head_dim, dtype)
        self._k = [arena.view(2 * layer * step, shape_PSNH, dtype) for layer in range(num_layers)]
        self._v = [arena.view((2 * layer + 1) * step, shape_PSNH, dtype) for layer in range(num_layers)]

    @staticmethod
    def bytes_per_page(
        num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        """Bytes that one page takes, keys and values of all layers together."""
        return 2 * num_layers * page_size * num_kv_heads * head_dim * dtype.itemsize

    @staticmethod
    def bytes_needed(
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
    ) -> int:
        """Bytes of arena that a pool takes, alignment included (at most 512 bytes per layer)."""
        return 2 * num_layers * _slab_bytes(num_pages, page_size, num_kv_heads, head_dim, dtype)

    def k(self, layer: int) -> torch.Tensor:
        """The layer's keys, [P, S, N, H]."""
        return self._k[layer]

    def v(self, layer: int) -> torch.Tensor:
        """The layer's values, [P, S, N, H]."""
        return self._v[layer]


def _slab_bytes(num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes from one layer's keys to its values, and on to the next layer's keys."""
    exact = num_pages * page_size * num_kv_heads * head_dim * dtype.itemsize
    return -(-exact // _ALIGNMENT) * _ALIGNMENT
