"""Matrix products with weights that are loaded later, token embeddings included.

Shapes: T tokens, D inputs, O outputs, I intermediate size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ebbtide.srt.distributed import Division, part_of
from ebbtide.srt.distributed.parallel_group import ParallelGroup
from ebbtide.srt.layers import parameter
from ebbtide.srt.layers.lora import ProductAdapters
from ebbtide.srt.layers.norm import (
    Activation,
    Addend,
    NormedResidual,
    gated,
    tensor_of,
)
from ebbtide.srt.layers.step import Kernels, Step

if TYPE_CHECKING:
    from ebbtide.srt.layers.small_batch import Shrinking


class Inputs:
    """The input of a product: x, or norm(x), where the product may compute the norm itself."""

    __slots__ = ("norm", "x_TD")

    def __init__(self, x: Tensor | NormedResidual) -> None:
        self.norm = None if isinstance(x, Tensor) else x.norm
        self.x_TD = x if isinstance(x, Tensor) else x.x_TD

    def tensor(self) -> Tensor:
        """norm(x), or x."""
        return self.x_TD if self.norm is None else self.norm(self.x_TD)


class Linear(nn.Module):
    """y = x Wᵀ (+ b). Models call its methods and never a kernel on its weight.

    Few tokens on a GPU use our own kernels (`small_batch`): the time of such a layer is that of reading its
    weights and of starting and draining each kernel, and these kernels save the latter. Everything else is
    left to a library.

    A subclass that stores its weight differently overrides `multiply`, `multiply_onto` and `takes_few`, and
    `scales` if kernels for few tokens can use them. Gates, residuals and ranks are handled here for all.

    Parameters are created on the meta device; the weight store gives them memory.

    Attributes:
        group: the ranks that divide the weight.
        is_quantizable: whether its weight may be kept in fewer bits.
        may_be_ragged: whether its rows need not fill whole blocks of one scale each. Then only `forward` may
            be called, not `gated` or `addend`.
        adapters: what the slots of adapters hold for this product; None: it takes no adapters.
        may_be_adapted: whether it may take adapters. Not if other code reads its weight directly, since that
            would ignore them.
    """

    is_quantizable = True
    may_be_ragged = False
    may_be_adapted = True

    def __init__(self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.group = ParallelGroup()
        self.adapters: ProductAdapters | None = None
        self.weight = parameter(out_features, in_features, dtype=dtype)
        self.bias = parameter(out_features, dtype=dtype) if bias else None

    @property
    def scales(self) -> Tensor | None:
        """The scales of the weight's blocks; None: it has none, or kernels for few tokens cannot use them."""
        return None

    def wide_weight(self, dtype: torch.dtype) -> Tensor:
        """The weight [O, D] in the model's dtype."""
        return self.weight

    def is_adapted(self, step: Step) -> bool:
        """Whether adapters contribute to its products in this pass."""
        return self.adapters is not None and step.adapters is not None

    def forward(self, x: Tensor | NormedResidual, step: Step) -> Tensor:
        """The product [T, O] of this rank's outputs."""
        if not self.is_adapted(step):
            return self.project(Inputs(x), self.bias, step.kernels)
        return self.adapted(tensor_of(x), self.bias, None, step)

    def gated(self, x: Tensor | NormedResidual, activation: Activation, step: Step) -> Gated | Tensor:
        """activation(gate) · up, [T, I]. The first half of the weight's rows are the gates."""
        if not self.is_adapted(step):
            return Gated(self, Inputs(x), activation, step.kernels)
        return gated(self.adapted(tensor_of(x), self.bias, None, step), activation)

    def addend(self, x: Tensor | Gated, step: Step) -> Addend:
        """The product [T, O], to be added to the residual. Ranks divide inputs, and hold the whole bias."""
        return Product(self, x, step)

    def adapted(self, x_TD: Tensor, bias_O: Tensor | None, onto_TO: Tensor | None, step: Step) -> Tensor:
        """The product plus what adapters add to it. With `onto_TO`, both are added to that in place."""
        adapters, of_step, kernels = self.adapters, step.adapters, step.kernels
        assert adapters is not None
        assert of_step is not None
        if x_TD.is_cuda and self.scales is None and self.takes_few(x_TD, kernels):
            shrinking = adapters.shrinking(of_step)
            out_TO = x_TD.new_empty(len(x_TD), len(self.weight)) if onto_TO is None else onto_TO
            add = onto_TO is not None
            self._multiply_few(Inputs(x_TD.contiguous()), bias_O, out_TO, add=add, shrinking=shrinking)
            adapters.add_(out_TO, x_TD, shrinking.inner, of_step)
            return out_TO
        inner = adapters.shrunk(x_TD, of_step)
        if onto_TO is None:
            out_TO = self.project(Inputs(x_TD), bias_O, kernels)
        else:
            out_TO = onto_TO
            self.add_to(out_TO, x_TD, kernels)
        adapters.add_(out_TO, x_TD, inner, of_step)
        return out_TO

    def project(self, x: Inputs, bias_O: Tensor | None, kernels: Kernels) -> Tensor:
        """Compute `forward` without adapters."""
        if self.takes_few(x.x_TD, kernels):
            out_TO = x.x_TD.new_empty(len(x.x_TD), len(self.weight))
            self._multiply_few(x, bias_O, out_TO)
            return out_TO
        return self.multiply(x, bias_O, kernels)

    def gate(self, x: Inputs, activation: Activation, kernels: Kernels) -> Tensor:
        """Compute `gated` without adapters."""
        if self.bias is None and self.takes_few(x.x_TD, kernels):
            out_TI = x.x_TD.new_empty(len(x.x_TD), len(self.weight) // 2)
            self._multiply_few(x, None, out_TI, activation=activation)
            return out_TI
        return gated(self.multiply(x, self.bias, kernels), activation)

    def add_to(self, residual_TO: Tensor, x: Tensor | Gated, kernels: Kernels) -> None:
        """Add the product to the residual in place."""
        x_TD = tensor_of(x)
        if self.group.size > 1:
            self.group.add_reduced_(self.part(x_TD, kernels), residual_TO)
        elif self.takes_few(x_TD, kernels):
            self._multiply_few(Inputs(x_TD), self.bias, residual_TO, add=True)
        else:
            self.multiply_onto(residual_TO, x_TD, kernels)

    def multiply(self, x: Inputs, bias_O: Tensor | None, kernels: Kernels) -> Tensor:
        """Compute the product for any number of tokens."""
        return F.linear(x.tensor(), self.weight, bias_O)

    def multiply_onto(self, residual_TO: Tensor, x_TD: Tensor, kernels: Kernels) -> None:
        """Add x Wᵀ (+ b) to the residual in place, for any number of tokens."""
        if residual_TO.is_cuda and self.bias is None:
            # The residual is added in the accumulator, which saves a pass over it and a rounding.
            residual_TO.addmm_(x_TD, self.weight.t())
        else:
            residual_TO += self.multiply(Inputs(x_TD), self.bias, kernels)

    def takes_few(self, x_TD: Tensor, kernels: Kernels) -> bool:
        """Whether the kernels for few tokens take these."""
        return len(x_TD) <= kernels.few

    def _multiply_few(
        self,
        x: Inputs,
        bias_O: Tensor | None,
        out_TO: Tensor,
        *,
        activation: Activation | None = None,
        add: bool = False,
        shrinking: Shrinking | None = None,
    ) -> None:
        """Write the product, or the gated product, into `out_TO`, or add it to that."""
        from ebbtide.srt.layers.small_batch import multiply

        # Only the kernels for one token compute norms, and only norms without offset.
        norm = x.norm if len(x.x_TD) == 1 and x.norm is not None and x.norm.offset == 0.0 else None
        multiply(
            x.tensor() if norm is None else x.x_TD,
            None if norm is None else norm.weight,
            0.0 if norm is None else norm.eps,
            self.weight,
            bias_O,
            out_TO,
            gated=activation,
            add=add,
            scales=self.scales,
            shrinking=shrinking,
        )

    def part(self, x_TD: Tensor, kernels: Kernels) -> Tensor:
        """This rank's part of the product, from its inputs. The first rank's part includes the bias."""
        return self.project(Inputs(x_TD), self.bias if self.group.rank == 0 else None, kernels)


class VocabEmbedding(Linear):
    """One row per token id. In a tied model the same rows are the output projection.

    Ranks divide the rows.

    Attributes:
        has_float32_logits: whether logits are float32, instead of being rounded to the parameters' dtype.
    """

    is_quantizable = False
    may_be_adapted = False

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype) -> None:
        super().__init__(hidden_size, vocab_size, bias=False, dtype=dtype)
        self._vocab_size = vocab_size
        self.has_float32_logits = False

    def embed(self, input_ids_T: Tensor) -> Tensor:
        """The rows of these tokens, [T, D]."""
        if self.group.size == 1:
            return F.embedding(input_ids_T, self.weight)
        first, count = self._rows_of(self.group.rank)
        rows_T = input_ids_T - first
        others_T = (rows_T < 0) | (rows_T >= count)
        # One rank holds each row, the others add zeros, so the all-reduce is exact.
        x_TD = F.embedding(rows_T.clamp_(0, count - 1), self.weight)
        return self.group.all_reduce_(x_TD.masked_fill_(others_T.unsqueeze(1), 0.0))

    def logits(self, x_TD: Tensor, kernels: Kernels) -> Tensor:
        """Scores [T, V] of the whole vocabulary, in the parameters' dtype, or in float32."""
        if self.has_float32_logits:
            scores = self._float32_product(x_TD)
        else:
            scores = self.project(Inputs(x_TD), None, kernels)
        return scores if self.group.size == 1 else self._gather(scores)

    def _float32_product(self, x_TD: Tensor) -> Tensor:
        if x_TD.is_cuda and self.weight.dtype != torch.float32:
            # 16-bit products are summed in float32 anyway, and this makes no float32 copy of the weights.
            return torch.mm(x_TD, self.weight.t(), out_dtype=torch.float32)
        return F.linear(x_TD.float(), self.weight.float())

    def _gather(self, scores: Tensor) -> Tensor:
        """All ranks' columns. Ranks with one row fewer pad theirs, since all must send equal shapes."""
        _, most = self._rows_of(0)
        if self._vocab_size % self.group.size == 0:
            return self.group.all_gather(scores, 1)
        padded = self.group.all_gather(F.pad(scores, (0, most - scores.shape[1])), 1)
        counts = [self._rows_of(rank)[1] for rank in range(self.group.size)]
        parts = zip(torch.split(padded, most, dim=1), counts, strict=True)
        return torch.cat([part[:, :count] for part, count in parts], dim=1)

    def _rows_of(self, rank: int) -> tuple[int, int]:
        """The first id whose row this rank holds, and how many rows it holds."""
        return part_of(rank, self.group.size, self._vocab_size, Division.SPREAD, "vocab_size")


