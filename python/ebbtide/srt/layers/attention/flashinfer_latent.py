"""Attention to latents by FlashInfer: one kernel for prompts and for decoding, eager and in CUDA graphs.

Shapes: T tokens, N query heads, H length of a query and of a cached row, C of a latent, P pages, S page_size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ebbtide.srt.errors import EngineError
from ebbtide.srt.kernel_cache import add_scripts_to_path, compiled_as_they_are, flashinfer_problem
from ebbtide.srt.layers.attention.base import (
    AttentionBackend,
    AttentionShape,
    CapturedAttention,
    DecodeBuffers,
    GraphFamily,
    KVPages,
    LayerAttention,
    PagedBatch,
    Progress,
    fp8_problem,
)
from ebbtide.srt.layers.attention.flashinfer_kernels import Workspace, compile_kernels
from ebbtide.srt.layers.attention.shared_runs import SharedRuns
from ebbtide.srt.layers.heads import HeadNorms, Rope
from ebbtide.srt.layers.kernels.launch import num_multiprocessors
from ebbtide.srt.mem_cache import Latent

# The only sizes for which the kernels are written.
_LATENT = Latent(rank=512, rope=64)
# The rows of a block, each of one head of one token. With many rows, two blocks share a tile.
_TILE_ROWS = 64
# How many pieces of work a plan can hold: one for each tile, plus one for each block if tiles are cut.
_MOST_PIECES = 16384


class FlashInferLatentAttention(AttentionBackend):
    """Attention in which all heads share one row per token. Planning does not wait for the device."""

    captures = True

    @classmethod
    def problem(cls, shape: AttentionShape, device: torch.device) -> str | None:
        if device.type != "cuda":
            return "FlashInfer's kernels run on CUDA devices"
        if shape.latent != _LATENT:
            return f"FlashInfer's kernels take latents of {_LATENT}, not {shape.latent}"
        if shape.dtype not in (torch.bfloat16, torch.float16) or shape.kv_dtype != shape.dtype:
            return (
                "FlashInfer's kernels take latents in the model's type, bfloat16 or float16, not "
                f"{shape.kv_dtype} for a model in {shape.dtype}"
            )
        return fp8_problem(shape, device) or flashinfer_problem()

    @classmethod
    def compile(cls, shape: AttentionShape, device: torch.device, progress: Progress, *, whole: bool) -> None:
        compile_kernels({"latent attention": _module_spec(shape, device)}, progress)

    def __init__(self, kv_pages: KVPages, layers: Sequence[LayerAttention], shape: AttentionShape) -> None:
        # FlashInfer may compile kernels that are not in its cache, and looks for tools on the path.
        add_scripts_to_path()
        self._latents_PS1H = {layer.layer: kv_pages.k(layer.layer) for layer in layers}
        device = kv_pages.k(layers[0].layer).device
        self._kernel, self._page_size = _Kernel(shape, device), shape.page_size

    def prepare(self, batch: PagedBatch) -> _LatentStep:
        lens = batch.q_indptr_R1, batch.kv_indptr_R1, batch.lens_R
        plan = self._kernel.plan(*(torch.from_numpy(np.ascontiguousarray(x, dtype=np.int32)) for x in lens))
        return self._step_of(batch.slots_T, batch.pages.kv_indices, plan)

    def graph_families(self, batch_sizes: Sequence[int]) -> list[GraphFamily]:
        return [GraphFamily("any", batch_sizes, self._capture)]

    def _capture(self, batch_size: int, buffers: DecodeBuffers) -> _LatentStep:
        return self._step_of(buffers.slots_B[:batch_size], buffers.kv_indices, None)

    def _step_of(self, slots_T: Tensor, kv_indices: Tensor, planned: Any) -> _LatentStep:
        return _LatentStep(self._kernel, self._page_size, self._latents_PS1H, slots_T, kv_indices, planned)


@dataclass(slots=True)
class _LatentStep(CapturedAttention):
    """A step, captured or not. Only the plan changes between replays. `planned`: None: not planned yet."""

    kernel: _Kernel
    page_size: int
    latents_PS1H: dict[int, Tensor]
    slots_T: Tensor
    kv_indices: Tensor
    planned: Any

    def plan(
        self,
        kv_indptr_B1: NDArray[np.int32],
        last_page_len_B: NDArray[np.int32],
        runs: SharedRuns | None = None,
    ) -> None:
        """Implement `CapturedAttention.plan`.

        Raises EngineError: the plan does not fit the captured kernel, which has the grid and the addresses of
        the first one.
        """
        lens_B = (np.diff(kv_indptr_B1) - 1) * self.page_size + last_page_len_B
        planned = self.kernel.plan(
            torch.arange(len(kv_indptr_B1), dtype=torch.int32),  # one new token each
            torch.from_numpy(np.ascontiguousarray(kv_indptr_B1, dtype=np.int32)),
            torch.from_numpy(lens_B.astype(np.int32)),
        )
        if self.planned is not None and list(planned) != list(self.planned):
            raise EngineError("FlashInfer planned a decode step that its captured kernel does not fit")
        self.planned = planned

    def forward(self, layer: LayerAttention, qkv_TNH: Tensor, rope: Rope, norms: HeadNorms | None) -> Tensor:
        from ebbtide.srt.layers.kernels.latent import rotate_and_store_latents

        latents_PS1H, scale = self.latents_PS1H[layer.layer], layer.kind.scale
        q_TNH = rotate_and_store_latents(qkv_TNH, rope, self.slots_T, latents_PS1H)
        return self.kernel.run(self.planned, self.kv_indices, q_TNH, latents_PS1H.squeeze(2), scale)


class _Kernel:
    """FlashInfer's kernel, with the memory for its plans."""

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        from flashinfer.utils import MaskMode

        self._num_heads, self._page_size = shape.num_q_heads, shape.page_size
        # For one new token the causal mask hides nothing.
        self._mask = MaskMode.CAUSAL.value
        # Each block leaves at most two tiles of partial results; each row has values and a sum in float32.
        row_bytes = shape.dtype.itemsize * _LATENT.rank + 4
        self._num_blocks = num_multiprocessors(device)
        num_rows = 2 * self._num_blocks * _TILE_ROWS
        self._workspace = Workspace(torch.zeros(num_rows * row_bytes + 256, dtype=torch.uint8, device=device))
        with compiled_as_they_are():
            self._module = _module_spec(shape, device).build_and_load()

    def plan(self, q_indptr_R1: Tensor, kv_indptr_R1: Tensor, lens_R: Tensor) -> Any:
        """Plan a step, and enqueue the copy of the plan. Lengths are int32 on the host.

        Raises EngineError: the step has more rows than a plan can hold.
        """
        num_tokens = int(q_indptr_R1[-1])
        num_tiles = num_tokens * self._num_heads // (2 * _TILE_ROWS) + 2 * len(lens_R)
        if num_tiles + self._num_blocks > _MOST_PIECES:
            raise EngineError(
                f"a pass of {num_tokens} tokens with {self._num_heads} heads each is more than FlashInfer "
                "plans for latents; lower chunked_prefill_size"
            )
        causal = True
        lens = q_indptr_R1, kv_indptr_R1, lens_R
        return self._workspace.plan(self._module.plan, *lens, self._num_heads, _LATENT.rank, causal)

    def run(self, plan: Any, kv_indices: Tensor, q_TNH: Tensor, latents_PSH: Tensor, scale: float) -> Tensor:
        """The weighted sums of latents [T, N, C]."""
        rope, workspace = _LATENT.rope, self._workspace
        out_TNC = q_TNH.new_empty(*q_TNH.shape[:2], _LATENT.rank)
        no_sums, base_e = None, False
        self._module.run(
            workspace.partial,
            workspace.plans,
            plan,
            q_TNH[..., rope:],
            q_TNH[..., :rope],
            latents_PSH[..., rope:],
            latents_PSH[..., :rope],
            kv_indices,
            out_TNC,
            no_sums,
            self._mask,
            self._num_heads,
            self._page_size,
            scale,
            base_e,
        )
        return out_TNC


def _module_spec(shape: AttentionShape, device: torch.device) -> Any:
    """FlashInfer's `JitSpec` of the kernel for this shape."""
    from flashinfer.jit import gen_batch_mla_module
    from flashinfer.utils import determine_mla_backend

    no_profiler = False
    dtypes = shape.dtype, shape.kv_dtype, shape.dtype, torch.int32
    return gen_batch_mla_module(
        determine_mla_backend(device), *dtypes, _LATENT.rank, _LATENT.rope, no_profiler
    )
