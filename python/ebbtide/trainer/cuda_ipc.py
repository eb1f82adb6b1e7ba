"""Payloads that refer to a trainer's tensors in GPU memory, which engines map by CUDA IPC.

Whole allocations are shared, by handles of the CUDA driver: a few hundred of them hold thousands of tensors.
A file in shared memory, in torch's format, counts the references that each reader still has.

Engines may keep allocations mapped between updates, if tensors keep their addresses: mapping and unmapping
hundreds of allocations takes longer than copying their contents. Memory that the trainer frees meanwhile
returns to the device only when an update has the same names at other addresses, or at `IpcExporter.close`.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import secrets
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ebbtide.formats.stored_tensor import COUNTER, HEADER_BYTES, object_path
from ebbtide.formats.tensor_list import DeviceStorage, Listing, Payload
from ebbtide.formats.tensor_refs import DRIVER_HANDLE_BYTES, NUM_COUNTERS

NamedTensors: TypeAlias = Sequence[tuple[str, torch.Tensor]]

# The most exports that stay mapped: enough for the buckets of an update, one export each.
MAX_STANDING: Final = 192
# CU_POINTER_ATTRIBUTE_CONTEXT
_CONTEXT_OF_POINTER: Final = 1
# CU_POINTER_ATTRIBUTE_BUFFER_ID
_BUFFER_ID_OF_POINTER: Final = 7


class CounterFile:
    """A file in shared memory with the number of references that each reader has not given back yet."""

    def __init__(self, num_readers: int, num_references: int) -> None:
        assert num_readers <= NUM_COUNTERS
        self.name = b"/torch_%d_%d" % (os.getpid(), secrets.randbits(48))
        self._num_readers, self._num_references = num_readers, num_references
        self._descriptor = os.open(object_path(self.name), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(self._descriptor, HEADER_BYTES + NUM_COUNTERS * COUNTER.size)
        # Removes the file even if nobody calls `close`: exports that stay mapped may live until exit.
        self._remove = weakref.finalize(self, _remove, self._descriptor, object_path(self.name), os.getpid())
        self.refill()

    def refill(self) -> None:
        """Set every reader's count to the number of references again."""
        counts = COUNTER.pack(self._num_references) * self._num_readers
        os.pwrite(self._descriptor, counts, HEADER_BYTES)

    def hold(self, *, stays: bool) -> None:
        """Lock the file while its memory may stay mapped, or unlock it. Process exit unlocks it too."""
        fcntl.flock(self._descriptor, fcntl.LOCK_EX if stays else fcntl.LOCK_UN)

    @property
    def are_zero(self) -> bool:
        """Whether all readers have given all references back."""
        counts = os.pread(self._descriptor, self._num_readers * COUNTER.size, HEADER_BYTES)
        return not any(counts)

    def close(self) -> None:
        self._remove()


def _remove(descriptor: int, path: Path, pid: int) -> None:
    os.close(descriptor)
    remove_own(path, pid)


def remove_own(path: Path, pid: int) -> None:
    """Remove a file, unless this is a fork of the process `pid` that made it."""
    if os.getpid() == pid:
        path.unlink(missing_ok=True)


class Driver:
    """Calls of the CUDA driver that find allocations, and make handles for other processes.

    `PyDLL` keeps the GIL during calls. They take a microsecond each; releasing the GIL in each of hundreds
    of calls would cost milliseconds of waiting per call while another thread serves streams.
    """

    def __init__(self) -> None:
        self._library = ctypes.PyDLL("libcuda.so.1")

    def range_of(self, address: int) -> tuple[int, int]:
        """Address and size, in bytes, of the allocation that contains an address. Raises RuntimeError."""
        begin, num_bytes = ctypes.c_uint64(), ctypes.c_size_t()
        to = ctypes.byref(begin), ctypes.byref(num_bytes)
        self._call("cuMemGetAddressRange_v2", *to, ctypes.c_uint64(address))
        return begin.value, num_bytes.value

    def handle_of(self, begin: int) -> bytes:
        """The IPC handle of the allocation at `begin`. RuntimeError: its memory cannot be shared."""
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
        """Id of the allocation at `begin`, unique in this process for ever; None: there is no allocation."""
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


class Addresses:
    """Names and shapes of tensors, and the addresses of their first elements; 0 for empty tensors."""

    def __init__(self, tensors: NamedTensors) -> None:
        self.listing = Listing(tensors)
        address_T = np.array([tensor.data_ptr() for _, tensor in tensors], dtype=np.int64)
        self.address_T = np.where(self.listing.num_bytes_T > 0, address_T, 0)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Addresses):
            return NotImplemented
        return self.listing.form == other.listing.form and np.array_equal(self.address_T, other.address_T)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, eq=False)
