"""Attention by FlashInfer: paged kernels, eager and in CUDA graphs, planned without waiting for the device.

Shapes: T tokens, R requests, B requests of a graph, N query heads, K KV heads, H head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ebbtide.srt.kernel_cache import add_scripts_to_path
from ebbtide.srt.layers.attention.base import HeadNorms, KVPages, PagedBatch
from ebbtide.srt.layers.attention.flashinfer_kernels import (
    DevicePages,
    HeadShape,
    HostLens,
    PagedKernel,
    Workspace,
    decode_kernel,
    partial_bytes,
    prefill_kernel,
)
from ebbtide.srt.layers.rotary import Rope


class CudaBatch(PagedBatch, Protocol):
    """What a batch on a GPU holds besides: its page table as FlashInfer reads it, there and on the host.

    Attributes:
        kv_indices: int32 on the device, ceil(len / page_size) page ids of each request, concatenated.
        kv_indptr_R1, q_indptr_R1: int32 on the host, first page id and first new token of each request,
            and their numbers.
        last_page_len_R: int32 on the host, tokens of each request's last page.
        kv_indptr_dev, q_indptr_dev, last_page_len_dev: the same on the device.
    """

    @property
    def kv_indices(self) -> Tensor: ...

    @property
    def kv_indptr_R1(self) -> NDArray[np.int32]: ...

    @property
    def q_indptr_R1(self) -> NDArray[np.int32]: ...

    @property
    def last_page_len_R(self) -> NDArray[np.int32]: ...

    @property
    def kv_indptr_dev(self) -> Tensor: ...

    @property
    def q_indptr_dev(self) -> Tensor: ...

    @property
    def last_page_len_dev(self) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class DecodeBuffers:
    """A decode batch at addresses that stay: CUDA graphs of B requests read the first B (or B + 1) entries.

    The caller fills them before a replay. A row that only fills up the graph has slot −1, so that nothing is
    stored, and may attend to anything. Its output means nothing.

    Attributes:
        slots_B: int64.
        kv_indptr_B1, kv_indices, last_page_len_B: int32, as in `CudaBatch`.
    """

    slots_B: Tensor
    kv_indptr_B1: Tensor
    kv_indices: Tensor
    last_page_len_B: Tensor


class _Layers:
    """The pool's layers, and what all kinds of steps do in each of them."""

    def __init__(self, kv_pages: KVPages, num_layers: int) -> None:
        self._k_PSKH = [kv_pages.k(layer) for layer in range(num_layers)]
        self._v_PSKH = [kv_pages.v(layer) for layer in range(num_layers)]

    def forward(
        self, layer: int, qkv_TNH: Tensor, rope: Rope, head_norms: HeadNorms | None, step: _Step
    ) -> Tensor:
        from ebbtide.srt.layers.kernels.rope import rotate_and_store

        k_PSKH, v_PSKH = self._k_PSKH[layer], self._v_PSKH[layer]
        q_TNH = rotate_and_store(qkv_TNH, rope, head_norms, step.slots_T, k_PSKH, v_PSKH)
        out_TNH = torch.empty_like(q_TNH)
        for part in step.parts:
            part.kernel.run(part.plan, part.pages, q_TNH[part.rows], k_PSKH, v_PSKH, out_TNH[part.rows])
        return out_TNH


@dataclass(frozen=True, slots=True)
class _Part:
    """Requests of a step that one kernel serves; `rows` are their new tokens."""

    kernel: PagedKernel
    plan: Any
    pages: DevicePages
    rows: slice


@dataclass(frozen=True, slots=True)
class _Step:
    """A planned step."""

    parts: list[_Part]
    slots_T: Tensor


