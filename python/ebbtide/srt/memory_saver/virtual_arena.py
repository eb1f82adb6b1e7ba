"""Arenas over virtual memory: a reservation of addresses in chunks, with a handle under each or nothing."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property

import torch

from ebbtide.srt.errors import OutOfDeviceMemory
from ebbtide.srt.memory_saver.arena import Arena, ArenaState, round_up
from ebbtide.srt.memory_saver.tags import MemoryTag
from ebbtide.srt.memory_saver.virtual_memory.base import Handle, VirtualMemory


@dataclass(slots=True, eq=False)
class ChunkSlot:
    """A chunk's place in the reservation.

    Attributes:
        handle: the memory that is ours, which is given up before it is unmapped; None: there is none.
        is_mapped: whether something is still mapped here.
        is_lent: others have the memory that belongs here.
        is_removed: there is to be no memory here.
    """

    offset: int
    num_bytes: int
    handle: Handle | None = None
    is_mapped: bool = False
    is_lent: bool = False
    is_removed: bool = False

    @property
    def is_missing(self) -> bool:
        """Whether a resume puts memory here."""
        return not (self.is_mapped or self.is_lent or self.is_removed)

    @property
    def is_held(self) -> bool:
        """Whether there is physical memory: both are so, but for what a driver has broken off half-way."""
        return self.is_mapped or self.handle is not None


class VirtualArena(Arena):
    """An arena whose memory comes and goes in chunks, by calls of a `VirtualMemory`.

    Args:
        tag: what the memory is for.
        num_bytes: bytes wanted; rounded up to the granularity of `vm`.
        vm: where addresses and memory come from.
        chunk_bytes: size of the pieces that the memory is taken in; rounded up likewise. None: one piece.

    Raises:
        OutOfDeviceMemory: the addresses could not be reserved.
    """

    def __init__(
        self, tag: MemoryTag, num_bytes: int, vm: VirtualMemory, chunk_bytes: int | None = None
    ) -> None:
        super().__init__(tag, num_bytes)
        if chunk_bytes is not None and chunk_bytes < 1:
            raise ValueError(f"chunks of {chunk_bytes} bytes make no arena")
        self.virtual_bytes = round_up(num_bytes, vm.granularity)
        self._vm = vm
        self._chunk_bytes = chunk_bytes
        step = round_up(chunk_bytes, vm.granularity) if chunk_bytes is not None else self.virtual_bytes
        self._slots = [
            ChunkSlot(offset, min(step, self.virtual_bytes - offset))
            for offset in range(0, self.virtual_bytes, step or 1)
        ]
        self._is_closed = False
        self._is_resumed = False  # of an arena without slots nothing else tells
        self._reservation = vm.reserve(self.virtual_bytes) if self.virtual_bytes else None

    @property
    def state(self) -> ArenaState:
        if self._is_closed:
            return ArenaState.CLOSED
        is_whole = self._is_resumed and not any(slot.is_missing for slot in self._slots)
        return ArenaState.RESIDENT if is_whole else ArenaState.RELEASED

    @property
    def is_whole(self) -> bool:
        return not self._is_closed and all(slot.handle is not None for slot in self._slots)

    @property
    def resident_bytes(self) -> int:
        # Every report of the state asks for it, so it is spelled out what `is_held` says.
        return sum(slot.num_bytes for slot in self._slots if slot.is_mapped or slot.handle is not None)

    @property
    def address(self) -> int:
        return self._reservation.address if self._reservation is not None else 0

    def repay(self) -> None:
        """Nothing was lent."""

    def shrink(self, num_bytes: int) -> int:
        num_kept = sum(slot.offset < num_bytes for slot in self._slots)
        given_up = self._slots[num_kept:]
        self._discard_all(given_up)
        del self._slots[num_kept:]
        given_up_bytes = _num_bytes(given_up)
        self.virtual_bytes -= given_up_bytes
        self.num_bytes = min(self.num_bytes, self.virtual_bytes)
        return given_up_bytes

    def close(self) -> None:
        if self._is_closed:
            return
        self._release()
        if self._reservation is not None:
            self._vm.free_reservation(self._reservation)
        self._is_closed = True

    def close_by_chunks(self) -> Generator[int, None, None]:
        try:
            for slot in reversed(self._slots):
                yield from self._discard_by_calls(slot)
        finally:
            self.close()

    def _flat(self) -> torch.Tensor:
        return self._bytes

    @cached_property
    def _bytes(self) -> torch.Tensor:
        if self._reservation is None:
            return torch.empty(0, dtype=torch.uint8)
        return self._vm.as_tensor(self._reservation)

    def _resume_by_chunks(self, *, at_once: bool) -> Generator[int, None, None]:
        """`at_once`: all of it is made accessible at the end, which is quicker, but takes milliseconds."""
        missing = [slot for slot in self._slots if slot.is_missing]
        taken_bytes = 0
        try:
            with ExitStack() as undo:
                for slot in missing:
                    undo.callback(self._discard, slot)
                    if slot.handle is None:
                        slot.handle = self._create(slot.num_bytes)
                    taken_bytes += slot.num_bytes
                    self._map(slot, slot.handle)
                    if not at_once:
                        self._make_accessible([slot])
                    yield slot.num_bytes
                if at_once:
                    self._make_accessible(missing)
                undo.pop_all()
        except OutOfDeviceMemory as error:
            raise OutOfDeviceMemory(_num_bytes(missing), error.free_bytes + taken_bytes) from error
        self._is_resumed = True

    def _release(self) -> int:
        freed_bytes = self.resident_bytes
        self._discard_all(self._slots)
        self._is_resumed = False
        return freed_bytes

    def _twin(self) -> VirtualArena:
        return VirtualArena(self.tag, self.num_bytes, self._vm, self._chunk_bytes)

    def _exchange(self, other: Arena, *, maps_former: bool) -> None:
        assert isinstance(other, VirtualArena)
        self._vm.drain()
        pairs = list(zip(self._slots, other._slots, strict=True))
        mapped = [self, other] if maps_former else [self]
        with ExitStack() as undo:
            for arena in (self, other):
                # It comes after the handles are back: what is put on the stack first is undone last.
                undo.callback(arena._make_mapped_accessible)
                for part in arena._unmap_all(slot for slot in arena._slots if slot.is_mapped):
                    undo.callback(arena._map_again, part)
            for mine, theirs in pairs:
                assert mine.handle is not None
                assert theirs.handle is not None
                self._map(mine, theirs.handle)
                undo.callback(self._unmap, mine)
                if maps_former:
                    other._map(theirs, mine.handle)
                    undo.callback(other._unmap, theirs)
            for arena in mapped:
                arena._make_accessible(arena._slots)
            undo.pop_all()
        for mine, theirs in pairs:
            mine.handle, theirs.handle = theirs.handle, mine.handle

    # -------------------------------------------------------------------------------------------- one slot

    def _create(self, num_bytes: int) -> Handle:
        return self._vm.create(num_bytes)

    def _map(self, slot: ChunkSlot, handle: Handle) -> None:
        assert self._reservation is not None
        self._vm.map(self._reservation, slot.offset, handle)
        slot.is_mapped = True

    def _map_again(self, slots: Iterable[ChunkSlot]) -> None:
        for slot in slots:
            assert slot.handle is not None
            self._map(slot, slot.handle)

    def _unmap(self, slot: ChunkSlot) -> None:
        assert self._reservation is not None
        self._vm.unmap(self._reservation, slot.offset, slot.num_bytes)
        slot.is_mapped = False

    def _make_mapped_accessible(self) -> None:
        self._make_accessible(slot for slot in self._slots if slot.is_mapped)

    def _make_accessible(self, slots: Iterable[ChunkSlot]) -> None:
        """Each run of adjacent slots in one call."""
        for run in _runs(slots):
            assert self._reservation is not None
            self._vm.make_accessible(self._reservation, run[0].offset, _num_bytes(run))

    def _unmap_all(self, slots: Iterable[ChunkSlot]) -> Generator[list[ChunkSlot], None, None]:
        """Yields the slots that each call has unmapped: whole runs, where a call cannot break off."""
        for run in _runs(slots):
            for part in [run] if self._vm.keeps_for_free else [[slot] for slot in run]:
                assert self._reservation is not None
                self._vm.unmap(self._reservation, part[0].offset, _num_bytes(part))
                for slot in part:
                    slot.is_mapped = False
                yield part

    def _discard_all(self, slots: Iterable[ChunkSlot]) -> None:
        held = [slot for slot in slots if slot.is_held]
        if held:
            self._vm.drain()
        if self._vm.keeps_for_free:
            list(self._unmap_all(slot for slot in held if slot.is_mapped))
        for slot in held:
            self._discard(slot)

    def _discard(self, slot: ChunkSlot) -> None:
        """Give a slot's memory back; called again after an error it does what is left.

        The handle is released first: its contents need not be kept at the unmap then, so that it cannot run
        out of memory.
        """
        if slot.handle is not None:
            self._vm.release(slot.handle)
            slot.handle = None
        if slot.is_mapped:
            self._unmap(slot)

    def _discard_by_calls(self, slot: ChunkSlot) -> Generator[int, None, None]:
        """As `_discard`, yielding bytes.

        Where a handle can be unmapped and kept for free, the driver's work is in two calls of about the same
        length: each is a step.
        """
        if not slot.is_held:
            return
        rest_bytes = slot.num_bytes
        if self._vm.keeps_for_free and slot.is_mapped:
            self._unmap(slot)
            rest_bytes -= slot.num_bytes // 2
            yield slot.num_bytes - rest_bytes
        self._discard(slot)
        yield rest_bytes


def _runs(slots: Iterable[ChunkSlot]) -> list[list[ChunkSlot]]:
    """Slots in order, cut where they are not adjacent."""
    runs: list[list[ChunkSlot]] = []
    for slot in slots:
        if runs and runs[-1][-1].offset + runs[-1][-1].num_bytes == slot.offset:
            runs[-1].append(slot)
        else:
            runs.append([slot])
    return runs


def _num_bytes(slots: Iterable[ChunkSlot]) -> int:
    return sum(slot.num_bytes for slot in slots)
