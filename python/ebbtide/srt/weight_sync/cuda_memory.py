"""Opens device memory that a payload refers to, as torch shares it between processes (CUDA IPC).

The sender counts each reference that it has handed out in a file in shared memory, and keeps the memory until
all are taken off the count. Source: wire_api section 4.2.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Final

import torch

from ebbtide.formats.stored_tensor import KEEP_ALIVE, Counters
from ebbtide.formats.tensor_refs import DRIVER_HANDLE_BYTES, CudaStorageRef
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.memory_saver.virtual_memory.cuda import CudaDriver, DriverError

# Copies out of a peer's memory come at 320 GB/s by NVLink (H200), those within a device at 2 TB/s.
PEER_COST: Final = 6


@dataclass
class MappedAllocation:
    """An allocation of another process, mapped here. `opened`: torch's storage of it, if any."""

    address: int
    _device: torch.device
    _unmap: Callable[[], None] | None = None
    opened: torch.UntypedStorage | None = None

    def storage(self, offset_bytes: int, num_bytes: int) -> torch.UntypedStorage:
        """A part of it, to be used only until it is closed; torch's own is the part that was asked for."""
        if self.opened is not None:
            return self.opened
        address = self.address + offset_bytes
        made = torch._C._construct_storage_from_data_pointer(address, self._device, num_bytes)
        assert isinstance(made, torch.UntypedStorage)
        return made

    def close(self) -> None:
        """End it, once all that reads it has run."""
        self.opened = None
        if self._unmap is not None:
            self._unmap()


class CudaIpc:
    """Opens other processes' memory on one device of this process, by calls of the driver.

    torch's own way maps a file for each reference, and waits for the forward pass under way wherever it gives
    one back. So does the driver at each unmapping: an allocation is opened once, closed with its last use.

    Args:
        index: of the device, as this process counts them.
        uuid: 36 characters, with or without `GPU-` before them.
        lasting: memory stays mapped, and counted as read, as long as there are storages of it: torch's way.
    """

    def __init__(self, index: int, uuid: str, *, lasting: bool = False) -> None:
        self._is_lasting = lasting
        self.index = index
        self.uuid = uuid.removeprefix("GPU-")
        # What a trainer has given up is closed by another thread.
        self._lock = threading.Lock()
        # By handle: where an allocation is mapped, and how many mappings lead there.
        self._opened: dict[bytes, tuple[int, int]] = {}

    def cost(self, device: int | str) -> int | None:
        """How many times as long this device takes to read that one's memory as its own; None: it cannot.

        `device`: index as this process counts devices, or UUID.
        """
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
    def _driver(self) -> CudaDriver:
        return CudaDriver()  # only machines with a GPU have it

    def key(self, ref: CudaStorageRef) -> object:
        return ref if self._needs_torch(ref) else ref.handle

    def open(self, ref: CudaStorageRef) -> MappedAllocation:
        """Map the sender's allocation that a reference leads into, or refuse."""
        if self._needs_torch(ref):
            return self._open_by_torch(ref)
        with self._lock:
            address, num_mappings = self._opened.get(ref.handle) or (self._mapped(ref), 0)
            self._opened[ref.handle] = address, num_mappings + 1
        return MappedAllocation(address, torch.device("cuda", self.index), partial(self._close, ref.handle))

    def _needs_torch(self, ref: CudaStorageRef) -> bool:
        return self._is_lasting or is_expandable(ref.handle)

    def _open_by_torch(self, ref: CudaStorageRef) -> MappedAllocation:
        """By torch: only that can map an expandable segment, by file descriptors of the sender's."""
        memory = (ref.handle, ref.num_bytes, ref.offset_bytes)
        counter = (ref.counter_file, ref.counter_index)
        with closing(Counters()) as counters:
            # torch takes a reference off the sender's count when it ends: it is given one of its own.
            counters.add(ref, 1)
            try:
                opened = torch.UntypedStorage._new_shared_cuda(self.index, *memory, *counter, b"", False)
            except RuntimeError as error:
                counters.add(ref, -1)
                reason = str(error).partition("\n")[0]
                raise RequestRejected(f"{ref} cannot be opened ({reason}): {KEEP_ALIVE}") from error
        return MappedAllocation(opened.data_ptr() - ref.offset_bytes, opened.device, opened=opened)

    def _mapped(self, ref: CudaStorageRef) -> int:
        bindings = self._driver.bindings
        handle = bindings.CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), ref.handle[-DRIVER_HANDLE_BYTES:], DRIVER_HANDLE_BYTES)
        flags = bindings.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        try:
            return int(self._driver.call("cuIpcOpenMemHandle", handle, flags))
        except DriverError as error:
            raise RequestRejected(f"{ref} cannot be opened ({error}): {KEEP_ALIVE}") from error

    def _close(self, handle: bytes) -> None:
        with self._lock:
            address, num_mappings = self._opened.pop(handle)
            if num_mappings > 1:
                self._opened[handle] = address, num_mappings - 1
                return
        self._driver.call("cuIpcCloseMemHandle", address)

    def extent(self, address: int) -> tuple[int, int] | None:
        """Begin and length of the mapped memory around an address; None if the driver does not know."""
        bindings = self._driver.bindings
        status, begin, num_bytes = bindings.cuMemGetAddressRange(address)
        return (int(begin), int(num_bytes)) if status == bindings.CUresult.CUDA_SUCCESS else None

    def wait(self, event: bytes) -> None:
        """Have what torch's current stream launches next run after the sender's event."""
        handle = self._driver.bindings.CUipcEventHandle()
        ctypes.memmove(handle.getPtr(), event, len(event))
        try:
            opened = self._driver.call("cuIpcOpenEventHandle", handle)
        except DriverError as error:
            raise RequestRejected(
                f"an event of the sender cannot be opened ({error}): {KEEP_ALIVE}"
            ) from error
        self._driver.call("cuStreamWaitEvent", torch.cuda.current_stream(self.index).cuda_stream, opened, 0)
        # The wait that was enqueued outlives the event.
        self._driver.call("cuEventDestroy", opened)

    def enter_thread(self) -> None:
        """Have this thread able to close mappings too."""
        torch.cuda.set_device(self.index)
        torch.cuda.synchronize(self.index)


def is_expandable(handle: bytes) -> bool:
    """Whether it is torch's handle of an expandable segment."""
    return len(handle) != DRIVER_HANDLE_BYTES and handle[1:2] == b"e"
