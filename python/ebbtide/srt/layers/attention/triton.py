"""Attention by a Triton kernel of our own: any head size, group, window and soft cap, with CUDA graphs.

Shapes: T tokens, R requests, B requests of a graph, N query heads, K KV heads, H head_dim.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ebbtide.srt.layers.attention.base import (
    AttentionBackend,
    AttentionShape,
    DecodeBuffers,
    KVPages,
    LayerAttention,
    PagedBatch,
    StepKind,
    fp8_problem,
    scaled_outputs_,
)
from ebbtide.srt.layers.attention.shared_runs import SharedRuns
from ebbtide.srt.layers.heads import HeadNorms, Rope
from ebbtide.srt.layers.rotary import split_heads

if TYPE_CHECKING:
    from ebbtide.srt.layers.kernels.paged_attention import Pages

MAX_HEAD_DIM = 256


class _Layers:
    """The pool's layers, and what all kinds of steps do in each of them."""

    def __init__(self, kv_pages: KVPages, layers: Sequence[LayerAttention]) -> None:
        self._k_PSKH = {layer.layer: kv_pages.k(layer.layer) for layer in layers}
        self._v_PSKH = {layer.layer: kv_pages.v(layer.layer) for layer in layers}
        self._scales = {layer.layer: kv_pages.head_scales(layer.layer) for layer in layers}

    def forward(
        self,
        layer: LayerAttention,
        qkv_TNH: Tensor,
        rope: Rope,
        norms: HeadNorms | None,
        slots_T: Tensor,
        parts: Sequence[Pages],
    ) -> Tensor:
        from ebbtide.srt.layers.kernels.paged_attention import attend
        from ebbtide.srt.layers.kernels.rope import rotate_and_store

        k_PSKH, v_PSKH = self._k_PSKH[layer.layer], self._v_PSKH[layer.layer]
        scales = self._scales[layer.layer]
        if scales is not None and scales.are_recorded:
            scales.record(*split_heads(qkv_TNH, rope, norms, k_PSKH.shape[2])[1:])
        q_TNH = rotate_and_store(qkv_TNH, rope, norms, slots_T, k_PSKH, v_PSKH, scales)
        out_TNH = torch.empty_like(q_TNH)
        for part in parts:
            attend(q_TNH, k_PSKH, v_PSKH, part, out_TNH, **layer.kind._asdict())
        return out_TNH if scales is None else scaled_outputs_(out_TNH, scales)


class TritonAttention(AttentionBackend):
    """Paged attention on a GPU, for shapes that FlashInfer does not take. Keys may have another dtype."""

    captures = True

    @classmethod
    def problem(cls, shape: AttentionShape, device: torch.device) -> str | None:
        if device.type != "cuda":
            return "Triton's kernels run on CUDA devices"
        if shape.head_dim > MAX_HEAD_DIM:
            return f"the Triton kernels take a head_dim up to {MAX_HEAD_DIM}, not {shape.head_dim}"
        if importlib.util.find_spec("triton") is None:
            return 'Triton is not installed (pip install "ebbtide[cuda]")'
        return fp8_problem(shape, device)

    def __init__(self, kv_pages: KVPages, layers: Sequence[LayerAttention], shape: AttentionShape) -> None:
        self._layers = _Layers(kv_pages, layers)
        self._slots_T = torch.empty(0, dtype=torch.int64)
        self._parts: list[Pages] = []

    def prepare(self, batch: PagedBatch) -> None:
        """Requests with one new token that come first, those that decode, are a launch of their own."""
        num_requests = len(batch.lens_R)
        others = np.flatnonzero(batch.num_new_R != 1)
        num_decoding = int(others[0]) if len(others) else num_requests
        self._slots_T = batch.slots_T
        self._parts = [
            _pages(batch, first, end)
            for first, end in ((0, num_decoding), (num_decoding, num_requests))
            if first < end
        ]

    def forward(self, layer: LayerAttention, qkv_TNH: Tensor, rope: Rope, norms: HeadNorms | None) -> Tensor:
        return self._layers.forward(layer, qkv_TNH, rope, norms, self._slots_T, self._parts)

    def captured(self, batch_size: int, buffers: DecodeBuffers, kind: StepKind = StepKind.ANY) -> GraphDecode:
        return GraphDecode(self._layers, batch_size, buffers)


class GraphDecode:
    """Attention of the decode steps that one CUDA graph serves: the kernels read the buffers themselves."""

    def __init__(self, layers: _Layers, batch_size: int, buffers: DecodeBuffers) -> None:
        from ebbtide.srt.layers.kernels.paged_attention import Pages

        self._layers = layers
        self._slots_B = buffers.slots_B[:batch_size]
        self._pages = Pages(
            torch.arange(batch_size + 1, dtype=torch.int32, device=buffers.slots_B.device),
            buffers.kv_indptr_B1[: batch_size + 1],
            buffers.kv_indices,
            buffers.last_page_len_B[:batch_size],
            most_new=1,
        )

    def plan(
        self,
        kv_indptr_B1: NDArray[np.int32],
        last_page_len_B: NDArray[np.int32],
        runs: SharedRuns | None = None,
    ) -> None:
        """There is nothing to plan."""

    def forward(self, layer: LayerAttention, qkv_TNH: Tensor, rope: Rope, norms: HeadNorms | None) -> Tensor:
        return self._layers.forward(layer, qkv_TNH, rope, norms, self._slots_B, [self._pages])


def _pages(batch: PagedBatch, first: int, end: int) -> Pages:
    """The requests `first` to `end` of a batch."""
    from ebbtide.srt.layers.kernels.paged_attention import Pages

    return Pages(
        batch.q_indptr_dev[first : end + 1],
        batch.kv_indptr_dev[first : end + 1],
        batch.kv_indices,
        batch.last_page_len_dev[first:end],
        most_new=int(batch.num_new_R[first:end].max()),
    )
