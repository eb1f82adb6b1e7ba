"""Chooses the kernel that attends in a decode step, by the shape, requests' lengths, and shared pages.

The thresholds are for an H200; docs/performance.md has the measurements.
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

# Query rows of a block: the fewest that a product on tensor cores takes.
TILE_ROWS = 16
_MAX_FEW_REQUESTS = 32
# With more keys than this in the longest part, `FewRequests` is slower than FlashInfer's kernels. Steps of
# Llama-3.1-8B are 4 to 7 % shorter with it at 128 keys per part, equal at 512, and 30 % longer at 8,192.
_MOST_FEW_KEYS = 448
# A step is uneven if its longest request, not split, takes this share of the time that all keys of the step
# would take if divided evenly over the device.
_UNEVEN_SHARE = 0.8
# The least that sharing must save per layer: twice the time of the second kernel, in bytes read.
_MIN_SAVED_BYTES = 16 << 20
# The kernel that shares pages reads FP8 slower than the other one, by about this share.
_MIN_SAVED_SHARE = 0.3


class DecodeKernel(Enum):
    """Kernels for any number and lengths of requests.

    FP8: our own, for 8-bit keys and values. CUDA_CORES: FlashInfer's decode kernel, which reads keys and
    values once per group of heads. TILES: FlashInfer's kernel for tiles of queries, on tensor cores.
    """

    FP8 = auto()
    CUDA_CORES = auto()
    TILES = auto()


def kernel_for(shape: AttentionShape) -> DecodeKernel:
    """The fastest kernel for a shape."""
    if shape.kv_dtype == FP8 and shape.group <= TILE_ROWS:
        return DecodeKernel.FP8
    return DecodeKernel.CUDA_CORES if shape.group <= 2 else DecodeKernel.TILES


def unsplit_from(shape: AttentionShape, device: torch.device) -> int:
    """How many requests make four rounds of blocks without any of them being split."""
    return -(-8 * num_multiprocessors(device) // shape.num_kv_heads)


def serves_few(shape: AttentionShape, num_requests: int) -> bool:
    """Whether `FewRequests` supports a step of this many requests."""
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
    """Whether `FewRequests` is fastest for these lengths. It cuts all requests into equally many parts.

    Args:
        batch_size: of the graph; it determines the number of parts.
    """
    from ebbtide.srt.layers.kernels.few_decode import choose_cut

    windows = [kind.window for kind in shape.kinds if kind.window is not None]
    if len(windows) == len(shape.kinds):
        lens_R = np.minimum(lens_R, max(windows))
    cut = choose_cut(batch_size, shape.num_kv_heads, shape.group, device)
    return int(lens_R.max()) <= cut.splits * _MOST_FEW_KEYS


class FewRequests(CapturedAttention):
    """The attention of a decode step of few requests, in a single kernel between two projections.

    With few requests, the time of attention is that of starting and ending kernels. This one replaces three,
    and starts while the projection still runs. It reads lengths and pages itself.

    Args:
        buffers: they hold lengths and pages, including the new tokens, when a step runs.
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
    """Whether, in a step without splits, the longest request would run on after the others have ended."""
    if kernel_for(shape) is not DecodeKernel.TILES or batch_size < unsplit_from(shape, device):
        return False
    num_at_a_time = 2 * num_multiprocessors(device) // shape.num_kv_heads
    return int(lens_R.max()) * num_at_a_time >= _UNEVEN_SHARE * int(lens_R.sum())


def can_share(shape: AttentionShape, kind: AttentionKind) -> bool:
    """Whether layers of this kind can read shared pages once: a block must hold several requests, and there
    must be no window, which would hide shared pages.
    """
    return 2 * shape.group <= TILE_ROWS and kind.window is None


def sharing_saves(shape: AttentionShape, num_rows: int, num_saved: int, num_pages: int) -> bool:
    """Whether not reading `num_saved` pages in every layer outweighs writing and reading partial results.

    Args:
        num_saved, num_pages: pages that sharing saves, and pages that are read without it.
    """
    if kernel_for(shape) is DecodeKernel.FP8 and num_saved < _MIN_SAVED_SHARE * num_pages:
        return False
    page_bytes = 2 * shape.page_size * shape.num_kv_heads * shape.head_dim * shape.kv_dtype.itemsize
    part_bytes = shape.num_q_heads * shape.head_dim * shape.dtype.itemsize
    return num_saved * page_bytes >= _MIN_SAVED_BYTES + 4 * num_rows * part_bytes
