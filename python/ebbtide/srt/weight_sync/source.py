"""What every weight source offers: the headers of its tensors first, then the tensors one by one."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from ebbtide.srt.config import ParallelConfig
from ebbtide.srt.stored_tensor import StoredTensor

ONE_RANK: Final = ParallelConfig()


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """Name, shape and dtype of a tensor that is about to arrive: enough to accept or refuse it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class WeightSource(Protocol):
    """A set of named tensors on their way into the engine.

    Everything that can be wrong with the request is found when the source is opened (`RequestRejected`,
    status 400), so that a refusal comes before the first byte is written. Close it when the tensors have been
    copied; do not keep tensors that it yielded: they may be views of memory that belongs to the sender.
    """

    @property
    def entries(self) -> Sequence[TensorHeader]:
        """What iteration will yield, in that order; known before any data is read."""
        ...

    @property
    def direct(self) -> bool:
        """Whether names and shapes are the engine's own (fused, sharded) and not those of a checkpoint."""
        ...

    def open(self) -> Iterator[None]:
        """Bring the tensors within reach, in steps between which other things may go on. Run it to its end.

        Raises:
            RequestRejected: they cannot be had; nothing has been written then.
        """
        ...

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor | StoredTensor]]:
        """Yields (name, tensor). May be repeated until the source is closed.

        Raises:
            RequestRejected: what is left of them cannot be read any more.
        """
        ...

    def drop(self) -> Iterator[None]:
        """Let go of memory on a device, in steps, once every copy from it has run; then only `close`."""
        ...

    def close(self) -> None:
        """Drops every reference to the sender's memory. Idempotent."""
        ...
