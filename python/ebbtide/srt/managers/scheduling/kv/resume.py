"""Brings the memory of the KV cache back in parts: requests run in the first while the rest is taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from ebbtide.srt.managers.control.ports import Slices
from ebbtide.srt.managers.scheduling.schedule_policy import SchedulePolicy

# The first part is so much of the cache. Each further one is as large as all before it.
FIRST_SHARE: Final = 1 / 32
# Taken by one call: of memory that was just freed the driver cleans a GiB in 2 ms.
SLICE_BYTES: Final = 1 << 30


class ResumableMemory(Protocol):
    """The memory of the KV cache. A `ChunkArena` is one."""

    @property
    def chunk_bytes(self) -> int: ...

    def hold_back(self, chunks: Sequence[int]) -> None:
        """The next resume takes no memory for these chunks, which have none."""
        ...

    def expect(self, chunks: Sequence[int]) -> None:
        """Chunks that were held back come with the next resume after all."""
        ...

    def add(self, chunks: Sequence[int]) -> int:
        """Take memory for such chunks, all or none; returns the bytes. Raises OutOfDeviceMemory."""
        ...


class KVResume:
    """Holds most of the pool back from a resume, and puts it back part by part.

    All but `map` comes out alike on all ranks.

    Args:
        memory: None: memory cannot come in parts here, and nothing is ever held back.
    """

    def __init__(self, policy: SchedulePolicy, memory: ResumableMemory | None) -> None:
        self._policy = policy
        self._memory = memory
        self._held_back: list[int] = []
        # Chunks that have memory on this rank, although they are not in the pool yet.
        self._mapped: set[int] = set()
        self._round = 0

    def hold_back(self, pages: Sequence[int]) -> None:
        """Before a resume: hold back all chunks but the first, those of these pages, and of pages in use."""
        assert not self._held_back, "a resume is under way"
        if self._memory is None:
            return
        allocator = self._policy.allocator
        held = allocator.held_by_chunk()
        num_first = max(1, int(len(held) * FIRST_SHARE))
        first = {*list(held)[:num_first], *map(allocator.chunk_of, pages)}
        self._held_back = [chunk for chunk in held if chunk not in first and not held[chunk]]
        self._mapped = set()
        self._round += 1
        for chunk in self._held_back:
            allocator.withdraw(chunk)
        self._memory.hold_back(self._held_back)

    def next_part(self) -> list[int]:
        """The chunks to be mapped next; none: nothing is held back any more."""
        return self._held_back[: len(self._policy.allocator.held_by_chunk())]

    def map(self, chunks: Sequence[int] | None = None) -> Slices[None]:
        """Take memory for these chunks, or for all that are held back, as far as there is none yet.

        Ends when they are not held back any more. Raises OutOfDeviceMemory; what was taken before is kept.
        """
        chunks = self._held_back if chunks is None else chunks
        return self._map([chunk for chunk in chunks if chunk not in self._mapped], self._round)

    def _map(self, missing: list[int], this_round: int) -> Slices[None]:
        while missing and this_round == self._round:
            assert self._memory is not None
            step = max(1, SLICE_BYTES // self._memory.chunk_bytes)
            part, missing = missing[:step], missing[step:]
            num_bytes = self._memory.add(part)
            self._mapped.update(part)
            yield num_bytes

    def put_back(self, chunks: Sequence[int]) -> None:
        """Put chunks that are mapped on all ranks back into the pool."""
        put_back = set(chunks)
        self._held_back = [chunk for chunk in self._held_back if chunk not in put_back]
        for chunk in chunks:
            self._policy.allocator.restore(chunk)

    def give_up(self) -> None:
        """Hold nothing back any more: the memory is released, or about to be. The next resume brings all."""
        self._round += 1
        if self._memory is not None:
            self._memory.expect([chunk for chunk in self._held_back if chunk not in self._mapped])
        self.put_back(list(self._held_back))
