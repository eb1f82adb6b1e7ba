"""Payloads that refer to a trainer's tensors where they are, on a GPU: the engine reads them there.

Allocations are shared whole, by the driver's handles: a few hundred of them hold thousands of tensors. Each
reader counts down, in a file in shared memory as torch makes them, as it gives references back.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import secrets
import struct
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import numpy as np
import torch
from numpy.typing import NDArray

from ebbtide.formats.shared_memory import HEADER_BYTES, object_path
from ebbtide.formats.tensor_list import DeviceStorage, Listing
from ebbtide.formats.tensor_refs import DRIVER_HANDLE_BYTES, NUM_COUNTERS
from ebbtide.srt.errors import RequestRejected

_COUNTER: Final = struct.Struct("=q")
# CU_POINTER_ATTRIBUTE_CONTEXT
_CONTEXT_OF_POINTER: Final = 1
# CU_POINTER_ATTRIBUTE_BUFFER_ID
_BUFFER_ID_OF_POINTER: Final = 7


class Payload(ABC):
    """What is sent, and the memory behind it for as long as it is open: until the update is answered.

    Attributes:
        entries: of `serialized_named_tensors`.
        load_format: with which they are sent.
    """

    load_format: str | None = None

    def __init__(self, entries: Sequence[bytes]) -> None:
        self.entries = list(entries)

    @property
    def payload(self) -> bytes:
        """The only entry, for an engine of one rank."""
        [entry] = self.entries
        return entry

    @abstractmethod
    def close(self) -> None:
        """Gives the memory back. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class LentTensors(Payload):
    """Entries that refer to the tensors themselves.

    Left by something else than `RequestRejected`, which says that nothing is read any more, the engine may
    be reading still: then whoever `keeps` it holds the tensors until it has finished.
    """

    def __init__(
        self,
        entries: Sequence[bytes],
        tensors: object,
        counts: Counts,
        keep: Callable[[LentTensors], None],
        *,
        owns_counts: bool = True,
    ) -> None:
        super().__init__(entries)
        self.owns_counts = owns_counts
        self._tensors: object | None = tensors
        self._counts = counts
        self._keep = keep

    @property
    def is_read(self) -> bool:
        """Whether every reader has given back what it was lent."""
        return self._counts.are_zero

    def close(self) -> None:
        """Lets go of the tensors."""
        self._tensors = None
        if self.owns_counts:
            self._counts.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or issubclass(kind, RequestRejected):
            self.close()
        else:
            self._keep(self)


class Counts:
    """How many references each reader has yet to give back, in a file in shared memory.

    Args:
        num_readers, num_references: so many readers are handed so many references each.

    Attributes:
        name: of the file, as payloads say it.
    """

    def __init__(self, num_readers: int, num_references: int) -> None:
        assert num_readers <= NUM_COUNTERS
        self.name = b"/torch_%d_%d" % (os.getpid(), secrets.randbits(48))
        self._num_readers, self._num_references = num_readers, num_references
        self._descriptor = os.open(object_path(self.name), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(self._descriptor, HEADER_BYTES + NUM_COUNTERS * _COUNTER.size)
        # Also where nobody closes it: what stays lent outlives the update, and may outlive the program.
        self._remove = weakref.finalize(self, _remove, self._descriptor, object_path(self.name), os.getpid())
        self.refill()

    def refill(self) -> None:
        """Hand every reader its references, once more."""
        counts = _COUNTER.pack(self._num_references) * self._num_readers
        os.pwrite(self._descriptor, counts, HEADER_BYTES)

    def hold(self, *, stays: bool) -> None:
        """Say that the memory stays where it is; or that it does not any more, as the end of this process
        says too."""
        fcntl.flock(self._descriptor, fcntl.LOCK_EX if stays else fcntl.LOCK_UN)

    @property
    def are_zero(self) -> bool:
        counts = os.pread(self._descriptor, self._num_readers * _COUNTER.size, HEADER_BYTES)
        return not any(counts)

    def close(self) -> None:
        """Remove the file. Idempotent."""
        self._remove()


def _remove(descriptor: int, path: Path, pid: int) -> None:
    os.close(descriptor)
    remove_own(path, pid)


def remove_own(path: Path, pid: int) -> None:
    """Remove a file of the process `pid`, in that process; not in one that was forked off."""
    if os.getpid() == pid:
        path.unlink(missing_ok=True)


class Driver:
    """The calls of the CUDA driver that tell where allocations begin, and how other processes map them.

    They take a microsecond each, and keep the interpreter's lock: a thread that lets go of it at each of
    hundreds of calls waits milliseconds for it each time, where another one serves streams.
    """

    def __init__(self) -> None:
        self._library = ctypes.PyDLL("libcuda.so.1")

    def range_of(self, address: int) -> tuple[int, int]:
        """Begin and length, in bytes, of the allocation around an address."""
        begin, num_bytes = ctypes.c_uint64(), ctypes.c_size_t()
        to = ctypes.byref(begin), ctypes.byref(num_bytes)
        self._call("cuMemGetAddressRange_v2", *to, ctypes.c_uint64(address))
        return begin.value, num_bytes.value

    def handle_of(self, begin: int) -> bytes:
        """What other processes map an allocation by."""
        handle = ctypes.create_string_buffer(DRIVER_HANDLE_BYTES)
        context = ctypes.c_void_p()
        self._call(
            "cuPointerGetAttribute", ctypes.byref(context), _CONTEXT_OF_POINTER, ctypes.c_uint64(begin)
        )
        self._call("cuCtxPushCurrent_v2", context)
        try:
            self._call("cuIpcGetMemHandle", handle, ctypes.c_uint64(begin))
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(context))
        return handle.raw

    def id_of(self, begin: int) -> int | None:
        """What no other allocation of this process has or had; None: there is none here."""
        number = ctypes.c_uint64()
        try:
            self._call(
                "cuPointerGetAttribute", ctypes.byref(number), _BUFFER_ID_OF_POINTER, ctypes.c_uint64(begin)
            )
        except RuntimeError:
            return None
        return number.value

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise RuntimeError(
                f"{name}: CUDA error {status}. What cudaMalloc gives can be shared: no expandable segment "
                "(PYTORCH_CUDA_ALLOC_CONF), nothing of torch_memory_saver"
            )


