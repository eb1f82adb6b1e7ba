"""Opens device memory that a payload refers to, as torch shares it between processes (CUDA IPC).

The sender counts, in a file in shared memory, each reference that it has handed out, and keeps the memory
until the receiver has taken every one off the count. Many references may lead into one allocation: that is
mapped once. Source: wire_api section 4.2.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import import_module
from typing import Any, Final, Protocol, Self

import torch

from ebbtide.formats.shared_memory import HEADER_BYTES, KEEP_ALIVE, object_path
from ebbtide.formats.tensor_refs import DRIVER_HANDLE_BYTES, NUM_COUNTERS, CudaStorageRef
from ebbtide.srt.errors import EngineError, RequestRejected

# Copies out of a peer's memory come at 320 GB/s by NVLink (H200), those within a device at 2 TB/s.
PEER_COST: Final = 6

_COUNTER: Final = struct.Struct("=q")


class Mapping(Protocol):
    """An allocation of another process, mapped here."""

    @property
    def address(self) -> int:
        """Where it begins."""
        ...

    def storage(self, offset_bytes: int, num_bytes: int) -> torch.UntypedStorage:
        """A part of it, to be used only until it is closed."""
        ...

    def close(self) -> None:
        """End it, once all that reads it has run."""
        ...


class CudaIpc(Protocol):
    """What opens other processes' memory on one device of this process.

    Attributes:
        index: of the device, as this process counts them.
        uuid: 36 characters.
    """

    index: int
    uuid: str

    def cost(self, device: int | str) -> int | None:
        """How many times as long as its own kernels on this device take to read that one's memory.

        1: it is this one. None: they cannot, it is no visible peer of it.

        Args:
            device: index as this process counts devices, or UUID.
        """
        ...

    def key(self, ref: CudaStorageRef) -> object:
        """The same for references that one mapping serves."""
        ...

    def open(self, ref: CudaStorageRef) -> Mapping:
        """Map the sender's allocation that a reference leads into.

        Raises:
            RequestRejected: it cannot be mapped.
        """
        ...

    def extent(self, address: int) -> tuple[int, int] | None:
        """Begin and length of the mapped memory around an address; None if the driver does not know."""
        ...

    def wait(self, event: bytes) -> None:
        """What is launched from here on, on torch's current stream, runs after the sender's event.

        Raises:
            RequestRejected: there is no such event.
        """
        ...

    def enter_thread(self) -> None:
        """Have this thread able to close mappings too."""
        ...


class TorchCudaIpc:
    """CUDA IPC as torch shares memory, by calls of the driver.

    torch's own way opens and maps a file for each reference, and waits for the forward pass under way
    wherever it gives one back. So does the driver wherever it ends a mapping, even if the same allocation was
    opened once more and stays mapped: an allocation is opened once here, and closed with its last mapping.

    Args:
        lasting: memory stays mapped, and counted as read, as long as there are storages of it: torch's way.
    """

    def __init__(self, index: int, uuid: str, *, lasting: bool = False) -> None:
        self._is_lasting = lasting
        self.index = index
        self.uuid = uuid.removeprefix("GPU-")
        # What a trainer has given up is closed by another thread.
        self._lock = threading.Lock()
        self._opened: dict[bytes, _Allocation] = {}

    def cost(self, device: int | str) -> int | None:
        if isinstance(device, str):
            if device.lower() == self.uuid.lower():
                return 1
            device = self._visible.get(device.lower(), -1)
        if device == self.index:
            return 1
        is_visible = 0 <= device < torch.cuda.device_count()
        is_peer = is_visible and torch.cuda.can_device_access_peer(self.index, device)
        return PEER_COST if is_peer else None

    @cached_property
    def _visible(self) -> dict[str, int]:
        """Index by UUID."""
        indices = range(torch.cuda.device_count())
        return {str(torch.cuda.get_device_properties(index).uuid).lower(): index for index in indices}

    @cached_property
    def _driver(self) -> Any:
        return import_module("cuda.bindings.driver")  # only machines with a GPU have it

    def key(self, ref: CudaStorageRef) -> object:
        return ref if self._needs_torch(ref) else ref.handle

    def _needs_torch(self, ref: CudaStorageRef) -> bool:
        return self._is_lasting or is_expandable(ref.handle)

    def open(self, ref: CudaStorageRef) -> Mapping:
        if self._needs_torch(ref):
            return _TorchMapping(self.index, ref)
        with self._lock:
            allocation = self._opened.get(ref.handle)
            if allocation is None:
                allocation = self._opened[ref.handle] = _Allocation(self._mapped(ref))
            allocation.num_mappings += 1
        close = partial(self._close, ref.handle)
        return _DriverMapping(torch.device("cuda", self.index), allocation.address, close)

    def _mapped(self, ref: CudaStorageRef) -> int:
        handle = self._driver.CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), ref.handle[-DRIVER_HANDLE_BYTES:], DRIVER_HANDLE_BYTES)
        flags = self._driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        status, address = self._driver.cuIpcOpenMemHandle(handle, flags)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise RequestRejected(f"{told(ref)} cannot be opened ({status.name}): {KEEP_ALIVE}")
        return int(address)

    def _close(self, handle: bytes) -> None:
        """End one of an allocation's mappings."""
        with self._lock:
            allocation = self._opened[handle]
            allocation.num_mappings -= 1
            if allocation.num_mappings:
                return
            del self._opened[handle]
        (status,) = self._driver.cuIpcCloseMemHandle(allocation.address)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise EngineError(f"cuIpcCloseMemHandle: {status.name}")

    def extent(self, address: int) -> tuple[int, int] | None:
        status, begin, num_bytes = self._driver.cuMemGetAddressRange(address)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            return None
        return int(begin), int(num_bytes)

    def wait(self, event: bytes) -> None:
        handle = self._driver.CUipcEventHandle()
        ctypes.memmove(handle.getPtr(), event, len(event))
        status, opened = self._driver.cuIpcOpenEventHandle(handle)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise RequestRejected(f"an event of the sender cannot be opened ({status.name}): {KEEP_ALIVE}")
        stream = torch.cuda.current_stream(self.index).cuda_stream
        (status,) = self._driver.cuStreamWaitEvent(stream, opened, 0)
        # The wait that was enqueued outlives the event.
        self._driver.cuEventDestroy(opened)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise EngineError(f"cuStreamWaitEvent: {status.name}")

    def enter_thread(self) -> None:
        torch.cuda.set_device(self.index)
        torch.cuda.synchronize(self.index)


