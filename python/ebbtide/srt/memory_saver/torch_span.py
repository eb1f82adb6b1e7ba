"""Spans over memory that torch allocates: it cannot change places, so contents are exchanged by copying."""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol

import torch

from ebbtide.srt.errors import EngineError, OutOfDeviceMemory
from ebbtide.srt.memory_saver.span import (
    Span,
    SpanState,
    require_released,
    require_resident,
    require_size,
    require_view,
    view_bytes,
)

# Three copies per slice: a slice that fits into the device's cache is read from there the second time.
SLICE_BYTES = 16 << 20


class TorchMemory(Protocol):
    """What spans need of the device that their memory is on."""

    @property
    def name(self) -> str:
        """As torch spells it."""
        ...

    def synchronize(self) -> None: ...

    def free_bytes(self) -> int: ...

    def trim(self) -> None:
        """Give back what torch keeps for reuse."""
        ...


class TorchSpan:
    """Memory that is there from the first to the last moment: RELEASED only until it is first populated.

    Args:
        num_bytes: what views may cover.
        device: where the memory is.

    Raises:
        OutOfDeviceMemory: there is no room.
    """

    def __init__(self, num_bytes: int, device: TorchMemory) -> None:
        require_size(num_bytes)
        self.num_bytes = num_bytes
        self.virtual_bytes = num_bytes
        self.state = SpanState.RELEASED
        self._device = device
        self._bytes = self._allocate()

    @property
    def address(self) -> int:
        return self._bytes.data_ptr()

    def twin(self) -> TorchSpan:
        return TorchSpan(self.num_bytes, self._device)

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        require_view(self.num_bytes, offset, shape, dtype)
        return view_bytes(self._bytes, offset, shape, dtype)

    def populate(self) -> int:
        require_released(self)
        self.state = SpanState.RESIDENT
        return self.virtual_bytes

    def populate_by_chunks(self) -> Generator[int, None, None]:
        yield self.populate()

    def empty(self) -> int:
        require_resident(self)
        if self.num_bytes:
            raise EngineError("memory_saver_backend is 'none': this memory stays resident")
        self.state = SpanState.RELEASED
        return 0

    def exchange(self, other: Span) -> None:
        assert isinstance(other, TorchSpan)
        require_resident(self)
        require_resident(other)
        try:
            # All memory that is needed is taken before the first byte moves.
            slice_bytes = min(self.num_bytes, SLICE_BYTES)
            spare = torch.empty(slice_bytes, dtype=torch.uint8, device=self._device.name)
        except torch.OutOfMemoryError as error:
            raise OutOfDeviceMemory(slice_bytes, self._device.free_bytes()) from error
        self._device.synchronize()
        ours, theirs = (span._bytes[: self.num_bytes] for span in (self, other))
        for here, there in zip(torch.split(ours, SLICE_BYTES), torch.split(theirs, SLICE_BYTES), strict=True):
            kept = spare[: here.nbytes].copy_(here)
            here.copy_(there)
            there.copy_(kept)
        self._device.synchronize()

    def shrink(self, num_bytes: int) -> int:
        return 0

    def close(self) -> None:
        if self.state is SpanState.CLOSED:
            return
        self.state = SpanState.CLOSED
        self._bytes = self._bytes[:0].clone()
        self._device.trim()

    def close_by_chunks(self) -> Generator[int, None, None]:
        num_bytes = self.virtual_bytes
        self.close()
        yield num_bytes

    def _allocate(self) -> torch.Tensor:
        try:
            return torch.empty(self.num_bytes, dtype=torch.uint8, device=self._device.name)
        except torch.OutOfMemoryError as error:
            raise OutOfDeviceMemory(self.num_bytes, self._device.free_bytes()) from error
