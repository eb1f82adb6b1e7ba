"""Which kernel attends in a decode step: by the shape, by lengths of requests, and by what they share.

The bounds are of an H200; docs/performance.md says what was measured.
"""

from __future__ import annotations

from enum import Enum, auto

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ebbtide.srt.layers.attention.base import (
    AttentionShape,
    CapturedAttention,
    DecodeBuffers,
    KVPages,
    LayerAttention,
)
from ebbtide.srt.layers.heads import AttentionKind, HeadNorms, Rope
from ebbtide.srt.layers.kernels.launch import num_multiprocessors
from ebbtide.srt.mem_cache.kv_scales import FP8

# Query rows of a block: the least that a product on tensor cores takes.
TILE_ROWS = 16
_MAX_FEW_REQUESTS = 32
# With more keys in the longest part, steps of Llama-3.1-8B are longer than with FlashInfer's kernels: those
# with 128 keys to a part are 4 to 7 % shorter, with 512 alike, with 8,192 longer by 30 %.
_MOST_FEW_KEYS = 448
# Of the time that all keys of a step take, evenly divided: what the longest request takes, unsplit.
_UNEVEN_SHARE = 0.8
# What sharing must save at least, per layer: the time of a second kernel, and as much again.
_MIN_SAVED_BYTES = 16 << 20
# The kernel that shares reads pages in FP8 slower, by about this share, than the one that does not.
_MIN_SAVED_SHARE = 0.3


class DecodeKernel(Enum):
    """What attends to requests of any number and length.

    FP8: our own, to keys and values of 8 bits. CUDA_CORES: FlashInfer's, which streams keys and values once
    per group of heads. TILES: FlashInfer's for tiles of queries, on tensor cores.
    """

    FP8 = auto()
    CUDA_CORES = auto()
    TILES = auto()


def kernel_for(shape: AttentionShape) -> DecodeKernel:
    """The kernel that is quickest for a shape."""
    if shape.kv_dtype == FP8 and shape.group <= TILE_ROWS:
        return DecodeKernel.FP8
    return DecodeKernel.CUDA_CORES if shape.group <= 2 else DecodeKernel.TILES


def unsplit_from(shape: AttentionShape, device: torch.device) -> int:
    """Requests from which four rounds of blocks are reached without splitting any of them."""
    return -(-8 * num_multiprocessors(device) // shape.num_kv_heads)


def serves_few(shape: AttentionShape, num_requests: int) -> bool:
    """Whether `FewRequests` serves a step of this many requests."""
    return (
        num_requests <= _MAX_FEW_REQUESTS
        and shape.kv_dtype == shape.dtype
        and shape.group <= TILE_ROWS
        and shape.head_dim & (shape.head_dim - 1) == 0
        and shape.rotates_all
    )


def suits_few(
    shape: AttentionShape, lens_R: NDArray[np.int32], batch_size: int, device: torch.device
) -> bool:
    """Whether `FewRequests` is quickest for these lengths: it cuts every request into equally many parts.

    Args:
        batch_size: of the graph, by which the number of parts is chosen.
    """
    from ebbtide.srt.layers.kernels.few_decode import choose_cut

    windows = [kind.window for kind in shape.kinds if kind.window is not None]
    if len(windows) == len(shape.kinds):
        lens_R = np.minimum(lens_R, max(windows))
    cut = choose_cut(batch_size, shape.num_kv_heads, shape.group, device)
    return int(lens_R.max()) <= cut.splits * _MOST_FEW_KEYS


class FewRequests(CapturedAttention):
    """The attention of a decode step of few requests: one kernel from projection to projection.

    With few requests a layer's attention takes as long as its kernels need to start and to end: one replaces
    three, and is in place while the projection still runs. It reads lengths and pages itself.

    Args:
        buffers: where lengths and pages are, with the new tokens counted in, when a step runs.
    """

    def __init__(
        self, kv_pages: KVPages, shape: AttentionShape, num_requests: int, buffers: DecodeBuffers
    ) -> None:
        self._kv_pages = kv_pages
        groups = buffers.groups
        self._slots = [each.slots_B[:num_requests] for each in groups]
        self._pages = [each.pages(num_requests) for each in groups]
        self._arrivals = torch.zeros(
            num_requests * shape.num_kv_heads, dtype=torch.int32, device=buffers.slots_B.device
        )

    def forward(self, layer: LayerAttention, qkv_TNH: Tensor, rope: Rope, norms: HeadNorms | None) -> Tensor:
        from ebbtide.srt.layers.kernels.few_decode import attend_few

        pool, group = self._kv_pages, self._kv_pages.group(layer.layer)
        keys_and_values = pool.k(layer.layer), pool.v(layer.layer)
        step = self._slots[group], *keys_and_values, self._pages[group], self._arrivals
        return attend_few(qkv_TNH, rope, norms, *step, layer.kind, sinks_N=layer.sinks)


def is_uneven(
    shape: AttentionShape, lens_R: NDArray[np.int32], batch_size: int, device: torch.device
) -> bool:
    """Whether the longest of many requests, of which none is split, would go on when others have ended."""
    if kernel_for(shape) is not DecodeKernel.TILES or batch_size < unsplit_from(shape, device):
        return False
    num_at_a_time = 2 * num_multiprocessors(device) // shape.num_kv_heads
    return int(lens_R.max()) * num_at_a_time >= _UNEVEN_SHARE * int(lens_R.sum())


def can_share(shape: AttentionShape, kind: AttentionKind) -> bool:
    """Whether such layers can read what requests share once: a block takes several requests, and no window
    cuts their pages.
    """
    return 2 * shape.group <= TILE_ROWS and kind.window is None


def sharing_saves(shape: AttentionShape, num_rows: int, num_saved: int, num_pages: int) -> bool:
    """Whether leaving out `num_saved` pages of every layer makes up for writing and reading partial results.

    Args:
        num_saved, num_pages: left out, and read otherwise.
    """
    if kernel_for(shape) is DecodeKernel.FP8 and num_saved < _MIN_SAVED_SHARE * num_pages:
        return False
    page_bytes = 2 * shape.page_size * shape.num_kv_heads * shape.head_dim * shape.kv_dtype.itemsize
    part_bytes = shape.num_q_heads * shape.head_dim * shape.dtype.itemsize
    return num_saved * page_bytes >= _MIN_SAVED_BYTES + 4 * num_rows * part_bytes
