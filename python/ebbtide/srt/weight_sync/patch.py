"""Patches: the common form of changes to a tensor, and their places in this rank's weights.

Source: wire_vllm section 5.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ebbtide.formats.delta import bits_of, matrix_shape, state_sum, sum_of_changes
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.memory_saver.arena import Arena
from ebbtide.srt.model_executor.host_copies import upload
from ebbtide.srt.model_executor.weight_copies import Destination
from ebbtide.srt.model_executor.weight_store import WeightStore
from ebbtide.srt.weight_sync.published import checksum_of

# `MatrixPart.numbers` of a tensor that this rank does not have.
_NOWHERE: Final = [0] * 8


class PatchKind(Enum):
    """How a value changes an element. SET: it replaces it. XOR: the bits of both are combined by exclusive
    or.

    BYTES: positions and values are bytes, which replace bytes of the tensor.
    """

    SET = "set"
    XOR = "xor"
    BYTES = "bytes"


@dataclass(frozen=True)
class Patch:
    """Changes of some elements of a tensor.

    Attributes:
        shape: of the whole tensor.
        positions: int64, flat, ascending and unique.
        values: one for each position.
        digest: (name of a checksum in `published`, its value over the bytes of the whole patched tensor);
            None: it is not checked.
    """

    name: str
    shape: tuple[int, ...]
    positions: Tensor
    values: Tensor
    kind: PatchKind = PatchKind.SET
    digest: tuple[str, str] | None = None

    def checked(self) -> Patch:
        """The same with sorted positions. RequestRejected: one is given twice, outside, or without value."""
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
class MatrixPart:
    """A rank's part of a tensor, seen as part of a matrix.

    Attributes:
        region: [rows, columns]; a row is contiguous.
        num_columns: of the whole matrix.
        first_row, first_column: where the part begins in the matrix.
        counts: whether no lower rank holds the same part, so that it counts for checksums.
        is_whole: whether the part is the whole tensor.
    """

    region: Tensor
    num_columns: int
    first_row: int
    first_column: int
    counts: bool
    is_whole: bool = True

    @classmethod
    def of(cls, destination: Destination, shape: tuple[int, ...]) -> MatrixPart:
        """The part of a tensor of this shape. Ranks divide its first dimension or its last."""
        region, part = destination.region, destination.part
        _, num_columns = matrix_shape(shape)
        matrix = region.reshape(1, -1) if region.dim() < 2 else region.flatten(0, -2)
        assert matrix.untyped_storage()._cdata == region.untyped_storage()._cdata, "a place is a view"
        if part is None:
            return cls(matrix, num_columns, 0, 0, destination.is_first)
        if part.dim == len(shape) - 1:
            return cls(matrix, num_columns, 0, part.start, destination.is_first, is_whole=False)
        assert part.dim == 0, "ranks divide the first dimension or the last"
        rows_of_one = torch.Size(shape[1:-1]).numel()
        first_row = part.start * rows_of_one
        return cls(matrix, num_columns, first_row, 0, destination.is_first, is_whole=False)

    def numbers(self, base: Tensor) -> list[int]:
        """The part as numbers for a kernel: where it begins, in elements of `base`, and its sizes."""
        bits = bits_of(self.region)
        num_rows, num_columns = bits.shape
        return [
            *(int(bits.storage_offset() - base.storage_offset()), bits.stride(0), self.num_columns),
            *(self.first_row, num_rows, self.first_column, num_columns, int(self.counts)),
        ]

    @classmethod
    def for_patch(cls, patch: Patch, destination: Destination | None) -> MatrixPart | None:
        """Where a patch goes; None: the tensor is ignored."""
        if destination is None:
            return None
        place = cls.of(destination, patch.shape)
        return place._bytewise() if patch.kind is PatchKind.BYTES else place

    def _bytewise(self) -> MatrixPart:
        size = self.region.element_size()
        return replace(
            self,
            region=self.region.view(torch.uint8),
            num_columns=self.num_columns * size,
            first_column=self.first_column * size,
        )

    def check(self, patch: Patch) -> None:
        """Check a patch's digest over the patched tensor, unless ranks divide the tensor."""
        if patch.digest is None or not self.is_whole:
            return
        region = self.region.to("cpu", copy=True).contiguous()
        on_host = replace(patch, positions=patch.positions.cpu(), values=patch.values.cpu())
        replace(self, region=region).apply(on_host)
        kind, expected = patch.digest
        found = checksum_of(region.view(-1).view(torch.uint8).numpy().data, kind)
        if found != expected:
            raise RequestRejected(
                f"nothing was written: {patch.name}: its {kind} would be {found}, the trainer's is "
                f"{expected}: what serves is not what was published, or the files are damaged"
            )

    def apply(self, patch: Patch) -> Tensor:
        """Write this rank's elements of a patch; returns the values written."""
        span, local, mine = self._local(patch)
        values = patch.values[mine]
        if patch.kind is PatchKind.XOR:
            bits = bits_of(span)
            values = (bits[local] ^ bits_of(values)).view(span.dtype)
        values = values.to(span.dtype)
        span.index_copy_(0, local, values)
        return values

    def sum_after(self, patch: Patch, known: int | None = None) -> Tensor:
        """This rank's share of the tensor's checksum after the patch. `known`: its share before."""
        if not self.counts:
            return torch.zeros((), dtype=torch.int64, device=self.region.device)
        span, local, mine = self._local(patch)
        before, values = bits_of(span)[local], bits_of(patch.values[mine])
        after = before ^ values if patch.kind is PatchKind.XOR else values
        changes = sum_of_changes(patch.positions[mine], before, after, self.num_columns)
        if known is not None:
            return changes + known
        return state_sum(self.region, self.first_row, self.first_column) + changes

    def _local(self, patch: Patch) -> tuple[Tensor, Tensor, Tensor]:
        """The memory from the region's first to its last element, the indices in it of this rank's elements
        of a
        patch, and a mask of these in the patch."""
        num_rows, num_columns = self.region.shape
        stride = self.region.stride(0)
        span_len = (num_rows - 1) * stride + num_columns if num_rows and num_columns else 0
        span = self.region.as_strided((span_len,), (1,))
        rows = patch.positions // self.num_columns - self.first_row
        columns = patch.positions % self.num_columns - self.first_column
        mine = (rows >= 0) & (rows < num_rows) & (columns >= 0) & (columns < num_columns)
        return span, (rows * stride + columns)[mine], mine


