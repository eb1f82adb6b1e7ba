"""FlashInfer's kernel for tiles of queries, told what to do item by item.

FlashInfer plans a step itself, but its plans know neither pages that several requests share nor grids that
stay while the work changes. The kernel takes a list: which block reads which pages for which queries, and
where its result goes. Here that list is made of `WorkItems`, at addresses that stay and for a grid that
stays, so that a CUDA graph can hold the launch. `merge_parts` puts the results together.

The layout of the list is that of FlashInfer 0.6.12: `PrefillPlanInfo` in attention/scheduler.cuh, read by
BatchPrefillWithPagedKVCacheKernel in attention/prefill.cuh.

Shapes: B rows, C parts, I items, N query heads, K KV heads, H head_dim, P pages, S page_size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ebbtide.srt.layers.attention.base import AttentionKind, AttentionShape
from ebbtide.srt.layers.attention.flashinfer_kernels import (
    _NO_WINDOW,
    _ROPE_SCALE,
    _ROPE_THETA,
    _module_key,
    _soft_cap,
)
from ebbtide.srt.layers.attention.work_items import WorkItems
from ebbtide.srt.layers.kernels.launch import can_overlap

# One piece of keys per item: longer than any request.
_WHOLE = (1 << 31) - 1


class ItemList:
    """The list of a grid of `num_items` items, as the kernel reads it.

    The kernel knows requests by number, and of each where it begins and where the next one does. Every item
    is two requests here, of which the second is never asked for: so items may overlap and leave gaps.
    """

    def __init__(self, num_items: int, num_rows: int, device: torch.device) -> None:
        self.num_items, self.num_rows = num_items, num_rows
        constants = np.zeros(2 * num_items + 4, dtype=np.int32)
        constants[:num_items] = 2 * np.arange(num_items)
        constants[2 * num_items] = _WHOLE
        self._starts = np.cumsum([0, len(constants), *[2 * num_items + 2] * 4, num_rows]).tolist()
        self.words = torch.zeros(self._starts[-1], dtype=torch.int32, device=device)
        self.words[: len(constants)].copy_(torch.from_numpy(constants))
        self.q_indptr, self.kv_indptr, self.last_page_len, self.out_indptr, self.num_parts = (
            self.words[start:end] for start, end in zip(self._starts[1:-1], self._starts[2:], strict=True)
        )

    def write(self, items: WorkItems, end_page: int) -> NDArray[np.int32]:
        """The part of `words` that changes from step to step, to be copied behind the constants."""
        count = len(items.part_I)
        host = np.zeros(len(self.words) - self._starts[1], dtype=np.int32)
        bounds = [start - self._starts[1] for start in self._starts[1:]]
        q, kv, last, out, num_parts = (
            host[start:end] for start, end in zip(bounds[:-1], bounds[1:], strict=True)
        )
        q[0 : 2 * count : 2] = items.first_row_I
        q[1 : 2 * count : 2] = items.first_row_I + items.num_rows_I
        kv[0 : 2 * count : 2] = items.first_page_I
        kv[1 : 2 * count : 2] = items.first_page_I + items.num_pages_I
        # The kernel reads no page id from here on.
        kv[2 * count :] = end_page
        last[0 : 2 * count : 2] = items.last_page_len_I
        out[0 : 2 * count : 2] = items.part_I * self.num_rows + items.first_row_I
        num_parts[: len(items.num_parts_B)] = items.num_parts_B
        return host

    def upload(self, items: WorkItems, end_page: int) -> None:
        host = torch.from_numpy(self.write(items, end_page)).pin_memory()
        self.words[self._starts[1] :].copy_(host, non_blocking=True)

    def plan_info(self, tile_rows: int) -> list[int]:
        """FlashInfer's `PrefillPlanInfo`: offsets are bytes in `words`."""
        requests, zeros, chunk = (4 * place for place in (0, self.num_items, 2 * self.num_items))
        out = 4 * self._starts[4]
        unused = 0
        return [
            self.num_items,  # padded_batch_size: the grid
            self.num_rows,  # total_num_rows
            unused,  # total_num_rows_offset
            tile_rows,  # cta_tile_q
            requests,
            zeros,  # qo_tile_indices
            zeros,  # kv_tile_indices
            unused,  # merge_indptr
            out,
            chunk,
            unused,  # v
            unused,  # s
            unused,  # block_valid_mask
            False,  # enable_cuda_graph
            False,  # split_kv: each item writes its result where the list says
        ]


class ItemKernel:
    """Attends item by item."""

    def __init__(self, shape: AttentionShape, kind: AttentionKind, partial: Tensor) -> None:
        from flashinfer.prefill import get_batch_prefill_module
        from flashinfer.utils import MaskMode, TensorLayout

        assert kind.window is None
        self._kind, self._partial = kind, partial
        self._mask, self._layout = MaskMode.NON_CAUSAL.value, TensorLayout.NHD.value
        self._module = get_batch_prefill_module("fa2", *_module_key(shape, kind), False)
        self._overlapped = can_overlap(partial.device)

    def run(
        self,
        plan_info: list[int],
        items: ItemList,
        kv_indices: Tensor,
        q_BNH: Tensor,
        k_PSKH: Tensor,
        v_PSKH: Tensor,
        parts_CBNH: Tensor,
        sums_CBN: Tensor,
    ) -> None:
        """Each part's attention and the logarithm to base 2 of its sum of weights."""
        num_rows = len(q_BNH)
        end = 2 * items.num_items
        arguments: dict[str, Any] = {
            "float_workspace_buffer": self._partial,
            "int_workspace_buffer": items.words,
            "plan_info_vec": plan_info,
            "q": q_BNH,
            "paged_k_cache": k_PSKH,
            "paged_v_cache": v_PSKH,
            "qo_indptr": items.q_indptr[:end],
            "paged_kv_indptr": items.kv_indptr[: end + 1],
            "paged_kv_indices": kv_indices,
            "paged_kv_last_page_len": items.last_page_len[:end],
            "o": parts_CBNH.flatten(0, 1)[:num_rows],
            "maybe_lse": sums_CBN.flatten(0, 1)[:num_rows],
            "mask_mode": self._mask,
            "layout": self._layout,
            "window_left": _NO_WINDOW,
            "enable_pdl": self._overlapped,
            "logits_soft_cap": _soft_cap(self._kind),
            "sm_scale": self._kind.scale,
            "rope_scale": _ROPE_SCALE,
            "rope_theta": _ROPE_THETA,
            "token_pos_in_items_len": 0,
            "workspace_size": self._partial.nbytes,
        }
        absent = ("maybe_custom_mask", "maybe_mask_indptr", "maybe_alibi_slopes", "maybe_prefix_len_ptr")
        absent += ("maybe_token_pos_in_items_ptr", "maybe_max_item_len_ptr", "scale_q", "scale_k", "scale_v")
        self._module.paged_run(**arguments, **dict.fromkeys(absent))
