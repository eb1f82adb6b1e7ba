"""FlashInfer's kernel for tiles of queries, with a work list of our own.

FlashInfer's plans support neither pages that requests share nor a fixed grid for changing work. Its kernel
reads a list: which block reads which pages for which queries, and where the result goes. Here the list is
made of `WorkItems`, at fixed addresses and for a fixed grid, so that a CUDA graph can capture the launch.
`merge_parts` combines the results.

The layout is that of FlashInfer 0.6.12: `PrefillPlanInfo` in attention/scheduler.cuh, and
BatchPrefillWithPagedKVCacheKernel in attention/prefill.cuh.

Shapes: B rows, C parts, I items, N query heads, K KV heads, H head_dim, P pages, S page_size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ebbtide.srt.layers.attention.base import AttentionShape
from ebbtide.srt.layers.attention.decode_choice import TILE_ROWS
from ebbtide.srt.layers.attention.flashinfer_kernels import TileModule
from ebbtide.srt.layers.attention.paged_kernel import Operands
from ebbtide.srt.layers.attention.shared_runs import SharedRuns, WorkItems, cut, piece_pages
from ebbtide.srt.layers.heads import AttentionKind, Pages
from ebbtide.srt.layers.kernels.launch import num_multiprocessors

# How many blocks a multiprocessor runs at once.
_BLOCKS_PER_SM = 2
# The size of FlashInfer's own pieces: longer than any request, so that it does not cut items again.
_WHOLE = (1 << 31) - 1
# The parts of all rows of a step, which bound the memory of partial results, and the parts of a row.
_MAX_PARTS_OF_STEP, _MIN_PARTS, _MAX_PARTS = 2048, 4, 32


class ItemBuffers:
    """The work list of a CUDA graph's steps as the kernel reads it, and the sizes of partial results.

    For the kernel, each request ends where the next one begins. So every item takes two request numbers here,
    the second of which is never used: items may then overlap or leave gaps.

    Attributes:
        max_parts: of a row.
        plan_info: FlashInfer's `PrefillPlanInfo`, with offsets in bytes within `words`.
        words: int32, the whole list. The other tensors are views of it.
    """

    def __init__(self, shape: AttentionShape, num_rows: int, device: torch.device) -> None:
        self._page_size, self._num_rows = shape.page_size, num_rows
        self._max_rows = TILE_ROWS // shape.group
        self._resident = _BLOCKS_PER_SM * num_multiprocessors(device) // shape.num_kv_heads + 1
        self.max_parts = min(_MAX_PARTS, max(_MIN_PARTS, _MAX_PARTS_OF_STEP // num_rows))
        # One for each row, one for each tile of rows that share pages, and some for rows that are cut. No
        # more, since blocks without work take time too.
        self.num_items = num_rows + num_rows // min(4, self._max_rows) + 2 * self._resident
        constants = np.zeros(2 * self.num_items + 4, dtype=np.int32)
        constants[: self.num_items] = 2 * np.arange(self.num_items)
        constants[2 * self.num_items] = _WHOLE
        sizes = [len(constants), *[2 * self.num_items + 2] * 4, num_rows]
        self._starts = np.cumsum([0, *sizes]).tolist()
        self.words = torch.zeros(self._starts[-1], dtype=torch.int32, device=device)
        _send(constants, self.words[: len(constants)])
        _, q, kv, last, _, num_parts = torch.split(self.words, sizes)
        requests = 2 * self.num_items
        self.q_indptr, self.kv_indptr, self.last_page_len = q[:requests], kv[: requests + 1], last[:requests]
        self.num_parts_B = num_parts
        self.plan_info = self._plan_info()

    def plan(
        self, kv_indptr_B1: NDArray[np.int32], last_page_len_B: NDArray[np.int32], runs: SharedRuns
    ) -> None:
        """List a step's work and send the list, without waiting for the device."""
        runs = runs.best(self.num_items - self._num_rows, self._max_rows)
        max_pages = piece_pages(
            kv_indptr_B1,
            runs,
            max_rows=self._max_rows,
            max_items=self.num_items,
            max_parts=self.max_parts,
            num_resident=self._resident,
        )
        items = cut(
            kv_indptr_B1,
            last_page_len_B,
            runs,
            page_size=self._page_size,
            max_rows=self._max_rows,
            max_pages=max_pages,
        )
        _send(self.listed(items, int(kv_indptr_B1[-1])), self.words[self._starts[1] :])

    def listed(self, items: WorkItems, end_page: int) -> NDArray[np.int32]:
        """The part of `words` that changes from step to step. Entries after the last item are empty.

        Args:
            end_page: the number of page ids of the step.
        """
        count = 2 * len(items.part_I)
        host = np.zeros(self._starts[-1] - self._starts[1], dtype=np.int32)
        bounds = [start - self._starts[1] for start in self._starts[2:-1]]
        q, kv, last, out, num_parts = np.split(host, bounds)
        q[0:count:2] = items.first_row_I
        q[1:count:2] = items.first_row_I + items.num_rows_I
        kv[0:count:2] = items.first_page_I
        kv[1:count:2] = items.first_page_I + items.num_pages_I
        # The last entry ends the page ids, beyond which the kernel reads none.
        kv[count:] = end_page
        last[0:count:2] = items.last_page_len_I
        out[0:count:2] = items.part_I * self._num_rows + items.first_row_I
        num_parts[:] = items.num_parts_B
        return host

    def _plan_info(self) -> list[int]:
        requests, zeros, whole = (4 * place for place in (0, self.num_items, 2 * self.num_items))
        out = 4 * self._starts[4]
        unused = 0
        return [
            self.num_items,  # padded_batch_size: the grid
            self._num_rows,  # total_num_rows
            unused,  # total_num_rows_offset
            TILE_ROWS,  # cta_tile_q
            requests,  # request_indices_offset
            zeros,  # qo_tile_indices_offset: no item has more queries than a tile
            zeros,  # kv_tile_indices_offset
            unused,  # merge_indptr_offset
            out,  # o_indptr_offset
            whole,  # kv_chunk_size_ptr_offset
            unused,  # v_offset
            unused,  # s_offset
            unused,  # block_valid_mask_offset
            False,  # enable_cuda_graph
            False,  # split_kv: each item writes its result where the list says
        ]