class FlashInferAttention:
    """Paged attention on a GPU. Everything runs on the current stream, one step after another.

    Args:
        kv_pages: the pool; its views stay good whether its memory is there or not.
        num_layers: layers of the pool.
        num_q_heads: query heads, a multiple of the pool's KV heads.
        dtype: of queries, keys and values alike: bfloat16 or float16.
        device: a GPU.
    """

    def __init__(
        self,
        kv_pages: KVPages,
        num_layers: int,
        num_q_heads: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        # FlashInfer compiles what is not in its cache.
        add_scripts_to_path()
        _, page_size, num_kv_heads, head_dim = kv_pages.k(0).shape
        shape = HeadShape(num_q_heads, num_kv_heads, head_dim, page_size, dtype)
        partial = torch.zeros(partial_bytes(shape, device), dtype=torch.uint8, device=device)
        self._layers = _Layers(kv_pages, num_layers)
        # A step may have both in it.
        self._decode = decode_kernel(shape, Workspace(partial))
        self._prefill = prefill_kernel(shape, Workspace(partial))
        self._page_size = page_size
        self._step: _Step | None = None

    def prepare(self, batch: PagedBatch) -> None:
        """Plan for one step; the device is not waited for. On a GPU every batch is a `CudaBatch`.

        The requests with one new token that come first, those that decode, are left to the decode kernel: the
        kernels for prompts compute whole tiles of queries for each of them.
        """
        cuda_batch = cast(CudaBatch, batch)
        num_requests = len(batch.lens_R)
        others = np.flatnonzero(batch.num_new_R != 1)
        num_decoding = int(others[0]) if len(others) else num_requests
        parts = []
        if num_decoding:
            parts.append(self._part(cuda_batch, self._decode, 0, num_decoding))
        if num_decoding < num_requests:
            parts.append(self._part(cuda_batch, self._prefill, num_decoding, num_requests))
        self._step = _Step(parts, batch.slots_T)

    def _part(self, batch: CudaBatch, kernel: PagedKernel, first: int, end: int) -> _Part:
        """Plan for the requests `first` to `end`."""
        requests, bounds = slice(first, end), slice(first, end + 1)
        first_row, end_row = (int(batch.q_indptr_R1[request]) for request in (first, end))
        kv_start = int(batch.kv_indptr_R1[first])
        lens = HostLens(
            torch.from_numpy(batch.q_indptr_R1[bounds] - first_row),
            torch.from_numpy(batch.kv_indptr_R1[bounds] - kv_start),
            torch.from_numpy(np.ascontiguousarray(batch.lens_R[requests], dtype=np.int32)),
        )
        q_indptr, kv_indptr = batch.q_indptr_dev[bounds], batch.kv_indptr_dev[bounds]
        pages = DevicePages(
            q_indptr - first_row if first else q_indptr,
            kv_indptr - kv_start if first else kv_indptr,
            batch.kv_indices[kv_start:],
            batch.last_page_len_dev[requests],
        )
        return _Part(kernel, kernel.plan(lens, captured=False), pages, slice(first_row, end_row))

    def forward(self, layer: int, qkv_TNH: Tensor, rope: Rope, head_norms: HeadNorms | None) -> Tensor:
        assert self._step is not None
        return self._layers.forward(layer, qkv_TNH, rope, head_norms, self._step)

    def graph(self, batch_size: int, buffers: DecodeBuffers) -> GraphDecode:
        """Decode steps of `batch_size` requests, to be captured and replayed."""
        return GraphDecode(self._layers, self._decode, self._page_size, batch_size, buffers)


class GraphDecode:
    """Attention of the decode steps that one CUDA graph serves.

    `plan` before the capture and before every replay, on the stream of the replays, outside of the capture.
    A plan and the contents of the buffers are what changes from replay to replay.
    """

    def __init__(
        self, layers: _Layers, kernel: PagedKernel, page_size: int, batch_size: int, buffers: DecodeBuffers
    ) -> None:
        self._layers, self._kernel, self._page_size = layers, kernel, page_size
        # One new token each.
        q_indptr_B1 = torch.arange(batch_size + 1, dtype=torch.int32)
        self._host_q_indptr_B1 = q_indptr_B1
        self._pages = DevicePages(
            q_indptr_B1.to(buffers.slots_B.device),
            buffers.kv_indptr_B1[: batch_size + 1],
            buffers.kv_indices,
            buffers.last_page_len_B[:batch_size],
        )
        self._slots_B = buffers.slots_B[:batch_size]
        self._step: _Step | None = None

    def plan(self, kv_indptr_B1: NDArray[np.int32], last_page_len_B: NDArray[np.int32]) -> None:
        """Plan for the lengths of one step, without waiting for the device.

        Args:
            kv_indptr_B1, last_page_len_B: what the buffers hold, or will hold when the graph is replayed.
        """
        num_pages_B = np.diff(kv_indptr_B1)
        lens_B = np.where(num_pages_B > 0, (num_pages_B - 1) * self._page_size + last_page_len_B, 0)
        lens = HostLens(
            self._host_q_indptr_B1,
            torch.from_numpy(np.ascontiguousarray(kv_indptr_B1, dtype=np.int32)),
            torch.from_numpy(lens_B.astype(np.int32)),
        )
        plan = self._kernel.plan(lens, captured=True)
        if self._step is None:
            part = _Part(self._kernel, plan, self._pages, slice(0, len(self._slots_B)))
            self._step = _Step([part], self._slots_B)
        # The captured launches hold grid and addresses of the first plan.
        assert list(plan) == list(self._step.parts[0].plan), "a plan that the captured kernels do not fit"

    def prepare(self, batch: PagedBatch) -> None:
        """Plan for a batch that fills the graph."""
        cuda_batch = cast(CudaBatch, batch)
        self.plan(cuda_batch.kv_indptr_R1, cuda_batch.last_page_len_R)

    def forward(self, layer: int, qkv_TNH: Tensor, rope: Rope, head_norms: HeadNorms | None) -> Tensor:
        assert self._step is not None
        return self._layers.forward(layer, qkv_TNH, rope, head_norms, self._step)
