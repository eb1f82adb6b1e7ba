"""What every weight source offers: the headers of its tensors first, then the tensors one by one.

Where they lie in memory of the sender's, that is opened, read, and given back once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeAlias

import torch

from ebbtide.srt.config import ParallelConfig
from ebbtide.srt.errors import EngineError
from ebbtide.srt.stored_tensor import StoredTensor
from ebbtide.srt.weight_sync.payload.bucket import Places, tensors_in
from ebbtide.srt.weight_sync.payload.cuda_memory import CudaBlocks, CudaIpc
from ebbtide.srt.weight_sync.payload.kept_memory import KeptMemory, KeptPayload
from ebbtide.srt.weight_sync.payload.shared_memory import SharedBlocks
from ebbtide.srt.weight_sync.payload.tensor_refs import (
    AnyStorageRef,
    CudaStorageRef,
    StorageRef,
    TensorHeader,
    TensorRef,
)

ONE_RANK: Final = ParallelConfig()

NamedTensor: TypeAlias = tuple[str, torch.Tensor | StoredTensor]


class BorrowedMemory:
    """The memory behind one payload.

    `note` takes down the references as they are decoded. `want` then checks those that are to be read; `open`
    maps device memory, which takes long enough to be done in steps. However it goes on, `close` gives every
    reference back that was noted.

    Args:
        cuda: for the device that the engine runs on; None where that is the CPU.
        reader, num_readers: of all ranks that were sent the same references, which one this is. The first one
            takes the references over. CUDA memory is for a single reader: the others refuse it, and the
            first one too, so that all of them do the same.
        is_kept: see `CudaBlocks`.
    """

    def __init__(
        self, cuda: CudaIpc | None = None, reader: int = 0, num_readers: int = 1, *, is_kept: bool = False
    ) -> None:
        self._noted: list[AnyStorageRef] = []
        self._wanted: list[CudaStorageRef] = []
        self._blocks = SharedBlocks(owns_references=reader == 0)
        self._kept: tuple[KeptMemory, KeptPayload] | None = None
        self._cuda = CudaBlocks(cuda, reader == 0, num_readers == 1, is_kept)

    def stay_in(self, keeper: KeptMemory, payload: KeptPayload) -> None:
        """What it maps stays mapped, and what is mapped already is used; until `close` it is in use."""
        self._kept = keeper, payload
        self._cuda.stay_in(payload.mapped)

    @property
    def notes(self) -> dict[object, Any] | None:
        """See `KeptPayload`; None where the memory does not stay."""
        return None if self._kept is None else self._kept[1].notes

    def note(self, ref: AnyStorageRef) -> None:
        """Take down a reference that the payload makes."""
        self._noted.append(ref)

    @property
    def lent_by_device(self) -> list[CudaStorageRef]:
        """Of what was noted, the memory of devices."""
        return [ref for ref in self._noted if isinstance(ref, CudaStorageRef)]

    def want(self, ref: TensorRef) -> None:
        """Check a tensor's memory.

        Raises:
            RequestRejected: it is not there, or out of reach of this engine's device.
        """
        match ref.storage:
            case StorageRef():
                self._blocks.block(ref.storage)
            case CudaStorageRef():
                self._cuda.check(ref.storage)
                self._wanted.append(ref.storage)

    @property
    def is_on_device(self) -> bool:
        """Whether all of it is on a device."""
        return bool(self._wanted) and all(isinstance(ref, CudaStorageRef) for ref in self._noted)

    def open(self) -> Iterator[int]:
        """Map the device memory of the tensors that `want` was given; yields the bytes of each.

        Raises:
            RequestRejected: it cannot be opened.
        """
        return self._cuda.open(self._wanted) if self._wanted else iter(())

    def tensor(self, ref: TensorRef) -> torch.Tensor | StoredTensor:
        """The sender's tensor: a view of device memory, for work launched on torch's current stream; or what
        is read from host memory, where the sender may cut short what it has shared."""
        match ref.storage:
            case None:
                return torch.empty(ref.shape, dtype=ref.dtype)
            case StorageRef():
                block = self._blocks.block(ref.storage)
                return StoredTensor(block, ref.offset * ref.dtype.itemsize, ref.shape, ref.stride, ref.dtype)
            case CudaStorageRef():
                storage = self._cuda.storage(ref.storage)
        empty = torch.empty(0, dtype=ref.dtype, device=storage.device)
        return empty.set_(storage, ref.offset, ref.shape, ref.stride)

    def release(self) -> Iterator[int]:
        """Give the device memory back, once all that reads it has run; yields the bytes of each."""
        return self._cuda.release()

    def detach(self) -> Callable[[], None]:
        """Let the sender use its device memory again; it stays mapped until what this returns is called."""
        return self._cuda.detach()

    def close(self) -> None:
        """Give everything back, opened or not. Idempotent."""
        noted, self._noted = self._noted, []
        self._cuda.close([ref for ref in noted if isinstance(ref, CudaStorageRef)])
        self._blocks.close([ref for ref in noted if isinstance(ref, StorageRef)])
        if self._kept is not None:
            keeper, payload = self._kept
            self._kept = None
            keeper.give_back(payload)


class WeightSource:
    """A set of named tensors on their way into the engine.

    Everything that can be wrong with a request is found when its source is made (`RequestRejected`, status
    400), so that a refusal comes before the first byte is written. Close it when the tensors are copied, and
    do not keep tensors that it yielded: they may be views of memory that belongs to the sender.

    Args:
        read: makes the tensors of `entries`, in that order; called for each iteration.
        memory: of the sender, in which they lie.
        is_on_device: where there is none, whether they lie on this rank's device, not to be opened.

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
        self._memory = memory

    @property
    def near_bytes(self) -> int | None:
        """How much it is, if all of it lies in memory that this rank's device reads at its own bandwidth."""
        is_near = self._memory.is_on_device if self._memory is not None else self._is_on_device
        if not is_near:
            return None
        return sum(entry.num_bytes for entry in self.entries)

    @property
    def notes(self) -> dict[object, Any] | None:
        """What follows from its entries and from where its memory is, kept for the next one of the same; None
        where there may be no such."""
        return None if self._memory is None else self._memory.notes

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

    def detach(self) -> Callable[[], None]:
        """Every copy has run: the sender may use its memory again. Only `close` may follow.

        Returns what ends the mapping of device memory. Until it is called, the same memory is opened again
        for nothing; the driver gives it to others only then.
        """
        self._read = None
        return (lambda: None) if self._memory is None else self._memory.detach()

    def close(self) -> None:
        """Give everything back that is still held. Idempotent."""
        self._read = None
        if self._memory is not None:
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
