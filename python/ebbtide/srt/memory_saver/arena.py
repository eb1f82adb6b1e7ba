"""One contiguous range of addresses per memory tag; the memory behind it is released, resumed and swapped.

Everything with the tag is a view into its arena: release and resume are a few calls, whatever the number of
tensors, and addresses never change. Not for use from several threads at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum, auto
from math import prod

import torch

from ebbtide.srt.errors import EngineError
from ebbtide.srt.memory_saver import MemoryTag
from ebbtide.srt.slices import Slices


class ArenaState(Enum):
    RELEASED = auto()  # not all of its memory is there
    RESIDENT = auto()
    CLOSED = auto()


class Arena(ABC):
    """The memory of one tag. It starts released: call `resume` before touching a view.

    Attributes:
        num_bytes: what views may cover. 0 is legal: both states, no memory.
        virtual_bytes: bytes of address space, which is also what a whole arena holds.
    """

    def __init__(self, tag: MemoryTag, num_bytes: int) -> None:
        self.tag = tag
        self.num_bytes = num_bytes
        self.virtual_bytes = num_bytes
        self._live: Arena | None = None  # of a shadow, what it is of

    # ------------------------------------------------------------------------- what each kind does in its way

    @property
    @abstractmethod
    def state(self) -> ArenaState: ...

    @property
    @abstractmethod
    def is_whole(self) -> bool:
        """Whether all of its memory is held, be it under its addresses or not."""

    @property
    @abstractmethod
    def resident_bytes(self) -> int:
        """Bytes of physical memory held now. Shadows are not counted."""

    @property
    @abstractmethod
    def address(self) -> int:
        """The first address, the same for the arena's whole life; 0 for an arena of no bytes."""

    @abstractmethod
    def close(self) -> None:
        """Give memory and addresses back; no view may be touched again. Idempotent."""

    @abstractmethod
    def close_by_chunks(self) -> Slices[None]:
        """Close, yielding the bytes of each piece; ended early, the rest is given back at once.

        Nothing may be running that reads or writes them.
        """

    @abstractmethod
    def shrink(self, num_bytes: int) -> int:
        """Give up for good the chunks that lie wholly behind `num_bytes`; returns the bytes.

        Views into them, and shadows, may not be used again. Memory that torch allocates stays as it is.
        """

    @abstractmethod
    def _flat(self) -> torch.Tensor:
        """All of it as a uint8 tensor, at least `num_bytes` long."""

    @abstractmethod
    def _resume_by_chunks(self, *, at_once: bool) -> Slices[None]:
        """Take the missing memory, yielding the bytes of each piece, or `at_once`.

        Ended early, it keeps nothing.
        """

    @abstractmethod
    def _release(self) -> int: ...

    @abstractmethod
    def _twin(self) -> Arena:
        """A second, released arena of the same size."""

    @abstractmethod
    def _exchange(self, other: Arena) -> None:
        """Change contents with a whole twin, after all that was launched has run."""

    # ------------------------------------------------------------------------------------------- what all do

    @property
    def is_resident(self) -> bool:
        return self.state is ArenaState.RESIDENT

    def resume(self) -> int:
        """Put physical memory under the addresses, contents undefined; returns the bytes mapped.

        Raises:
            OutOfDeviceMemory: `needed_bytes` is all that was missing. Nothing is kept; a retry is legal.
            EngineError: the arena is closed.
        """
        if self.is_resident:
            return 0
        self._require_open()
        return sum(self._resume_by_chunks(at_once=True))

    def release(self) -> int:
        """Give the physical memory back; the contents are lost, the addresses stay. Returns the bytes freed.

        What was launched is waited for first. Where the driver fails half-way, a second call does the rest.
        """
        return self._release() if self.resident_bytes or self.is_resident else 0

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor at `offset` bytes, for as long as the arena is open; touch it while resident.

        ValueError: it does not fit, or lies between two elements.
        """
        end = offset + prod(shape) * dtype.itemsize
        if not 0 <= offset <= end <= self.num_bytes:
            raise ValueError(f"bytes {offset} to {end} do not lie in an arena of {self.num_bytes} bytes")
        if offset % dtype.itemsize:
            raise ValueError(f"offset {offset} is not a multiple of the element size, {dtype.itemsize}")
        return self._flat()[offset:end].view(dtype).view(shape)

    def stage(self) -> Slices[Arena]:
        """A shadow: a second set of memory of the same layout, to be written aside and swapped in.

        Yields the bytes of each chunk just taken. Ended early, or without room (OutOfDeviceMemory), it keeps
        nothing.
        """
        twin = self._twin()
        try:
            yield from twin._resume_by_chunks(at_once=False)
        except BaseException:
            twin.close()
            raise
        twin._live = self
        return twin

    def swap(self, shadow: Arena) -> None:
        """Exchange physical memory with a shadow under the live addresses, or the bytes of torch's memory.

        If it fails, both are as they were. What was launched on a device is waited for first. The shadow's
        tensors may not be touched afterwards, which saves the driver half its work.

        Raises:
            EngineError: the arena is released, or the shadow is closed.
            OutOfDeviceMemory: the machine has no room to hold the pages while they change places.
            ValueError: the shadow is not one of this arena.
        """
        if shadow._live is not self:
            raise ValueError("the shadow belongs to another arena")
        self.require_resident()
        if not shadow.is_whole:
            raise EngineError(f"the shadow is {shadow.state.name.lower()}")
        self._exchange(shadow)

    def repay(self) -> None:
        """Of a shadow, give up as many chunks as were lent for it; after that it may only be closed."""
        return

    def require_resident(self) -> None:
        if not self.is_resident:
            raise EngineError(f"this memory is {self.state.name.lower()}, and must be resident")

    def _require_open(self) -> None:
        if self.state is ArenaState.CLOSED:
            raise EngineError("this memory is closed, and cannot be resumed")


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple that is at least as large."""
    return -(-number // multiple) * multiple
