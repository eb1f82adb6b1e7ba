"""Weights in MXFP4, widened to bfloat16 as they are read: numbers of 4 bits, and an exponent for each 32.

Source: OCP Microscaling Formats (MX) Specification 1.0, as gpt-oss's checkpoints have it.

Shapes: E experts, R outputs, D inputs, G = D / 32 groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ebbtide.formats.stored_tensor import StoredTensor

BLOCKS, SCALES = "_blocks", "_scales"
_GROUP, _BYTES = 32, 16
# e2m1, then the same with the sign bit set.
_VALUES = [sign * value for sign in (1.0, -1.0) for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]
_BIAS = 127


@dataclass(frozen=True, slots=True)
class Mxfp4Tensor(StoredTensor):
    """What two tensors of a checkpoint stand for: [E, D, R] in bfloat16, widened on the device it goes to.

    Attributes:
        blocks: uint8 [E, R, G, 16].
        scales: uint8 [E, R, G].
        first_input: of those that this is a view of.
    """

    blocks: StoredTensor
    scales: StoredTensor
    first_input: int = 0

    @classmethod
    def of(cls, blocks: StoredTensor, scales: StoredTensor) -> Mxfp4Tensor | None:
        """The tensor; None where they are something else."""
        alike = blocks.dtype == scales.dtype == torch.uint8 and blocks.shape == (*scales.shape, _BYTES)
        if not alike or scales.dim() != 3:
            return None
        num_experts, num_outputs, num_groups = scales.shape
        num_inputs = num_groups * _GROUP
        shape = (num_experts, num_inputs, num_outputs)
        stride = (num_inputs * num_outputs, 1, num_inputs)
        return cls(blocks.storage, blocks.offset, shape, stride, torch.bfloat16, blocks, scales)

    def narrow(self, dim: int, start: int, length: int) -> Mxfp4Tensor:
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        if dim == 1:
            return replace(self, shape=shape, first_input=self.first_input + start)
        stored_dim = 0 if dim == 0 else 1
        blocks, scales = (each.narrow(stored_dim, start, length) for each in (self.blocks, self.scales))
        return replace(self, shape=shape, blocks=blocks, scales=scales)

    def split(self, num_rows: int) -> Iterator[StoredTensor]:
        for start in range(0, self.shape[0], num_rows):
            yield self.narrow(0, start, min(num_rows, self.shape[0] - start))

    def read(self) -> Tensor:
        return self._widened(torch.device("cpu"))

    def copy_to(self, room: Tensor) -> None:
        room.copy_(self._widened(room.device))

    def _widened(self, device: torch.device) -> Tensor:
        wide_ERD = widen(self.blocks.read().to(device), self.scales.read().to(device))
        return wide_ERD.transpose(1, 2).narrow(1, self.first_input, self.shape[1])


def widen(blocks: Tensor, scales: Tensor) -> Tensor:
    """bfloat16 [..., 32 G] of uint8 [..., G, 16] and [..., G]; the first of two lies in the low bits."""
    values = torch.tensor(_VALUES, dtype=torch.bfloat16, device=blocks.device)
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=1)
    factors = torch.ldexp(torch.ones(scales.shape, device=blocks.device), scales.int() - _BIAS).to(
        torch.bfloat16
    )
    wide = torch.nn.functional.embedding(blocks.int(), pairs).flatten(-2).mul_(factors.unsqueeze(-1))
    return wide.flatten(-2)