def _send(array: NDArray[np.int32], to: Tensor) -> None:
    """Copy without waiting for the device, from pinned memory, which torch reuses only after the copy."""
    host = torch.from_numpy(array)
    to.copy_(host.pin_memory() if to.is_cuda else host, non_blocking=True)


class ItemKernel:
    """Attends item by item, and merges the parts. Its plans are `ItemBuffers`."""

    def __init__(self, shape: AttentionShape, kind: AttentionKind, device: torch.device) -> None:
        self._module = TileModule(shape, kind, device, causal=False, backend="fa2")
        # The kernel keeps nothing in a workspace when it does not split.
        self._no_workspace = torch.zeros(16, dtype=torch.uint8, device=device)

    def run(self, plan: Any, pages: Pages, x: Operands) -> None:
        from ebbtide.srt.layers.kernels.merge_parts import merge_parts

        items: ItemBuffers = plan
        parts_CTNH = x.q_TNH.new_empty(items.max_parts, *x.q_TNH.shape)
        sums_CTN = torch.empty(parts_CTNH.shape[:-1], dtype=torch.float32, device=parts_CTNH.device)
        listed = Pages(items.q_indptr, items.kv_indptr, pages.kv_indices, items.last_page_len)
        # Only base pointers: the list says where each result goes.
        into = x._replace(out_TNH=parts_CTNH[0], sums_TN=sums_CTN[0])
        self._module.run(self._no_workspace, items.words, items.plan_info, listed, into)
        merge_parts(parts_CTNH, sums_CTN, items.num_parts_B, x.out_TNH, x.sums_TN)
