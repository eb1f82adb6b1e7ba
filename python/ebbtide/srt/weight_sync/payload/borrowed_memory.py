"""All memory that one payload refers to, on the host and on the device: opened, read, and given back once."""

from collections.abc import Iterator

import torch

from ebbtide.srt.stored_tensor import StoredTensor
from ebbtide.srt.weight_sync.payload.allowed_globals import (
    AnyStorageRef,
    CudaStorageRef,
    StorageRef,
    TensorRef,
)
from ebbtide.srt.weight_sync.payload.cuda_memory import CudaBlocks, CudaIpc
from ebbtide.srt.weight_sync.payload.shared_memory import SharedBlocks


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
    """

    def __init__(self, cuda: CudaIpc | None = None, reader: int = 0, num_readers: int = 1) -> None:
        self._noted: list[AnyStorageRef] = []
        self._wanted: list[CudaStorageRef] = []
        self._blocks = SharedBlocks(owns_references=reader == 0)
        self._cuda = CudaBlocks(cuda, owns_references=reader == 0, may_open=num_readers == 1)

    def note(self, ref: AnyStorageRef) -> None:
        """Take down a reference that the payload makes."""
        self._noted.append(ref)

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

    def close(self) -> None:
        """Give everything back, opened or not. Idempotent."""
        noted, self._noted = self._noted, []
        self._cuda.close([ref for ref in noted if isinstance(ref, CudaStorageRef)])
        self._blocks.close([ref for ref in noted if isinstance(ref, StorageRef)])
