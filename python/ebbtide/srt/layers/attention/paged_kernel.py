"""Kernels that attend to pages by a plan, and how the layers of a pool call them.

Shapes: T tokens, R requests, N query heads, K KV heads, H head_dim, P pages, S page_size.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Thread
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ebbtide.srt.layers.attention.base import KVPages, LayerAttention, scaled_outputs_
from ebbtide.srt.layers.heads import HeadNorms, Pages, Rope
from ebbtide.srt.layers.rotary import split_heads

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HostLens:
    """Lengths on the host, as int32 tensors, from which plans are made."""

    q_indptr_R1: Tensor
    kv_indptr_R1: Tensor
    lens_R: Tensor


class Operands(NamedTuple):
    """The tensors with which a layer attends.

    Attributes:
        q_TNH: queries, rotated.
        k_PSKH, v_PSKH: the layer's pages.
        out_TNH: receives the outputs.
        sums_TN: float32, receives log2 of the sums of softmax weights; None: they are not wanted.
    """

    q_TNH: Tensor
    k_PSKH: Tensor
    v_PSKH: Tensor
    out_TNH: Tensor
    sums_TN: Tensor | None = None

    def part(self, rows: slice) -> Operands:
        """The operands of some new tokens."""
        sums_TN = None if self.sums_TN is None else self.sums_TN[rows]
        return Operands(self.q_TNH[rows], self.k_PSKH, self.v_PSKH, self.out_TNH[rows], sums_TN)


Attend = Callable[[LayerAttention, Operands], None]


class PoolLayers:
    """The layers of a pool, and the steps of attention that are the same for all kernels."""

    def __init__(self, kv_pages: KVPages, layers: Sequence[LayerAttention]) -> None:
        self.kv_pages = kv_pages
        self.groups = {each.layer: kv_pages.group(each.layer) for each in layers}
        self._pools = {
            each.layer: (kv_pages.k(each.layer), kv_pages.v(each.layer), kv_pages.head_scales(each.layer))
            for each in layers
        }

    def forward(
        self,
        layer: LayerAttention,
        qkv_TNH: Tensor,
        rope: Rope,
        norms: HeadNorms | None,
        slots: Sequence[Tensor],
        attend: Attend,
    ) -> Tensor:
        """Implement `LayerAttention.__call__`.

        Args:
            slots: of the new tokens, for each group of layers.
            attend: writes the outputs of the layer.
        """
        from ebbtide.srt.layers.kernels.rope import rotate_and_store

        k_PSKH, v_PSKH, scales = self._pools[layer.layer]
        if scales is not None and scales.are_recorded:
            scales.record(*split_heads(qkv_TNH, rope, norms, k_PSKH.shape[2])[1:])
        q_TNH = rotate_and_store(
            qkv_TNH, rope, norms, slots[self.groups[layer.layer]], k_PSKH, v_PSKH, scales
        )
        out_TNH = torch.empty_like(q_TNH)
        attend(layer, Operands(q_TNH, k_PSKH, v_PSKH, out_TNH))
        return out_TNH if scales is None else scaled_outputs_(out_TNH, scales)


class PlannedAttention(Protocol):
    """Attends to pages by a plan."""

    def run(self, plan: Any, pages: Pages, x: Operands) -> None: ...


class PagedKernel(PlannedAttention, Protocol):
    """A kernel that attends to pages, with its plans."""

    def plan(self, lens: HostLens, *, captured: bool) -> Any:
        """Plan a step, and enqueue the copy of the plan.

        Args:
            captured: whether `run` is captured in a CUDA graph, so that later plans for equally many requests
                must fit it.
        """
        ...


class UntilCompiled:
    """A kernel that serves while a better one is compiled, so that starting need not wait for that.

    The better one is compiled in a thread, during forward passes, and serves from the next plan on; its
    results differ by rounding. If compiling fails, the first kernel stays, and the log says why.

    Args:
        at_first: serves now.
        make: compiles and makes the better kernel, which takes a minute.
    """

    def __init__(self, at_first: PagedKernel, make: Callable[[], PagedKernel]) -> None:
        self._kernel = at_first
        # A daemon: a process that ends does not wait for compilers, which finish for the next start.
        self._thread = Thread(target=self._take_over, args=(make,), name="compiling", daemon=True)
        self._thread.start()

    def plan(self, lens: HostLens, *, captured: bool) -> tuple[PagedKernel, Any]:
        kernel = self._kernel
        return kernel, kernel.plan(lens, captured=captured)

    def run(self, plan: Any, pages: Pages, x: Operands) -> None:
        kernel, planned = plan
        kernel.run(planned, pages, x)

    def wait(self) -> None:
        """Wait until the better kernel serves, or has failed to compile."""
        self._thread.join()

    def _take_over(self, make: Callable[[], PagedKernel]) -> None:
        started = time.monotonic()
        try:
            self._kernel = make()
        except Exception as error:
            logger.warning("prompts keep using the slower attention: %s", str(error)[-500:])
        else:
            logger.info(
                "faster attention for prompts compiled, and used from now on: s=%.1f",
                time.monotonic() - started,
            )
