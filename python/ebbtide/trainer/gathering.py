"""A trainer's tensors by the bucket: sharded ones are gathered, a bucket at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from ebbtide.formats.announcement import ChangedTensor


@dataclass(frozen=True)
class ChangeHeader:
    """What a bucket of changes changes, and of which version."""

    changed: list[ChangedTensor]
    base_version: str


@dataclass(frozen=True)
class Bucket:
    """Whole tensors under their checkpoint names, the `index`-th of an update's buckets.

    Attributes:
        changes: of a bucket of changes, whose tensors are codes and values.
    """

    index: int
    tensors: list[tuple[str, torch.Tensor]]
    num_bytes: int
    changes: ChangeHeader | None = None

    def __str__(self) -> str:
        what = "changes of " if self.changes is not None else ""
        names = self.names
        told = f"{what}{len(names)} tensors, {names[0]} to {names[-1]}, {self.num_bytes} bytes"
        return f"bucket {self.index} ({told})"

    @property
    def names(self) -> list[str]:
        """The names of the tensors that it is about."""
        if self.changes is not None:
            return [each.name for each in self.changes.changed]
        return [name for name, _ in self.tensors]


def gathered_buckets(
    named_tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int
) -> Iterator[Bucket]:
    """Whole tensors by the bucket, gathered as the bucket is asked for.

    Raises:
        ValueError, TypeError: not pairs of a name and a dense tensor, or a name twice.
    """
    names: set[str] = set()
    pending: list[tuple[str, torch.Tensor]] = []
    pending_bytes = index = 0
    for item in named_tensors:
        name, tensor = _checked(item)
        if name in names:
            raise ValueError(f"{name}: the name was given twice")
        names.add(name)
        whole = _gathered(tensor)
        num_bytes = whole.numel() * whole.element_size()
        if pending and pending_bytes + num_bytes > bucket_bytes:
            yield Bucket(index, pending, pending_bytes)
            pending, pending_bytes, index = [], 0, index + 1
        pending.append((name, whole))
        pending_bytes += num_bytes
    if pending:
        yield Bucket(index, pending, pending_bytes)


def _checked(item: object) -> tuple[str, torch.Tensor]:
    match item:
        case (str(name), torch.Tensor() as tensor):
            if tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized:
                return name, tensor
            raise TypeError(
                f"{name}: expected a dense tensor with data, got {tensor.layout} on {tensor.device}"
            )
    raise TypeError(f"named_tensors: expected pairs (name, Tensor), got {type(item).__name__}")


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor; of a `DTensor`, by a collective of its mesh."""
    gather = getattr(tensor.detach(), "full_tensor", None)
    whole: torch.Tensor = tensor.detach() if gather is None else gather()
    return whole


def read_rest(buckets: Iterator[Bucket]) -> None:
    """Gather what is left, for the other ranks of the trainer that gather along."""
    for _ in buckets:
        pass
