"""Matrix products with weights that are loaded later.

Shapes: T tokens, D inputs, O outputs, I intermediate size.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ebbtide.srt.distributed.parallel_group import ParallelGroup, SoloGroup
from ebbtide.srt.layers.activation import Activation, gated
from ebbtide.srt.layers.norm import RMSNorm

if TYPE_CHECKING:
    from ebbtide.srt.layers.small_batch import Normed

    # A norm of the residual that whoever wrote it has begun with: what comes next takes what it knows.
    Begun: TypeAlias = "Normed | QuantizedTokens"

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


class QuantizedTokens(NamedTuple):
    """norm(x) in 8 bits, of `layers.kernels.fp8.product`.

    Attributes:
        values_TK: e4m3; more rows than there are tokens.
        scales_TG: float32, of each group of 128 columns.
    """

    values_TK: Tensor
    scales_TG: Tensor


class Linear(nn.Module):
    """y = x Wᵀ (+ b). It owns its products: models call its methods and no kernel on its weight.

    Few tokens on a GPU take kernels of their own (`small_batch`): a layer then costs the time to read its
    weights and to start and drain each kernel, which they save. Everything else is a library's.

    A subclass whose weight is stored otherwise gives its own `multiply` and `multiply_onto`, and the `scales`
    that kernels for few tokens are to know of; gates, residuals and ranks are the same for all.

    Parameters are made on the meta device; the weight store gives them memory.

    Attributes:
        group: the ranks that divide the weight among them.
        is_quantizable: whether its weight may be kept in fewer bits.
    """

    is_quantizable = True

    def __init__(self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.group: ParallelGroup = SoloGroup()
        self.weight = nn.Parameter(
            torch.empty(out_features, in_features, dtype=dtype, device="meta"), requires_grad=False
        )
        self.bias = (
            nn.Parameter(torch.empty(out_features, dtype=dtype, device="meta"), requires_grad=False)
            if bias
            else None
        )

    @property
    def scales(self) -> Tensor | None:
        """The factors of the weight's blocks; None: the weight needs none."""
        return None

    def project(self, x_TD: Tensor, norm: RMSNorm | None = None, begun: Begun | None = None) -> Tensor:
        """The product with norm(x), or x: [T, O] of this rank's outputs.

        Args:
            begun: what `add_to` has returned for this norm of x.
        """
        return self._project(x_TD, norm, self.bias, begun)

    def project_gated(
        self, x_TD: Tensor, norm: RMSNorm, activation: Activation, begun: Begun | None = None
    ) -> Tensor:
        """activation(gate) · up of norm(x), [T, I]; the gates' rows of the weight come first."""
        if self.bias is None and (kernels := self.few_token_kernels(x_TD)) is not None:
            x_TD, weight = _foldable(x_TD, norm)
            product: Tensor = kernels.norm_gate_up(
                x_TD, weight, norm.eps, self.weight, activation, self.scales, _normed(kernels, begun)
            )
            return product
        return gated(self.multiply_normed(x_TD, norm, self.bias), activation)

    def add_gated_to(
        self,
        residual_TO: Tensor,
        norm: RMSNorm,
        activation: Activation,
        down: Linear,
        begun: Begun | None = None,
        then: RMSNorm | None = None,
    ) -> Begun | None:
        """residual += what `down` makes of the residual's `project_gated`, in place; see `add_to`."""
        return down.add_to(residual_TO, self.project_gated(residual_TO, norm, activation, begun), then)

    def project_summed(self, x_TD: Tensor) -> Tensor:
        """The product, [T, O], where each rank holds some of the inputs: all ranks' products added up."""
        return self.group.all_reduce_(self._part(x_TD))

    def add_to(self, residual_TO: Tensor, x_TD: Tensor, then: RMSNorm | None = None) -> Begun | None:
        """residual += x Wᵀ (+ b), in place. Each rank holds some of the inputs, and all of the bias.

        Args:
            then: the norm that the residual is given to next. Where that saves time it is begun here, and
                what came of it is returned.
        """
        if self.group.size > 1:
            self.group.add_reduced_(self._part(x_TD), residual_TO)
        elif (kernels := self.few_token_kernels(x_TD)) is not None:
            follows = None if then is None or then.offset != 0.0 else (then.weight, then.eps)
            begun: Begun | None = kernels.linear_add_(
                x_TD, self.weight, self.bias, residual_TO, self.scales, follows
            )
            return begun
        else:
            self.multiply_onto(residual_TO, x_TD)
        return None

    def multiply(self, x_TD: Tensor, bias_O: Tensor | None) -> Tensor:
        """x Wᵀ (+ b) for any number of tokens."""
        return linear(x_TD, self.weight, bias_O)

    def multiply_normed(self, x_TD: Tensor, norm: RMSNorm, bias_O: Tensor | None) -> Tensor:
        """The same of norm(x)."""
        return self.multiply(norm(x_TD), bias_O)

    def multiply_onto(self, residual_TO: Tensor, x_TD: Tensor) -> None:
        """residual += x Wᵀ (+ b) for any number of tokens."""
        if residual_TO.is_cuda and self.bias is None:
            # The product is added in the accumulator: one pass over the residual less, and one rounding.
            residual_TO.addmm_(x_TD, self.weight.t())
        else:
            residual_TO += self.multiply(x_TD, self.bias)

    def few_token_kernels(self, x_TD: Tensor) -> ModuleType | None:
        """The kernels for few tokens, where they apply to this weight and these tokens."""
        if not (x_TD.is_cuda and x_TD.dtype == torch.bfloat16):
            return None
        from ebbtide.srt.layers import small_batch

        return small_batch if len(x_TD) <= small_batch.MAX_TOKENS else None

    def _part(self, x_TD: Tensor) -> Tensor:
        """What this rank adds to the product: its inputs', and from the first rank the bias."""
        return self._project(x_TD, None, self.bias if self.group.rank == 0 else None)

    def _project(
        self, x_TD: Tensor, norm: RMSNorm | None, bias_O: Tensor | None, begun: Begun | None = None
    ) -> Tensor:
        if (kernels := self.few_token_kernels(x_TD)) is not None:
            x_TD, weight = (x_TD, None) if norm is None else _foldable(x_TD, norm)
            eps = norm.eps if norm is not None else 0.0
            known = _normed(kernels, begun)
            product: Tensor = kernels.norm_linear(x_TD, weight, eps, self.weight, bias_O, self.scales, known)
            return product
        return self.multiply(x_TD, bias_O) if norm is None else self.multiply_normed(x_TD, norm, bias_O)


def _foldable(x_TD: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor | None]:
    """Inputs and the norm's weight for kernels that apply the norm themselves.

    They know no offset: with one the inputs are normalised here, and there is no weight.
    """
    return (x_TD, norm.weight) if norm.offset == 0.0 else (norm(x_TD), None)


def _normed(kernels: ModuleType, begun: Begun | None) -> Normed | None:
    """What kernels for few tokens know how to go on with."""
    return begun if isinstance(begun, kernels.Normed) else None
