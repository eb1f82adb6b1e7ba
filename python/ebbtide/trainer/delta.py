"""What changed since the last update: the trainer's copy of what the engines serve, and buckets of changes.

Source: wire_vllm section 5.5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ebbtide.formats.announcement import ChangedTensor
from ebbtide.formats.delta import (
    MAX_ELEMENTS,
    as_hex,
    bits_of,
    encode_positions,
    matrix_shape,
    state_sum,
    sum_of_changes,
)
from ebbtide.trainer.gathering import Bucket, ChangeHeader


@dataclass
class _Copy:
    """A tensor as it was sent, and its checksum, int64 of no dimensions."""

    tensor: Tensor
    total: Tensor


@dataclass(frozen=True)
class _Change:
    """Which elements of a tensor have which values now, and what its checksum is then."""

    name: str
    copy: _Copy
    positions: Tensor
    values: Tensor
    total: Tensor

    def header(self, num_codes: int) -> ChangedTensor:
        shape, checksum = tuple(self.copy.tensor.shape), as_hex(int(self.total))
        return ChangedTensor(
            name=self.name,
            shape=shape,
            num_codes=num_codes,
            num_changed=len(self.values),
            checksum=checksum,
        )

    def carry_out(self) -> None:
        self.copy.tensor.view(-1)[self.positions] = self.values
        self.copy.total = self.total


class ServedWeights:
    """A copy of every tensor that the engines serve, each on the device that it was sent from.

    Attributes:
        version: that they serve it as; None: nothing is known of what they serve.
    """

    def __init__(self) -> None:
        self.version: str | None = None
        self._copies: dict[str, _Copy] = {}
        self._on_commit: list[Callable[[], None]] = []

    def changes(self, buckets: Iterable[Bucket]) -> Iterator[Bucket]:
        """What has to be sent of buckets of whole tensors: changes, or tensors of which there is no copy."""
        self._on_commit = []
        index = 0
        for bucket in buckets:
            for tensors, header in self._parts(bucket.tensors):
                num_bytes = sum(tensor.nbytes for _, tensor in tensors)
                yield Bucket(index, tensors, num_bytes, header)
                index += 1

    def commit(self, version: str) -> None:
        """The engines serve what was sent last."""
        for carry_out in self._on_commit:
            carry_out()
        self._on_commit = []
        self.version = version

    def forget(self) -> None:
        """What they serve is not known any more: all of the next update is sent."""
        self.version = None
        self._copies = {}
        self._on_commit = []

    def _parts(
        self, tensors: list[tuple[str, Tensor]]
    ) -> Iterator[tuple[list[tuple[str, Tensor]], ChangeHeader | None]]:
        whole: list[tuple[str, Tensor]] = []
        changed: dict[torch.dtype, list[_Change]] = {}
        for name, tensor in tensors:
            change = self._change(name, tensor)
            if change is None:
                whole.append((name, tensor))
                self._copy(name, tensor)
            elif len(change.values):
                changed.setdefault(tensor.dtype, []).append(change)
        if whole:
            yield whole, None
        for changes in changed.values():
            yield self._coded(changes)

    def _change(self, name: str, tensor: Tensor) -> _Change | None:
        """None where all of it has to be sent."""
        copy = self._copies.get(name)
        if copy is None or self.version is None or not 0 < tensor.numel() <= MAX_ELEMENTS:
            return None
        before = copy.tensor
        if (before.shape, before.dtype, before.device) != (tensor.shape, tensor.dtype, tensor.device):
            return None
        new, old = bits_of(tensor).reshape(-1), bits_of(before).view(-1)
        positions = (new != old).nonzero()[:, 0]
        # A code and a value for each take more than the tensor itself.
        if len(positions) * (1 + new.element_size()) >= tensor.nbytes:
            return None
        _, num_columns = matrix_shape(tuple(tensor.shape))
        moved = sum_of_changes(positions, old[positions], new[positions], num_columns)
        values = new[positions].view(tensor.dtype)
        return _Change(name, copy, positions.to(torch.int32), values, copy.total + moved)

    def _copy(self, name: str, tensor: Tensor) -> None:
        clone = tensor.detach().clone(memory_format=torch.contiguous_format)
        copy = _Copy(clone, state_sum(clone.view(*matrix_shape(tuple(clone.shape)))))
        self._on_commit.append(lambda: self._copies.update({name: copy}))

    def _coded(self, changes: list[_Change]) -> tuple[list[tuple[str, Tensor]], ChangeHeader]:
        assert self.version is not None, "without a version all is sent"
        codes, counts = encode_positions([change.positions for change in changes])
        values = torch.cat([change.values for change in changes])
        self._on_commit += [change.carry_out for change in changes]
        listed = [change.header(count) for change, count in zip(changes, counts, strict=True)]
        return [("codes", codes), ("values", values)], ChangeHeader(listed, self.version)
