"""Low-rank adapters of products: y += scaling · (x Aᵀ) Bᵀ, with the A and B of each token's slot.

Shapes: T tokens, N rows of one expert, D inputs, O outputs, S slots, E experts (1 where there are none),
P tensors that are fused in the product, R the largest rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ebbtide.srt.layers.kernels.lora import Factors, SlotGroups
    from ebbtide.srt.layers.small_batch import Shrinking


@dataclass(frozen=True, slots=True, eq=False)
class StepAdapters:
    """The adapters of a forward pass.

    Attributes:
        slots_T: int32, the slot of each token's adapter; −1: the token has none.
        num_slots: S.
        groups: the tokens by slot; None on a CPU.
    """

    slots_T: Tensor
    num_slots: int
    groups: SlotGroups | None

    @classmethod
    def of(cls, slots_T: Tensor, num_slots: int) -> StepAdapters:
        """Group tokens by their slots. Call it before the first kernel of a pass."""
        if not slots_T.is_cuda:
            return cls(slots_T, num_slots, None)
        from ebbtide.srt.layers.kernels.lora import list_groups

        return cls(slots_T, num_slots, list_groups(slots_T, num_slots))


@dataclass(frozen=True, slots=True, eq=False)
class ProductAdapters:
    """What all slots hold for one product. Adapters with ranks below R are padded with zeros.

    Attributes:
        a_SEPD: [S, E, P·R, D], of this rank's inputs; each fused tensor has its own R rows.
        b_SEOR: [S, E, O, R], of this rank's outputs.
        scalings_SP: float32.
        ends: where the outputs of each fused tensor end.
    """

    a_SEPD: Tensor
    b_SEOR: Tensor
    scalings_SP: Tensor
    ends: tuple[int, ...]

    @property
    def factors(self) -> Factors:
        """The arguments of kernels."""
        return self.a_SEPD, self.b_SEOR, self.scalings_SP, self.ends

    def shrunk(self, x_TD: Tensor, step: StepAdapters) -> Tensor | None:
        """On a GPU, launch the first half, x Aᵀ of each token's adapter, before the product. Else None."""
        if step.groups is None:
            return None
        from ebbtide.srt.layers.kernels.lora import shrink

        return shrink(x_TD.contiguous(), self.factors, step.groups)

    def shrinking(self, adapters: StepAdapters) -> Shrinking:
        """The first half as an argument of a product of few tokens, whose kernel computes it too."""
        from ebbtide.srt.layers.small_batch import Shrinking

        return Shrinking.of(self.a_SEPD, adapters.slots_T)

    def add_(self, out_TO: Tensor, x_TD: Tensor, inner: Tensor | None, step: StepAdapters) -> None:
        """Add each token's adapter to its product in place. `inner`: the result of the first half."""
        if inner is None or step.groups is None:
            self.add_rows_(out_TO, x_TD, step.slots_T, 0)
            return
        from ebbtide.srt.layers.kernels.lora import expand

        expand(inner, self.factors, step.groups, out_TO)

    def add_rows_(self, out_NO: Tensor, x_ND: Tensor, slots_N: Tensor, expert: int) -> None:
        """Add adapters in place to the product of rows that all go to one expert, slot by slot."""
        for slot in sorted(set(slots_N.tolist())):
            if slot < 0:
                continue
            rows_M = (slots_N == slot).nonzero().flatten()
            out_NO.index_add_(0, rows_M, self._product(x_ND[rows_M], slot, expert).to(out_NO.dtype))

    def _product(self, x_MD: Tensor, slot: int, expert: int) -> Tensor:
        rank, pieces, start = self.b_SEOR.shape[-1], [], 0
        inner_MP = x_MD @ self.a_SEPD[slot, expert].to(x_MD.dtype).t()
        for part, end in enumerate(self.ends):
            inner_MR = inner_MP[:, part * rank : (part + 1) * rank] * self.scalings_SP[slot, part]
            b_OR = self.b_SEOR[slot, expert, start:end]
            pieces.append(inner_MR.to(x_MD.dtype) @ b_OR.to(x_MD.dtype).t())
            start = end
        return torch.cat(pieces, dim=1)
