"""Operations between products: norms, activations, and the residual stream.

Shapes: T tokens, D hidden, I intermediate size, M rows that are wanted.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ebbtide.srt.layers import parameter

Activation = Literal["silu", "gelu_tanh"]


def gated(gate_up_T2I: Tensor, activation: Activation = "silu") -> Tensor:
    """activation(gate) · up, [T, I]; the gates are the first half of each row."""
    if gate_up_T2I.is_cuda:
        from ebbtide.srt.layers.kernels.norm import gated as gated_at_once

        return gated_at_once(gate_up_T2I, activation)
    gate, up = gate_up_T2I.chunk(2, dim=-1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")).mul_(up)


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)²."""
    if x.is_cuda:
        from ebbtide.srt.layers.kernels.norm import squared_relu as squared_at_once

        return squared_at_once(x)
    return F.relu(x).square_()


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x / sqrt(mean(x²) + eps) · (weight + offset) over the last dimension, accumulated in float32."""
    if x.is_cuda:
        from ebbtide.srt.layers.kernels.norm import rms_norm_at_once

        return rms_norm_at_once(x, weight, eps, offset)
    if offset == 0.0:
        return F.rms_norm(x, weight.shape, weight, eps)
    # In float32, since rounding weight + offset to the weight's dtype would lose digits.
    return F.rms_norm(x.float(), weight.shape, weight.float() + offset, eps).to(x.dtype)


class RMSNorm(nn.Module):
    """`rms_norm` with a weight that is loaded later.

    Args:
        offset: added to the weight. Gemma's checkpoints hold weights minus one.
    """

    def __init__(self, size: int, *, eps: float, dtype: torch.dtype, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = parameter(size, dtype=dtype)
        self.eps = eps
        self.offset = offset

    def forward(self, x: Tensor | Addend) -> Tensor:
        return rms_norm(tensor_of(x), self.weight, self.eps, self.offset)


class Deferred(Protocol):
    """A tensor that is computed when it is read."""

    def tensor(self) -> Tensor: ...


class Addend(Deferred, Protocol):
    """What can be added to the residual stream without first being stored as a tensor."""

    def add_to(self, residual_TD: Tensor) -> None:
        """Add it in place."""
        ...


def tensor_of(x: Tensor | Deferred) -> Tensor:
    return x if isinstance(x, Tensor) else x.tensor()


class Residual:
    """The residual stream of a forward pass.

    Args:
        x_TD: becomes the stream's own, and is changed in place.
    """

    __slots__ = ("num_changes", "x_TD")

    def __init__(self, x_TD: Tensor) -> None:
        self.x_TD = x_TD
        self.num_changes = 0

    def add(self, addend: Addend | Tensor) -> None:
        """Add to the residual in place."""
        self.num_changes += 1
        if isinstance(addend, Tensor):
            self.x_TD += addend
        else:
            addend.add_to(self.x_TD)

    def normed(self, norm: RMSNorm) -> NormedResidual:
        """norm(residual)."""
        return NormedResidual(self, norm)

    def keep(self, rows_M: Tensor | None) -> None:
        """Keep only these rows; None: keep all."""
        if rows_M is not None:
            self.x_TD = self.x_TD[rows_M]
            self.num_changes += 1


class NormedResidual:
    """norm(residual), computed by the product that reads it or as a tensor, before the residual changes."""

    __slots__ = ("_num_changes", "_residual", "norm")

    def __init__(self, residual: Residual, norm: RMSNorm) -> None:
        self._residual, self.norm = residual, norm
        self._num_changes = residual.num_changes

    @property
    def x_TD(self) -> Tensor:
        """The residual, not normalised."""
        assert self._num_changes == self._residual.num_changes, (
            "the residual has changed since its norm was taken"
        )
        return self._residual.x_TD

    def tensor(self) -> Tensor:
        """norm(residual), [T, D]."""
        return self.norm(self.x_TD)  # type: ignore[no-any-return]
