"""The KV cache's memory in chunks that are only counted."""

from __future__ import annotations

from collections.abc import Sequence

from ebbtide.srt.mem_cache.page_allocator import PageIds
from ebbtide.testing.null_parts import NullMemory

# What pages are called: as in a pool of which each chunk has a block that no page fills.
PAGE_IDS = PageIds(per_chunk=4, stride=5)
# What a second copy of the weights takes.
NUM_WEIGHT_CHUNKS = 2
CHUNK_BYTES = 300


class NullChunks:
    """Chunks that are lent, and spare until a second copy has taken them, or given up."""

    def __init__(self, memory: NullMemory) -> None:
        self.lent: set[int] = set()
        self.num_spare = 0
        self._memory = memory

    @property
    def is_resident(self) -> bool:
        return self._memory.resident_bytes > 0

    def lend(self, chunks: Sequence[int]) -> None:
        assert self.is_resident, "memory that is not there was lent"
        assert not self.lent & set(chunks), "a chunk was lent twice"
        self.lent.update(chunks)
        self.num_spare += len(chunks)

    def take_back(self, chunks: Sequence[int]) -> None:
        returned = self.lent & set(chunks)
        assert len(returned) <= self.num_spare, "a second copy still has what was lent for it"
        self.lent -= returned
        self.num_spare -= len(returned)

    def remove(self, chunks: Sequence[int]) -> int:
        assert self.is_resident, "memory that is not there was given up"
        assert not self.lent & set(chunks), "memory that was lent was given up"
        return len(chunks) * CHUNK_BYTES

    def add(self, chunks: Sequence[int]) -> int:
        assert self.is_resident, "a pool without memory grows"
        return len(chunks) * CHUNK_BYTES

    def take_spare(self) -> int:
        """For a second copy; how many there were."""
        taken = min(self.num_spare, NUM_WEIGHT_CHUNKS)
        self.num_spare -= taken
        return taken

    def return_spare(self, num_chunks: int) -> None:
        """A second copy does not have them any more."""
        self.num_spare += num_chunks
