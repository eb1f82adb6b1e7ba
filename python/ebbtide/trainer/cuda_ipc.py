"""Payloads that refer to a trainer's tensors where they are, on a GPU (CUDA IPC), for engines to read there.

Allocations are shared whole, by the driver's handles: a few hundred of them hold thousands of tensors. Each
reader counts down, in a file in shared memory as torch makes them, as it gives references back.

Engines may keep the memory of tensors that stay where they are mapped between updates: mapping and unmapping
hundreds of allocations takes longer than copying what is in them. Memory that the trainer frees meanwhile
goes back to the device only with an update in which the same names lie elsewhere, or at `IpcExporter.close`.
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

# Exports that stay mapped: the buckets of one update, and some more.
MAX_STANDING: Final = 192
# CU_POINTER_ATTRIBUTE_CONTEXT
_CONTEXT_OF_POINTER: Final = 1
# CU_POINTER_ATTRIBUTE_BUFFER_ID
_BUFFER_ID_OF_POINTER: Final = 7


class CounterFile:
    """A file in shared memory that counts the references which each reader has yet to give back."""

    def __init__(self, num_readers: int, num_references: int) -> None:
        assert num_readers <= NUM_COUNTERS
        self.name = b"/torch_%d_%d" % (os.getpid(), secrets.randbits(48))
        self._num_readers, self._num_references = num_readers, num_references
        self._descriptor = os.open(object_path(self.name), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.ftruncate(self._descriptor, HEADER_BYTES + NUM_COUNTERS * COUNTER.size)
        # Also where nobody closes it: what stays mapped outlives the update, and may outlive the program.
        self._remove = weakref.finalize(self, _remove, self._descriptor, object_path(self.name), os.getpid())
        self.refill()

    def refill(self) -> None:
        """Hand every reader its references, once more."""
        counts = COUNTER.pack(self._num_references) * self._num_readers
        os.pwrite(self._descriptor, counts, HEADER_BYTES)

    def hold(self, *, stays: bool) -> None:
        """Say that the memory stays where it is, or no longer does; the end of this process says so too."""
        fcntl.flock(self._descriptor, fcntl.LOCK_EX if stays else fcntl.LOCK_UN)

    @property
    def are_zero(self) -> bool:
        counts = os.pread(self._descriptor, self._num_readers * COUNTER.size, HEADER_BYTES)
        return not any(counts)

    def close(self) -> None:
        self._remove()


def _remove(descriptor: int, path: Path, pid: int) -> None:
    os.close(descriptor)
    remove_own(path, pid)


def remove_own(path: Path, pid: int) -> None:
    """Remove a file of the process `pid`, in that process; not in one that was forked off."""
    if os.getpid() == pid:
        path.unlink(missing_ok=True)


class Driver:
    """The calls of the CUDA driver that say where allocations begin, and how other processes map them.

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


class Addresses:
    """Names and shapes of tensors, and the address of each one's first element; 0 for what is empty."""

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
    """The memory that tensors lie in, as other processes map it. The tensors themselves may be freed.

    Attributes:
        storages: of each allocation the device's UUID, the handle, and the bytes. The first has no memory:
            what is empty lies there.
        storage_T, offset_T: the number of each tensor's storage, and its place there, in elements.
    """

    addresses: Addresses
    begins: list[int]
    ids: list[int | None]
    storages: list[tuple[str, bytes, int]]
    storage_T: NDArray[np.int64]
    offset_T: NDArray[np.int64]

    @classmethod
    def of(cls, tensors: NamedTensors, addresses: Addresses) -> Self:
        """Ask the driver. RuntimeError: it does not share this memory."""
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
        """Whether the tensors lie there, and the allocations are still those that they were."""
        return self.addresses == addresses and None not in self.ids and _ids(self.begins) == self.ids


def _ids(begins: Sequence[int]) -> list[int | None]:
    return [driver().id_of(begin) for begin in begins]


@dataclass(frozen=True, eq=False)
class _Export:
    """Allocations that readers have references to; `names`: of tensors whose allocations stay mapped."""

    allocations: Allocations
    entries: list[bytes]
    counts: CounterFile
    names: tuple[str, ...]


class IpcExporter:
    """Makes payloads of tensors on a GPU, for the time of an update or until their memory moves."""

    def __init__(self, num_readers: int) -> None:
        self._num_readers = num_readers
        # What the driver said last: asking it for hundreds of handles takes milliseconds.
        self._last: Allocations | None = None
        # By each tensor's name; the first of a name's exports is the only one.
        self._standing: dict[str, _Export] = {}
        self._unfinished: list[tuple[Payload, CounterFile]] = []
        # Updates may be encoded in several threads at once.
        self._lock = threading.Lock()

    def export(self, tensors: NamedTensors, *, keep_mapped: bool = False) -> Payload:
        """Entries, one for each reader, that refer to these tensors, whose contents are there.

        With `keep_mapped` the memory may stay mapped; what stayed mapped under one of these names elsewhere
        no longer does.
        RuntimeError: the driver does not share this memory.
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
        """Let go of what was abandoned and has been given back since."""
        with self._lock:
            for payload, counts in [each for each in self._unfinished if each[1].are_zero]:
                self._unfinished.remove((payload, counts))
                payload.close()
                counts.close()

    def close(self) -> None:
        """Have nothing stay mapped any more. Idempotent."""
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
        """It may be read still: hold the tensors until every reader has given its references back."""
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
