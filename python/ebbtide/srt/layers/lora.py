"""Low-rank adapters of products: y += scaling · (x Aᵀ) Bᵀ, where each token has the A and B of its slot.

Shapes: T tokens, N rows of one expert, D inputs, O outputs, S slots, E experts (1 where there are none),
P tensors that are fused in the product, R most ranks.
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
        slots_T: int32, the slot of each token's adapter; −1: it has none.
        num_slots: S.
        groups: on a GPU the tokens by slot.
    """

    slots_T: Tensor
    num_slots: int
    groups: SlotGroups | None

    @classmethod
    def of(cls, slots_T: Tensor, num_slots: int) -> StepAdapters:
        """The adapters of tokens by their slots. To be called ahead of a pass's first kernel."""
        if not slots_T.is_cuda:
            return cls(slots_T, num_slots, None)
        from ebbtide.srt.layers.kernels.lora import list_groups

        return cls(slots_T, num_slots, list_groups(slots_T, num_slots))


@dataclass(frozen=True, slots=True, eq=False)
class ProductAdapters:
    """What all slots hold for one product. Lower ranks than R are filled up with zeros.

    Attributes:
        a_SEPD: [S, E, P·R, D], of this rank's inputs; each fused tensor has R rows of its own.
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
        """What kernels take."""
        return self.a_SEPD, self.b_SEOR, self.scalings_SP, self.ends

    def shrunk(self, x_TD: Tensor, step: StepAdapters) -> Tensor | None:
        """On a GPU the first half of what each token's adapter makes of x, launched ahead of its product."""
        if step.groups is None:
            return None
        from ebbtide.srt.layers.kernels.lora import shrink

        return shrink(x_TD.contiguous(), self.factors, step.groups)

    def shrinking(self, adapters: StepAdapters) -> Shrinking:
        """The same for a product of few tokens, which computes the first half of it."""
        from ebbtide.srt.layers.small_batch import Shrinking

        return Shrinking.of(self.a_SEPD, adapters.slots_T)

    def add_(self, out_TO: Tensor, x_TD: Tensor, inner: Tensor | None, step: StepAdapters) -> None:
        """Add what each token's adapter makes of x to its product, in place; `inner`: its first half."""
        if inner is None or step.groups is None:
            self.add_rows_(out_TO, x_TD, step.slots_T, 0)
            return
        from ebbtide.srt.layers.kernels.lora import expand

        expand(inner, self.factors, step.groups, out_TO)

    def add_rows_(self, out_NO: Tensor, x_ND: Tensor, slots_N: Tensor, expert: int) -> None:
        """Add it to the product of rows that all go through one expert, in place, slot by slot."""
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
