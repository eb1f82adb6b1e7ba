"""Lends the KV cache's memory, chunk by chunk, for a second copy of the weights.

Which chunks are lent follows from the accounting of pages alone: it is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Protocol

from ebbtide.srt.errors import OutOfDeviceMemory
from ebbtide.srt.managers.scheduling.request import Req
from ebbtide.srt.managers.scheduling.schedule_policy import SchedulePolicy

# Room that each running request is left to grow: more than it will while an update lasts.
GROWTH_TOKENS: Final = 256


class LendableMemory(Protocol):
    """The memory of the KV cache. A `ChunkArena` is one."""

    @property
    def is_resident(self) -> bool: ...

    def lend(self, chunks: Sequence[int]) -> None:
        """Give chunks up to whoever makes a second copy next."""
        ...

    def take_back(self, chunks: Sequence[int]) -> None:
        """Have chunks again that were lent, when the copy is gone; those that were not stay as they are."""
        ...


class KVLender:
    """Sets chunks aside that hold nothing live, and has them lent.

    Args:
        policy: whose pages they are.
        memory: None: memory cannot change places here, and nothing is ever lent.
        num_wanted: chunks that a copy takes, on the rank where it takes most.
        may_retract: whether requests may be retracted for it, the youngest first.
    """

    def __init__(
        self,
        policy: SchedulePolicy,
        memory: LendableMemory | None,
        num_wanted: int,
        *,
        may_retract: bool = False,
    ) -> None:
        self._policy = policy
        self._memory = memory
        self._num_wanted = num_wanted
        self._may_retract = may_retract
        self._aside: list[int] = []

    def set_aside(self, *, hard: bool = False) -> bool:
        """Take chunks out of the pool for a copy; returns whether they are all that it takes.

        The same on all ranks, in the same turn, with no forward pass under way.

        Args:
            hard: not only chunks without a page that is held, but those with cached pages too, which are
                dropped, and those of requests that may be retracted; all that a copy takes, or none.
        """
        assert not self._aside, "chunks are set aside already"
        if self._memory is None or not self._memory.is_resident:
            return False
        allocator = self._policy.allocator
        if hard and self._may_retract:
            self._retract_youngest()
        num_wanted = min(self._num_wanted, self._num_lendable())
        chunks = allocator.withdrawable()[:num_wanted]
        if hard:
            chunks = without_live_pages(self._policy)[:num_wanted]
            if len(chunks) < self._num_wanted:
                return False
            drop_cached(self._policy, chunks)
        for chunk in chunks:
            allocator.withdraw(chunk)
        self._aside = chunks
        return 0 < self._num_wanted == len(chunks)

    def hand_over(self) -> None:
        """Lend what was set aside, if it has not been released since. At its own speed on each rank."""
        if self._memory is not None and self._aside and self._memory.is_resident:
            with suppress(OutOfDeviceMemory):  # then there are a few fewer
                self._memory.lend(self._aside)

    def take_back(self) -> None:
        """Put everything that was set aside back into the pool. The same on all ranks, in the same turn."""
        if self._memory is not None and self._aside:
            self._memory.take_back(self._aside)
        for chunk in self._aside:
            self._policy.allocator.restore(chunk)
        self._aside = []

    def _retract_youngest(self) -> None:
        """Retract requests until a whole copy can be lent; none of them if it never could."""
        policy, allocator = self._policy, self._policy.allocator
        num_spare = (allocator.num_pages - self._longest) // allocator.pages_per_chunk
        if min(num_spare, len(allocator.held_by_chunk()) - 1) < self._num_wanted:
            return
        while policy.running and self._num_wanted > min(
            self._num_lendable(), len(without_live_pages(policy))
        ):
            policy.retract_youngest()

    @property
    def _longest(self) -> int:
        """Pages of the longest request that there can be."""
        return int(self._policy.table.array.shape[1])

    def _num_lendable(self) -> int:
        """So many that running requests can grow, and that the longest one that may be waiting has room."""
        policy, allocator = self._policy, self._policy.allocator
        num_live = allocator.num_pages - allocator.num_free - policy.cache.num_evictable_pages
        growth = sum(self._num_growth_pages(req) for req in policy.running)
        num_spare = allocator.num_pages - max(num_live + growth, self._longest)
        return max(0, num_spare // allocator.pages_per_chunk)

    def _num_growth_pages(self, req: Req) -> int:
        num_tokens = min(req.max_new_tokens - len(req.spec.output_ids), GROWTH_TOKENS)
        return -(-num_tokens // self._policy.page_size) + 1


def without_live_pages(policy: SchedulePolicy) -> list[int]:
    """Chunks with nothing but cached pages or none, those with fewest first, of these the highest."""
    allocator = policy.allocator
    num_held = allocator.held_by_chunk()
    num_live = dict(num_held)
    for page in policy.cache.evictable_pages():
        num_live[allocator.chunk_of(page)] -= 1
    chunks = [chunk for chunk, live in reversed(num_live.items()) if chunk > 0 and not live]
    return sorted(chunks, key=num_held.__getitem__)


def drop_cached(policy: SchedulePolicy, chunks: Sequence[int]) -> None:
    """Drop the cached pages of these chunks from the prefix cache."""
    chunk_of, dropped = policy.allocator.chunk_of, set(chunks)
    policy.cache.drop({page for page in policy.cache.evictable_pages() if chunk_of(page) in dropped})
