"""Attention by torch's own kernels: request by request over gathered pages.

Made for the CPU. On a GPU it is the reference, and what is left where FlashInfer cannot be used.

Shapes: T tokens, R requests, P pages, S page_size, N query heads, K KV heads, H head_dim.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ebbtide.srt.layers.attention.base import HeadNorms, KVPages, PagedBatch
from ebbtide.srt.layers.norm import rms_norm
from ebbtide.srt.layers.rotary import Rope, rotate


@dataclass(frozen=True, slots=True)
class Span:
    """One request's part of the batch.

    Attributes:
        first, end: its new tokens.
        length: tokens it attends to.
        pages: their pages in the pool, int32.
        mask: added to the scores where new tokens follow cached ones; None where none is needed.
    """

    first: int
    end: int
    length: int
    pages: Tensor
    mask: Tensor | None


class TorchNativeAttention:
    """One `scaled_dot_product_attention` per request.

    Measured for 32 requests of mixed lengths: gathering one request's pages into a buffer that stays in the
    core's cache and attending to it at once takes half the time of a gather of the whole batch padded to
    the longest request.

    Args:
        kv_pages: the pool; its views stay good whether its memory is there or not.
        num_layers: layers of the pool.
        dtype: of the queries; pages of another dtype are converted.
    """

    def __init__(self, kv_pages: KVPages, num_layers: int, dtype: torch.dtype) -> None:
        self._k_PSKH = [kv_pages.k(layer) for layer in range(num_layers)]
        self._v_PSKH = [kv_pages.v(layer) for layer in range(num_layers)]
        self._k_slots = [pages.flatten(0, 1) for pages in self._k_PSKH]
        self._v_slots = [pages.flatten(0, 1) for pages in self._v_PSKH]
        _, self._page_size, self._num_kv_heads, self._head_dim = self._k_PSKH[0].shape
        self._kv_dtype = self._k_PSKH[0].dtype
        self._dtype = dtype
        self._device = self._k_PSKH[0].device
        self._slots_T = torch.empty(0, dtype=torch.int64)
        self._spans: list[Span] = []
        self._k_room, self._v_room = self._room(0), self._room(0)

    def prepare(self, batch: PagedBatch) -> None:
        self._slots_T = batch.slots_T
        ends = np.cumsum(batch.num_new_R).tolist()
        lens = batch.lens_R.tolist()
        num_pages = (-(-batch.lens_R // self._page_size)).tolist()
        table_RP = torch.from_numpy(batch.page_table_RP).to(self._device)
        self._spans = [
            Span(end - num_new, end, length, table_RP[row, :pages], self._mask(num_new, length))
            for row, (end, num_new, length, pages) in enumerate(
                zip(ends, batch.num_new_R.tolist(), lens, num_pages, strict=True)
            )
        ]
        if max(num_pages) > len(self._k_room):
            # Room to grow by half, so that decoding does not come back here at every page.
            self._k_room, self._v_room = (self._room(max(num_pages) * 3 // 2) for _ in range(2))

    def forward(self, layer: int, qkv_TNH: Tensor, rope: Rope, head_norms: HeadNorms | None) -> Tensor:
        q_TNH, k_TKH, v_TKH = self._heads(qkv_TNH, rope, head_norms)
        k_TKH, v_TKH = k_TKH.to(self._kv_dtype), v_TKH.to(self._kv_dtype)
        self._k_slots[layer].index_copy_(0, self._slots_T, k_TKH)
        self._v_slots[layer].index_copy_(0, self._slots_T, v_TKH)
        out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=self._device)
        for span in self._spans:
            new = slice(span.first, span.end)
            if span.length == span.end - span.first:
                # Everything it attends to is in this batch: no need to read it back from the pool.
                k_LKH, v_LKH = k_TKH[new], v_TKH[new]
            else:
                k_LKH = self._gather(self._k_PSKH[layer], span, self._k_room)
                v_LKH = self._gather(self._v_PSKH[layer], span, self._v_room)
            k_LKH, v_LKH = k_LKH.to(self._dtype), v_LKH.to(self._dtype)
            if span.end - span.first == 1:
                self._decode(q_TNH[span.first], k_LKH, v_LKH, out_TNH[span.first])
            else:
                self._extend(q_TNH[new], k_LKH, v_LKH, out_TNH[new], span.mask)
        return out_TNH

    def _heads(
        self, qkv_TNH: Tensor, rope: Rope, head_norms: HeadNorms | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, normalised and rotated, and values."""
        num_kv = self._num_kv_heads
        sizes = [qkv_TNH.shape[1] - 2 * num_kv, num_kv, num_kv]
        q_TNH, k_TKH, v_TKH = torch.split(qkv_TNH, sizes, dim=1)
        if head_norms is not None:
            q_TNH = rotate(rms_norm(q_TNH, head_norms.q_weight, head_norms.eps), *rope)
            k_TKH = rotate(rms_norm(k_TKH, head_norms.k_weight, head_norms.eps), *rope)
            return q_TNH, k_TKH, v_TKH
        rotated_TNH = rotate(qkv_TNH[:, : qkv_TNH.shape[1] - num_kv], *rope)
        return rotated_TNH[:, :-num_kv], rotated_TNH[:, -num_kv:], v_TKH

    def _decode(self, q_NH: Tensor, k_LKH: Tensor, v_LKH: Tensor, out_NH: Tensor) -> None:
        """One new token attends to everything: the heads that share a KV head act as its queries."""
        shape = (1, self._num_kv_heads, -1, self._head_dim)
        out = F.scaled_dot_product_attention(
            q_NH.view(shape), k_LKH.transpose(0, 1).unsqueeze(0), v_LKH.transpose(0, 1).unsqueeze(0)
        )
        out_NH.view(shape).copy_(out)

    def _extend(
        self, q_TNH: Tensor, k_LKH: Tensor, v_LKH: Tensor, out_TNH: Tensor, mask: Tensor | None
    ) -> None:
        out = F.scaled_dot_product_attention(
            q_TNH.transpose(0, 1).unsqueeze(0),
            k_LKH.transpose(0, 1).unsqueeze(0),
            v_LKH.transpose(0, 1).unsqueeze(0),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=True,
        )
        out_TNH.copy_(out[0].transpose(0, 1))

    def _gather(self, pages_PSKH: Tensor, span: Span, room_PSKH: Tensor) -> Tensor:
        room = room_PSKH[: len(span.pages)]
        torch.index_select(pages_PSKH, 0, span.pages, out=room)
        return room.flatten(0, 1)[: span.length]

    def _mask(self, num_new: int, length: int) -> Tensor | None:
        """Token i of the new ones sees the cached tokens and the first i + 1 new ones."""
        if num_new in (1, length):
            return None
        blocked = torch.full((num_new, length), float("-inf"), dtype=self._dtype, device=self._device)
        return blocked.triu_(length - num_new + 1)

    def _room(self, num_pages: int) -> Tensor:
        shape = (num_pages, self._page_size, self._num_kv_heads, self._head_dim)
        return torch.empty(shape, dtype=self._kv_dtype, device=self._device)
