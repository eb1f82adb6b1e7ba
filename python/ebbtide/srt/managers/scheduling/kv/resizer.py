"""Makes the KV cache smaller and larger while it serves, in whole chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.control.ports import ShrinkingPlan
from ebbtide.srt.managers.io_struct import Preserve, RetractCause
from ebbtide.srt.managers.scheduling.kv.compaction import KVCompaction
from ebbtide.srt.managers.scheduling.request import Req
from ebbtide.srt.managers.scheduling.schedule_policy import SchedulePolicy


class ResizableMemory(Protocol):
    """The memory of the KV cache. A `ChunkArena` is one."""

    @property
    def chunk_bytes(self) -> int: ...

    @property
    def is_resident(self) -> bool: ...

    def hold_back(self, chunks: Sequence[int]) -> None:
        """Leave chunks of released memory without any at the next resume."""
        ...

    def remove(self, chunks: Sequence[int]) -> int:
        """Give chunks to the system for good; returns the bytes."""
        ...

    def add(self, chunks: Sequence[int]) -> int:
        """Take such chunks again, all or none; returns the bytes. Raises OutOfDeviceMemory."""
        ...


class KVResizer:
    """How many pages there are, and the memory under them.

    What is chosen follows from the accounting of pages alone: it is the same on all ranks.

    Args:
        compaction: empties chunks.
        memory: None: memory cannot be taken from the pool here.
    """

    def __init__(
        self,
        policy: SchedulePolicy,
        compaction: KVCompaction,
        memory: ResizableMemory | None,
    ) -> None:
        self._policy = policy
        self._compaction = compaction
        self._memory = memory
        self._removed: list[int] = []
        # Withdrawn and about to be removed; removed and about to be restored, with memory again.
        self._chosen: list[int] = []
        self._added: list[int] = []
        # The slots of the requests that are about to be parked.
        self._slots: list[list[int]] = []

    @property
    def chunk_bytes(self) -> int:
        assert self._memory is not None
        return self._memory.chunk_bytes

    @property
    def chunk_tokens(self) -> int:
        return self._policy.allocator.pages_per_chunk * self._policy.page_size

    @property
    def num_tokens(self) -> int:
        """What the pool holds now."""
        return self._num_pages * self._policy.page_size

    @property
    def num_bytes(self) -> int:
        """The memory of its chunks on this rank, with those that are lent for a while."""
        return (self._policy.allocator.num_chunks - len(self._removed)) * self.chunk_bytes

    def choose(self, num_tokens: int | None, num_bytes: int | None) -> int:
        """Decide on a size; returns by how many chunks the pool grows (below 0: shrinks).

        Raises:
            RequestRejected: 409, memory cannot be moved here; 400, it is no size for this pool.
        """
        if self._memory is None:
            raise RequestRejected(
                "the KV cache keeps its size: this memory_saver_backend cannot take memory out of it", 409
            )
        policy, allocator = self._policy, self._policy.allocator
        num_chunks = allocator.num_chunks
        # The last chunk may hold fewer tokens than the others.
        most_tokens = (allocator.num_pages + allocator.num_withdrawn) * policy.page_size
        if num_tokens is not None:
            wanted = -(-num_tokens // self.chunk_tokens) if num_tokens <= most_tokens else num_chunks + 1
        else:
            assert num_bytes is not None
            wanted = num_bytes // self.chunk_bytes
        least = min(num_chunks, -(-int(policy.table.array.shape[1]) // allocator.pages_per_chunk))
        if not least <= wanted <= num_chunks:
            least_tokens = min(least * self.chunk_tokens, most_tokens)
            least_bytes, most_bytes = least * self.chunk_bytes, num_chunks * self.chunk_bytes
            raise RequestRejected(
                f"the KV cache can have {least_tokens} to {most_tokens} tokens, {least_bytes} to "
                f"{most_bytes} bytes on each rank, from one whole context to its size at the start: in "
                f"chunks of {self.chunk_tokens} tokens and {self.chunk_bytes} bytes, to which tokens are "
                "rounded up and bytes down",
                400,
                least_tokens=least_tokens,
                most_tokens=most_tokens,
                least_bytes=least_bytes,
                most_bytes=most_bytes,
            )
        return wanted - (num_chunks - len(self._removed))

    def plan(self, num_chunks: int, preserve: Preserve) -> ShrinkingPlan:
        """Decide whose KV goes so that so many chunks can be emptied; nothing changes yet.

        Of the requests in the way, the oldest are parked as far as the store has room.

        Raises:
            RequestRejected: 409, an update has borrowed too many of them.
        """
        policy = self._policy
        if num_chunks >= len(policy.allocator.held_by_chunk()):  # the lowest stays
            raise RequestRejected(
                "a weight update has borrowed memory of the KV cache: end or abort it, and try again", 409
            )
        in_the_way = self._compaction.in_the_way(num_chunks)
        rids = [req.rid for req in in_the_way]
        pages: set[int] = set()
        num_parked = 0
        for req in in_the_way if preserve is not Preserve.NONE else []:
            pages.update(policy.pages.computed(req))
            if len(pages) > policy.page_store.num_free:
                break
            num_parked += 1
        return ShrinkingPlan(num_chunks, rids[:num_parked], rids[num_parked:])

    def save(self, plan: ShrinkingPlan) -> int:
        """Copy what is parked to the host; returns the bytes. Raises OutOfDeviceMemory: nothing is kept."""
        policy = self._policy
        before = policy.page_store.num_bytes
        self._slots = policy.page_store.save([policy.pages.computed(req) for req in self._found(plan.parked)])
        return policy.page_store.num_bytes - before

    def discard(self) -> None:
        """Forget what was saved, if anything: not every rank had room."""
        for slots in self._slots:
            self._policy.page_store.drop(slots)
        self._slots = []

    def withdraw(self, plan: ShrinkingPlan) -> None:
        """Take the KV of those requests away, and the chunks out of the pool.

        No forward pass may be under way.
        """
        for req, slots in zip(self._found(plan.parked), self._slots, strict=True):
            self._policy.park_request(req, slots)
        self._slots = []
        for req in self._found(plan.retracted):
            self._policy.retract(req, RetractCause.RESIZE)
        self._chosen = self._compaction.withdraw(plan.num_chunks)

    def remove(self, num_chunks: int) -> int:
        """Give so many of the withdrawn chunks to the system; returns the bytes."""
        chunks, self._chosen = self._chosen[:num_chunks], self._chosen[num_chunks:]
        self._removed += chunks
        return self._give_up(chunks)

    def add(self, num_chunks: int) -> int:
        """Take memory for so many more chunks; returns the bytes. Raises OutOfDeviceMemory."""
        assert self._memory is not None
        chunks = [chunk for chunk in sorted(self._removed) if chunk not in self._added][:num_chunks]
        num_bytes = self._memory.add(chunks)
        self._added += chunks
        return num_bytes

    def unadd(self) -> None:
        """Undo every `add` since the last `restore`: another rank had no memory, or all of it is gone."""
        added, self._added = self._added, []
        self._give_up(added)

    def restore(self) -> None:
        """Put the added chunks into the pool."""
        added, self._added = self._added, []
        for chunk in added:
            self._policy.allocator.restore(chunk)
        self._removed = [chunk for chunk in self._removed if chunk not in added]

    def _give_up(self, chunks: Sequence[int]) -> int:
        """Have these chunks no more; where the memory was released meanwhile, no resume brings them back.

        Returns the bytes that this gives back.
        """
        assert self._memory is not None
        if self._memory.is_resident:
            return self._memory.remove(chunks)
        self._memory.hold_back(chunks)
        return 0

    def _found(self, rids: Sequence[str]) -> list[Req]:
        found = [self._policy.find(rid) for rid in rids]
        return [req for req in found if req is not None]

    @property
    def _num_pages(self) -> int:
        """The pages of the pool, with those that are lent for a while."""
        allocator = self._policy.allocator
        return allocator.num_pages + allocator.num_withdrawn - allocator.num_pages_of(self._removed)
