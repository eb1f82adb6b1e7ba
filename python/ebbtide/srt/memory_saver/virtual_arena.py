"""Arenas over virtual memory: a reserved address range, cut into chunks with or without physical memory.

The arenas of a `ChunkPool` have chunks of one size, and pass them on to each other without the driver. An
arena *lends* chunks: their memory is unmapped and kept as spare. A shadow of another arena takes spare chunks
before it creates new ones. When the shadow is closed, as many of its chunks as are owed become spare again,
no matter which ones, and the lender takes them back. So if a second copy of the weights was made of lent
chunks and swapped in, the lender gets the memory of the former weights, and nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property

import torch

from ebbtide.srt.errors import EngineError, OutOfDeviceMemory
from ebbtide.srt.memory_saver import MemoryTag
from ebbtide.srt.memory_saver.arena import Arena, ArenaState, round_up
from ebbtide.srt.memory_saver.virtual_memory import Handle, VirtualMemory
from ebbtide.srt.slices import Slices


@dataclass(slots=True, eq=False)
class ChunkSlot:
    """A chunk's place in the reservation.

    Attributes:
        handle: the physical memory, released before it is unmapped; None: there is none.
        is_mapped: whether memory is mapped here.
        is_lent: whether its memory is lent.
        is_removed: whether it is to have no memory, also after a resume.
    """

    offset: int
    num_bytes: int
    handle: Handle | None = None
    is_mapped: bool = False
    is_lent: bool = False
    is_removed: bool = False

    @property
    def is_missing(self) -> bool:
        """Whether a resume must put memory here."""
        return not (self.is_mapped or self.is_lent or self.is_removed)

    @property
    def is_held(self) -> bool:
        """Whether there is physical memory. Both hold, unless the driver has failed half-way."""
        return self.is_mapped or self.handle is not None


class VirtualArena(Arena):
    """An arena in chunks of a `VirtualMemory`. Sizes are rounded up to its granularity.

    Args:
        chunk_bytes: None: the arena is one chunk.

    Raises OutOfDeviceMemory: there is no address range.
    """

    def __init__(
        self, tag: MemoryTag, num_bytes: int, vm: VirtualMemory, chunk_bytes: int | None = None
    ) -> None:
        super().__init__(tag, num_bytes)
        self.virtual_bytes = round_up(num_bytes, vm.granularity)
        self._vm = vm
        self._chunk_bytes = chunk_bytes
        step = round_up(chunk_bytes, vm.granularity) if chunk_bytes is not None else self.virtual_bytes
        self._slots = [
            ChunkSlot(offset, min(step, self.virtual_bytes - offset))
            for offset in range(0, self.virtual_bytes, step or 1)
        ]
        self._is_closed = False
        self._is_resumed = False  # the only state of an arena without slots
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
        # Inlines `is_held`: every report of the state asks for it.
        return sum(slot.num_bytes for slot in self._slots if slot.is_mapped or slot.handle is not None)

    @property
    def address(self) -> int:
        return self._reservation.address if self._reservation is not None else 0

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

    def close_by_chunks(self) -> Slices[None]:
        try:
            for slot in reversed([slot for slot in self._slots if slot.is_held]):
                self._discard(slot)
                yield slot.num_bytes
        finally:
            self.close()

    def _flat(self) -> torch.Tensor:
        return self._bytes

    @cached_property
    def _bytes(self) -> torch.Tensor:
        if self._reservation is None:
            return torch.empty(0, dtype=torch.uint8)
        return self._vm.as_tensor(self._reservation)

    def _resume_by_chunks(self, *, at_once: bool) -> Slices[None]:
        """`at_once`: make all of it accessible at the end, which is quicker, but one call of milliseconds."""
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

    def _exchange(self, other: Arena) -> None:
        assert isinstance(other, VirtualArena)
        self._vm.drain()
        pairs = list(zip(self._slots, other._slots, strict=True))
        with ExitStack() as undo:
            for arena in (self, other):
                # Registered first, so it is undone last: after the handles are mapped again.
                undo.callback(arena._make_mapped_accessible)
                for part in arena._unmap_all(slot for slot in arena._slots if slot.is_mapped):
                    undo.callback(arena._map_again, part)
            for mine, theirs in pairs:
                assert mine.handle is not None
                assert theirs.handle is not None
                self._map(mine, theirs.handle)
                undo.callback(self._unmap, mine)
            self._make_accessible(self._slots)
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
        """Make slots accessible, with one call for each run of adjacent ones."""
        for run in _runs(slots):
            assert self._reservation is not None
            self._vm.make_accessible(self._reservation, run[0].offset, _num_bytes(run))

    def _unmap_all(self, slots: Iterable[ChunkSlot]) -> Generator[list[ChunkSlot], None, None]:
        """Unmap slots; yields those of each call: a run of slots if a call cannot fail half-way, else one."""
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
        """Give a slot's memory back. After an error, a second call does the rest.

        The handle is released first: then the unmap need not keep its contents, which could take memory.
        """
        if slot.handle is not None:
            self._vm.release(slot.handle)
            slot.handle = None
        if slot.is_mapped:
            self._unmap(slot)


class ChunkPool:
    """The chunks of a rank: an `ArenaSource` whose arenas consist of them.

    Attributes:
        spare: chunks that are not mapped. All of them are owed to lenders.
        num_owed: chunks that arenas have lent and not got back.
    """

    def __init__(self, vm: VirtualMemory, chunk_bytes: int) -> None:
        self.chunk_bytes = round_up(chunk_bytes, vm.granularity)
        self.granularity = vm.granularity
        self.spare: list[Handle] = []
        self.num_owed = 0
        self._vm = vm

    def arena(self, tag: MemoryTag, num_bytes: int, chunk_bytes: int | None = None) -> ChunkArena:
        """A released arena of whole chunks of this pool, whatever `chunk_bytes` is."""
        return ChunkArena(tag, num_bytes, self._vm, self)

    @property
    def is_owed_more(self) -> bool:
        """Whether more chunks are owed than are spare."""
        return len(self.spare) < self.num_owed

    def forgive(self, num_chunks: int) -> None:
        """Note that a lender has ended, and wants its chunks no longer."""
        self.num_owed -= num_chunks
        while len(self.spare) > self.num_owed:
            self._vm.release(self.spare.pop())


class ChunkArena(VirtualArena):
    """An arena of whole chunks of a pool, which can lend them."""

    def __init__(
        self, tag: MemoryTag, num_bytes: int, vm: VirtualMemory, pool: ChunkPool, *, is_twin: bool = False
    ) -> None:
        super().__init__(tag, round_up(num_bytes, pool.chunk_bytes), vm, pool.chunk_bytes)
        self.num_bytes = num_bytes
        self._pool = pool
        self._is_twin = is_twin
        # How many chunks a twin has from lenders. It gives back as many, which may be other ones.
        self._num_borrowed = 0

    @property
    def num_chunks(self) -> int:
        return len(self._slots)

    @property
    def chunk_bytes(self) -> int:
        return self._pool.chunk_bytes

    @property
    def num_lent(self) -> int:
        """Chunks that it has lent and not got back."""
        return sum(slot.is_lent and slot.handle is None for slot in self._slots)

    def lend(self, chunks: Sequence[int]) -> None:
        """Lend the memory of these chunks (indices) to the pool. Their contents are lost.

        Waits for launched work first. The chunks stay lent through a release and a resume.

        Raises:
            EngineError: the arena is not resident, or the driver failed; chunks before that are lent.
            OutOfDeviceMemory: the machine cannot keep the memory unmapped.
        """
        self.require_resident()
        slots = [self._slots[chunk] for chunk in sorted(chunks)]
        assert all(slot.is_mapped for slot in slots), "a chunk is lent twice"
        if slots:
            self._vm.drain()
        for part in self._unmap_all(slots):
            for slot in part:
                assert slot.handle is not None
                self._pool.spare.append(slot.handle)
                self._pool.num_owed += 1
                slot.handle, slot.is_lent = None, True

    def take_back(self, chunks: Sequence[int]) -> None:
        """Map memory under lent chunks again, contents undefined; chunks that are not lent are left alone.

        If the arena is released, the memory goes back to the driver, and the next resume maps these chunks
        too.
        EngineError: the chunks are still in use, or the driver failed; a second call does the rest.
        """
        slots = [slot for slot in (self._slots[chunk] for chunk in sorted(chunks)) if slot.is_lent]
        for slot in slots:
            if slot.handle is None:
                if not self._pool.spare:
                    raise EngineError("chunks that were lent are still in use: they cannot be taken back yet")
                slot.handle = self._pool.spare.pop()
                self._pool.num_owed -= 1
            if self.is_resident:
                if not slot.is_mapped:
                    self._map(slot, slot.handle)
            else:
                self._discard(slot)
        if self.is_resident:
            self._make_accessible(slots)
        for slot in slots:
            slot.is_lent = False

    def remove(self, chunks: Sequence[int]) -> int:
        """Give the memory of these chunks to the system, after launched work has run; returns the bytes."""
        slots = [self._slots[chunk] for chunk in sorted(chunks)]
        given_bytes = _num_bytes(slot for slot in slots if slot.is_held)
        assert not any(slot.is_lent or slot.is_removed for slot in slots), (
            "a chunk is removed that is not there"
        )
        self._discard_all(slots)
        for slot in slots:
            slot.is_removed = True
        return given_bytes

    def expect(self, chunks: Sequence[int]) -> None:
        """Let the next resume bring back these removed chunks."""
        for chunk in chunks:
            self._slots[chunk].is_removed = False

    def add(self, chunks: Sequence[int]) -> int:
        """Map memory under removed chunks again; returns the bytes. OutOfDeviceMemory: none was taken."""
        self.require_resident()
        slots = [self._slots[chunk] for chunk in sorted(chunks)]
        assert all(slot.is_removed for slot in slots), "a chunk is added that was not removed"
        for slot in slots:
            slot.is_removed = False
        try:
            return self.resume()
        except BaseException:
            for slot in slots:
                slot.is_removed = True
            raise

    def repay(self) -> None:
        """Make as many chunks spare as lenders wait for, no matter which ones."""
        for slot in self._slots:
            if not self._is_owed_more:
                return
            self._discard(slot)

    def close(self) -> None:
        if not self._is_closed:
            self._pool.forgive(self.num_lent)
        super().close()

    def _twin(self) -> ChunkArena:
        return ChunkArena(self.tag, self.num_bytes, self._vm, self._pool, is_twin=True)

    def _create(self, num_bytes: int) -> Handle:
        if not (self._is_twin and self._pool.spare):
            return super()._create(num_bytes)
        self._num_borrowed += 1
        return self._pool.spare.pop()

    @property
    def _is_owed_more(self) -> bool:
        return self._num_borrowed > 0 and self._pool.is_owed_more

    def _discard(self, slot: ChunkSlot) -> None:
        if slot.handle is not None and self._is_owed_more:
            if slot.is_mapped:
                self._unmap(slot)
            self._pool.spare.append(slot.handle)
            slot.handle = None
            self._num_borrowed -= 1
            return
        super()._discard(slot)


def _runs(slots: Iterable[ChunkSlot]) -> list[list[ChunkSlot]]:
    """The slots as runs of adjacent ones."""
    runs: list[list[ChunkSlot]] = []
    for slot in slots:
        if runs and runs[-1][-1].offset + runs[-1][-1].num_bytes == slot.offset:
            runs[-1].append(slot)
        else:
            runs.append([slot])
    return runs


def _num_bytes(slots: Iterable[ChunkSlot]) -> int:
    return sum(slot.num_bytes for slot in slots)
