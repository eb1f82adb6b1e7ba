"""Arenas: one contiguous address range per memory tag, whose memory can be released, resumed and swapped.

All tensors of a tag are views into its arena. So a release or a resume takes a few driver calls, whatever the
number of tensors, and addresses never change. Arenas are not thread-safe.
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
    RELEASED = auto()  # some of its memory, or all, is missing
    RESIDENT = auto()
    CLOSED = auto()


class Arena(ABC):
    """The memory of one tag. It starts released: call `resume` before touching a view.

    Attributes:
        num_bytes: bytes that views may cover. 0 is legal: an arena without memory.
        virtual_bytes: bytes of address space; an arena with all of its memory holds as many.
    """

    def __init__(self, tag: MemoryTag, num_bytes: int) -> None:
        self.tag = tag
        self.num_bytes = num_bytes
        self.virtual_bytes = num_bytes
        self._live: Arena | None = None  # of a shadow: the arena that it is a copy of

    # --------------------------------------------------------------------------------- what subclasses define

    @property
    @abstractmethod
    def state(self) -> ArenaState: ...

    @property
    @abstractmethod
    def is_whole(self) -> bool:
        """Whether it holds all of its memory, mapped at its addresses or not."""

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
        """Close, yielding the bytes of each piece. If it is ended early, the rest is given back at once.

        No work that reads or writes the memory may be running.
        """

    @abstractmethod
    def shrink(self, num_bytes: int) -> int:
        """Give up for good the chunks that lie entirely after `num_bytes`; returns the bytes.

        Views into them, and shadows, may not be used again. Memory from torch's allocator is not given up.
        """

    @abstractmethod
    def _flat(self) -> torch.Tensor:
        """All of it as a uint8 tensor, at least `num_bytes` long."""

    @abstractmethod
    def _resume_by_chunks(self, *, at_once: bool) -> Slices[None]:
        """Take the missing memory, yielding the bytes of each piece. If it is ended early, it keeps nothing.

        Args:
            at_once: nobody waits between pieces, so the quicker way may be taken.
        """

    @abstractmethod
    def _release(self) -> int: ...

    @abstractmethod
    def _twin(self) -> Arena:
        """A second, released arena of the same size."""

    @abstractmethod
    def _exchange(self, other: Arena) -> None:
        """Exchange contents with a twin that has all its memory, after all launched work has run."""

    # ---------------------------------------------------------------------------------------- what all share

    @property
    def is_resident(self) -> bool:
        return self.state is ArenaState.RESIDENT

    def resume(self) -> int:
        """Map physical memory at the addresses, contents undefined; returns the bytes mapped.

        Raises:
            OutOfDeviceMemory: nothing was taken; `needed_bytes` is all that is missing. It may be retried.
            EngineError: the arena is closed.
        """
        if self.is_resident:
            return 0
        self._require_open()
        return sum(self._resume_by_chunks(at_once=True))

    def release(self) -> int:
        """Give the physical memory back; returns the bytes. Contents are lost, addresses stay.

        Waits for launched work first. If the driver fails half-way, a second call does the rest.
        """
        return self._release() if self.resident_bytes or self.is_resident else 0

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor at `offset` bytes. Use it only while the arena is resident.

        ValueError: it does not fit, or the offset is not aligned to the dtype.
        """
        end = offset + prod(shape) * dtype.itemsize
        if not 0 <= offset <= end <= self.num_bytes:
            raise ValueError(f"bytes {offset} to {end} do not lie in an arena of {self.num_bytes} bytes")
        if offset % dtype.itemsize:
            raise ValueError(f"offset {offset} is not a multiple of the element size, {dtype.itemsize}")
        return self._flat()[offset:end].view(dtype).view(shape)

    def stage(self) -> Slices[Arena]:
        """Make a shadow: a second arena of the same layout, to be written and then swapped in.

        Yields the bytes of each chunk just taken. Ended early, or out of memory (OutOfDeviceMemory), it keeps
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
        """Exchange contents with a shadow: by mapping its memory here, or by copying if torch allocated it.

        Waits for launched work first. If it fails, both are as they were. The shadow's tensors may not be
        used afterwards: its memory is not mapped again, which saves the driver half of the work.

        Raises:
            EngineError: the arena is released, or the shadow is closed.
            OutOfDeviceMemory: there is too little memory for the exchange itself.
            ValueError: the shadow is not one of this arena.
        """
        if shadow._live is not self:
            raise ValueError("the shadow belongs to another arena")
        self.require_resident()
        if not shadow.is_whole:
            raise EngineError(f"the shadow is {shadow.state.name.lower()}")
        self._exchange(shadow)

    def repay(self) -> None:
        """Return as many chunks of a shadow as were lent for it. Afterwards it may only be closed."""
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
