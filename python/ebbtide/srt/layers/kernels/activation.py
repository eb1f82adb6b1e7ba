"""The activation of an MLP in one pass.

Shapes: T tokens, I intermediate size.
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl
from torch import Tensor

from ebbtide.srt.layers.kernels.instructions import lead
from ebbtide.srt.layers.kernels.launch import overlap_options

_BLOCK = 1024


def gated(gate_up_T2I: Tensor, activation: str) -> Tensor:
    """activation(gate) · up, [T, I], in float32 and rounded once; the gates are the first half of each row.

    Args:
        activation: silu or gelu_tanh.
    """
    gate_up_T2I = gate_up_T2I.contiguous()
    num_tokens, inner = gate_up_T2I.shape[0], gate_up_T2I.shape[1] // 2
    out_TI = gate_up_T2I.new_empty((num_tokens, inner))
    _gated[(num_tokens, triton.cdiv(inner, _BLOCK))](
        gate_up_T2I,
        out_TI,
        inner,
        GELU=activation == "gelu_tanh",
        BLOCK=_BLOCK,
        num_warps=4,
        **overlap_options(gate_up_T2I),
    )
    return out_TI


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)², in float32 and rounded once. x is contiguous."""
    out = torch.empty_like(x)
    _squared_relu[(triton.cdiv(x.numel(), _BLOCK),)](
        x, out, x.numel(), BLOCK=_BLOCK, num_warps=4, **overlap_options(x)
    )
    return out


@triton.jit
def activate(gate, GELU: tl.constexpr):  # type: ignore[no-untyped-def]
    """silu, or gelu in the form with a tanh, of float32."""
    if GELU:
        # 0.5 · (1 + tanh(z)) is the logistic function of 2z; here 2z, with 2·sqrt(2/π) before the bracket.
        return gate / (1.0 + tl.exp(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)))
    return gate / (1.0 + tl.exp(-gate))


@triton.jit
def _gated(  # type: ignore[no-untyped-def]
    gate_up_ptr, out_ptr, inner, GELU: tl.constexpr, BLOCK: tl.constexpr, OVERLAPPED: tl.constexpr
) -> None:
    lead(OVERLAPPED)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inner
    gates = gate_up_ptr + token * 2 * inner + column
    gate = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gates + inner, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * inner + column, activate(gate, GELU) * up, mask=inside)


@triton.jit(do_not_specialize=["count"])
def _squared_relu(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, count, BLOCK: tl.constexpr, OVERLAPPED: tl.constexpr
) -> None:
    lead(OVERLAPPED)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place, mask=place < count, other=0.0).to(tl.float32)
    x = tl.maximum(x, 0.0)
    tl.store(out_ptr + place, x * x, mask=place < count)
