"""Lends the KV cache's memory, chunk by chunk, for a second copy of the weights.

Which chunks are lent follows from the accounting of pages alone: it is the same on all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, Protocol

from ebbtide.srt.errors import OutOfDeviceMemory
from ebbtide.srt.managers.io_struct import RetractCause
from ebbtide.srt.managers.scheduling.kv.compaction import KVCompaction
from ebbtide.srt.managers.scheduling.request import Req
from ebbtide.srt.managers.scheduling.schedule_policy import SchedulePolicy

logger = logging.getLogger(__name__)

# Room that each running request is left to grow: more than it will while an update lasts.
GROWTH_TOKENS: Final = 256


class LendableMemory(Protocol):
    """The memory of the KV cache. A `ChunkArena` is one."""

    @property
    def chunk_bytes(self) -> int: ...

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
        compaction: empties chunks that hold something.
        memory: None: memory cannot change places here, and nothing is ever lent.
        num_wanted: chunks that a copy takes, on the rank where it takes most.
        may_retract: whether requests may be retracted for it, the youngest first.
    """

    def __init__(
        self,
        policy: SchedulePolicy,
        compaction: KVCompaction,
        memory: LendableMemory | None,
        num_wanted: int,
        *,
        may_retract: bool = False,
    ) -> None:
        self._policy = policy
        self._compaction = compaction
        self._memory = memory
        self._num_wanted = num_wanted
        self._may_retract = may_retract
        self._aside: list[int] = []

    @property
    def lent_bytes(self) -> int:
        """What a copy has of this rank's memory, or is about to have."""
        return 0 if self._memory is None else len(self._aside) * self._memory.chunk_bytes

    def set_aside(self, *, hard: bool = False) -> bool:
        """Take chunks out of the pool for a copy; returns whether they are all that it takes.

        The same on all ranks, in the same turn, with no forward pass under way.

        Args:
            hard: not only chunks without a page that is held. Cached pages are dropped, live ones moved
                together, and requests retracted where that is allowed; all that a copy takes, or none.
        """
        assert not self._aside, "chunks are set aside already"
        if self._memory is None or not self._memory.is_resident:
            return False
        allocator = self._policy.allocator
        if hard:
            if self._may_retract:
                self._retract_youngest()
            if self._num_lendable() < self._num_wanted:
                return False
            self._aside = self._compaction.withdraw(self._num_wanted)
        else:
            num_chunks = min(self._num_wanted, self._num_lendable())
            self._aside = allocator.withdrawable()[:num_chunks]
            for chunk in self._aside:
                allocator.withdraw(chunk)
        return 0 < self._num_wanted == len(self._aside)

    def hand_over(self) -> None:
        """Lend what was set aside, if it has not been released since. At its own speed on each rank."""
        if self._memory is not None and self._aside and self._memory.is_resident:
            try:
                self._memory.lend(self._aside)
            except OutOfDeviceMemory as error:
                # The copy is then made of what was lent before, and of memory that is free.
                logger.warning("not all chunks of the KV cache could be lent: %s", error)

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
        if (allocator.num_pages - self._longest) // allocator.pages_per_chunk < self._num_wanted:
            return
        while policy.running and self._num_lendable() < self._num_wanted:
            policy.retract(policy.running[-1], RetractCause.UPDATE)

    @property
    def _longest(self) -> int:
        """Pages of the longest request that there can be."""
        return int(self._policy.table.array.shape[1])

    def _num_lendable(self) -> int:
        """So many that running requests can grow, and that the longest one that may be waiting has room."""
        policy, allocator = self._policy, self._policy.allocator
        growth = sum(self._num_growth_pages(req) for req in policy.running)
        num_spare = allocator.num_pages - max(self._compaction.num_live_pages + growth, self._longest)
        # The lowest chunk stays.
        return max(0, min(num_spare // allocator.pages_per_chunk, len(allocator.held_by_chunk()) - 1))

    def _num_growth_pages(self, req: Req) -> int:
        num_tokens = min(req.max_new_tokens - len(req.spec.output_ids), GROWTH_TOKENS)
        return -(-num_tokens // self._policy.page_size) + 1
