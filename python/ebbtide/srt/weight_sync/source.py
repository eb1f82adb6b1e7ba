"""What every weight source offers: the headers of its tensors first, then the tensors one by one.

Where they lie in memory of the sender's, that is opened, read, and given back once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch

from ebbtide.srt.errors import EngineError
from ebbtide.srt.stored_tensor import StoredTensor
from ebbtide.srt.weight_sync.payload.borrowed_memory import BorrowedMemory
from ebbtide.srt.weight_sync.payload.bucket import Places, tensors_in
from ebbtide.srt.weight_sync.payload.tensor_refs import (
    TensorHeader,
    TensorRef,
)

NamedTensor: TypeAlias = tuple[str, torch.Tensor | StoredTensor]


class WeightSource:
    """A set of named tensors on their way into the engine.

    Everything that can be wrong with a request is found when its source is made (`RequestRejected`, status
    400), so that a refusal comes before the first byte is written. Close it when the tensors are copied, and
    do not keep tensors that it yielded: they may be views of memory that belongs to the sender.

    Args:
        read: makes the tensors of `entries`, in that order; called for each iteration.
        memory: of the sender, in which they lie; None: none that is to be opened or given back.
        is_on_device: whether they lie on this rank's device although there is no such memory.

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
        is_on_device: bool = False,
    ) -> None:
        self.entries = entries
        self._is_on_device = is_on_device
        self.direct = direct
        self._read: Callable[[], Iterable[NamedTensor]] | None = read
        self._memory = BorrowedMemory() if memory is None else memory

    @property
    def near_bytes(self) -> int | None:
        """How much it is, if all of it lies in memory that this rank's device reads: in bytes of its own.

        Bytes of another device's count as so many as take as long.
        """
        cost = 1 if self._is_on_device else self._memory.cost
        return None if cost is None else cost * sum(entry.num_bytes for entry in self.entries)

    @property
    def notes(self) -> dict[object, Any] | None:
        """What follows from its entries and from where its memory is, kept for the next one of the same; None
        where there may be no such."""
        return self._memory.notes

    def open(self) -> Iterator[int]:
        """Bring the tensors within reach; yields the bytes of each piece of memory. Run it to its end.

        Raises:
            RequestRejected: they cannot be had; nothing has been written then.
        """
        return self._memory.open()

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
        return self._memory.release()

    def detach(self) -> Generator[int, None, None]:
        """Every copy has run: the sender may use its memory again. Only `close` may follow. Idempotent.

        Returns what ends the mapping of device memory, piece by piece. Until it has run, the same memory is
        opened again for nothing; the driver gives it to others only then.
        """
        self._read = None
        return self._memory.detach()

    def close(self) -> None:
        """Give everything back that is still held. Idempotent."""
        self._read = None
        self._memory.close()


def borrowed_source(
    refs: Sequence[tuple[str, TensorRef]], memory: BorrowedMemory, *, direct: bool = False
) -> WeightSource:
    """The source of tensors that lie in a sender's memory, by name.

    Raises:
        RequestRejected: 400, some of it is not there, or out of reach.
    """
    for _, ref in refs:
        memory.want(ref)
    headers = [TensorHeader(name, ref.shape, ref.dtype) for name, ref in refs]
    # One by one, so that no tensor outlives the memory that it views.
    return WeightSource(
        headers, lambda: ((name, memory.tensor(ref)) for name, ref in refs), direct=direct, memory=memory
    )


def packed_source(flat: TensorRef, places: Places, memory: BorrowedMemory) -> WeightSource:
    """As `borrowed_source`, of tensors that lie in a flat one: see `tensors_in`."""
    memory.want(flat)
    headers = [header for header, _ in places]
    return WeightSource(headers, lambda: tensors_in(memory.tensor(flat), places), memory=memory)