driver: Final = functools.cache(Driver)


@dataclass(frozen=True)
class Loan:
    """What is said of tensors that are lent.

    Attributes:
        entries: one for each reader.
    """

    entries: list[bytes]
    counts: Counts


class Places:
    """Names and shapes of tensors, and where they lie.

    Attributes:
        address_T: of each one's first element; 0 for what is empty.
    """

    def __init__(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        self.listing = Listing(tensors)
        address_T = np.array([tensor.data_ptr() for _, tensor in tensors], dtype=np.int64)
        self.address_T = np.where(self.listing.num_bytes_T > 0, address_T, 0)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Places):
            return NotImplemented
        return self.listing.form == other.listing.form and np.array_equal(self.address_T, other.address_T)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, eq=False)
class Allocations:
    """The memory that tensors lie in, as other processes map it. The tensors themselves may be freed.

    Attributes:
        places: of the tensors.
        begins, ids: of the allocations.
        storages: of each the device's UUID, the handle, and the bytes. The first has no memory: what is
            empty lies there.
        storage_T, offset_T: the number of each tensor's storage, and its place there, in elements.
    """

    places: Places
    begins: list[int]
    ids: list[int | None]
    storages: list[tuple[str, bytes, int]]
    storage_T: NDArray[np.int64]
    offset_T: NDArray[np.int64]

    @classmethod
    def of(cls, tensors: Sequence[tuple[str, torch.Tensor]], places: Places) -> Self:
        """Ask the driver. Raises RuntimeError for memory that it does not share.

        Args:
            places: of the tensors.
        """
        order_T = np.argsort(places.address_T, kind="stable")
        sorted_T = places.address_T[order_T]
        storages, begins = [("", b"", 0)], [0]
        storage_T = np.zeros(len(tensors), dtype=np.int64)
        first = int(np.searchsorted(sorted_T, 0, side="right"))
        while first < len(tensors):
            begin, num_bytes = driver().range_of(int(sorted_T[first]))
            end = int(np.searchsorted(sorted_T, begin + num_bytes))
            storage_T[order_T[first:end]] = len(storages)
            device = tensors[order_T[first]][1].device
            storages.append((uuid_of(device), driver().handle_of(begin), num_bytes))
            begins.append(begin)
            first = end
        itemsize_T = places.listing.itemsize_T
        offset_T, rest_T = np.divmod(places.address_T - np.array(begins)[storage_T], itemsize_T)
        for index in np.flatnonzero(rest_T)[:1].tolist():
            raise RuntimeError(f"{tensors[index][0]} does not lie at a multiple of its elements' size")
        return cls(places, begins[1:], _ids(begins[1:]), storages, storage_T, offset_T)

    @property
    def are_there(self) -> bool:
        """Whether they are still those that they were."""
        return None not in self.ids and _ids(self.begins) == self.ids

    def lent(self, num_readers: int, *, stays: bool = False) -> Loan:
        """A loan of the tensors to so many readers.

        Args:
            stays: the memory stays where it is, and may stay mapped until the counts are let go of.
        """
        counts = Counts(num_readers, len(self.begins))
        entries = [
            [DeviceStorage(*storage, 0, counts.name, reader) for storage in self.storages]
            for reader in range(num_readers)
        ]
        listing = self.places.listing
        return Loan(listing.encode(entries, self.storage_T, self.offset_T, stays=stays), counts)


def _ids(begins: Sequence[int]) -> list[int | None]:
    return [driver().id_of(begin) for begin in begins]


class Lender:
    """Lends tensors for the time of an update.

    What the driver said of the last ones is kept: of the same tensors in the same allocations it would say
    the same, and asking it for hundreds of handles takes milliseconds.

    Args:
        num_readers: of each loan.
        keep: takes over what a reader may not have finished with.
    """

    def __init__(self, num_readers: int, keep: Callable[[LentTensors], None]) -> None:
        self._num_readers = num_readers
        self._keep = keep
        self._last: Allocations | None = None

    def lend(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> LentTensors:
        """Entries, one for each reader, that refer to these tensors, whose contents are there.

        Raises RuntimeError for memory that the driver does not share in this way.
        """
        places = Places(tensors)
        last = self._last
        if last is None or last.places != places or not last.are_there:
            last = self._last = Allocations.of(tensors, places)
        loan = last.lent(self._num_readers)
        return LentTensors(loan.entries, tensors, loan.counts, self._keep)


@functools.cache
def uuid_of(device: torch.device) -> str:
    """What other processes know a GPU by."""
    return str(torch.cuda.get_device_properties(device).uuid)
