"""Matrix products with weights that are loaded later.

Shapes: T tokens, D inputs, O outputs, I intermediate size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ebbtide.srt.distributed.parallel_group import ParallelGroup, SoloGroup
from ebbtide.srt.layers.lora import Delta, ProductAdapters, StepAdapters
from ebbtide.srt.layers.norm import (
    Activation,
    Addend,
    NormedResidual,
    PartialNorm,
    RMSNorm,
    Started,
    gated,
    tensor_of,
)
from ebbtide.srt.layers.parameters import parameter
from ebbtide.srt.layers.step import Kernels, Step

if TYPE_CHECKING:
    from ebbtide.srt.layers.small_batch import Shrinking

# Torch multiplies float32 by MKL, which leaves half of what a CPU can do unused where it does not know the
# CPU: measured on AMD EPYC, oneDNN takes 0.5–0.7 of the time at every number of rows. Torch multiplies
# narrower types by oneDNN. The operator is the one that torch's own compiler emits; builds without it use
# `F.linear`.
_HAS_ONEDNN = hasattr(torch.ops.mkldnn, "_linear_pointwise")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ (+ b), by the quickest library for the dtype and the device."""
    if _HAS_ONEDNN and weight.dtype == torch.float32 and weight.is_cpu:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return product
    return F.linear(x, weight, bias)


class Inputs:
    """What a product multiplies: x, or norm(x), of which the product before may have computed a part."""

    __slots__ = ("norm", "started", "x_TD")

    def __init__(self, x: Tensor | NormedResidual) -> None:
        self.norm: RMSNorm | None = None
        self.started: Started | None = None
        if isinstance(x, Tensor):
            self.x_TD = x
        else:
            self.norm = x.norm
            self.x_TD, self.started = x.read(x.norm)

    def tensor(self) -> Tensor:
        """norm(x), or x."""
        return self.x_TD if self.norm is None else self.norm(self.x_TD)