@dataclass(slots=True)
class Gated:
    """A gated product that is computed, perhaps in 8 bits, when it is read."""

    linear: Linear
    x: Inputs
    activation: Activation
    kernels: Kernels

    def tensor(self) -> Tensor:
        return self.linear.gate(self.x, self.activation, self.kernels)


@dataclass(slots=True)
class Product:
    """A product that is computed when it is added to the residual. An `Addend`.

    Each rank includes in its part of the sum what adapters make of its inputs.
    """

    linear: Linear
    x: Tensor | Gated
    step: Step

    def add_to(self, residual_TD: Tensor) -> None:
        linear = self.linear
        if not linear.is_adapted(self.step):
            linear.add_to(residual_TD, self.x, self.step.kernels)
        elif linear.group.size > 1:
            linear.group.add_reduced_(self._part(), residual_TD)
        else:
            linear.adapted(tensor_of(self.x), linear.bias, residual_TD, self.step)

    def tensor(self) -> Tensor:
        return self.linear.group.all_reduce_(self._part())

    def _part(self) -> Tensor:
        linear, x_TD = self.linear, tensor_of(self.x)
        if not linear.is_adapted(self.step):
            return linear.part(x_TD, self.step.kernels)
        return linear.adapted(x_TD, linear.bias if linear.group.rank == 0 else None, None, self.step)
