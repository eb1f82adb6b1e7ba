"""A trainer's tensors by the bucket: sharded ones are gathered, a bucket at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from ebbtide.formats.announcement import ChangedTensor
from ebbtide.formats.bucket import grouped


@dataclass(frozen=True)
class ChangeHeader:
    """What a bucket of changes changes, and of which version."""

    changed: list[ChangedTensor]
    base_version: str


@dataclass(frozen=True)
class Bucket:
    """Whole tensors under their checkpoint names, the `index`-th of an update's buckets.

    Or codes and values of changes.
    """

    index: int
    tensors: list[tuple[str, torch.Tensor]]
    num_bytes: int
    changes: ChangeHeader | None = None

    def __str__(self) -> str:
        what, names = "" if self.changes is None else "changes of ", self.names
        listed = f"{what}{len(names)} tensors, {names[0]} to {names[-1]}, {self.num_bytes} bytes"
        return f"bucket {self.index} ({listed})"

    @property
    def names(self) -> list[str]:
        if self.changes is not None:
            return [each.name for each in self.changes.changed]
        return [name for name, _ in self.tensors]

    @property
    def fields(self) -> dict[str, Any]:
        """What a request says of its format."""
        if self.changes is None:
            return {}
        changed = msgspec.to_builtins(self.changes.changed)
        return {"load_format": "sparse", "changed": changed, "base_version": self.changes.base_version}


def gathered_buckets(
    named_tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int
) -> Iterator[Bucket]:
    """Whole tensors by the bucket, gathered as the bucket is asked for.

    ValueError, TypeError: not pairs of a name and a dense tensor, or a name twice.
    """
    for index, tensors in enumerate(grouped(_gathered(named_tensors), bucket_bytes)):
        yield Bucket(index, tensors, sum(tensor.nbytes for _, tensor in tensors))


def _gathered(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The whole tensors; a `DTensor` becomes one by a collective of its mesh."""
    names: set[str] = set()
    for item in named_tensors:
        name, tensor = _checked(item)
        if name in names:
            raise ValueError(f"{name}: the name was given twice")
        names.add(name)
        gather = getattr(tensor.detach(), "full_tensor", None)
        yield name, tensor.detach() if gather is None else gather()


def _checked(item: object) -> tuple[str, torch.Tensor]:
    match item:
        case (str(name), torch.Tensor() as tensor):
            if tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized:
                return name, tensor
            raise TypeError(
                f"{name}: expected a dense tensor with data, got {tensor.layout} on {tensor.device}"
            )
    raise TypeError(f"named_tensors: expected pairs (name, Tensor), got {type(item).__name__}")


def read_rest(buckets: Iterator[Bucket]) -> None:
    """Gather what is left, for the other ranks of the trainer that gather along."""
    for _ in buckets:
        pass
