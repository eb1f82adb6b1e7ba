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
        return attend_few(qkv_TNH, rope, norms, *step, sinks_N=layer.sinks, **layer.kind._asdict())