class Allocations:
    """The allocations that contain tensors, as other processes map them. It does not keep the tensors alive.

    Attributes:
        begins, ids: address and id of each allocation.
        storages: device UUID, handle and bytes of each allocation; before these, one without memory, for
            empty tensors.
        storage_T, offset_T: index of each tensor's storage, and offset in it, in elements.
    """

    addresses: Addresses
    begins: list[int]
    ids: list[int | None]
    storages: list[tuple[str, bytes, int]]
    storage_T: NDArray[np.int64]
    offset_T: NDArray[np.int64]

    @classmethod
    def of(cls, tensors: NamedTensors, addresses: Addresses) -> Self:
        """Find the allocations of tensors. RuntimeError: their memory cannot be shared."""
        order_T = np.argsort(addresses.address_T, kind="stable")
        sorted_T = addresses.address_T[order_T]
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
        itemsize_T = addresses.listing.itemsize_T
        offset_T, rest_T = np.divmod(addresses.address_T - np.array(begins)[storage_T], itemsize_T)
        for index in np.flatnonzero(rest_T)[:1].tolist():
            raise RuntimeError(f"{tensors[index][0]} does not lie at a multiple of its elements' size")
        return cls(addresses, begins[1:], _ids(begins[1:]), storages, storage_T, offset_T)

    def are_at(self, addresses: Addresses) -> bool:
        """Whether the tensors have these addresses, and the allocations there are still the same ones."""
        return self.addresses == addresses and None not in self.ids and _ids(self.begins) == self.ids


def _ids(begins: Sequence[int]) -> list[int | None]:
    return [driver().id_of(begin) for begin in begins]


@dataclass(frozen=True, eq=False)
class _Export:
    """Allocations that are shared with readers.

    Attributes:
        entries: the payload's entry for each reader.
        counts: references that readers have.
        names: of the tensors, if the allocations stay mapped; else empty.
    """

    allocations: Allocations
    entries: list[bytes]
    counts: CounterFile
    names: tuple[str, ...]


class IpcExporter:
    """Makes payloads of tensors on a GPU. They are valid for one update, or until their memory moves.

    Args:
        num_readers: ranks that read a payload.
    """

    def __init__(self, num_readers: int) -> None:
        self._num_readers = num_readers
        # Kept from the last export, since getting hundreds of handles takes milliseconds.
        self._last: Allocations | None = None
        # Exports that stay mapped, by tensor name. A name has one at most.
        self._standing: dict[str, _Export] = {}
        self._unfinished: list[tuple[Payload, CounterFile]] = []
        # Updates may be encoded in several threads at once.
        self._lock = threading.Lock()

    def export(self, tensors: NamedTensors, *, keep_mapped: bool = False) -> Payload:
        """Make a payload with one entry per reader. The tensors must be computed already.

        Args:
            keep_mapped: the memory may stay mapped; other memory that stayed mapped for one of these names no
                longer does.

        Raises:
            RuntimeError: the memory cannot be shared.
        """
        addresses = Addresses(tensors)
        if keep_mapped:
            with self._lock:
                export = self._standing_export(tensors, addresses)
            return Payload(export.entries, memory=tensors, abandon=functools.partial(self._hold, export))
        last = self._last
        if last is None or not last.are_at(addresses):
            last = self._last = Allocations.of(tensors, addresses)
        export = self._share(last)
        return Payload(
            export.entries,
            memory=tensors,
            release=export.counts.close,
            abandon=functools.partial(self._hold, export),
        )

    def let_go(self) -> None:
        """Free abandoned payloads to which readers have no references any more."""
        with self._lock:
            for payload, counts in [each for each in self._unfinished if each[1].are_zero]:
                self._unfinished.remove((payload, counts))
                payload.close()
                counts.close()

    def close(self) -> None:
        """End all exports that stay mapped. Idempotent."""
        with self._lock:
            for export in list(dict.fromkeys(self._standing.values())):
                self._end(export)

    def _standing_export(self, tensors: NamedTensors, addresses: Addresses) -> _Export:
        export = self._standing.get(tensors[0][0])
        if export is not None and export.allocations.are_at(addresses) and export.counts.are_zero:
            export.counts.refill()
            return export
        names = tuple(name for name, _ in tensors)
        for name in names:
            if (former := self._standing.get(name)) is not None:
                self._end(former)
        exports = list(dict.fromkeys(self._standing.values()))
        for oldest in exports[: max(0, len(exports) + 1 - MAX_STANDING)]:
            self._end(oldest)
        export = self._share(Allocations.of(tensors, addresses), names)
        export.counts.hold(stays=True)
        self._standing.update(dict.fromkeys(names, export))
        return export

    def _share(self, allocations: Allocations, names: tuple[str, ...] = ()) -> _Export:
        counts = CounterFile(self._num_readers, len(allocations.begins))
        storages = [
            [DeviceStorage(*storage, 0, counts.name, reader) for storage in allocations.storages]
            for reader in range(self._num_readers)
        ]
        listing, columns = allocations.addresses.listing, (allocations.storage_T, allocations.offset_T)
        entries = listing.encode(storages, *columns, stays=bool(names))
        return _Export(allocations, entries, counts, names)

    def _hold(self, export: _Export, payload: Payload) -> None:
        """Keep an abandoned payload's tensors until every reader has given its references back."""
        with self._lock:
            self._forget(export)
            export.counts.hold(stays=False)
            self._unfinished.append((payload, export.counts))

    def _end(self, export: _Export) -> None:
        self._forget(export)
        export.counts.close()

    def _forget(self, export: _Export) -> None:
        for name in export.names:
            if self._standing.get(name) is export:
                del self._standing[name]


@functools.cache
def uuid_of(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