class Linear(nn.Module):
    """y = x Wᵀ (+ b). It owns its products: models call its methods and no kernel on its weight.

    Few tokens on a GPU take kernels of their own (`small_batch`): a layer then costs the time to read its
    weights and to start and drain each kernel, which they save. Everything else is a library's.

    A subclass whose weight is stored otherwise gives its own `multiply`, `multiply_onto` and `takes_few`, and
    the `scales` that kernels for few tokens know; gates, residuals and ranks are the same for all.

    Parameters are made on the meta device; the weight store gives them memory.

    Attributes:
        group: the ranks that divide the weight among them.
        is_quantizable: whether its weight may be kept in fewer bits.
        may_be_ragged: whether its rows need not fill blocks that have a scale each; then it is called for
            products, not for gated ones or addends.
        adapters: what the slots of adapters hold for it; None: it takes none.
        may_be_adapted: whether it may take some: whoever reads its weight itself would leave them out.
    """

    is_quantizable = True
    may_be_ragged = False
    may_be_adapted = True

    def __init__(self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.group: ParallelGroup = SoloGroup()
        self.adapters: ProductAdapters | None = None
        self.weight = parameter(out_features, in_features, dtype=dtype)
        self.bias = parameter(out_features, dtype=dtype) if bias else None

    @property
    def scales(self) -> Tensor | None:
        """The factors of the weight's blocks; None: the weight needs none."""
        return None

    def wide_weight(self, dtype: torch.dtype) -> Tensor:
        """The weight as numbers of the model's type, [O, D]."""
        return self.weight

    def forward(self, x: Tensor | NormedResidual, step: Step) -> Tensor:
        """The product, [T, O] of this rank's outputs."""
        if self.adapters is None or step.adapters is None:
            return self.project(Inputs(x), self.bias, step.kernels)
        given = (self.adapters, step.adapters, step.kernels)
        out_TO, delta = self.adapted(tensor_of(x), self.bias, None, *given)
        delta.add_(out_TO)
        return out_TO

    def gated(self, x: Tensor | NormedResidual, activation: Activation, step: Step) -> Gated | Tensor:
        """activation(gate) · up, [T, I]; the gates' rows of the weight come first."""
        if self.adapters is None or step.adapters is None:
            return Gated(self, Inputs(x), activation, step.kernels)
        given = (self.adapters, step.adapters, step.kernels)
        out_TO, delta = self.adapted(tensor_of(x), self.bias, None, *given)
        delta.add_(out_TO)
        return gated(out_TO, activation)

    def addend(self, x: Tensor | Gated, step: Step) -> Addend:
        """The product, [T, O], for the residual. Each rank holds some of the inputs, and all of the bias."""
        if self.adapters is None or step.adapters is None:
            return Product(self, x, step.kernels)
        return AdaptedProduct(self, tensor_of(x), step.kernels, self.adapters, step.adapters)

    def adapted(
        self,
        x_TD: Tensor,
        bias_O: Tensor | None,
        onto_TO: Tensor | None,
        adapters: ProductAdapters,
        step: StepAdapters,
        kernels: Kernels,
    ) -> tuple[Tensor, Delta]:
        """The product, or what it is added to in place, without what adapters add; and that."""
        if x_TD.is_cuda and self.scales is None and self.takes_few(x_TD, kernels):
            shrinking = adapters.shrinking(step)
            out_TO = x_TD.new_empty(len(x_TD), len(self.weight)) if onto_TO is None else onto_TO
            add = onto_TO is not None
            self._multiply_few(Inputs(x_TD.contiguous()), bias_O, out_TO, add=add, shrinking=shrinking)
            return out_TO, Delta(adapters, x_TD, step, shrinking.inner)
        delta = adapters.of(x_TD, step)
        if onto_TO is None:
            return self.project(Inputs(x_TD), bias_O, kernels), delta
        self.add_to(onto_TO, x_TD, None, kernels)
        return onto_TO, delta

    def project(self, x: Inputs, bias_O: Tensor | None, kernels: Kernels) -> Tensor:
        """What `forward` gives."""
        if self.takes_few(x.x_TD, kernels):
            out_TO = x.x_TD.new_empty(len(x.x_TD), len(self.weight))
            self._multiply_few(x, bias_O, out_TO)
            return out_TO
        return self.multiply(x, bias_O, kernels)

    def gate(self, x: Inputs, activation: Activation, kernels: Kernels) -> Tensor:
        """What `gated` gives."""
        if self.bias is None and self.takes_few(x.x_TD, kernels):
            out_TI = x.x_TD.new_empty(len(x.x_TD), len(self.weight) // 2)
            self._multiply_few(x, None, out_TI, activation=activation)
            return out_TI
        return gated(self.multiply(x, self.bias, kernels), activation)

    def add_to(
        self, residual_TO: Tensor, x: Tensor | Gated, then: RMSNorm | None, kernels: Kernels
    ) -> Started | None:
        """residual += the product, in place. See `Addend`."""
        x_TD = tensor_of(x)
        if self.group.size > 1:
            self.group.add_reduced_(self.part(x_TD, kernels), residual_TO)
        elif self.takes_few(x_TD, kernels):
            return self._multiply_few(Inputs(x_TD), self.bias, residual_TO, add=True, then=then)
        else:
            self.multiply_onto(residual_TO, x_TD, kernels)
        return None

    def summed(self, x: Tensor | Gated, kernels: Kernels) -> Tensor:
        """The product, [T, O], of all ranks' inputs."""
        return self.group.all_reduce_(self.part(tensor_of(x), kernels))

    def multiply(self, x: Inputs, bias_O: Tensor | None, kernels: Kernels) -> Tensor:
        """The product for any number of tokens."""
        return linear(x.tensor(), self.weight, bias_O)

    def multiply_onto(self, residual_TO: Tensor, x_TD: Tensor, kernels: Kernels) -> None:
        """residual += x Wᵀ (+ b) for any number of tokens."""
        if residual_TO.is_cuda and self.bias is None:
            # The product is added in the accumulator: one pass over the residual less, and one rounding.
            residual_TO.addmm_(x_TD, self.weight.t())
        else:
            residual_TO += self.multiply(Inputs(x_TD), self.bias, kernels)

    def takes_few(self, x_TD: Tensor, kernels: Kernels) -> bool:
        """Whether the kernels for few tokens multiply these."""
        return len(x_TD) <= kernels.few

    def _multiply_few(
        self,
        x: Inputs,
        bias_O: Tensor | None,
        out_TO: Tensor,
        *,
        activation: Activation | None = None,
        add: bool = False,
        then: RMSNorm | None = None,
        shrinking: Shrinking | None = None,
    ) -> Started | None:
        """The product, or a gated one, into `out_TO`, or added to it; returns a part of `then`."""
        from ebbtide.srt.layers.small_batch import multiply

        # These kernels know no offset of a norm.
        norm = x.norm if x.norm is not None and x.norm.offset == 0.0 else None
        return multiply(
            x.tensor() if norm is None else x.x_TD,
            None if norm is None else norm.weight,
            0.0 if norm is None else norm.eps,
            self.weight,
            bias_O,
            out_TO,
            gated=activation,
            add=add,
            scales=self.scales,
            started=x.started if isinstance(x.started, PartialNorm) else None,
            then=None if then is None or then.offset != 0.0 else (then.weight, then.eps),
            shrinking=shrinking,
        )

    def part(self, x_TD: Tensor, kernels: Kernels) -> Tensor:
        """What this rank adds to the product: its inputs', and from the first rank the bias."""
        return self.project(Inputs(x_TD), self.bias if self.group.rank == 0 else None, kernels)


@dataclass(slots=True)
class Gated:
    """A gated product that is computed by whoever reads it, perhaps in 8 bits."""

    linear: Linear
    x: Inputs
    activation: Activation
    kernels: Kernels

    def tensor(self) -> Tensor:
        return self.linear.gate(self.x, self.activation, self.kernels)


@dataclass(slots=True)
class Product:
    """A product that is computed when it is added to the residual. An `Addend`."""

    linear: Linear
    x: Tensor | Gated
    kernels: Kernels

    def add_to(self, residual_TD: Tensor, then: RMSNorm | None) -> Started | None:
        return self.linear.add_to(residual_TD, self.x, then, self.kernels)

    def tensor(self) -> Tensor:
        return self.linear.summed(self.x, self.kernels)


@dataclass(slots=True)
class AdaptedProduct:
    """A `Product` with adapters. Each rank adds what they make of its inputs to what it adds to the sum."""

    linear: Linear
    x_TD: Tensor
    kernels: Kernels
    adapters: ProductAdapters
    step: StepAdapters

    def add_to(self, residual_TD: Tensor, then: RMSNorm | None) -> Started | None:
        if self.linear.group.size > 1:
            self.linear.group.add_reduced_(self._part(), residual_TD)
            return None
        self._adapted(self.linear.bias, residual_TD)
        return None

    def tensor(self) -> Tensor:
        return self.linear.group.all_reduce_(self._part())

    def _part(self) -> Tensor:
        return self._adapted(self.linear.bias if self.linear.group.rank == 0 else None, None)

    def _adapted(self, bias_O: Tensor | None, onto_TO: Tensor | None) -> Tensor:
        given = (self.adapters, self.step, self.kernels)
        out_TO, delta = self.linear.adapted(self.x_TD, bias_O, onto_TO, *given)
        delta.add_(out_TO)
        return out_TO
