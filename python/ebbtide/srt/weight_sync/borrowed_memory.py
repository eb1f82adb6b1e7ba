"""A sender's memory behind a payload: it is opened, read, and given back once.

GPU memory stays mapped between updates if the sender declares that it stays in place. Then the next payload
with the same bytes needs no decoding and no mapping. The sender holds a lock on the file that counts its
references, until it frees the memory or ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import torch

from ebbtide.formats.stored_tensor import Counters, SharedBlock, StoredTensor, is_held
from ebbtide.formats.tensor_refs import AnyStorageRef, CudaStorageRef, StorageRef, TensorRef
from ebbtide.srt.errors import EngineError, RequestRejected
from ebbtide.srt.model_executor.weight_copies import PlannedSpans
from ebbtide.srt.slices import Slices
from ebbtide.srt.weight_sync.cuda_memory import CudaIpc, MappedAllocation

logger = logging.getLogger(__name__)

# The most payloads that are kept: more than the buckets of one trainer. Later ones replace the oldest.
MAX_PAYLOADS: Final = 256
# How often to look for memory that its trainer no longer holds.
ENDED_LOOK_S: Final = 1.0


@dataclass
class KeptPayload:
    """A payload whose memory stays mapped, with its decoded contents and planned copies.

    Attributes:
        mapped, ends: as in `BorrowedMemory`; filled when the payload is opened for the first time.
        spans: planned copies from where it is mapped, by `direct`.
        num_users: updates that use it now.
    """

    refs: Sequence[CudaStorageRef]
    decoded: object
    mapped: dict[object, MappedAllocation] = field(default_factory=dict, init=False)
    ends: dict[int, int] = field(default_factory=dict, init=False)
    spans: dict[bool, PlannedSpans] = field(default_factory=dict, init=False)
    num_users: int = field(default=0, init=False)

    @property
    def has_ended(self) -> bool:
        """Whether the sender no longer holds its memory."""
        return not all(is_held(name) for name in {ref.counter_file for ref in self.refs})


class KeptMemory:
    """The kept payloads of a rank, the least recently used first."""

    def __init__(self, ipc: CudaIpc) -> None:
        self._ipc = ipc
        self._payloads: dict[bytes, KeptPayload] = {}
        # A thread looks for ended senders, since the loop may be asleep.
        self._lock = threading.Lock()
        self._watch: threading.Thread | None = None

    def __len__(self) -> int:
        return len(self._payloads)

    def take(self, data: bytes) -> KeptPayload | None:
        """The kept payload with these bytes, in use until `give_back`; None: it is not kept."""
        with self._lock:
            payload = self._payloads.pop(data, None)
            if payload is None:
                return None
            if payload.num_users == 0 and payload.has_ended:
                self._unmap([payload])
                return None
            self._payloads[data] = payload
            payload.num_users += 1
            return payload

    def add(self, data: bytes, refs: Sequence[CudaStorageRef], decoded: object) -> KeptPayload | None:
        """Keep a payload, in use until `give_back`. None: its sender does not hold the memory."""
        payload = KeptPayload(refs, decoded)
        if not refs or payload.has_ended:
            return None
        payload.num_users = 1
        with self._lock:
            idle = [key for key, one in self._payloads.items() if one.num_users == 0]
            num_over = len(self._payloads) + 1 - MAX_PAYLOADS
            self._unmap([self._payloads.pop(key) for key in idle[: max(0, num_over)]])
            self._payloads[data] = payload
            if self._watch is None:
                self._watch = threading.Thread(target=self._look, name="kept-memory", daemon=True)
                self._watch.start()
        return payload

    def give_back(self, payload: KeptPayload) -> None:
        with self._lock:
            payload.num_users -= 1

    def drop_ended(self) -> None:
        """Unmap memory that its sender no longer holds."""
        with self._lock:
            ended = [key for key, one in self._payloads.items() if one.num_users == 0 and one.has_ended]
            self._unmap([self._payloads.pop(key) for key in ended])

    def _look(self) -> None:
        self._ipc.enter_thread()
        while True:
            time.sleep(ENDED_LOOK_S)
            self.drop_ended()
            with self._lock:
                if not self._payloads:
                    self._watch = None
                    return

    def _unmap(self, payloads: Iterable[KeptPayload]) -> None:
        for payload in payloads:
            while payload.mapped:
                _, mapping = payload.mapped.popitem()
                try:
                    mapping.close()
                except EngineError as error:
                    logger.warning("memory that a trainer has given up stays mapped: %s", error)


class BorrowedMemory:
    """The memory of one payload: blocks of shared memory, and device memory, mapped once per allocation.

    `record` takes references over, `require` checks the ones to be read, and `open` maps device memory in
    slices. `close` gives back everything that was recorded, whatever has happened.

    Args:
        cuda: of the engine's device; None: it runs on the CPU.
        reader, num_readers: the number of this rank among all ranks that were sent the same references. The
            first one takes the references over. CUDA memory may have only one reader: with several, all
            refuse it.
        is_kept: the sender keeps device memory by itself, and sends the same references again and again. Only
            the first one is given back.
    """

    def __init__(
        self, cuda: CudaIpc | None = None, reader: int = 0, num_readers: int = 1, *, is_kept: bool = False
    ) -> None:
        self._cuda = cuda
        self._owns_references = reader == 0
        self._may_map = num_readers == 1
        self._is_kept = is_kept
        self._cost = 1
        self._recorded: list[AnyStorageRef] = []
        self._required: dict[CudaStorageRef, None] = {}
        self._blocks: dict[bytes, SharedBlock] = {}
        self._mapped: dict[object, MappedAllocation] = {}
        # The end address of each mapping, by its first address.
        self._ends: dict[int, int] = {}
        self._opened: dict[object, list[CudaStorageRef]] = {}
        self._counters = Counters()
        self._given_back: set[CudaStorageRef] = set()
        self._awaited: set[CudaStorageRef] = set()
        self._stays_in: tuple[KeptMemory, KeptPayload] | None = None

    def stay_in(self, keeper: KeptMemory, payload: KeptPayload) -> None:
        """Use the mappings of a kept payload, and add new ones to it. It is in use until `close`."""
        self._stays_in = keeper, payload
        self._mapped, self._ends = payload.mapped, payload.ends

    @property
    def spans(self) -> dict[bool, PlannedSpans] | None:
        """See `KeptPayload`; None: the memory is not kept."""
        return None if self._stays_in is None else self._stays_in[1].spans

    def record(self, ref: AnyStorageRef) -> None:
        """Take over a reference of the payload."""
        self._recorded.append(ref)

    @property
    def device_refs(self) -> list[CudaStorageRef]:
        return [ref for ref in self._recorded if isinstance(ref, CudaStorageRef)]

    def require(self, storage: AnyStorageRef | None) -> None:
        """Check that memory of tensors exists and can be reached. RequestRejected: it does not, or cannot."""
        match storage:
            case StorageRef():
                self._block(storage)
            case CudaStorageRef():
                self._check_reach(storage)
                self._required[storage] = None

    @property
    def cost(self) -> int | None:
        """How many times as long the device takes to read it as its own memory; None: some is on the host."""
        is_on_device = bool(self._required) and all(isinstance(ref, CudaStorageRef) for ref in self._recorded)
        return self._cost if is_on_device else None

    def open(self) -> Slices[None]:
        """Map the required device memory; yields the bytes of each reference.

        RequestRejected: the sender has ended, or the memory is not as the payload says.
        """
        looked_at: set[tuple[bytes, int]] = set()
        for ref in self._required:
            assert self._cuda is not None
            counter = ref.counter_file, ref.counter_index
            if counter not in looked_at and not self._is_kept and self._counters.add(ref, 0) == 0:
                raise RequestRejected(f"{ref} was given back before: serialize the tensors anew")
            looked_at.add(counter)
            key = self._cuda.key(ref)
            if key not in self._mapped:
                self._mapped[key] = self._cuda.open(ref)
            self._opened.setdefault(key, []).append(ref)
            self._check_extent(self._cuda, self._mapped[key].address, ref)
            yield ref.num_bytes

    def tensor(self, ref: TensorRef) -> torch.Tensor | StoredTensor:
        """The sender's tensor: a view of device memory, for torch's current stream; or a stored tensor."""
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
        """The address of mapped device memory, for torch's current stream; 0: it is not required."""
        if not isinstance(storage, CudaStorageRef) or storage not in self._required:
            return 0
        return self._awaited_mapping(storage).address + storage.offset_bytes

    def detach(self) -> Slices[None]:
        """See `WritePlan.detach`; the returned work yields the bytes of each mapping."""
        opened, self._opened = self._opened, {}
        mapped, self._mapped = ({} if self._stays_in is not None else self._mapped), {}
        self._give_back([ref for refs in opened.values() for ref in refs])

        def unmap() -> Slices[None]:
            while mapped:
                key, mapping = mapped.popitem()
                mapping.close()
                yield sum(ref.num_bytes for ref in opened.get(key, ()))

        return unmap()

    def close(self) -> None:
        """Give everything back, opened or not. Idempotent."""
        recorded, self._recorded = self._recorded, []
        for _ in self.detach():
            pass
        self._give_back([ref for ref in recorded if isinstance(ref, CudaStorageRef)])
        self._counters.close()
        self._close_blocks([ref for ref in recorded if isinstance(ref, StorageRef)])
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
        """Refuse memory that this engine's device cannot reach, without opening it."""
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

    def _check_extent(self, cuda: CudaIpc, begin: int, ref: CudaStorageRef) -> None:
        """Refuse a storage that reaches beyond its mapping: reading there would destroy the CUDA context."""
        needed_end = begin + ref.offset_bytes + ref.num_bytes
        end = self._ends.get(begin, begin)
        while end < needed_end:
            # An expandable segment is mapped in pieces that follow one another.
            extent = cuda.extent(end)
            if extent is None and end == begin:
                return  # The driver does not tell the size of this kind of mapping.
            if extent is None or sum(extent) <= end or (end == begin and extent[0] != begin):
                raise RequestRejected(
                    f"{ref}: bytes {ref.offset_bytes} to {ref.offset_bytes + ref.num_bytes} do not "
                    f"lie in the sender's allocation of {end - begin} bytes"
                )
            end = self._ends[begin] = sum(extent)

    def _awaited_mapping(self, ref: CudaStorageRef) -> MappedAllocation:
        """The mapping; torch's current stream is made to wait for the sender's writes."""
        assert self._cuda is not None
        mapping = self._mapped.get(self._cuda.key(ref))
        if mapping is None:
            raise EngineError(f"{ref} is read before it was opened")
        if ref.event is not None and ref not in self._awaited:
            self._cuda.wait(ref.event)
            self._awaited.add(ref)
        return mapping

    def _give_back(self, refs: Sequence[CudaStorageRef]) -> None:
        if not self._owns_references:
            return
        # Many references share a counter: change each counter once.
        by_counter: dict[tuple[bytes, int], list[CudaStorageRef]] = {}
        for ref in refs:
            if ref not in self._given_back:
                self._given_back.add(ref)
                by_counter.setdefault((ref.counter_file, ref.counter_index), []).append(ref)
        for alike in by_counter.values():
            num_left = self._counters.add(alike[0], 0) if self._is_kept else len(alike)
            if num_left:
                self._counters.add(alike[0], -min(len(alike), num_left))

    def _close_blocks(self, recorded: Sequence[StorageRef]) -> None:
        """Close the blocks and drop the references, also those that were never read."""
        if self._owns_references:
            for ref in recorded:
                # A block that cannot be opened holds no memory of the sender.
                with suppress(RequestRejected):
                    self._block(ref)
        while self._blocks:
            _, block = self._blocks.popitem()
            if self._owns_references:
                block.drop()
            else:
                block.close()
