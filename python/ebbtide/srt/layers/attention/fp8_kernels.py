"""Attention to a KV cache in FP8 where others are quicker than FlashInfer's kernels.

Decode steps have a kernel of our own. Prompts go to the kernel for keys and values of the queries' type, into
which pages are read back, layer by layer: it holds every number of FP8. Scales are no matter here: see
`rotate_and_store` and `scaled_outputs_`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ebbtide.srt.layers.attention.base import AttentionKind, AttentionShape
from ebbtide.srt.layers.attention.flashinfer_kernels import (
    PrefillKernel,
    Workspace,
    prefill_kernel,
    wide,
)
from ebbtide.srt.layers.attention.paged_kernel import HostLens, Operands, PagedKernel
from ebbtide.srt.layers.heads import Pages

# Tokens that a step with prompts reads back at most: 256 MiB for eight heads of 128. Where there are more,
# nothing is read back.
ROOM_TOKENS = 65_536


class Fp8DecodeKernel:
    """One new token per request. Nothing is planned: the kernel reads lengths and pages itself."""

    def __init__(self, kind: AttentionKind) -> None:
        self._kind = kind

    def plan(self, lens: HostLens, *, captured: bool) -> Any:
        return []

    def run(self, plan: Any, pages: Pages, x: Operands) -> None:
        from ebbtide.srt.layers.kernels.fp8.decode import attend_fp8

        assert x.sums_TN is None, "layers with sinks have no pages in FP8 here"
        attend_fp8(x.q_TNH, x.k_PSKH, x.v_PSKH, pages, x.out_TNH, **self._kind._asdict())


class WidePages:
    """Room for pages that are read back from FP8, which all layers share.

    Attributes:
        k_MSKH, v_MSKH: `num_pages` pages, in the type of the queries.
        order_M: int32, their numbers.
    """

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        self.num_pages = ROOM_TOKENS // shape.page_size
        size = (self.num_pages, shape.page_size, shape.num_kv_heads, shape.head_dim)
        self.k_MSKH, self.v_MSKH = (torch.zeros(size, dtype=shape.dtype, device=device) for _ in range(2))
        self.order_M = torch.arange(self.num_pages, dtype=torch.int32, device=device)


class Fp8PrefillKernel:
    """Any number of new tokens per request; not to be captured."""

    def __init__(
        self, shape: AttentionShape, kind: AttentionKind, workspace: Workspace, room: WidePages
    ) -> None:
        self._wide: PagedKernel = prefill_kernel(wide(shape), kind, workspace)
        self._narrow: PagedKernel = PrefillKernel(shape, kind, workspace, causal=True, backend="fa2")
        self._room = room

    def plan(self, lens: HostLens, *, captured: bool) -> tuple[int, Any]:
        """Pages to read back, or 0, and the plan of the kernel for what is read then."""
        num_pages = int(lens.kv_indptr_R1[-1])
        if num_pages > self._room.num_pages:
            return 0, self._narrow.plan(lens, captured=captured)
        return num_pages, self._wide.plan(lens, captured=captured)

    def run(self, plan: Any, pages: Pages, x: Operands) -> None:
        from ebbtide.srt.layers.kernels.fp8.pages import widen_pages

        num_pages, planned = plan
        if num_pages == 0:
            self._narrow.run(planned, pages, x)
            return
        room = self._room
        widen_pages(x.k_PSKH, x.v_PSKH, pages.kv_indices[:num_pages], room.k_MSKH, room.v_MSKH)
        read = replace(pages, kv_indices=room.order_M)
        self._wide.run(planned, read, x._replace(k_PSKH=room.k_MSKH, v_PSKH=room.v_MSKH))
