"""What every weight source offers: the headers of its tensors first, then the tensors one by one.

Where they lie in memory of the sender's, that is opened, read, and given back once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ebbtide.formats.bucket import tensors_in
from ebbtide.formats.stored_tensor import StoredTensor
from ebbtide.formats.tensor_refs import (
    TensorHeader,
    TensorRef,
    TensorTable,
)
from ebbtide.srt.errors import EngineError
from ebbtide.srt.model_executor.weight_store import TensorProblem, WeightStore
from ebbtide.srt.weight_sync.borrowed_memory import BorrowedMemory
from ebbtide.srt.weight_sync.plan_cache import PackedTensors, Spans

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
        digest: the same for sources of the same headers, and of no others; None: nothing of it is kept.
        base_version: of the weights that it changes; None: it says nothing of that.
    """

    is_sent = False
    digest: Hashable = None
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
    def num_bytes(self) -> int:
        """The size of all tensors together."""
        return sum(entry.num_bytes for entry in self.entries)

    @property
    def near_bytes(self) -> int | None:
        """How much it is, if all of it lies in memory that this rank's device reads: in bytes of its own.

        Bytes of another device's count as so many as take as long.
        """
        cost = 1 if self._is_on_device else self._memory.cost
        return None if cost is None else cost * self.num_bytes

    @property
    def spans(self) -> tuple[Spans | None, int]:
        """Copies that were planned from where its memory is, relative to an address; None: none are kept.

        To be asked for once it is open, where work is launched that reads it.
        """
        return self._memory.spans, 0

    def misfit(
        self, store: WeightStore, entry: TensorHeader, dtypes: Mapping[str, torch.dtype]
    ) -> TensorProblem | None:
        """What stands against a tensor that fits, because of what comes with it (by name) or how it comes."""
        return store.check_scales(entry.name, entry.dtype, dtypes, self.direct)

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
        """Receive no more of it; returns whether nothing writes to destinations any more."""
        return True

    def __iter__(self) -> Iterator[NamedTensor]:
        """Yields (name, tensor). May be repeated until the source is closed.

        Raises:
            RequestRejected: what is left of them cannot be read any more.
        """
        if self._read is None:
            raise EngineError("the weight source is closed")
        return iter(self._read())

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
        memory.require(ref.storage)
    headers = [TensorHeader(name, ref.shape, ref.dtype) for name, ref in refs]
    # One by one, so that no tensor outlives the memory that it views.
    return WeightSource(
        headers, lambda: ((name, memory.tensor(ref)) for name, ref in refs), direct=direct, memory=memory
    )


def packed_source(flat: TensorRef, packed: PackedTensors, memory: BorrowedMemory) -> WeightSource:
    """As `borrowed_source`, of tensors that lie in a flat one, within its bytes: see `tensors_in`."""
    form, begin = packed.form, flat.offset * flat.dtype.itemsize
    begin_T = begin + packed.start_T
    if not (begin_T % form.itemsize_T).any():
        storage_T = np.zeros(len(begin_T), dtype=np.int64)
        # The flat tensor was checked to lie within its storage, and these within that.
        table = TensorTable(form, [flat.storage], storage_T, begin_T // form.itemsize_T)
        return TableSource(table, memory, packed=(packed, begin))
    # Such a place cannot be said in elements, so the bytes are copied.
    memory.require(flat.storage)
    headers = [header for header, _ in packed.places]
    return WeightSource(headers, lambda: tensors_in(memory.tensor(flat), packed.places), memory=memory)


class TableSource(WeightSource):
    """Tensors of a table, in a sender's memory.

    Args:
        packed: them, where they are one run of bytes, and the byte of its storage at which that begins.

    Attributes:
        table: what they are.

    Raises:
        RequestRejected: 400, some of the memory is not there, or out of reach.
    """

    def __init__(
        self,
        table: TensorTable,
        memory: BorrowedMemory,
        *,
        direct: bool = False,
        packed: tuple[PackedTensors, int] | None = None,
    ) -> None:
        for storage in table.used_storages:
            memory.require(storage)

        # One by one, so that no tensor outlives the memory that it views.
        def read() -> Iterator[NamedTensor]:
            return ((name, memory.tensor(ref)) for name, ref in table.refs())

        super().__init__(table.form.headers, read, direct=direct, memory=memory)
        self.table = table
        self.digest = table.form.digest
        self._packed = packed

    @property
    def num_bytes(self) -> int:
        return self.table.form.num_bytes

    @property
    def spans(self) -> tuple[Spans | None, int]:
        if self._packed is None:
            return super().spans
        packed, begin = self._packed
        return packed.spans, self._memory.address(self.table.storages[0]) + begin

    @property
    def address_T(self) -> NDArray[np.int64]:
        """Where the tensors begin, once they are opened on a device."""
        table = self.table
        begin_S = np.array([self._memory.address(storage) for storage in table.storages], dtype=np.int64)
        return begin_S[table.storage_T] + table.offset_T * table.form.itemsize_T

    def tensor(self, index: int) -> torch.Tensor | StoredTensor:
        """One of them; as those of iteration."""
        return self._memory.tensor(self.table.ref(index))
