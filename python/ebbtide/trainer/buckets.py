"""Splits a trainer's tensors into buckets: whole tensors, or their changes since the last update.

Source of the format of changes: wire_vllm section 5.5.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from ebbtide.formats import ChangedTensor
from ebbtide.formats.bucket import grouped
from ebbtide.formats.delta import (
    MAX_ELEMENTS,
    as_hex,
    bits_of,
    encode_positions,
    matrix_shape,
    state_sum,
    sum_of_changes,
)
from ebbtide.trainer.payload_encoding import checked_pair


@dataclass(frozen=True)
class Bucket:
    """Whole tensors with their checkpoint names, or the changed elements of tensors.

    Attributes:
        index: number among the buckets of an update.
        tensors: (name, tensor) pairs; of changes two: "codes" (positions) and "values".
        changed: the changed tensors; None: `tensors` are whole.
        base_version: the version that changes apply to; None: `tensors` are whole.
    """

    index: int
    tensors: list[tuple[str, Tensor]]
    changed: Sequence[ChangedTensor] | None = None
    base_version: str | None = None

    def __str__(self) -> str:
        what, names = "" if self.changed is None else "changes of ", self.names
        listed = f"{what}{len(names)} tensors, {names[0]} to {names[-1]}, {self.num_bytes} bytes"
        return f"bucket {self.index} ({listed})"

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for _, tensor in self.tensors)

    @property
    def names(self) -> list[str]:
        if self.changed is not None:
            return [each.name for each in self.changed]
        return [name for name, _ in self.tensors]

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of the request that describe the bucket's format."""
        if self.changed is None:
            return {}
        changed = msgspec.to_builtins(self.changed)
        return {"load_format": "sparse", "changed": changed, "base_version": self.base_version}


def gathered_buckets(named_tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[Bucket]:
    """Yield whole tensors in buckets; sharded tensors are gathered when their bucket is read.

    Args:
        bucket_bytes: the most bytes of a bucket; a larger tensor is a bucket of its own.

    Raises:
        ValueError: a repeated name, or `bucket_bytes` is not positive.
        TypeError: an item is not a pair of a name and a dense tensor.
    """
    return itertools.starmap(Bucket, enumerate(grouped(_gathered(named_tensors), bucket_bytes)))


def _gathered(named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors. A `DTensor` is gathered by a collective of its mesh."""
    names: set[str] = set()
    for item in named_tensors:
        name, tensor = checked_pair(item)
        if name in names:
            raise ValueError(f"{name}: the name was given twice")
        names.add(name)
        gather = getattr(tensor.detach(), "full_tensor", None)
        yield name, tensor.detach() if gather is None else gather()


def read_rest(buckets: Iterator[Bucket]) -> None:
    """Read the remaining buckets, since other ranks of the trainer may be gathering along."""
    for _ in buckets:
        pass


@dataclass
class _Copy:
    """A copy of a tensor as it was sent, and its checksum: int64, shape []."""

    tensor: Tensor
    total: Tensor


@dataclass(frozen=True)
class _Change:
    """Changed elements of a tensor.

    Attributes:
        copy: the tensor as it was sent last.
        positions: flat positions, int32 [changes], ascending.
        values: the new values, [changes].
        total: checksum of the whole new tensor, int64 [].
    """

    name: str
    copy: _Copy
    positions: Tensor
    values: Tensor
    total: Tensor

    def header(self, num_codes: int) -> ChangedTensor:
        return ChangedTensor(
            name=self.name,
            shape=tuple(self.copy.tensor.shape),
            num_codes=num_codes,
            num_changed=len(self.values),
            checksum=as_hex(int(self.total)),
        )

    def carry_out(self) -> None:
        self.copy.tensor.view(-1)[self.positions] = self.values
        self.copy.total = self.total


class ServedWeights:
    """Copies of all tensors that the engines serve, each on the device that it was sent from.

    Attributes:
        version: the version that the engines serve; None: not known.
    """

    def __init__(self) -> None:
        self.version: str | None = None
        self._copies: dict[str, _Copy] = {}
        self._on_commit: list[Callable[[], None]] = []

    def changes(self, buckets: Iterable[Bucket]) -> Iterator[Bucket]:
        """Turn buckets of whole tensors into what must be sent: changes, or whole tensors without a copy."""
        self._on_commit = []
        parts = itertools.chain.from_iterable(self._parts(bucket.tensors) for bucket in buckets)
        return (Bucket(index, *part) for index, part in enumerate(parts))

    def commit(self, version: str) -> None:
        """Update the copies: the engines now serve what was sent last."""
        for carry_out in self._on_commit:
            carry_out()
        self._on_commit = []
        self.version = version

    def forget(self) -> None:
        """Drop all copies, so that the next update is sent whole."""
        self.version = None
        self._copies = {}
        self._on_commit = []

    def _parts(self, tensors: list[tuple[str, Tensor]]) -> Iterator[tuple[Any, ...]]:
        """Yield the arguments of each `Bucket` after `index`: whole tensors, then changes by dtype."""
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
            yield (whole,)
        for changes in changed.values():
            yield self._coded(changes)

    def _change(self, name: str, tensor: Tensor) -> _Change | None:
        """The change of a tensor since it was sent; None: it must be sent whole."""
        copy = self._copies.get(name)
        if copy is None or self.version is None or not 0 < tensor.numel() <= MAX_ELEMENTS:
            return None
        before = copy.tensor
        if (before.shape, before.dtype, before.device) != (tensor.shape, tensor.dtype, tensor.device):
            return None
        new, old = bits_of(tensor).reshape(-1), bits_of(before).view(-1)
        positions = (new != old).nonzero()[:, 0]
        # A change takes at least one byte of code and the value: this many take more than the whole tensor.
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

    def _coded(self, changes: list[_Change]) -> tuple[Any, ...]:
        codes, counts = encode_positions([change.positions for change in changes])
        values = torch.cat([change.values for change in changes])
        self._on_commit += [change.carry_out for change in changes]
        listed = [change.header(count) for change, count in zip(changes, counts, strict=True)]
        return [("codes", codes), ("values", values)], listed, self.version