@dataclass(frozen=True)
class MatrixParts:
    """The `MatrixPart.numbers` of T tensors, on the host and on the device."""

    rows_T8: NDArray[np.int64]
    on_device_T8: Tensor

    @classmethod
    def of(cls, places: Sequence[list[int] | None], device: torch.device) -> Self:
        rows = [_NOWHERE if place is None else place for place in places]
        rows_T8 = np.array(rows, dtype=np.int64).reshape(-1, len(_NOWHERE))
        return cls(rows_T8, upload(rows_T8, device))


@dataclass
class PatchedWeights:
    """The parameters of a rank that deltas are written to: live, or those of a staged copy."""

    _store: WeightStore
    _shadow: Arena | None
    places_known: MatrixParts | None = None

    def destination(self, name: str) -> Destination | None:
        return self._store.destination(name, self._shadow)

    def table(self, names: Sequence[str]) -> MatrixParts:
        """The places of these tensors, in elements of `base`; the same in every copy of the weights."""
        if self.places_known is None:
            self.places_known = MatrixParts.of([self._numbers(name) for name in names], self._store.device)
        return self.places_known

    def _numbers(self, name: str) -> list[int] | None:
        destination = self._store.destination(name, None)
        if destination is None:
            return None
        live = self._store.arena.view(0, (0,), destination.region.dtype)
        return MatrixPart.of(destination, self._store.shape(name)).numbers(live)

    def base(self, dtype: torch.dtype) -> Tensor:
        """All memory of the parameters, viewed as this dtype."""
        memory = self._store.arena if self._shadow is None else self._shadow
        return memory.view(0, (memory.num_bytes // dtype.itemsize,), dtype)
