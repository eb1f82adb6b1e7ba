"""Root-mean-square normalisation in one pass.

Shapes: M rows, D columns.
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

import triton
import triton.language as tl
from torch import Tensor

from ebbtide.srt.layers.kernels.instructions import announce, wait
from ebbtide.srt.layers.kernels.launch import overlap_options


def rms_norm_at_once(x: Tensor, weight_D: Tensor, eps: float, offset: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · (weight + offset) over the last dimension, in float32 and rounded once."""
    # Rows that are a part of wider ones are read where they lie.
    x_MD = x if x.dim() == 2 and x.stride(1) == 1 else x.contiguous().view(-1, len(weight_D))
    out_MD = x.new_empty(x_MD.shape)
    _rms_norm[(len(x_MD),)](
        x_MD,
        weight_D,
        out_MD,
        eps,
        offset,
        x_MD.stride(0),
        COLUMNS=len(weight_D),
        BLOCK=triton.next_power_of_2(len(weight_D)),
        num_warps=8 if len(weight_D) > 2048 else 4,
        **overlap_options(x_MD),
    )
    return out_MD.view(x.shape)


@triton.jit
def _rms_norm(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    out_ptr,
    eps,
    offset,
    step,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
) -> None:
    announce(OVERLAPPED)
    columns = tl.arange(0, BLOCK)
    inside = columns < COLUMNS
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32) + offset
    wait(OVERLAPPED)
    row = tl.program_id(0).to(tl.int64)
    x = tl.load(x_ptr + row * step + columns, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / COLUMNS + eps)
    tl.store(out_ptr + row * COLUMNS + columns, x * scale * weight, mask=inside)
