"""Physical memory in chunks of one size, which arenas pass on to one another without asking the driver.

An arena *lends* chunks: their memory is unmapped and kept spare. A shadow of another arena takes spare chunks
before it has new ones created. When the shadow is closed, as many chunks as are owed become spare again,
whichever they are, and the lender takes them back. So a second copy of the weights that was made of lent
chunks and swapped in leaves the memory of the former weights to the lender, and nothing was allocated.
"""

from __future__ import annotations

from collections.abc import Sequence

from ebbtide.srt.errors import EngineError
from ebbtide.srt.memory_saver.arena import round_up
from ebbtide.srt.memory_saver.tags import MemoryTag
from ebbtide.srt.memory_saver.virtual_arena import ChunkSlot, VirtualArena
from ebbtide.srt.memory_saver.virtual_memory.base import Handle, VirtualMemory


class ChunkPool:
    """The chunks of a rank; an `ArenaSource` whose arenas consist of them.

    Args:
        vm: where addresses and memory come from.
        chunk_bytes: size of a chunk, rounded up to the granularity of `vm`.
    """

    def __init__(self, vm: VirtualMemory, chunk_bytes: int) -> None:
        self.chunk_bytes = round_up(chunk_bytes, vm.granularity)
        self.granularity = vm.granularity
        self._vm = vm
        self._spare: list[Handle] = []
        # Chunks that arenas have lent and not taken back.
        self._num_owed = 0

    @property
    def num_spare(self) -> int:
        """Chunks that are mapped nowhere. They are all owed."""
        return len(self._spare)

    def arena(self, tag: MemoryTag, num_bytes: int, chunk_bytes: int | None = None) -> ChunkArena:
        """A released arena of whole chunks of this pool, whatever `chunk_bytes` is.

        Raises:
            OutOfDeviceMemory: the addresses could not be reserved.
        """
        return ChunkArena(tag, num_bytes, self._vm, self)

    def note_lent(self, handle: Handle) -> None:
        """An arena has unmapped a chunk, for others to use."""
        self._spare.append(handle)
        self._num_owed += 1

    def note_kept(self, handle: Handle) -> None:
        """A shadow has unmapped a chunk and is done with it, and somebody is owed one."""
        assert self.is_owed_more, "nobody is owed this chunk"
        self._spare.append(handle)

    @property
    def is_owed_more(self) -> bool:
        """Whether lenders wait for more chunks than are spare."""
        return len(self._spare) < self._num_owed

    def take_spare(self) -> Handle | None:
        """A chunk for a shadow; None: there is none to be had for nothing."""
        return self._spare.pop() if self._spare else None

    def return_spare(self) -> Handle:
        """A chunk for one that has lent one."""
        if not self._spare:
            raise EngineError("chunks that were lent are still in use: they cannot be taken back yet")
        self._num_owed -= 1
        return self._spare.pop()

    def forgive(self, num_chunks: int) -> None:
        """A lender has ended, and wants nothing back."""
        self._num_owed -= num_chunks
        while len(self._spare) > self._num_owed:
            self._vm.release(self._spare.pop())


class ChunkArena(VirtualArena):
    """An arena of whole chunks of a pool, which can lend them."""

    def __init__(
        self, tag: MemoryTag, num_bytes: int, vm: VirtualMemory, pool: ChunkPool, *, is_twin: bool = False
    ) -> None:
        super().__init__(tag, round_up(num_bytes, pool.chunk_bytes), vm, pool.chunk_bytes)
        self.num_bytes = num_bytes
        self._pool = pool
        self._is_twin = is_twin
        # Chunks that a twin has of lenders: so many it gives back to them, be they others by then.
        self._num_borrowed = 0

    @property
    def num_chunks(self) -> int:
        return len(self._slots)

    @property
    def chunk_bytes(self) -> int:
        return self._pool.chunk_bytes

    @property
    def num_lent(self) -> int:
        """Chunks that it has lent and that are not back."""
        return sum(slot.is_lent and slot.handle is None for slot in self._slots)

    def lend(self, chunks: Sequence[int]) -> None:
        """Give the memory of these chunks (by their place) to the pool. Their contents are lost.

        What was launched on a device is waited for first: it may still write to them. A release and a resume
        in between leave them lent.

        Raises:
            EngineError: the arena is not resident, or the driver failed: those before are lent then.
            OutOfDeviceMemory: the machine cannot keep them unmapped.
        """
        self.require_resident()
        slots = [self._slots[chunk] for chunk in sorted(chunks)]
        assert all(slot.is_mapped for slot in slots), "a chunk is lent twice"
        if slots:
            self._vm.drain()
        for part in self._unmap_all(slots):
            for slot in part:
                assert slot.handle is not None
                self._pool.note_lent(slot.handle)
                slot.handle, slot.is_lent = None, True

    def take_back(self, chunks: Sequence[int]) -> None:
        """Have memory under lent chunks again, contents undefined; those that are not lent stay as they are.

        Of a released arena it goes back to the driver: the next resume brings these chunks along.

        Raises:
            EngineError: they are still in use, or the driver failed: a second call does the rest.
        """
        slots = [slot for slot in (self._slots[chunk] for chunk in sorted(chunks)) if slot.is_lent]
        for slot in slots:
            if slot.handle is None:
                slot.handle = self._pool.return_spare()
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
        """Give the memory of these chunks to the system, for good: a resume does not bring it back.

        What was launched on a device is waited for first. Returns the bytes.
        """
        self.require_resident()
        slots = [self._slots[chunk] for chunk in sorted(chunks)]
        assert all(slot.is_mapped for slot in slots), "a chunk is removed that is not there"
        self._discard_all(slots)
        for slot in slots:
            slot.is_removed = True
        return len(slots) * self._pool.chunk_bytes

    def hold_back(self, chunks: Sequence[int]) -> None:
        """Leave these chunks, which have no memory, without any at the next resume, as if removed."""
        slots = [self._slots[chunk] for chunk in chunks]
        assert all(slot.is_missing for slot in slots), "a chunk is held back that has memory"
        for slot in slots:
            slot.is_removed = True

    def expect(self, chunks: Sequence[int]) -> None:
        """Have the next resume bring these chunks, which were held back."""
        for chunk in chunks:
            self._slots[chunk].is_removed = False

    def add(self, chunks: Sequence[int]) -> int:
        """Have memory again under chunks that were removed, or held back; returns the bytes.

        Raises:
            OutOfDeviceMemory: nothing was kept.
        """
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
        """Make as much spare again as lenders wait for: the chunks that they lent, or others."""
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
        spare = self._pool.take_spare() if self._is_twin else None
        if spare is None:
            return super()._create(num_bytes)
        self._num_borrowed += 1
        return spare

    @property
    def _is_owed_more(self) -> bool:
        """Whether lenders wait for chunks of this twin."""
        return self._num_borrowed > 0 and self._pool.is_owed_more

    def _discard(self, slot: ChunkSlot) -> None:
        if slot.handle is not None and self._is_owed_more:
            if slot.is_mapped:
                self._unmap(slot)
            self._pool.note_kept(slot.handle)
            slot.handle = None
            self._num_borrowed -= 1
            return
        super()._discard(slot)
