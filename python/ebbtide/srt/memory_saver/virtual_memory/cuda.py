"""Virtual memory of a CUDA device, by the driver's own calls for it (cuMem*).

It is apart from torch's caching allocator: what is released here is the device's at once.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from ebbtide.srt.errors import ConfigurationError, EngineError, OutOfDeviceMemory
from ebbtide.srt.memory_saver.virtual_memory import Handle, Reservation


class CudaVirtualMemory:
    """VirtualMemory over the memory of one device, as torch and the driver count it.

    Args:
        trim: gives back what torch keeps for reuse; called once before memory is said to be out.
        driver: the driver's functions; None: those of this machine.

    Attributes:
        held_bytes: physical memory that was created here and not released.

    Raises:
        ConfigurationError: the package cuda-bindings is not installed.
        EngineError: the driver refused. So does every method; the message holds the call and its error.
    """

    keeps_for_free = True

    def __init__(
        self,
        index: int,
        *,
        free_bytes: Callable[[], int],
        synchronize: Callable[[], None],
        trim: Callable[[], None],
        driver: CudaDriver | None = None,
    ) -> None:
        self._device = torch.device("cuda", index)
        self._free_bytes = free_bytes
        self._synchronize = synchronize
        self._trim = trim
        self._driver = driver if driver is not None else CudaDriver()
        bindings = self._driver.bindings
        self._properties = _pinned_memory_of(bindings, index)
        self._access = bindings.CUmemAccessDesc()
        self._access.location = self._properties.location
        self._access.flags = bindings.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self.granularity = int(
            self._driver.call(
                "cuMemGetAllocationGranularity",
                self._properties,
                bindings.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
            )
        )
        self.held_bytes = 0

    def reserve(self, num_bytes: int) -> Reservation:
        address = self._take(num_bytes, "cuMemAddressReserve", num_bytes, self.granularity, 0, 0)
        return Reservation(int(address), num_bytes)

    def free_reservation(self, reservation: Reservation) -> None:
        self._driver.call("cuMemAddressFree", reservation.address, reservation.num_bytes)

    def create(self, num_bytes: int) -> Handle:
        creation = "cuMemCreate", num_bytes, self._properties, 0
        try:
            key = self._take(num_bytes, *creation)
        except OutOfDeviceMemory:
            self._trim()
            key = self._take(num_bytes, *creation)
        self.held_bytes += num_bytes
        return Handle(int(key), num_bytes)

    def map(self, at: Reservation, offset: int, handle: Handle) -> None:
        self._take(handle.num_bytes, "cuMemMap", at.address + offset, handle.num_bytes, 0, handle.key, 0)

    def make_accessible(self, at: Reservation, offset: int, num_bytes: int) -> None:
        self._take(num_bytes, "cuMemSetAccess", at.address + offset, num_bytes, [self._access], 1)

    def drain(self) -> None:
        # The driver unmaps at once: a kernel or a graph replay that still reads the pages would fault.
        self._synchronize()

    def unmap(self, at: Reservation, offset: int, num_bytes: int) -> None:
        self._driver.call("cuMemUnmap", at.address + offset, num_bytes)

    def release(self, handle: Handle) -> None:
        self._driver.call("cuMemRelease", handle.key)
        self.held_bytes -= handle.num_bytes

    def as_tensor(self, reservation: Reservation) -> torch.Tensor:
        # The public ways to a tensor at an address ask the driver what lies there, and nothing has to yet.
        storage = torch._C._construct_storage_from_data_pointer(
            reservation.address, self._device, reservation.num_bytes
        )
        flat = torch.empty(0, dtype=torch.uint8, device=self._device)
        return flat.set_(storage, 0, (reservation.num_bytes,), (1,))

    def _take(self, num_bytes: int, call: str, *arguments: Any) -> Any:
        """Call what takes memory, addresses, or tables of the driver for them."""
        try:
            return self._driver.call(call, *arguments)
        except DriverError as error:
            if not error.is_out_of_memory:
                raise
            raise OutOfDeviceMemory(num_bytes, self._free_bytes()) from error


class CudaHostPinning:
    """Makes host memory known to the driver, so that copies from and to it run at the speed of the bus.

    Its methods may be called from any thread. The memory is pinned for all devices.
    """

    def __init__(self, index: int, synchronize: Callable[[], None], driver: CudaDriver | None = None) -> None:
        self._driver = driver if driver is not None else CudaDriver()
        self._synchronize = synchronize
        # torch's own context, and kept: another thread has none until it is given one.
        self._context = self._driver.call("cuDevicePrimaryCtxRetain", index)

    def pin(self, address: int, num_bytes: int) -> None:
        self._driver.call("cuCtxSetCurrent", self._context)
        self._driver.call(
            "cuMemHostRegister", address, num_bytes, self._driver.bindings.CU_MEMHOSTREGISTER_PORTABLE
        )

    def unpin(self, address: int) -> None:
        self._driver.call("cuCtxSetCurrent", self._context)
        self._driver.call("cuMemHostUnregister", address)

    def synchronize(self) -> None:
        self._synchronize()


def _pinned_memory_of(bindings: Any, index: int) -> Any:
    properties = bindings.CUmemAllocationProp()
    properties.type = bindings.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    location = bindings.CUmemLocation()
    location.type = bindings.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = index
    properties.location = location
    return properties


class DriverError(EngineError):
    """A call of the CUDA driver failed.

    `is_out_of_memory`: the device, or the driver's tables, had no room.
    """

    def __init__(self, call: str, text: str, is_out_of_memory: bool) -> None:
        super().__init__(f"{call}: {text}")
        self.is_out_of_memory = is_out_of_memory


class CudaDriver:
    """The driver's functions by name, as `cuda.bindings.driver` offers them: each returns its status, then
    values.

    ConfigurationError: the package cuda-bindings is not installed.
    """

    def __init__(self, bindings: Any = None) -> None:
        self.bindings = bindings if bindings is not None else _load_bindings()
        self._success = self.bindings.CUresult.CUDA_SUCCESS
        self._out_of_memory = self.bindings.CUresult.CUDA_ERROR_OUT_OF_MEMORY

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function; its value, if it has one, or DriverError with the driver's own words."""
        status, *values = getattr(self.bindings, name)(*arguments)
        if status != self._success:
            raise DriverError(name, self._text(status), status == self._out_of_memory)
        return values[0] if values else None

    def _text(self, status: Any) -> str:
        answer, text = self.bindings.cuGetErrorString(status)
        return text.decode() if answer == self._success and text else f"error {int(status)}"


def _load_bindings() -> Any:
    try:
        return import_module("cuda.bindings.driver")
    except ImportError as error:
        raise ConfigurationError(
            "device=cuda needs the package cuda-bindings: pip install 'ebbtide[cuda]'"
        ) from error
