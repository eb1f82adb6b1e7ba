"""The memory behind one payload: a sender's, which is opened, read, and given back once."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch

from ebbtide.formats.shared_memory import SharedBlock
from ebbtide.formats.stored_tensor import StoredTensor
from ebbtide.formats.tensor_refs import AnyStorageRef, CudaStorageRef, StorageRef, TensorRef
from ebbtide.srt.errors import EngineError, RequestRejected
from ebbtide.srt.weight_sync.cuda_memory import Counters, CudaIpc, Mapping, check_extent, told
from ebbtide.srt.weight_sync.kept_memory import KeptMemory, KeptPayload


class BorrowedMemory:
    """Shared memory, held open by block, and device memory, each allocation of which is mapped once.

    `note` takes down the references as they are decoded. `want` then checks those that are to be read; `open`
    maps device memory, which takes long enough to be done in steps. However it goes on, `close` gives every
    reference back that was noted.

    Args:
        cuda: for the device that the engine runs on; None where that is the CPU.
        reader, num_readers: of all ranks that were sent the same references, which one this is. The first one
            takes the references over. CUDA memory is for a single reader: the others refuse it, and the
            first one too, so that all of them do the same.
        is_kept: the sender keeps device memory by itself, and sends the same references again and again: the
            first to come is given back.
    """

    def __init__(
        self, cuda: CudaIpc | None = None, reader: int = 0, num_readers: int = 1, *, is_kept: bool = False
    ) -> None:
        self._cuda = cuda
        self._owns_references = reader == 0
        self._may_map = num_readers == 1
        self._is_kept = is_kept
        self._cost = 1
        self._noted: list[AnyStorageRef] = []
        self._wanted: dict[CudaStorageRef, None] = {}
        self._blocks: dict[bytes, SharedBlock] = {}
        self._mapped: dict[object, Mapping] = {}
        # Where mappings end, by their beginnings; see `check_extent`.
        self._ends: dict[int, int] = {}
        self._opened: dict[object, list[CudaStorageRef]] = {}
        self._counters = Counters()
        self._given_back: set[CudaStorageRef] = set()
        self._awaited: set[CudaStorageRef] = set()
        self._stays_in: tuple[KeptMemory, KeptPayload] | None = None

    def stay_in(self, keeper: KeptMemory, payload: KeptPayload) -> None:
        """Keep what is mapped with this payload, and use what it has mapped; it is in use until `close`."""
        self._stays_in = keeper, payload
        self._mapped, self._ends = payload.mapped, payload.ends

    @property
    def notes(self) -> dict[object, Any] | None:
        """See `KeptPayload`; None where the memory does not stay."""
        return None if self._stays_in is None else self._stays_in[1].notes

    def note(self, ref: AnyStorageRef) -> None:
        """Take down a reference that the payload makes."""
        self._noted.append(ref)

    @property
    def lent_by_device(self) -> list[CudaStorageRef]:
        """The references to memory of devices that were noted."""
        return [ref for ref in self._noted if isinstance(ref, CudaStorageRef)]

    def want(self, storage: AnyStorageRef | None) -> None:
        """Check the memory of tensors.

        Raises:
            RequestRejected: it is not there, or out of reach of this engine's device.
        """
        match storage:
            case StorageRef():
                self._block(storage)
            case CudaStorageRef():
                self._check_reach(storage)
                self._wanted[storage] = None

    @property
    def cost(self) -> int | None:
        """How many times as long as out of this device's memory all of it takes to be read, at most.

        None: some of it is on no device.
        """
        is_on_device = bool(self._wanted) and all(isinstance(ref, CudaStorageRef) for ref in self._noted)
        return self._cost if is_on_device else None

    def open(self) -> Iterator[int]:
        """Map the device memory of the tensors that `want` was given; yields the bytes of each reference.

        Raises:
            RequestRejected: the sender has ended, or the memory is not what the payload says.
        """
        looked_at: set[tuple[bytes, int]] = set()
        for ref in self._wanted:
            assert self._cuda is not None
            counter = ref.counter_file, ref.counter_index
            if counter not in looked_at and not self._is_kept and self._counters.add(ref, 0) == 0:
                raise RequestRejected(f"{told(ref)} was given back before: serialize the tensors anew")
            looked_at.add(counter)
            key = self._cuda.key(ref)
            if key not in self._mapped:
                self._mapped[key] = self._cuda.open(ref)
            self._opened.setdefault(key, []).append(ref)
            check_extent(self._cuda, self._mapped[key].address, ref, self._ends)
            yield ref.num_bytes

    def tensor(self, ref: TensorRef) -> torch.Tensor | StoredTensor:
        """The sender's tensor: a view of device memory, for work launched on torch's current stream; or what
        is read from host memory, where the sender may cut short what it has shared."""
        match ref.storage:
            case None:
                return torch.empty(ref.shape, dtype=ref.dtype)
            case StorageRef():
                offset = ref.offset * ref.dtype.itemsize
                return StoredTensor(self._block(ref.storage), offset, ref.shape, ref.stride, ref.dtype)
            case CudaStorageRef():
                mapping = self._awaited_mapping(ref.storage)
                storage = mapping.storage(ref.storage.offset_bytes, ref.storage.num_bytes)
        empty = torch.empty(0, dtype=ref.dtype, device=storage.device)
        return empty.set_(storage, ref.offset, ref.shape, ref.stride)

    def address(self, storage: AnyStorageRef | None) -> int:
        """Where device memory is mapped that is open, for work launched on torch's current stream; 0 for what
        is not wanted."""
        if not isinstance(storage, CudaStorageRef) or storage not in self._wanted:
            return 0
        return self._awaited_mapping(storage).address + storage.offset_bytes

    def release(self) -> Iterator[int]:
        """Give the device memory back, once all that reads it has run; yields the bytes of each mapping."""
        if self._stays_in is not None:
            self._mapped = {}
        while self._mapped:
            key, mapping = self._mapped.popitem()
            mapping.close()
            refs = self._opened.pop(key, [])
            self._give_back(refs)
            yield sum(ref.num_bytes for ref in refs)
        self._give_back_opened()

    def detach(self) -> Generator[int, None, None]:
        """Let the sender use its device memory again; it stays mapped until what this returns has run.

        That yields the bytes of each mapping. All that reads them has run.
        """
        opened = dict(self._opened)
        mapped, self._mapped = ({} if self._stays_in is not None else self._mapped), {}
        self._give_back_opened()

        def unmap() -> Generator[int, None, None]:
            while mapped:
                key, mapping = mapped.popitem()
                mapping.close()
                yield sum(ref.num_bytes for ref in opened.get(key, ()))

        return unmap()

    def close(self) -> None:
        """Give everything back, opened or not. Idempotent."""
        noted, self._noted = self._noted, []
        for _ in self.release():
            pass
        self._give_back([ref for ref in noted if isinstance(ref, CudaStorageRef)])
        self._counters.close()
        self._close_blocks([ref for ref in noted if isinstance(ref, StorageRef)])
        if self._stays_in is not None:
            (keeper, payload), self._stays_in = self._stays_in, None
            keeper.give_back(payload)

    def _block(self, ref: StorageRef) -> SharedBlock:
        block = self._blocks.get(ref.handle)
        if block is None:
            block = self._blocks[ref.handle] = SharedBlock(ref.handle, ref.num_bytes)
        if block.num_bytes != ref.num_bytes:
            raise RequestRejected(
                f"the payload gives {block} two sizes: {block.num_bytes} and {ref.num_bytes} bytes"
            )
        block.references.add(ref)
        return block

    def _check_reach(self, ref: CudaStorageRef) -> None:
        """Refuse what this engine's device does not reach, without opening it."""
        if self._cuda is None:
            raise RequestRejected(
                "the payload refers to memory of a CUDA device, and this engine runs on the CPU: "
                "send tensor.cpu()"
            )
        cost = self._cuda.cost(ref.device)
        if cost is None:
            raise RequestRejected(
                f"the payload refers to memory of CUDA device {ref.device}, this engine runs on device "
                f"{self._cuda.index}, UUID {self._cuda.uuid}, and does not reach it"
            )
        if not self._may_map:
            raise RequestRejected("a CUDA tensor can be opened by one rank only: send one entry per rank")
        self._cost = max(self._cost, cost)

    def _mapping(self, ref: CudaStorageRef) -> Mapping:
        assert self._cuda is not None
        mapping = self._mapped.get(self._cuda.key(ref))
        if mapping is None:
            raise EngineError(f"{told(ref)} is read before it was opened")
        return mapping

    def _awaited_mapping(self, ref: CudaStorageRef) -> Mapping:
        """What is launched from here on, on torch's current stream, runs after the sender's writes."""
        assert self._cuda is not None
        mapping = self._mapping(ref)
        if ref.event is not None and ref not in self._awaited:
            self._cuda.wait(ref.event)
            self._awaited.add(ref)
        return mapping

    def _give_back_opened(self) -> None:
        opened, self._opened = self._opened, {}
        self._give_back([ref for refs in opened.values() for ref in refs])

    def _give_back(self, refs: Sequence[CudaStorageRef]) -> None:
        if not self._owns_references:
            return
        # Thousands of allocations may be counted in one place.
        by_counter: dict[tuple[bytes, int], list[CudaStorageRef]] = {}
        for ref in refs:
            if ref not in self._given_back:
                self._given_back.add(ref)
                by_counter.setdefault((ref.counter_file, ref.counter_index), []).append(ref)
        for alike in by_counter.values():
            num_left = self._counters.add(alike[0], 0) if self._is_kept else len(alike)
            if num_left:
                self._counters.add(alike[0], -min(len(alike), num_left))

    def _close_blocks(self, noted: Sequence[StorageRef]) -> None:
        """Let go of the blocks, and drop the references, also those that travelled unread."""
        if self._owns_references:
            for ref in noted:
                # What cannot be opened holds nothing of the sender's.
                with suppress(RequestRejected):
                    self._block(ref)
        while self._blocks:
            _, block = self._blocks.popitem()
            if self._owns_references:
                block.drop()
            else:
                block.close()
