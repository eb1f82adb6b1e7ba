"""Decode steps of few requests, whose attention is one kernel from projection to projection.

With so few requests a layer's attention takes as long as its kernels need to start and to end: one of them
in place of three, which is in place while the projection still runs.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ebbtide.srt.layers.attention.base import AttentionShape, DecodeBuffers, KVPages, LayerAttention
from ebbtide.srt.layers.attention.shared_runs import SharedRuns
from ebbtide.srt.layers.heads import HeadNorms, Rope

MAX_REQUESTS = 32
# Query heads that share a KV head: the rows of a product on tensor cores.
_MAX_GROUP = 16
# With more keys in the longest part, steps of Llama-3.1-8B are longer than with FlashInfer's kernels: on an
# H200 those with 128 keys to a part are 4 to 7 % shorter, with 512 alike, with 8,192 longer by 30 %.
_MOST_KEYS = 448


def serves_few(shape: AttentionShape, num_requests: int) -> bool:
    """Whether `FewRequests` serves a step of this many requests."""
    is_power_of_2 = shape.head_dim & (shape.head_dim - 1) == 0
    return (
        num_requests <= MAX_REQUESTS
        and shape.kv_dtype == shape.dtype
        and shape.group <= _MAX_GROUP
        and is_power_of_2
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
    return int(lens_R.max()) <= cut.splits * _MOST_KEYS


class FewRequests:
    """The attention of a decode step of few requests. Nothing is planned: kernels read lengths and pages.

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

    def plan(
        self,
        kv_indptr_B1: NDArray[np.int32],
        last_page_len_B: NDArray[np.int32],
        runs: SharedRuns | None = None,
    ) -> None:
        """There is nothing to plan."""

    def forward(self, layer: LayerAttention, qkv_TNH: Tensor, rope: Rope, norms: HeadNorms | None) -> Tensor:
        from ebbtide.srt.layers.kernels.few_decode import attend_few

        pool, group = self._kv_pages, self._kv_pages.group(layer.layer)
        keys_and_values = pool.k(layer.layer), pool.v(layer.layer)
        step = self._slots[group], *keys_and_values, self._pages[group], self._arrivals
        return attend_few(qkv_TNH, rope, norms, *step, **layer.kind._asdict())
