"""Where a tensor goes on a rank, and how it is written there."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ebbtide.srt.layers.fp8 import BLOCK, BLOCKS, CHANNELS, ScaleLayout, quantize_into
from ebbtide.srt.models.sharding import Part
from ebbtide.srt.stored_tensor import StoredTensor, copy_into, whole

AnyTensor = TypeVar("AnyTensor", Tensor, StoredTensor, Tensor | StoredTensor)


@dataclass(frozen=True)
class Destination:
    """Where a tensor goes on this rank.

    Attributes:
        region: of a parameter, which may be wider than what is written.
        part: what this rank holds of the tensor; None: all of it.
        is_first: whether no rank before this one holds the same.
        scales: those of the region, where it holds 8 bits of each element: a tensor of more is quantised.
        layout: of the scales.
    """

    region: Tensor
    part: Part | None
    is_first: bool = True
    scales: Tensor | None = None
    layout: ScaleLayout = BLOCKS

    def is_like(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        """Whether such a tensor could be received here as it is: byte for byte, in one piece."""
        same = self.part is None and tuple(self.region.shape) == shape and self.region.dtype == dtype
        return same and self.region.is_contiguous()

    def part_of(self, tensor: AnyTensor) -> AnyTensor:
        """What this rank holds of a whole tensor."""
        part = self.part
        return tensor if part is None else tensor.narrow(part.dim, part.start, part.length)

    @property
    def telling(self) -> Tensor:
        """What holds NaN or Inf if what was written does."""
        return self.region if self.scales is None else self.scales

    def write(self, tensor: Tensor) -> None:
        """Write a whole tensor that the store's `check` accepts."""
        for _ in self.write_by_slices(tensor, self.region.nbytes):
            pass

    def write_by_slices(self, tensor: Tensor | StoredTensor, slice_bytes: int) -> Iterator[int]:
        """As `write`, yielding the bytes of each slice of about so many just written."""
        part, region, scales = self.part_of(tensor), self.region, self.scales
        if scales is None or tensor.dtype == region.dtype:
            for piece, room in row_slices(part, region, slice_bytes):
                copy_into(room, piece)
                yield room.nbytes
            return
        first_column = 0
        if self.layout is CHANNELS and self.part is not None and self.part.dim == 1:
            # A row has the same scale on all ranks.
            part, first_column = tensor, self.part.start
        for piece, room in row_slices(part, region, slice_bytes, multiple_of=BLOCK):
            num_scales = -(-len(room) // self.layout.block_rows)
            quantize_into(room, scales[:num_scales], whole(piece), self.layout, first_column)
            scales = scales[num_scales:]
            yield room.nbytes


def row_slices(
    source: Tensor | StoredTensor, destination: Tensor, slice_bytes: int, multiple_of: int = 1
) -> Iterator[tuple[Tensor | StoredTensor, Tensor]]:
    """Pairs of rows of two tensors of one shape, of at most `slice_bytes` in the destination, or so many."""
    if destination.nbytes <= slice_bytes or source.dim() == 0:
        yield source, destination
        return
    num_rows = slice_bytes // max(1, destination[:1].nbytes)
    num_rows = max(multiple_of, num_rows // multiple_of * multiple_of)
    pieces = torch.split(source, num_rows) if isinstance(source, Tensor) else source.split(num_rows)
    yield from zip(pieces, torch.split(destination, num_rows), strict=True)
