"""One contiguous range of addresses per memory tag; the memory behind it is released, resumed and swapped.

Everything with the tag is a view into its arena: release and resume are a few calls, whatever the number of
tensors, and addresses never change. Not for use from several threads at once.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack
from enum import Enum, auto
from functools import cached_property
from math import prod
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

from ebbtide.srt.errors import EngineError, OutOfDeviceMemory
from ebbtide.srt.memory_saver.tags import MemoryTag
from ebbtide.srt.memory_saver.virtual_memory.base import Handle, VirtualMemory

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
        self._span = _Span(num_bytes, vm, chunk_bytes)

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
        return self._span.state is _State.RESIDENT

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

        Afterwards the arena's tensors read what the shadow's tensors held, and the other way round. If it
        fails, both are as they were.

        Raises:
            EngineError: the arena is released, or the shadow is closed.
            OutOfDeviceMemory: the machine has no room to hold the pages while they change places.
            ValueError: the shadow is not one of this arena.
        """
        if shadow._live is not self._span:
            raise ValueError("the shadow belongs to another arena")
        self._span.exchange(shadow._span)

    def close(self) -> None:
        """Give memory and addresses back; no view may be touched again. Idempotent."""
        self._span.close()


class Shadow:
    """A second set of an arena's memory at addresses of its own. A context manager: leaving it closes it."""

    def __init__(self, live: _Span, span: _Span) -> None:
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
        self._live.require_resident()
        source = self._live.view(offset, (num_bytes,), torch.uint8)
        self.view(offset, (num_bytes,), torch.uint8).copy_(source)

    def close(self) -> None:
        """Give memory and addresses back; no view may be touched again. Idempotent."""
        self._span.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _State(Enum):
    RELEASED = auto()
    RESIDENT = auto()
    CLOSED = auto()


class _Span:
    """A reservation divided into chunks and, while it is resident, the handle under each chunk."""

    def __init__(self, num_bytes: int, vm: VirtualMemory, chunk_bytes: int | None) -> None:
        if num_bytes < 0 or (chunk_bytes is not None and chunk_bytes < 1):
            raise ValueError(f"sizes of {num_bytes} bytes in chunks of {chunk_bytes} make no arena")
        self.num_bytes = num_bytes
        self.virtual_bytes = _round_up(num_bytes, vm.granularity)
        self.state = _State.RELEASED
        self._vm = vm
        self._chunk_bytes = chunk_bytes
        step = _round_up(chunk_bytes, vm.granularity) if chunk_bytes is not None else self.virtual_bytes
        self._chunks = [
            (offset, min(step, self.virtual_bytes - offset))
            for offset in range(0, self.virtual_bytes, step or 1)
        ]
        self._handles: list[Handle] = []
        self._reservation = vm.reserve(self.virtual_bytes) if self.virtual_bytes else None

    @property
    def address(self) -> int:
        return self._reservation.address if self._reservation is not None else 0

    @cached_property
    def _bytes(self) -> torch.Tensor:
        if self._reservation is None:
            return torch.empty(0, dtype=torch.uint8)
        return self._vm.as_tensor(self._reservation)

    def twin(self) -> _Span:
        return _Span(self.num_bytes, self._vm, self._chunk_bytes)

    def require_resident(self) -> None:
        if self.state is not _State.RESIDENT:
            raise EngineError(f"this memory is {self.state.name.lower()}, and must be resident")

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        end = offset + prod(shape) * dtype.itemsize
        if not 0 <= offset <= end <= self.num_bytes:
            raise ValueError(f"bytes {offset} to {end} do not lie in an arena of {self.num_bytes} bytes")
        if offset % dtype.itemsize:
            raise ValueError(f"offset {offset} is not a multiple of the element size, {dtype.itemsize}")
        return self._bytes[offset:end].view(dtype).view(shape)

    def populate(self) -> int:
        return sum(self.populate_by_chunks())

    def populate_by_chunks(self) -> Generator[int, None, None]:
        """Take memory for every chunk, or for none: ended early, or by an error, it gives all of it back."""
        if self.state is not _State.RELEASED:
            raise EngineError(f"this memory is {self.state.name.lower()}, and must be released to be resumed")
        handles: list[Handle] = []
        try:
            with ExitStack() as undo:
                for offset, num_bytes in self._chunks:
                    handle = self._vm.create(num_bytes)
                    handles.append(handle)
                    try:
                        self._map(offset, handle)
                    except BaseException:
                        self._vm.release(handle)
                        raise
                    undo.callback(self._discard, offset, handle)
                    yield num_bytes
                undo.pop_all()
        except OutOfDeviceMemory as error:
            undone_bytes = sum(handle.num_bytes for handle in handles)
            raise OutOfDeviceMemory(self.virtual_bytes, error.free_bytes + undone_bytes) from error
        self._handles = handles
        self.state = _State.RESIDENT

    def empty(self) -> int:
        self.require_resident()
        for (offset, _), handle in zip(self._chunks, self._handles, strict=True):
            self._discard(offset, handle)
        self._handles = []
        self.state = _State.RELEASED
        return self.virtual_bytes

    def exchange(self, other: _Span) -> None:
        self.require_resident()
        other.require_resident()
        exchanged = ((self, other._handles), (other, self._handles))
        with ExitStack() as undo:
            for span in (self, other):
                for (offset, _), handle in zip(span._chunks, span._handles, strict=True):
                    span._unmap(offset, handle)
                    undo.callback(span._map, offset, handle)
            for span, handles in exchanged:
                for (offset, _), handle in zip(span._chunks, handles, strict=True):
                    span._map(offset, handle)
                    undo.callback(span._unmap, offset, handle)
            undo.pop_all()
        self._handles, other._handles = other._handles, self._handles

    def close(self) -> None:
        if self.state is _State.RESIDENT:
            self.empty()
        if self.state is not _State.CLOSED and self._reservation is not None:
            self._vm.free_reservation(self._reservation)
        self.state = _State.CLOSED

    def _map(self, offset: int, handle: Handle) -> None:
        assert self._reservation is not None
        self._vm.map(self._reservation, offset, handle)

    def _unmap(self, offset: int, handle: Handle) -> None:
        assert self._reservation is not None
        self._vm.unmap(self._reservation, offset, handle.num_bytes)

    def _discard(self, offset: int, handle: Handle) -> None:
        # In this order the contents need not be kept at unmap, which must not fail here.
        self._vm.release(handle)
        self._unmap(offset, handle)


def _round_up(num_bytes: int, multiple: int) -> int:
    return -(-num_bytes // multiple) * multiple


def _result(work: Generator[Any, None, T]) -> T:
    """Run a generator to its end; what it returns."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result
