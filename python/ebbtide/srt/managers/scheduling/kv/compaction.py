"""Empties chunks of the KV cache: what nobody needs is dropped, what is live moves to other chunks."""

from __future__ import annotations

from collections import Counter

from ebbtide.srt.managers.scheduling.request import Req
from ebbtide.srt.managers.scheduling.schedule_policy import SchedulePolicy


class KVCompaction:
    """Takes chunks out of the pool without taking KV from any request.

    What is chosen follows from the accounting of pages alone: it is the same on all ranks. No forward pass
    may be under way.

    Args:
        policy: whose pages they are.
    """

    def __init__(self, policy: SchedulePolicy) -> None:
        self._policy = policy

    @property
    def num_live_pages(self) -> int:
        """Pages that requests hold, and not the prefix cache alone."""
        allocator = self._policy.allocator
        return allocator.num_pages - allocator.num_free - self._policy.cache.num_evictable_pages

    def in_the_way(self, num_chunks: int) -> list[Req]:
        """The youngest running requests, without whose KV so many chunks can be withdrawn; oldest first."""
        policy, allocator = self._policy, self._policy.allocator
        num_left = allocator.num_pages - allocator.num_pages_of(self._sparsest()[:num_chunks])
        num_surplus = self.num_live_pages - num_left
        num_users = Counter(page for req in policy.running for page in self._pages(req))
        num_kept = len(policy.running)
        while num_surplus > 0 and num_kept > 0:
            num_kept -= 1
            pages = self._pages(policy.running[num_kept])
            num_users.subtract(pages)
            num_surplus -= sum(not num_users[page] for page in pages)
        return policy.running[num_kept:]

    def withdraw(self, num_chunks: int) -> list[int]:
        """Empty so many chunks, and take them out of the pool.

        They are one that holds fewer pages than others, then those with the fewest live pages, of these those
        with the fewest cached ones, of these the highest; the lowest chunk stays. Live pages must have room
        in the others, else AssertionError. A driver that fails to move them leaves all pages where they were.
        """
        policy, allocator = self._policy, self._policy.allocator
        chunks = self._sparsest()[:num_chunks]
        assert len(chunks) == num_chunks, "the lowest chunk stays"
        left = set(chunks)
        policy.cache.drop(
            {page for page in policy.cache.evictable_pages() if allocator.chunk_of(page) in left}
        )
        held = allocator.held_by_chunk()
        num_moved = sum(held[chunk] for chunk in chunks)
        num_free = allocator.num_free - (allocator.num_pages_of(chunks) - num_moved)
        if num_moved > num_free:
            policy.cache.evict(num_moved - num_free)
        if num_moved:
            target_of = allocator.plan_move(chunks)
            policy.page_store.move(list(target_of), list(target_of.values()))
            policy.relocate(target_of)
        for chunk in chunks:
            allocator.withdraw(chunk)
        return chunks

    def _sparsest(self) -> list[int]:
        allocator = self._policy.allocator
        num_held = allocator.held_by_chunk()
        num_live = dict(num_held)
        for page in self._policy.cache.evictable_pages():
            num_live[allocator.chunk_of(page)] -= 1
        return sorted(
            (chunk for chunk in num_held if chunk > 0),
            key=lambda c: (allocator.num_pages_of([c]), num_live[c], num_held[c], -c),
        )

    def _pages(self, req: Req) -> list[int]:
        assert req.kv is not None
        return req.kv.pages
