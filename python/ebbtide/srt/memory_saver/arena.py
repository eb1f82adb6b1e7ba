"""One contiguous range of addresses per memory tag; the memory behind it is released, resumed and swapped.

Everything with the tag is a view into its arena: release and resume are a few calls, whatever the number of
tensors, and addresses never change. Not for use from several threads at once.
"""

from __future__ import annotations

from collections.abc import Generator
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

from ebbtide.srt.memory_saver.span import Span, SpanState, VirtualSpan, require_resident
from ebbtide.srt.memory_saver.tags import MemoryTag
from ebbtide.srt.memory_saver.virtual_memory.base import VirtualMemory

T = TypeVar("T")


class Arena:
    """The memory of one tag. It starts released: call `resume` before touching a view.

    Args:
        tag: what the memory is for.
        num_bytes: bytes wanted; rounded up to the granularity of `vm`. 0 is legal: both states, no memory.
        vm: where addresses and memory come from.
        chunk_bytes: size of the pieces that the memory is taken in; rounded up likewise. None: one piece.

    Raises:
        OutOfDeviceMemory: the addresses could not be reserved.
    """

    def __init__(
        self, tag: MemoryTag, num_bytes: int, vm: VirtualMemory, chunk_bytes: int | None = None
    ) -> None:
        self.tag = tag
        self._span: Span = VirtualSpan(num_bytes, vm, chunk_bytes)

    @classmethod
    def over(cls, tag: MemoryTag, span: Span) -> Self:
        """An arena whose memory is managed in another way than by a VirtualMemory."""
        arena = cls.__new__(cls)
        arena.tag = tag
        arena._span = span
        return arena

    @property
    def num_bytes(self) -> int:
        """Bytes asked for: what views may cover."""
        return self._span.num_bytes

    @property
    def virtual_bytes(self) -> int:
        """Bytes of address space, which is also what a resume takes and a release gives back."""
        return self._span.virtual_bytes

    @property
    def resident_bytes(self) -> int:
        """Bytes of physical memory held now. Shadows are not counted."""
        return self.virtual_bytes if self.is_resident else 0

    @property
    def is_resident(self) -> bool:
        return self._span.state is SpanState.RESIDENT

    @property
    def address(self) -> int:
        """The first address, the same for the arena's whole life; 0 for an arena of no bytes."""
        return self._span.address

    def resume(self) -> int:
        """Put physical memory under the addresses, contents undefined.

        Returns:
            Bytes mapped; 0 if the arena is resident already.

        Raises:
            OutOfDeviceMemory: `needed_bytes` is the whole arena. Nothing is kept; a retry is legal.
        """
        return 0 if self.is_resident else self._span.populate()

    def release(self) -> int:
        """Give the physical memory back; the contents are lost, the addresses stay.

        What was launched on a device is waited for first: it may still read the memory.

        Returns:
            Bytes freed; 0 if the arena is released already.
        """
        return self._span.empty() if self.is_resident else 0

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor at `offset` bytes; it stays good across release, resume and swap.

        Creating it is legal in any state; touching it is legal only while the arena is resident.

        Raises:
            ValueError: it does not fit into the arena, or `offset` is not a multiple of the element size.
        """
        return self._span.view(offset, shape, dtype)

    def stage(self) -> Shadow:
        """Take a second set of physical memory of the same layout, to be written aside and swapped in.

        Raises:
            OutOfDeviceMemory: there is no room for it; nothing is kept.
        """
        return _result(self.stage_by_chunks())

    def stage_by_chunks(self) -> Generator[int, None, Shadow]:
        """As `stage`, yielding the bytes of each chunk just taken, so that other things may go on in between.

        Ended early, it keeps nothing.
        """
        span = self._span.twin()
        try:
            yield from span.populate_by_chunks()
        except BaseException:
            span.close()
            raise
        return Shadow(self._span, span)

    def swap(self, shadow: Shadow) -> None:
        """Exchange physical memory with a shadow under the live addresses; no byte is copied.

        (Memory that torch allocates cannot change places: there the bytes are exchanged.) Afterwards the
        arena's tensors read what the shadow's tensors held, and the other way round. If it fails, both are
        as they were. What was launched on a device is waited for first.

        Raises:
            EngineError: the arena is released, or the shadow is closed.
            OutOfDeviceMemory: the machine has no room to hold the pages while they change places.
            ValueError: the shadow is not one of this arena.
        """
        if shadow._live is not self._span:
            raise ValueError("the shadow belongs to another arena")
        self._span.exchange(shadow._span)

    def shrink(self, num_bytes: int) -> int:
        """Give up for good the chunks that lie wholly behind `num_bytes`; later resumes do not take them.

        For an arena that was laid out before it was known how much is needed. Views into what is given up,
        and shadows, may not be used again. Memory that torch allocates stays as it is.

        Returns:
            Bytes given up.
        """
        return self._span.shrink(num_bytes)

    def close(self) -> None:
        """Give memory and addresses back; no view may be touched again. Idempotent."""
        self._span.close()


class Shadow:
    """A second set of an arena's memory at addresses of its own. A context manager: leaving it closes it."""

    def __init__(self, live: Span, span: Span) -> None:
        self._live = live
        self._span = span

    @property
    def num_bytes(self) -> int:
        """Bytes that views may cover, as of the arena."""
        return self._span.num_bytes

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """As `Arena.view`: what will be at that offset of the arena after a swap."""
        return self._span.view(offset, shape, dtype)

    def copy_from_live(self, offset: int, num_bytes: int) -> None:
        """Copy bytes that will not be written from the arena, which must be resident."""
        require_resident(self._live)
        source = self._live.view(offset, (num_bytes,), torch.uint8)
        self.view(offset, (num_bytes,), torch.uint8).copy_(source)

    def close(self) -> None:
        """Give memory and addresses back; no view may be touched again. Idempotent."""
        self._span.close()

    def close_by_chunks(self) -> Generator[int, None, None]:
        """As `close`, yielding the bytes of each chunk just given back. Copies must have run to their end."""
        return self._span.close_by_chunks()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _result(work: Generator[Any, None, T]) -> T:
    """Run a generator to its end; what it returns."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result
