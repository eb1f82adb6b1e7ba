"""Opens device memory that a payload refers to, as torch shares it between processes (CUDA IPC).

The sender counts, in a file in shared memory, each reference that it has handed out, and keeps the memory
until the receiver has taken every one off the count: torch does so when an opened storage is freed, and
`CudaBlocks` for those that were never opened. Source: wire_api section 4.2.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterable, Iterator
from functools import cached_property
from importlib import import_module
from typing import Any, Final, Protocol, Self

import torch

from ebbtide.srt.errors import EngineError, RequestRejected
from ebbtide.srt.weight_sync.payload.allowed_globals import NUM_COUNTERS, CudaStorageRef
from ebbtide.srt.weight_sync.payload.shared_memory import HEADER_BYTES, KEEP_ALIVE, object_path

_COUNTER: Final = struct.Struct("=q")


class CudaIpc(Protocol):
    """What opens other processes' memory on one device of this process.

    Attributes:
        index: of the device, as this process counts them.
        uuid: 36 characters.
    """

    index: int
    uuid: str

    def reaches(self, device: int | str) -> bool:
        """Whether kernels on this device can read that one's memory: it is this one, or a visible peer of it.

        Args:
            device: index as this process counts devices, or UUID.
        """
        ...

    def open(self, ref: CudaStorageRef) -> torch.UntypedStorage:
        """Map the sender's allocation. Freeing the storage closes it and takes the reference off the count.

        Raises:
            RequestRejected: it cannot be mapped, and the count is as it was.
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


class CudaBlocks:
    """The device memory of one payload: each reference opened once, and given back once.

    Args:
        ipc: of the device that the engine runs on; None where that is the CPU.
        owns_references: whether this rank gives the references back; of several that were sent the same ones
            exactly one does.
        may_open: False where several were sent the same ones, since a reference can be opened only once.
    """

    def __init__(self, ipc: CudaIpc | None, owns_references: bool, may_open: bool) -> None:
        self._ipc = ipc
        self._owns_references = owns_references
        self._may_open = may_open
        self._opened: dict[CudaStorageRef, torch.UntypedStorage] = {}
        self._given_back: set[CudaStorageRef] = set()
        self._awaited: set[CudaStorageRef] = set()

    def check(self, ref: CudaStorageRef) -> None:
        """Refuse what this engine's device does not reach, without opening it."""
        if self._ipc is None:
            raise RequestRejected(
                "the payload refers to memory of a CUDA device, and this engine runs on the CPU: "
                "send tensor.cpu()"
            )
        if not self._ipc.reaches(ref.device):
            raise RequestRejected(
                f"the payload refers to memory of CUDA device {ref.device}, this engine runs on device "
                f"{self._ipc.index}, UUID {self._ipc.uuid}, and does not reach it"
            )
        if not self._may_open:
            raise RequestRejected("a CUDA tensor can be opened by one rank only: send one entry per rank")

    def open(self, refs: Iterable[CudaStorageRef]) -> Iterator[int]:
        """Map the memory of references that `check` accepts; yields the bytes of each.

        Raises:
            RequestRejected: the sender has ended, or the memory is not what the payload says.
        """
        assert self._ipc is not None
        extents: dict[int, int] = {}
        with _Counters() as counters:
            for ref in refs:
                if ref in self._opened:
                    continue
                if counters.add(ref, 0) == 0:
                    raise RequestRejected(f"{_name(ref)} was given back before: serialize the tensors anew")
                self._opened[ref] = self._ipc.open(ref)
                self._check_extent(ref, extents)
                yield ref.num_bytes

    def storage(self, ref: CudaStorageRef) -> torch.UntypedStorage:
        """An opened storage, for work launched on torch's current stream."""
        assert self._ipc is not None
        if ref not in self._opened:
            raise EngineError(f"{_name(ref)} is read before it was opened")
        if ref.event is not None and ref not in self._awaited:
            self._ipc.wait(ref.event)
            self._awaited.add(ref)
        return self._opened[ref]

    def release(self) -> Iterator[int]:
        """Give back what was opened; yields the bytes of each. Nothing that reads it may be under way."""
        while self._opened:
            ref, storage = self._opened.popitem()
            self._given_back.add(ref)
            del storage
            yield ref.num_bytes

    def close(self, unread: Iterable[CudaStorageRef] = ()) -> None:
        """Give everything back, also references that travelled and were never opened. Idempotent."""
        for _ in self.release():
            pass
        if self._owns_references:
            with _Counters() as counters:
                for ref in unread:
                    if ref not in self._given_back:
                        self._given_back.add(ref)
                        counters.add(ref, -1)

    def _check_extent(self, ref: CudaStorageRef, extents: dict[int, int]) -> None:
        """Refuse a storage that reaches beyond the mapping: reading there would end the engine's context.

        Args:
            extents: ends of the mappings that have been looked at, by their beginnings.
        """
        assert self._ipc is not None
        begin = self._opened[ref].data_ptr() - ref.offset_bytes
        needed_end = begin + ref.offset_bytes + ref.num_bytes
        end = extents.get(begin, begin)
        while end < needed_end:
            # An expandable segment is mapped in pieces that follow one another.
            extent = self._ipc.extent(end)
            if extent is None and end == begin:
                return  # Nothing is known about this kind of mapping.
            if extent is None or sum(extent) <= end or (end == begin and extent[0] != begin):
                raise RequestRejected(
                    f"{_name(ref)}: bytes {ref.offset_bytes} to {ref.offset_bytes + ref.num_bytes} do not "
                    f"lie in the sender's allocation of {end - begin} bytes"
                )
            end = extents[begin] = sum(extent)


class TorchCudaIpc:
    """CUDA IPC through torch, which shares mappings and keeps the counts; events and extents by the driver.

    torch never destroys an event that it has opened, so it is not given any.
    """

    def __init__(self, index: int, uuid: str) -> None:
        self.index = index
        self.uuid = uuid.removeprefix("GPU-")

    def reaches(self, device: int | str) -> bool:
        if isinstance(device, str):
            if device.lower() == self.uuid.lower():
                return True
            device = self._visible.get(device.lower(), -1)
        if device == self.index:
            return True
        is_visible = 0 <= device < torch.cuda.device_count()
        return is_visible and torch.cuda.can_device_access_peer(self.index, device)

    @cached_property
    def _visible(self) -> dict[str, int]:
        """Index by UUID."""
        indices = range(torch.cuda.device_count())
        return {str(torch.cuda.get_device_properties(index).uuid).lower(): index for index in indices}

    @cached_property
    def _driver(self) -> Any:
        return import_module("cuda.bindings.driver")  # only machines with a GPU have it

    def open(self, ref: CudaStorageRef) -> torch.UntypedStorage:
        try:
            return torch.UntypedStorage._new_shared_cuda(
                self.index,
                ref.handle,
                ref.num_bytes,
                ref.offset_bytes,
                ref.counter_file,
                ref.counter_index,
                b"",
                False,
            )
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise RequestRejected(f"{_name(ref)} cannot be opened ({reason}): {KEEP_ALIVE}") from error

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


def _name(ref: CudaStorageRef) -> str:
    return f"CUDA memory counted in {os.fsdecode(ref.counter_file)}[{ref.counter_index}]"


class _Counters:
    """The sender's counts of references, each file of them opened once. A context manager.

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._files.values():
            if descriptor is not None:
                os.close(descriptor)


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
