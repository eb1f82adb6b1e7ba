"""silu(gate) · up in one pass.

Shapes: T tokens, I intermediate size.
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def silu_mul(gate_up_T2I: Tensor) -> Tensor:
    """silu(gate) · up, [T, I], in float32 and rounded once; the gates are the first half of each row."""
    gate_up_T2I = gate_up_T2I.contiguous()
    num_tokens, inner = gate_up_T2I.shape[0], gate_up_T2I.shape[1] // 2
    out_TI = gate_up_T2I.new_empty((num_tokens, inner))
    _silu_mul[(num_tokens, triton.cdiv(inner, _BLOCK))](gate_up_T2I, out_TI, inner, BLOCK=_BLOCK, num_warps=4)
    return out_TI


@triton.jit
def _silu_mul(gate_up_ptr, out_ptr, inner, BLOCK: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    gates = gate_up_ptr + token * 2 * inner + column
    gate = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gates + inner, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * inner + column, gate / (1.0 + tl.exp(-gate)) * up, mask=inside)
