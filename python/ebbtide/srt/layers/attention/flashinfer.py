"""Attention by FlashInfer: paged kernels, eager and in CUDA graphs, planned without waiting for the device.

Shapes: T tokens, R requests, B requests of a graph, N query heads, K KV heads, H head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ebbtide.srt.errors import EngineError
from ebbtide.srt.kernel_cache import add_scripts_to_path, flashinfer_problem
from ebbtide.srt.layers.attention.base import (
    AttentionBackend,
    AttentionShape,
    DecodeBuffers,
    GraphFamily,
    KVPages,
    LayerAttention,
    PagedBatch,
    Progress,
    fp8_problem,
)
from ebbtide.srt.layers.attention.decode_choice import (
    DecodeKernel,
    FewRequests,
    can_share,
    is_uneven,
    kernel_for,
    serves_few,
    sharing_saves,
    suits_few,
)
from ebbtide.srt.layers.attention.flashinfer_items import ItemBuffers, ItemKernel
from ebbtide.srt.layers.attention.flashinfer_kernels import (
    Fp8DecodeKernel,
    Fp8PrefillKernel,
    PrefillKernel,
    StreamKernel,
    WidePages,
    Workspace,
    compile_kernels,
    module_specs,
    partial_bytes,
    prefill_kernel,
)
from ebbtide.srt.layers.attention.paged_kernel import (
    HostLens,
    Operands,
    PagedKernel,
    PlannedAttention,
    PoolLayers,
)
from ebbtide.srt.layers.attention.shared_runs import NO_RUNS, SharedRuns, runs_of_neighbours
from ebbtide.srt.layers.heads import AttentionKind, HeadNorms, Pages, Rope
from ebbtide.srt.mem_cache.kv_scales import FP8

_SHARED_SIZE_STEP = 16


@dataclass(frozen=True, slots=True)
class _Kernels:
    """The kernels for layers of one kind. A step may use several, each with a plan of its own.

    Attributes:
        shared: for decoding requests that share pages; None: not supported, as for layers with a window.
    """

    decode: PagedKernel
    prefill: PagedKernel
    shared: ItemKernel | None


@dataclass(frozen=True, slots=True)
class _Part:
    """Requests of a step that one kernel serves.

    Attributes:
        pages: for each group of layers. All groups have equally many, so that one plan fits all.
        rows: the new tokens.
    """

    kernel: PlannedAttention
    plan: Any
    pages: Sequence[Pages]
    rows: slice


@dataclass
class _PlannedStep:
    """A planned step: the parts of each kind of layers."""

    layers: PoolLayers
    slots: Sequence[Tensor]
    parts: dict[AttentionKind, list[_Part]]

    def forward(self, layer: LayerAttention, qkv_TNH: Tensor, rope: Rope, norms: HeadNorms | None) -> Tensor:
        return self.layers.forward(layer, qkv_TNH, rope, norms, self.slots, self._attend)

    def _attend(self, layer: LayerAttention, x: Operands) -> None:
        if layer.sinks is not None:
            sums_TN = torch.empty(x.q_TNH.shape[:2], dtype=torch.float32, device=x.q_TNH.device)
            x = x._replace(sums_TN=sums_TN)
        group = self.layers.groups[layer.layer]
        for part in self.parts[layer.kind]:
            part.kernel.run(part.plan, part.pages[group], x.part(part.rows))
        if layer.sinks is not None:
            from ebbtide.srt.layers.kernels.merge_parts import count_sinks_

            count_sinks_(x.out_TNH, sums_TN, layer.sinks)


class FlashInferAttention(AttentionBackend):
    """Paged attention on a GPU. Everything runs on the current stream, one step after the other."""

    captures = True

    @classmethod
    def problem(cls, shape: AttentionShape, device: torch.device) -> str | None:
        if device.type != "cuda":
            return "FlashInfer's kernels run on CUDA devices"
        if shape.head_dim not in (64, 128, 256):
            return f"FlashInfer's kernels take a head_dim of 64, 128 or 256, not {shape.head_dim}"
        dtype, kv_dtype = (str(name).removeprefix("torch.") for name in (shape.dtype, shape.kv_dtype))
        if shape.dtype not in (torch.bfloat16, torch.float16):
            return f"FlashInfer's kernels take bfloat16 or float16, not {dtype}"
        if shape.kv_dtype not in (shape.dtype, FP8):
            return (
                f"the KV cache has dtype {kv_dtype}, the model {dtype}; FlashInfer is used where both are "
                "alike, or the cache is in FP8"
            )
        if shape.kv_dtype == FP8 and shape.has_sinks:
            return "FlashInfer's kernels take a KV cache in FP8 where no layer has attention sinks"
        if shape.kv_dtype == FP8 and shape.head_dim == 64:
            return "FlashInfer's kernels take a KV cache in FP8 with a head_dim of 128 or 256, not 64"
        return fp8_problem(shape, device) or flashinfer_problem()

    @classmethod
    def compile(cls, shape: AttentionShape, device: torch.device, progress: Progress, *, whole: bool) -> None:
        compile_kernels(module_specs(shape, device, whole=whole), progress)

    def __init__(self, kv_pages: KVPages, layers: Sequence[LayerAttention], shape: AttentionShape) -> None:
        # FlashInfer may compile kernels that are not in its cache, and looks for tools on the path.
        add_scripts_to_path()
        device = kv_pages.k(layers[0].layer).device
        self._layers = PoolLayers(kv_pages, layers)
        self._kernels = _make_kernels(shape, device)
        self._shape, self._device = shape, device

    def prepare(self, batch: PagedBatch) -> _PlannedStep:
        """Plan one pass, without waiting for the device.

        Requests that decode, which come first, go to the decode kernel: kernels for prompts would compute a
        whole tile of queries for each of them.
        """
        num_requests, num_decoding = len(batch.lens_R), batch.num_decoding
        parts: dict[AttentionKind, list[_Part]] = {kind: [] for kind in self._kernels}
        items, groups = self._items(batch, num_decoding), batch.groups
        for kind, kernels in self._kernels.items():
            if items is not None and kernels.shared is not None:
                pages = [each.pages.part(0, num_decoding) for each in groups]
                parts[kind].append(_Part(kernels.shared, items, pages, slice(0, num_decoding)))
            elif num_decoding:
                parts[kind].append(_plan_part(groups, kernels.decode, 0, num_decoding))
            if num_decoding < num_requests:
                parts[kind].append(_plan_part(groups, kernels.prefill, num_decoding, num_requests))
        return _PlannedStep(self._layers, [each.slots_T for each in groups], parts)

    def _items(self, batch: PagedBatch, num_decoding: int) -> ItemBuffers | None:
        """The work list of the decoding requests, if neighbours share enough pages; otherwise None."""
        num_full_R = (batch.lens_R[:num_decoding] - 1) // self._shape.page_size
        runs = runs_of_neighbours(batch.page_table_RP[:num_decoding], num_full_R)
        if not self.is_worth_sharing(num_decoding, runs.num_saved, int(num_full_R.sum())):
            return None
        items = ItemBuffers(self._shape, num_decoding, self._device)
        items.plan(batch.kv_indptr_R1[: num_decoding + 1], batch.last_page_len_R[:num_decoding], runs)
        return items

    def graph_families(self, batch_sizes: Sequence[int]) -> list[GraphFamily]:
        shape, any_size = self._shape, list(batch_sizes)
        families = [
            GraphFamily(
                "few",
                [size for size in any_size if serves_few(shape, size)],
                lambda size, buffers: FewRequests(self._layers.kv_pages, shape, size, buffers),
                suits=lambda lens_R, size: suits_few(shape, lens_R, size, self._device),
            ),
            GraphFamily("any", any_size, self._capture),
        ]
        if self._shares_prefixes:
            shared = GraphFamily(
                "shared",
                _sizes_for_sharing(any_size),
                lambda size, buffers: self._capture(size, buffers, ItemBuffers(shape, size, self._device)),
                suits=lambda lens_R, size: is_uneven(shape, lens_R, size, self._device),
                shares=True,
            )
            families.insert(0, shared)
        return families

    def _capture(
        self, batch_size: int, buffers: DecodeBuffers, items: ItemBuffers | None = None
    ) -> GraphDecode:
        return GraphDecode(self._layers, self._kernels, self._shape, batch_size, buffers, items)

    @property
    def _shares_prefixes(self) -> bool:
        return any(kernels.shared is not None for kernels in self._kernels.values())

    def is_worth_sharing(self, num_requests: int, num_saved: int, num_pages: int) -> bool:
        return self._shares_prefixes and sharing_saves(self._shape, num_requests, num_saved, num_pages)


def _sizes_for_sharing(batch_sizes: Sequence[int]) -> list[int]:
    """Fewer sizes than for other steps: these are large, so that a few rows of padding cost little."""
    step, largest = _SHARED_SIZE_STEP, batch_sizes[-1]
    return [size for size in batch_sizes if size >= step and (size % step == 0 or size == largest)]


def _make_kernels(shape: AttentionShape, device: torch.device) -> dict[AttentionKind, _Kernels]:
    """The kernels for each kind of layers."""
    partial = torch.zeros(partial_bytes(shape, device), dtype=torch.uint8, device=device)
    room = WidePages(shape, device) if shape.kv_dtype == FP8 else None
    kernels = {}
    for kind in shape.kinds:
        decode, prefill = Workspace(partial), Workspace(partial)
        kernels[kind] = _Kernels(
            _decode_kernel(shape, kind, decode),
            prefill_kernel(shape, kind, prefill)
            if room is None
            else Fp8PrefillKernel(shape, kind, prefill, room),
            ItemKernel(shape, kind, device) if can_share(shape, kind) else None,
        )
    return kernels


def _decode_kernel(shape: AttentionShape, kind: AttentionKind, workspace: Workspace) -> PagedKernel:
    match kernel_for(shape):
        case DecodeKernel.FP8:
            return Fp8DecodeKernel(kind)
        case DecodeKernel.CUDA_CORES:
            return StreamKernel(shape, kind, workspace)
        case DecodeKernel.TILES:
            return PrefillKernel(shape, kind, workspace, causal=False, backend="fa2")


def _plan_part(groups: Sequence[PagedBatch], kernel: PagedKernel, first: int, end: int) -> _Part:
    """Plan the requests from `first` to before `end` of a batch, for all groups of layers."""
    batch = groups[0]
    requests, bounds = slice(first, end), slice(first, end + 1)
    first_row, end_row = (int(batch.q_indptr_R1[request]) for request in (first, end))
    kv_start = int(batch.kv_indptr_R1[first])
    lens = HostLens(
        torch.from_numpy(batch.q_indptr_R1[bounds] - first_row),
        torch.from_numpy(batch.kv_indptr_R1[bounds] - kv_start),
        torch.from_numpy(np.ascontiguousarray(batch.lens_R[requests], dtype=np.int32)),
    )
    part = batch.pages.part(first, end)
    if first:  # FlashInfer's offsets start at the part's first request.
        part = replace(
            part, q_indptr_R1=part.q_indptr_R1 - first_row, kv_indptr_R1=part.kv_indptr_R1 - kv_start
        )
    pages = [replace(part, kv_indices=each.pages.kv_indices[kv_start:]) for each in groups]
    return _Part(kernel, kernel.plan(lens, captured=False), pages, slice(first_row, end_row))


class GraphDecode(_PlannedStep):
    """Attention of the decode steps that one CUDA graph serves.

    Call `plan` before the capture and before every replay, on the replays' stream and outside of the capture.
    Only the plan and the contents of the buffers change between replays.

    Args:
        items: the work list for steps whose requests share pages; None: the graph does not share pages.
    """

    def __init__(
        self,
        layers: PoolLayers,
        kernels: dict[AttentionKind, _Kernels],
        shape: AttentionShape,
        batch_size: int,
        buffers: DecodeBuffers,
        items: ItemBuffers | None = None,
    ) -> None:
        self._page_size, self._items = shape.page_size, items
        self._q_indptr_B1 = torch.arange(batch_size + 1, dtype=torch.int32)  # one new token each
        groups = buffers.groups
        super().__init__(layers, [each.slots_B[:batch_size] for each in groups], {})
        self._pages, self._rows = [each.pages(batch_size) for each in groups], slice(0, batch_size)
        self._planned: dict[AttentionKind, PagedKernel] = {}
        for kind, each in kernels.items():
            if items is not None and each.shared is not None:
                self.parts[kind] = [_Part(each.shared, items, self._pages, self._rows)]
            else:
                self._planned[kind] = each.decode

    def plan(
        self,
        kv_indptr_B1: NDArray[np.int32],
        last_page_len_B: NDArray[np.int32],
        runs: SharedRuns | None = None,
    ) -> None:
        """Implement `CapturedAttention.plan`.

        Raises EngineError: the plan does not fit the captured kernels, which have the grid and the addresses
        of the first one, and would read and write wrong places.
        """
        if self._items is not None:
            self._items.plan(kv_indptr_B1, last_page_len_B, runs if runs is not None else NO_RUNS)
        if not self._planned:
            return
        num_pages_B = np.diff(kv_indptr_B1)
        lens_B = np.where(num_pages_B > 0, (num_pages_B - 1) * self._page_size + last_page_len_B, 0)
        lens = HostLens(
            self._q_indptr_B1,
            torch.from_numpy(np.ascontiguousarray(kv_indptr_B1, dtype=np.int32)),
            torch.from_numpy(lens_B.astype(np.int32)),
        )
        for kind, kernel in self._planned.items():
            plan = kernel.plan(lens, captured=True)
            if kind not in self.parts:
                self.parts[kind] = [_Part(kernel, plan, self._pages, self._rows)]
            elif list(plan) != list(self.parts[kind][0].plan):
                raise EngineError("FlashInfer planned a decode step that its captured kernels do not fit")
