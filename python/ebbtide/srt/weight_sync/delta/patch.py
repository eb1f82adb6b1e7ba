"""What a delta changes of one tensor, in the one form that every source of deltas is decoded into.

Source: wire_vllm section 5.5.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.model_executor.weight_copies import Destination
from ebbtide.srt.weight_sync.delta.state_sum import bits_of, matrix_shape, state_sum, sum_of_changes


class Operation(Enum):
    """What becomes of an element: the value replaces it, or its bits are those of both, exclusive or."""

    SET = "set"
    XOR = "xor"


@dataclass(frozen=True)
class Patch:
    """Some elements of a tensor.

    Attributes:
        shape: of the whole tensor.
        positions: int64, flat, ascending and different.
        values: one for each position.
        checksum: of the whole tensor once it is patched, see `state_sum`; None: nobody compares it.
    """

    name: str
    shape: tuple[int, ...]
    positions: Tensor
    values: Tensor
    operation: Operation = Operation.SET
    checksum: str | None = None

    def checked(self) -> Patch:
        """The same with its positions in order.

        Raises:
            RequestRejected: 400, a position twice, or outside of the tensor, or not as many values.
        """
        if len(self.positions) != len(self.values):
            raise RequestRejected(
                f"{self.name}: {len(self.positions)} positions and {len(self.values)} values"
            )
        if len(self.positions) == 0:
            return self
        positions, order = torch.sort(self.positions.to(torch.int64))
        first, last = int(positions[0]), int(positions[-1])
        num_elements = torch.Size(self.shape).numel()
        if first < 0 or last >= num_elements:
            wrong = first if first < 0 else last
            raise RequestRejected(f"{self.name}: position {wrong} of a tensor of {num_elements} elements")
        if bool((positions[1:] == positions[:-1]).any()):
            raise RequestRejected(f"{self.name}: a position is given twice")
        return replace(self, positions=positions, values=self.values[order])


@dataclass(frozen=True)
class Place:
    """A rank's part of a tensor, as a part of a matrix.

    Attributes:
        region: [rows, columns]; the columns of a row lie side by side.
        num_columns: of the whole matrix.
        first_row, first_column: where the part begins in it.
        counts: whether no rank before this one holds the same part.
    """

    region: Tensor
    num_columns: int
    first_row: int
    first_column: int
    counts: bool

    @classmethod
    def of(cls, destination: Destination, shape: tuple[int, ...]) -> Place:
        """The place of a tensor of this whole shape. Ranks divide its first dimension, or its last."""
        region, part = destination.region, destination.part
        _, num_columns = matrix_shape(shape)
        matrix = region.reshape(1, -1) if region.dim() < 2 else region.flatten(0, -2)
        assert matrix.untyped_storage()._cdata == region.untyped_storage()._cdata, "a place is a view"
        if part is None:
            return cls(matrix, num_columns, 0, 0, destination.is_first)
        if part.dim == len(shape) - 1:
            return cls(matrix, num_columns, 0, part.start, destination.is_first)
        assert part.dim == 0, "ranks divide the first dimension or the last"
        rows_of_one = torch.Size(shape[1:-1]).numel()
        return cls(matrix, num_columns, part.start * rows_of_one, 0, destination.is_first)

    def numbers(self, base: Tensor) -> list[int]:
        """The place as a kernel takes it: where it begins, counted in elements of `base`, and its sizes."""
        bits = bits_of(self.region)
        num_rows, num_columns = bits.shape
        return [
            *(int(bits.storage_offset() - base.storage_offset()), bits.stride(0), self.num_columns),
            *(self.first_row, num_rows, self.first_column, num_columns, int(self.counts)),
        ]

    def bytewise(self) -> Place:
        """The same of the tensor's bytes."""
        size = self.region.element_size()
        return replace(
            self,
            region=self.region.view(torch.uint8),
            num_columns=self.num_columns * size,
            first_column=self.first_column * size,
        )

    def apply(self, patch: Patch) -> Tensor:
        """Write the elements that are this rank's; returns them."""
        span, local, mine = self._local(patch)
        values = patch.values[mine]
        if patch.operation is Operation.XOR:
            bits = bits_of(span)
            values = (bits[local] ^ bits_of(values)).view(span.dtype)
        values = values.to(span.dtype)
        span.index_copy_(0, local, values)
        return values

    def sum_after(self, patch: Patch, known: int | None = None) -> Tensor:
        """This rank's share of the tensor's sum as it is to be. Nothing is written.

        Args:
            known: its share as it is; None: it is summed up.
        """
        if not self.counts:
            return torch.zeros((), dtype=torch.int64, device=self.region.device)
        span, local, mine = self._local(patch)
        before, values = bits_of(span)[local], bits_of(patch.values[mine])
        after = before ^ values if patch.operation is Operation.XOR else values
        changes = sum_of_changes(patch.positions[mine], before, after, self.num_columns)
        if known is not None:
            return changes + known
        return state_sum(self.region, self.first_row, self.first_column) + changes

    def _local(self, patch: Patch) -> tuple[Tensor, Tensor, Tensor]:
        """The memory from the region's first element to its last, which elements of it are meant, and which
        of the patch these are."""
        num_rows, num_columns = self.region.shape
        stride = self.region.stride(0)
        span_len = (num_rows - 1) * stride + num_columns if num_rows and num_columns else 0
        span = self.region.as_strided((span_len,), (1,))
        rows = patch.positions // self.num_columns - self.first_row
        columns = patch.positions % self.num_columns - self.first_column
        mine = (rows >= 0) & (rows < num_rows) & (columns >= 0) & (columns < num_columns)
        return span, (rows * stride + columns)[mine], mine
