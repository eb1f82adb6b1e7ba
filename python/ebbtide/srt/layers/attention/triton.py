"""Attention by a Triton kernel of our own: any head size, group, window and soft cap, with CUDA graphs.

Shapes: T tokens, R requests, B requests of a graph, N query heads, K KV heads, H head_dim.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ebbtide.srt.layers.attention.base import (
    AttentionBackend,
    AttentionShape,
    CapturedAttention,
    DecodeBuffers,
    GraphFamily,
    KVPages,
    LayerAttention,
    PagedBatch,
    fp8_problem,
)
from ebbtide.srt.layers.attention.paged_kernel import Operands, PoolLayers
from ebbtide.srt.layers.heads import HeadNorms, Pages, Rope

MAX_HEAD_DIM = 256


class TritonAttention(AttentionBackend):
    """Paged attention on a GPU, for shapes that FlashInfer does not serve. Keys may have another dtype."""

    captures = True

    @classmethod
    def problem(cls, shape: AttentionShape, device: torch.device) -> str | None:
        if device.type != "cuda":
            return "Triton's kernels run on CUDA devices"
        if shape.latent is not None:
            return "the Triton kernels take keys and values, not latents"
        if shape.head_dim > MAX_HEAD_DIM:
            return f"the Triton kernels take a head_dim up to {MAX_HEAD_DIM}, not {shape.head_dim}"
        if importlib.util.find_spec("triton") is None:
            return 'Triton is not installed (pip install "ebbtide[cuda]")'
        return fp8_problem(shape, device)

    def __init__(self, kv_pages: KVPages, layers: Sequence[LayerAttention], shape: AttentionShape) -> None:
        self._layers = PoolLayers(kv_pages, layers)

    def prepare(self, batch: PagedBatch) -> _TritonStep:
        """Split off the requests that decode, which come first: they get a launch of their own."""
        num_decoding, num_requests = batch.num_decoding, len(batch.lens_R)
        ends = [end for end in ((0, num_decoding), (num_decoding, num_requests)) if end[0] < end[1]]
        groups = batch.groups
        parts = [
            [each.pages.part(first, end, int(batch.num_new_R[first:end].max())) for first, end in ends]
            for each in groups
        ]
        return _TritonStep(self._layers, [each.slots_T for each in groups], parts)

    def graph_families(self, batch_sizes: Sequence[int]) -> list[GraphFamily]:
        return [GraphFamily("any", batch_sizes, self._capture)]

    def _capture(self, batch_size: int, buffers: DecodeBuffers) -> _TritonStep:
        groups = buffers.groups
        parts = [[each.pages(batch_size)] for each in groups]
        return _TritonStep(self._layers, [each.slots_B[:batch_size] for each in groups], parts)


@dataclass(frozen=True, slots=True)
class _TritonStep(CapturedAttention):
    """A step, captured or not, with slots and parts for each group of layers.

    It needs no plan, since the kernels read lengths and pages themselves.
    """

    layers: PoolLayers
    slots: Sequence[Tensor]
    parts: Sequence[Sequence[Pages]]

    def forward(self, layer: LayerAttention, qkv_TNH: Tensor, rope: Rope, norms: HeadNorms | None) -> Tensor:
        return self.layers.forward(layer, qkv_TNH, rope, norms, self.slots, self._attend)

    def _attend(self, layer: LayerAttention, x: Operands) -> None:
        from ebbtide.srt.layers.kernels.paged_attention import attend

        for part in self.parts[self.layers.groups[layer.layer]]:
            attend(x.q_TNH, x.k_PSKH, x.v_PSKH, part, x.out_TNH, layer.kind, sinks_N=layer.sinks)
