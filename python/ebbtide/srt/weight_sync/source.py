"""What every weight source offers: the headers of its tensors first, then the tensors one by one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch

from ebbtide.srt.config import ParallelConfig
from ebbtide.srt.errors import EngineError
from ebbtide.srt.stored_tensor import StoredTensor
from ebbtide.srt.weight_sync.payload.borrowed_memory import BorrowedMemory

ONE_RANK: Final = ParallelConfig()

NamedTensor: TypeAlias = tuple[str, torch.Tensor | StoredTensor]


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """Name, shape and dtype of a tensor that is about to arrive: enough to accept or refuse it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class WeightSource:
    """A set of named tensors on their way into the engine.

    Everything that can be wrong with a request is found when its source is made (`RequestRejected`, status
    400), so that a refusal comes before the first byte is written. Close it when the tensors are copied, and
    do not keep tensors that it yielded: they may be views of memory that belongs to the sender.

    Args:
        read: makes the tensors of `entries`, in that order; called for each iteration.
        memory: of the sender, in which they lie.

    Attributes:
        entries: what iteration will yield; known before any data is read.
        direct: whether names and shapes are the engine's own (fused, sharded) and not those of a checkpoint.
        is_sent: whether somebody has yet to send the tensors, see `BroadcastSource`.
        base_version: of the weights that it changes; None: it says nothing of that.
    """

    is_sent = False
    base_version: str | None = None

    def __init__(
        self,
        entries: Sequence[TensorHeader],
        read: Callable[[], Iterable[NamedTensor]],
        *,
        direct: bool = False,
        memory: BorrowedMemory | None = None,
    ) -> None:
        self.entries = entries
        self.direct = direct
        self._read: Callable[[], Iterable[NamedTensor]] | None = read
        self._memory = memory

    @property
    def is_near(self) -> bool:
        """Whether all of it lies in memory that this rank's device reads at its own bandwidth."""
        return self._memory is not None and self._memory.is_on_device

    def open(self) -> Iterator[int]:
        """Bring the tensors within reach; yields the bytes of each piece of memory. Run it to its end.

        Raises:
            RequestRejected: they cannot be had; nothing has been written then.
        """
        if self._memory is not None:
            yield from self._memory.open()

    def arrived(self) -> bool:
        """Whether everything that others send is here; the first call begins to receive it.

        Raises:
            RequestRejected: 400, it will not come.
        """
        return True

    def abandon(self) -> bool:
        """Receive no more of it; whether nothing is written to destinations any more."""
        return True

    def __iter__(self) -> Iterator[NamedTensor]:
        """Yields (name, tensor). May be repeated until the source is closed.

        Raises:
            RequestRejected: what is left of them cannot be read any more.
        """
        if self._read is None:
            raise EngineError("the weight source is closed")
        return iter(self._read())

    def release(self) -> Iterator[int]:
        """Every copy has run: give device memory back, piece by piece. Only `close` may follow."""
        self._read = None
        if self._memory is not None:
            yield from self._memory.release()

    def close(self) -> None:
        """Give everything back that is still held. Idempotent."""
        self._read = None
        if self._memory is not None:
            self._memory.close()
