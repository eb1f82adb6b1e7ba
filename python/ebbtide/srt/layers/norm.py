"""What stands between products: norms, gates, and the residual stream.

Shapes: T tokens, D hidden, I intermediate size, M rows that are wanted.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ebbtide.srt.layers.parameters import parameter

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
    # The sum of weight and offset has more digits than either.
    return F.rms_norm(x.float(), weight.shape, weight.float() + offset, eps).to(x.dtype)


class RMSNorm(nn.Module):
    """`rms_norm` with a weight that is loaded later.

    Args:
        offset: added to the weight; Gemma's checkpoints hold what is to be added to one.
    """

    def __init__(self, size: int, *, eps: float, dtype: torch.dtype, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = parameter(size, dtype=dtype)
        self.eps = eps
        self.offset = offset

    def forward(self, x: Tensor | Addend) -> Tensor:
        return rms_norm(tensor_of(x), self.weight, self.eps, self.offset)


class PartialNorm(NamedTuple):
    """rms_norm(x) without its last factor, left by the product that wrote x. See `layers.small_batch`.

    Attributes:
        x_TD: x · weight, rounded.
        sums_TB: float32 sums of x², in a power of two of parts.
        eps: the norm's.
    """

    x_TD: Tensor
    sums_TB: Tensor
    eps: float


class QuantizedTokens(NamedTuple):
    """Tokens in 8 bits. See `layers.kernels.fp8.product`.

    Attributes:
        values_TK: e4m3; more rows than there are tokens.
        scales_TG: float32, of each group of 128 columns.
    """

    values_TK: Tensor
    scales_TG: Tensor


# What the product that writes x may leave of a norm of x, to the product that reads it.
Started = PartialNorm | QuantizedTokens


class Deferred(Protocol):
    """A tensor that is computed when somebody reads it."""

    def tensor(self) -> Tensor: ...


class Addend(Deferred, Protocol):
    """What will be added to the residual stream. It is computed when it is known which norm follows."""

    def add_to(self, residual_TD: Tensor, then: RMSNorm | None) -> Started | None:
        """Add it in place. Returns what was computed of `then` on the way."""
        ...


def tensor_of(x: Tensor | Deferred) -> Tensor:
    return x if isinstance(x, Tensor) else x.tensor()


class Residual:
    """The residual stream of a forward pass.

    The last addend waits until it is known which norm follows: one kernel may do both.

    Args:
        x_TD: owned by the stream, which is added up in place.
    """

    __slots__ = ("_waiting", "_x_TD", "num_changes")

    def __init__(self, x_TD: Tensor) -> None:
        self._x_TD = x_TD
        self.num_changes = 0
        self._waiting: Addend | None = None

    def add(self, addend: Addend | Tensor) -> None:
        """residual += addend."""
        x_TD, _ = self.read()
        self.num_changes += 1
        if isinstance(addend, Tensor):
            x_TD += addend
        else:
            self._waiting = addend

    def normed(self, norm: RMSNorm) -> NormedResidual:
        """norm(residual)."""
        return NormedResidual(self, norm)

    def keep(self, rows_M: Tensor | None) -> None:
        """Drop all rows but these; None: keep all."""
        if rows_M is not None:
            self._x_TD = self.read()[0][rows_M]
            self.num_changes += 1

    def read(self, then: RMSNorm | None = None) -> tuple[Tensor, Started | None]:
        """The stream [T, D] with everything added, and what was computed of the norm that follows."""
        addend, self._waiting = self._waiting, None
        return self._x_TD, None if addend is None else addend.add_to(self._x_TD, then)


class NormedResidual:
    """norm(residual), read before more is added: by a product that computes it itself, or as a tensor."""

    __slots__ = ("_num_changes", "_residual", "norm")

    def __init__(self, residual: Residual, norm: RMSNorm) -> None:
        self._residual, self.norm = residual, norm
        self._num_changes = residual.num_changes

    def read(self, then: RMSNorm | None = None) -> tuple[Tensor, Started | None]:
        """The residual [T, D], and what was computed of a norm on the way to it."""
        assert self._num_changes == self._residual.num_changes, (
            "the residual has changed since its norm was taken"
        )
        return self._residual.read(then)

    def tensor(self) -> Tensor:
        """norm(residual), [T, D]."""
        return self.norm(self.read()[0])  # type: ignore[no-any-return]
