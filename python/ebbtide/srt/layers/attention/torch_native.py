"""Attention by torch's own kernels, request by request over gathered pages.

Made for the CPU. On a GPU it is the reference in tests, and the fallback if no other backend serves.

Shapes: T tokens, R requests, P pages, S page_size, N query heads, K KV heads, H head_dim, L attended tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ebbtide.srt.layers.attention.base import (
    AttentionBackend,
    AttentionShape,
    KVPages,
    LayerAttention,
    PagedBatch,
    fp8_problem,
)
from ebbtide.srt.layers.heads import AttentionKind, HeadNorms, Rope
from ebbtide.srt.layers.rotary import rotate, split_heads
from ebbtide.srt.mem_cache.kv_scales import FP8, HeadScales, dequantised, quantised


@dataclass(frozen=True, slots=True)
class Span:
    """One request of the batch, as layers of one kind see it.

    Attributes:
        first, end: its new tokens.
        length: how many of the request's last tokens any of the new ones attends to.
        pages: int32, the pages that hold these.
        skipped: tokens at the start of the first page that are not attended to.
        mask: added to the scores; None: the only new token attends to everything, or the new tokens are the
            whole request with a causal mask.
    """

    first: int
    end: int
    length: int
    pages: Tensor
    skipped: int
    mask: Tensor | None


class TorchNativeAttention(AttentionBackend):
    """One `scaled_dot_product_attention` per request.

    Measured with 32 requests of mixed lengths: gathering one request's pages into a buffer that stays in the
    core's cache and attending to it at once takes half the time of gathering the whole batch, padded to the
    longest request.

    Pages of another dtype than the queries' are converted. With FP8 this emulates GPUs, which store the same
    numbers.
    """

    @classmethod
    def problem(cls, shape: AttentionShape, device: torch.device) -> str | None:
        return fp8_problem(shape, device)

    def __init__(self, kv_pages: KVPages, layers: Sequence[LayerAttention], shape: AttentionShape) -> None:
        numbers = [layer.layer for layer in layers]
        self._k_PSKH = {number: _movable(kv_pages.k(number)) for number in numbers}
        self._latent = shape.latent
        stored = numbers if shape.latent is None else []
        self._v_PSKH = {number: _movable(kv_pages.v(number)) for number in stored}
        self._scales = {number: kv_pages.head_scales(number) for number in numbers}
        self._page_size, self._num_kv_heads = shape.page_size, shape.num_kv_heads
        self._head_dim, self._value_dim = shape.head_dim, shape.value_dim
        self._groups = {number: kv_pages.group(number) for number in numbers}
        self._kinds = list(dict.fromkeys((layer.kind, self._groups[layer.layer]) for layer in layers))
        self._kv_dtype, self._dtype = shape.kv_dtype, shape.dtype
        self._device = self._k_PSKH[numbers[0]].device
        self._slots: list[Tensor] = []
        self._spans: dict[tuple[AttentionKind, int], list[Span]] = {}
        self._k_room, self._v_room = self._room(0), self._room(0)

    def prepare(self, batch: PagedBatch) -> TorchNativeAttention:
        groups = batch.groups
        self._slots = [each.slots_T for each in groups]
        tables = [torch.from_numpy(each.page_table_RP).to(self._device) for each in groups]
        lens = np.cumsum(batch.num_new_R).tolist(), batch.num_new_R.tolist(), batch.lens_R.tolist()
        self._spans = {
            (kind, group): [self._span(kind, *row) for row in zip(tables[group], *lens, strict=True)]
            for kind, group in self._kinds
        }
        most_pages = max(len(span.pages) for spans in self._spans.values() for span in spans)
        if most_pages > len(self._k_room):
            # With half as much again, so that decoding does not reallocate at every new page.
            self._k_room, self._v_room = (self._room(most_pages * 3 // 2) for _ in range(2))
        return self

    def forward(self, layer: LayerAttention, qkv_TNH: Tensor, rope: Rope, norms: HeadNorms | None) -> Tensor:
        q_TNH, k_TKH, v_TKH = self._heads(qkv_TNH, rope, norms)
        k_PSKH, v_PSKH = self._k_PSKH[layer.layer], self._v_PSKH.get(layer.layer)
        scales = self._scales[layer.layer]
        if scales is not None and scales.are_recorded:
            scales.record(k_TKH, v_TKH)
        k_TKH, v_TKH = self._stored(k_TKH, v_TKH, scales)
        group = self._groups[layer.layer]
        k_PSKH.flatten(0, 1).index_copy_(0, self._slots[group], _movable(k_TKH))
        if v_PSKH is not None:
            v_PSKH.flatten(0, 1).index_copy_(0, self._slots[group], _movable(v_TKH))
        out_TNH = q_TNH.new_empty(*q_TNH.shape[:2], self._value_dim)
        for span in self._spans[layer.kind, group]:
            new = slice(span.first, span.end)
            if span.length == span.end - span.first:
                # All tokens that it attends to are in this batch: no need to read them back from the pool.
                k_LKH, v_LKH = k_TKH[new], v_TKH[new]
            else:
                k_LKH = self._gather(k_PSKH, span, self._k_room)
                v_LKH = self._values_in(k_LKH) if v_PSKH is None else self._gather(v_PSKH, span, self._v_room)
            k_scale_K, v_scale_K = scales.scales_2K if scales is not None else (None, None)
            k_LKH = dequantised(k_LKH, k_scale_K, self._dtype)
            v_LKH = dequantised(v_LKH, v_scale_K, self._dtype)
            if span.end - span.first == 1:
                self._decode(layer, q_TNH[span.first], k_LKH, v_LKH, out_TNH[span.first])
            else:
                self._extend(layer, q_TNH[new], k_LKH, v_LKH, out_TNH[new], span.mask)
        return out_TNH

    def _heads(self, qkv_TNH: Tensor, rope: Rope, norms: HeadNorms | None) -> tuple[Tensor, Tensor, Tensor]:
        """Split queries, keys and values, normalised and rotated."""
        if self._latent is None:
            return split_heads(qkv_TNH, rope, norms, self._num_kv_heads)
        rotated_TNH = rotate(qkv_TNH, *rope)
        latents_TKH = rotated_TNH[:, -1:]
        return rotated_TNH[:, :-1], latents_TKH, self._values_in(latents_TKH)

    def _values_in(self, latents_LKH: Tensor) -> Tensor:
        return latents_LKH[..., -self._value_dim :]

    def _stored(self, k_TKH: Tensor, v_TKH: Tensor, scales: HeadScales | None) -> tuple[Tensor, Tensor]:
        """Convert keys and values to the pool's dtype and scales."""
        if self._kv_dtype != FP8:
            return k_TKH.to(self._kv_dtype), v_TKH.to(self._kv_dtype)
        k_inverse_K, v_inverse_K = scales.inverses_2K if scales is not None else (None, None)
        return quantised(k_TKH, k_inverse_K), quantised(v_TKH, v_inverse_K)

    def _span(self, kind: AttentionKind, table_P: Tensor, end: int, num_new: int, total: int) -> Span:
        length = total if kind.window is None else min(total, kind.window + num_new - 1)
        first_page, skipped = divmod(total - length, self._page_size)
        pages = table_P[first_page : -(-total // self._page_size)]
        return Span(end - num_new, end, length, pages, skipped, self._mask(kind, num_new, length))

    def _mask(self, kind: AttentionKind, num_new: int, length: int) -> Tensor | None:
        """The mask under which each new token sees the window that ends with it; None: see `Span`."""
        in_window = kind.window is None or length <= kind.window
        if num_new == 1 or (in_window and num_new == length and kind.soft_cap is None):
            return None
        first = length - num_new
        blocked = torch.full((num_new, length), float("-inf"), dtype=self._dtype, device=self._device)
        mask = blocked.triu(first + 1)
        if not in_window and kind.window is not None:
            mask += blocked.tril(first - kind.window)
        return mask

    def _decode(
        self, layer: LayerAttention, q_NH: Tensor, k_LKH: Tensor, v_LKH: Tensor, out_NH: Tensor
    ) -> None:
        """Attend with one new token. The query heads that share a KV head act as that head's queries."""
        q = q_NH.view(1, self._num_kv_heads, -1, self._head_dim)
        k, v = k_LKH.transpose(0, 1).unsqueeze(0), v_LKH.transpose(0, 1).unsqueeze(0)
        out = out_NH.view(1, self._num_kv_heads, -1, self._value_dim)
        sinks = None if layer.sinks is None else layer.sinks.view(1, self._num_kv_heads, -1, 1)
        out.copy_(_attend(layer.kind, sinks, q, k, v, None, is_causal=False))

    def _extend(
        self,
        layer: LayerAttention,
        q_TNH: Tensor,
        k_LKH: Tensor,
        v_LKH: Tensor,
        out_TNH: Tensor,
        mask: Tensor | None,
    ) -> None:
        q, k, v = (heads.transpose(0, 1).unsqueeze(0) for heads in (q_TNH, k_LKH, v_LKH))
        sinks = None if layer.sinks is None else layer.sinks.view(1, -1, 1, 1)
        out = _attend(layer.kind, sinks, q, k, v, mask, is_causal=mask is None)
        out_TNH.copy_(out[0].transpose(0, 1))

    def _gather(self, pages_PSKH: Tensor, span: Span, room_PSKH: Tensor) -> Tensor:
        room = room_PSKH[: len(span.pages)]
        torch.index_select(pages_PSKH, 0, span.pages, out=room)
        return room.view(self._kv_dtype).flatten(0, 1)[span.skipped : span.skipped + span.length]

    def _room(self, num_pages: int) -> Tensor:
        shape = (num_pages, self._page_size, self._num_kv_heads, self._head_dim)
        return _movable(torch.empty(shape, dtype=self._kv_dtype, device=self._device))


def _movable(x: Tensor) -> Tensor:
    """View FP8 as bytes, since torch does not copy FP8 by index on every device."""
    return x.view(torch.uint8) if x.dtype == FP8 else x


def _attend(
    kind: AttentionKind,
    sinks: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    is_causal: bool,
) -> Tensor:
    """Attention of [1, N, T, H] to [1, K, L, H]. Written out for soft caps and sinks, which torch's lacks."""
    group = q.shape[1] // k.shape[1]
    if kind.soft_cap is None and sinks is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal, scale=kind.scale, enable_gqa=group > 1
        )
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = (q @ k.transpose(2, 3)).mul_(kind.scale)
    if kind.soft_cap is not None:
        scores.div_(kind.soft_cap).tanh_().mul_(kind.soft_cap)
    if is_causal:
        mask = torch.full_like(scores[0, 0], float("-inf")).triu_(1)
    if mask is not None:
        scores += mask
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(q.dtype).expand(*scores.shape[:3], 1)), dim=-1)
    return scores.softmax(dim=-1, dtype=torch.float32).to(q.dtype)[..., : k.shape[2]] @ v