def check_extent(ipc: CudaIpc, begin: int, ref: CudaStorageRef, ends: dict[int, int]) -> None:
    """Refuse a storage that reaches beyond its mapping: reading there would end the engine's context.

    Args:
        begin: of the mapping, an address.
        ends: of the mappings that have been looked at, by their beginnings; added to.
    """
    needed_end = begin + ref.offset_bytes + ref.num_bytes
    end = ends.get(begin, begin)
    while end < needed_end:
        # An expandable segment is mapped in pieces that follow one another.
        extent = ipc.extent(end)
        if extent is None and end == begin:
            return  # Nothing is known about this kind of mapping.
        if extent is None or sum(extent) <= end or (end == begin and extent[0] != begin):
            raise RequestRejected(
                f"{told(ref)}: bytes {ref.offset_bytes} to {ref.offset_bytes + ref.num_bytes} do not "
                f"lie in the sender's allocation of {end - begin} bytes"
            )
        end = ends[begin] = sum(extent)


@dataclass(slots=True)
class _Allocation:
    """An allocation of the sender's, mapped by the driver."""

    address: int
    num_mappings: int = 0


@dataclass(frozen=True)
class _DriverMapping:
    """A whole allocation of the sender's."""

    device: torch.device
    address: int
    close: Callable[[], None]

    def storage(self, offset_bytes: int, num_bytes: int) -> torch.UntypedStorage:
        made = torch._C._construct_storage_from_data_pointer(
            self.address + offset_bytes, self.device, num_bytes
        )
        assert isinstance(made, torch.UntypedStorage)
        return made


class _TorchMapping:
    """One reference by torch: only that can map an expandable segment, by file descriptors of the sender's.

    torch takes a reference off the sender's count when it ends: it is given one of its own.
    """

    def __init__(self, index: int, ref: CudaStorageRef) -> None:
        with Counters() as counters:
            counters.add(ref, 1)
        memory = (ref.handle, ref.num_bytes, ref.offset_bytes)
        counter = (ref.counter_file, ref.counter_index)
        try:
            opened = torch.UntypedStorage._new_shared_cuda(index, *memory, *counter, b"", False)
        except RuntimeError as error:
            with Counters() as counters:
                counters.add(ref, -1)
            reason = str(error).partition("\n")[0]
            raise RequestRejected(f"{told(ref)} cannot be opened ({reason}): {KEEP_ALIVE}") from error
        self._storage: torch.UntypedStorage | None = opened
        self.address = opened.data_ptr() - ref.offset_bytes

    def storage(self, offset_bytes: int, num_bytes: int) -> torch.UntypedStorage:
        assert self._storage is not None
        return self._storage

    def close(self) -> None:
        self._storage = None


def is_expandable(handle: bytes) -> bool:
    """Whether it is torch's handle of an expandable segment."""
    return len(handle) != DRIVER_HANDLE_BYTES and handle[1:2] == b"e"


def told(ref: CudaStorageRef) -> str:
    """A reference, for people."""
    return f"CUDA memory counted in {os.fsdecode(ref.counter_file)}[{ref.counter_index}]"


class Counters:
    """The sender's counts of references, each file of them opened once. A context manager, or to be closed.

    They are read and written by position: a file that is mapped and then cut short would end the process.
    """

    def __init__(self) -> None:
        self._files: dict[bytes, int | None] = {}

    def add(self, ref: CudaStorageRef, change: int) -> int | None:
        """Add to the count of a reference; returns what it is then, None where there is none to see."""
        if ref.counter_file not in self._files:
            self._files[ref.counter_file] = _opened(ref.counter_file)
        descriptor = self._files[ref.counter_file]
        if descriptor is None:
            return None
        at = HEADER_BYTES + ref.counter_index * _COUNTER.size
        found = os.pread(descriptor, _COUNTER.size, at)
        if len(found) < _COUNTER.size:
            return None
        [value] = _COUNTER.unpack(found)
        if change:
            os.pwrite(descriptor, _COUNTER.pack(value + change), at)
        return int(value + change)

    def close(self) -> None:
        """Idempotent; it may be used again."""
        while self._files:
            _, descriptor = self._files.popitem()
            if descriptor is not None:
                os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _opened(counter_file: bytes) -> int | None:
    """A file of counts; None where there is none, or not one that torch makes."""
    try:
        descriptor = os.open(object_path(counter_file), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_size < HEADER_BYTES + NUM_COUNTERS * _COUNTER.size:
        os.close(descriptor)
        return None
    return descriptor
