"""Pages of FP8 read back into a wider type, one behind the other, for kernels that take no other.

Shapes: P pages of the pool, M pages of a step, S page_size, K KV heads, H head_dim.
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_STEP = 2048


def widen_pages(k_PSKH: Tensor, v_PSKH: Tensor, page_ids_M: Tensor, k_MSKH: Tensor, v_MSKH: Tensor) -> None:
    """Copy these pages, in their order, to others of another type, which holds every number of FP8.

    Args:
        k_PSKH, v_PSKH: one layer of the pool in FP8, contiguous.
        page_ids_M: int32.
        k_MSKH, v_MSKH: room for as many pages, or more, contiguous.
    """
    num_values = k_PSKH[0].numel()
    _widen[(len(page_ids_M), triton.cdiv(num_values, _STEP), 2)](
        k_PSKH, v_PSKH, page_ids_M, k_MSKH, v_MSKH, NUM_VALUES=num_values, STEP=_STEP
    )


@triton.jit(do_not_specialize_on_alignment=["page_ids"])
def _widen(  # type: ignore[no-untyped-def]
    k_ptr, v_ptr, page_ids, k_out_ptr, v_out_ptr, NUM_VALUES: tl.constexpr, STEP: tl.constexpr
) -> None:
    """A program widens a piece of one page's keys, or of its values."""
    page = tl.program_id(0)
    source = tl.load(page_ids + page).to(tl.int64) * NUM_VALUES
    target = page.to(tl.int64) * NUM_VALUES
    place = tl.program_id(1) * STEP + tl.arange(0, STEP)
    inside = place < NUM_VALUES
    if tl.program_id(2) == 0:
        numbers = tl.load(k_ptr + source + place, mask=inside)
        tl.store(k_out_ptr + target + place, numbers.to(k_out_ptr.dtype.element_ty), mask=inside)
    else:
        numbers = tl.load(v_ptr + source + place, mask=inside)
        tl.store(v_out_ptr + target + place, numbers.to(v_out_ptr.dtype.element_ty), mask=inside)
