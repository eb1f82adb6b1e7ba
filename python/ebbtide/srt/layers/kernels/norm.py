"""The norms and activations of `layers.norm`, each in one kernel.

Shapes: T tokens, I intermediate size, M rows, D columns.
"""

# mypy: disallow-untyped-calls=False, disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl
from torch import Tensor

from ebbtide.srt.layers.kernels.instructions import announce, lead, wait
from ebbtide.srt.layers.kernels.launch import overlap_options

_BLOCK = 1024


def rms_norm_at_once(x: Tensor, weight_D: Tensor, eps: float, offset: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · (weight + offset) over the last dimension, in float32, rounded once."""
    # Rows of a wider tensor need no copy: the kernel takes a stride.
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


def gated(gate_up_T2I: Tensor, activation: str) -> Tensor:
    """activation(gate) · up, [T, I], in float32, rounded once. The gates are the first half of each row.

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
    """relu(x)², in float32, rounded once. x is contiguous."""
    out = torch.empty_like(x)
    _squared_relu[(triton.cdiv(x.numel(), _BLOCK),)](
        x, out, x.numel(), BLOCK=_BLOCK, num_warps=4, **overlap_options(x)
    )
    return out


@triton.jit
def activate(gate, GELU: tl.constexpr):  # type: ignore[no-untyped-def]
    """silu, or gelu in its tanh form, in float32."""
    if GELU:
        # 0.5 · (1 + tanh(z)) = sigmoid(2z), and 1.5957… = 2 · sqrt(2 / π).
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
