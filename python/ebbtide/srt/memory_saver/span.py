"""What lies behind an arena: a range of addresses, and the memory that comes and goes under it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack
from enum import Enum, auto
from functools import cached_property, partial
from math import prod
from typing import Protocol

import torch

from ebbtide.srt.errors import EngineError, OutOfDeviceMemory
from ebbtide.srt.memory_saver.virtual_memory.base import Handle, VirtualMemory


class SpanState(Enum):
    RELEASED = auto()
    RESIDENT = auto()
    CLOSED = auto()


class Span(Protocol):
    """The memory of an arena, or of a shadow.

    Attributes:
        num_bytes: what views may cover.
        virtual_bytes: what `populate` takes and `empty` gives back.
        state: starts as RELEASED.
    """

    num_bytes: int
    virtual_bytes: int
    state: SpanState

    @property
    def address(self) -> int:
        """The first address; 0 where there are no bytes."""
        ...

    def twin(self) -> Span:
        """A second, released span of the same size."""
        ...

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor: ...

    def populate(self) -> int:
        """From RELEASED to RESIDENT; returns the bytes. Raises OutOfDeviceMemory and keeps nothing."""
        ...

    def populate_by_chunks(self) -> Generator[int, None, None]:
        """As `populate`, yielding the bytes of each piece; ended early, it keeps nothing."""
        ...

    def empty(self) -> int:
        """From RESIDENT to RELEASED; returns the bytes."""
        ...

    def exchange(self, other: Span) -> None:
        """Change contents with a resident span that is its twin."""
        ...

    def shrink(self, num_bytes: int) -> int:
        """Give up for good what lies behind `num_bytes`, as far as it can be; returns the bytes."""
        ...

    def close(self) -> None:
        """Give memory and addresses back. Idempotent."""
        ...

    def close_by_chunks(self) -> Generator[int, None, None]:
        """As `close`, yielding the bytes of each piece. Nothing may be running that reads or writes them.

        Ended early, the rest is given back at once.
        """
        ...


class VirtualSpan:
    """A reservation divided into chunks and, while it is resident, the handle under each chunk."""

    def __init__(self, num_bytes: int, vm: VirtualMemory, chunk_bytes: int | None) -> None:
        require_size(num_bytes, chunk_bytes)
        self.num_bytes = num_bytes
        self.virtual_bytes = round_up(num_bytes, vm.granularity)
        self.state = SpanState.RELEASED
        self._vm = vm
        self._chunk_bytes = chunk_bytes
        step = round_up(chunk_bytes, vm.granularity) if chunk_bytes is not None else self.virtual_bytes
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

    def twin(self) -> VirtualSpan:
        return VirtualSpan(self.num_bytes, self._vm, self._chunk_bytes)

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        require_view(self.num_bytes, offset, shape, dtype)
        return view_bytes(self._bytes, offset, shape, dtype)

    def populate(self) -> int:
        return sum(self._populate(at_once=True))

    def populate_by_chunks(self) -> Generator[int, None, None]:
        return self._populate(at_once=False)

    def _populate(self, *, at_once: bool) -> Generator[int, None, None]:
        """`at_once`: make all of it accessible at the end, which is quicker, but milliseconds in one go."""
        require_released(self)
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
                    if not at_once:
                        self._make_accessible(offset, num_bytes)
                    yield num_bytes
                if at_once:
                    self._make_accessible(0, self.virtual_bytes)
                undo.pop_all()
        except OutOfDeviceMemory as error:
            undone_bytes = sum(handle.num_bytes for handle in handles)
            raise OutOfDeviceMemory(self.virtual_bytes, error.free_bytes + undone_bytes) from error
        self._handles = handles
        self.state = SpanState.RESIDENT

    def empty(self) -> int:
        require_resident(self)
        self._vm.drain()
        for (offset, _), handle in zip(self._chunks, self._handles, strict=True):
            self._discard(offset, handle)
        self._handles = []
        self.state = SpanState.RELEASED
        return self.virtual_bytes

    def exchange(self, other: Span) -> None:
        assert isinstance(other, VirtualSpan)
        require_resident(self)
        require_resident(other)
        self._vm.drain()
        exchanged = ((self, other._handles), (other, self._handles))
        with ExitStack() as undo:
            for span in (self, other):
                # After its handles are back: last in, first out.
                undo.callback(span._make_accessible, 0, span.virtual_bytes)
                for (offset, _), handle in zip(span._chunks, span._handles, strict=True):
                    span._unmap(offset, handle)
                    undo.callback(span._map, offset, handle)
            for span, handles in exchanged:
                for (offset, _), handle in zip(span._chunks, handles, strict=True):
                    span._map(offset, handle)
                    undo.callback(span._unmap, offset, handle)
                span._make_accessible(0, span.virtual_bytes)
            undo.pop_all()
        self._handles, other._handles = other._handles, self._handles

    def shrink(self, num_bytes: int) -> int:
        num_kept = sum(offset < num_bytes for offset, _ in self._chunks)
        if self.state is SpanState.RESIDENT:
            self._vm.drain()
            for (offset, _), handle in zip(self._chunks[num_kept:], self._handles[num_kept:], strict=True):
                self._discard(offset, handle)
        given_up_bytes = sum(size for _, size in self._chunks[num_kept:])
        del self._chunks[num_kept:], self._handles[num_kept:]
        self.virtual_bytes -= given_up_bytes
        self.num_bytes = min(self.num_bytes, self.virtual_bytes)
        return given_up_bytes

    def close(self) -> None:
        if self.state is SpanState.RESIDENT:
            self.empty()
        if self.state is not SpanState.CLOSED and self._reservation is not None:
            self._vm.free_reservation(self._reservation)
        self.state = SpanState.CLOSED

    def close_by_chunks(self) -> Generator[int, None, None]:
        if self.state is SpanState.RESIDENT:
            self.state = SpanState.RELEASED
        steps = self._steps_to_discard()
        self._handles = []
        try:
            while steps:
                num_bytes, step = steps.pop()
                step()
                yield num_bytes
        finally:
            for _, step in reversed(steps):
                step()
            self.close()

    def _steps_to_discard(self) -> list[tuple[int, Callable[[], None]]]:
        """What gives each handle back, the last step first, and the bytes that it counts for.

        Where a handle can be unmapped and kept for free, the driver's work is in two calls of about the same
        length: each is a step.
        """
        steps: list[tuple[int, Callable[[], None]]] = []
        for (offset, num_bytes), handle in zip(self._chunks, self._handles, strict=False):
            if self._vm.keeps_for_free:
                half = num_bytes // 2
                steps.append((half, partial(self._vm.release, handle)))
                steps.append((num_bytes - half, partial(self._unmap, offset, handle)))
            else:
                steps.append((num_bytes, partial(self._discard, offset, handle)))
        return steps

    def _map(self, offset: int, handle: Handle) -> None:
        assert self._reservation is not None
        self._vm.map(self._reservation, offset, handle)

    def _unmap(self, offset: int, handle: Handle) -> None:
        assert self._reservation is not None
        self._vm.unmap(self._reservation, offset, handle.num_bytes)

    def _make_accessible(self, offset: int, num_bytes: int) -> None:
        if self._reservation is not None and num_bytes:
            self._vm.make_accessible(self._reservation, offset, num_bytes)

    def _discard(self, offset: int, handle: Handle) -> None:
        # In this order the contents need not be kept at unmap, which must not fail here.
        self._vm.release(handle)
        self._unmap(offset, handle)


def require_resident(span: Span) -> None:
    if span.state is not SpanState.RESIDENT:
        raise EngineError(f"this memory is {span.state.name.lower()}, and must be resident")


def require_released(span: Span) -> None:
    if span.state is not SpanState.RELEASED:
        raise EngineError(f"this memory is {span.state.name.lower()}, and must be released to be resumed")


def require_size(num_bytes: int, chunk_bytes: int | None = None) -> None:
    if num_bytes < 0 or (chunk_bytes is not None and chunk_bytes < 1):
        raise ValueError(f"sizes of {num_bytes} bytes in chunks of {chunk_bytes} make no arena")


def require_view(num_bytes: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Refuse a view that does not lie within `num_bytes`, or not on a whole element."""
    end = offset + prod(shape) * dtype.itemsize
    if not 0 <= offset <= end <= num_bytes:
        raise ValueError(f"bytes {offset} to {end} do not lie in an arena of {num_bytes} bytes")
    if offset % dtype.itemsize:
        raise ValueError(f"offset {offset} is not a multiple of the element size, {dtype.itemsize}")


def view_bytes(flat: torch.Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor over a flat uint8 tensor, from `offset` on."""
    return flat[offset : offset + prod(shape) * dtype.itemsize].view(dtype).view(shape)


def round_up(num_bytes: int, multiple: int) -> int:
    return -(-num_bytes // multiple) * multiple
