"""The chunks of the KV cache: lent to a second copy of the weights, removed, and resumed in parts.

The choice of chunks depends on the accounting of pages alone, so it is the same on all ranks. The lowest
chunk always stays: steps that are padded to the size of a CUDA graph read its first page.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Final, Protocol

from ebbtide.srt.errors import OutOfDeviceMemory, RequestRejected
from ebbtide.srt.managers.control import ShrinkingPlan
from ebbtide.srt.managers.io_struct import Preserve, RetractCause
from ebbtide.srt.managers.scheduling.request import Req
from ebbtide.srt.managers.scheduling.schedule_policy import SchedulePolicy
from ebbtide.srt.slices import Slices

logger = logging.getLogger(__name__)

# Tokens that each running request may grow by while chunks are lent: more than come during an update.
GROWTH_TOKENS: Final = 256
# The share of the cache that a resume waits for. Each further part is as large as all parts before it.
FIRST_SHARE: Final = 1 / 32
# Bytes mapped by one call. The driver clears memory that was just freed at about 1 GiB in 2 ms.
SLICE_BYTES: Final = 1 << 30


class ChunkMemory(Protocol):
    """The memory under the chunks. A `ChunkArena` is one."""

    @property
    def chunk_bytes(self) -> int: ...

    @property
    def is_resident(self) -> bool: ...

    def lend(self, chunks: Sequence[int]) -> None:
        """Lend chunks to the second copy of the weights that is made next."""

    def take_back(self, chunks: Sequence[int]) -> None:
        """Take back the lent ones of these chunks, after the copy is gone."""

    def remove(self, chunks: Sequence[int]) -> int:
        """Give the chunks' memory to the system; later resumes leave them out. Returns the bytes."""

    def expect(self, chunks: Sequence[int]) -> None:
        """Let the next resume bring back chunks that were removed."""

    def add(self, chunks: Sequence[int]) -> int:
        """Take memory for removed chunks now, all or none; returns the bytes. Raises OutOfDeviceMemory."""


@dataclass(eq=False)
class KVChunks:
    """Takes chunks out of the page pool and puts them back, with the memory under them.

    Implements `KVMemory` of the control plane. No forward pass may be under way while chunks are taken out.

    Args:
        memory: None: this memory saver cannot move chunks, so none is lent, removed, or held back.
        num_wanted: chunks that a copy of the weights takes, on the rank where it takes most.
        may_retract: whether requests may be retracted for a copy, the youngest first.
    """

    _policy: SchedulePolicy
    _memory: ChunkMemory | None
    _num_wanted: int
    _: KW_ONLY
    may_retract: bool

    def __post_init__(self) -> None:
        self._allocator = self._policy.allocator
        self._lent: list[int] = []
        # Of a resize: chunks without memory; out of the pool, and about to lose it; with memory again, and
        # not in the pool yet.
        self._removed: list[int] = []
        self._emptied: list[int] = []
        self._added: list[int] = []
        self._parked_slots: list[list[int]] = []
        # Of a resume: chunks that are not in the pool yet, and those of them that have memory on this rank.
        self._held_back: list[int] = []
        self._mapped: set[int] = set()
        self._num_resumes = 0

    # ---------------------------------------------------------------------------- lending, for weight updates

    @property
    def lent_bytes(self) -> int:
        """Bytes of this rank's KV cache that a copy of the weights has, or is about to get."""
        return 0 if self._memory is None else len(self._lent) * self._memory.chunk_bytes

    def set_aside(self, *, hard: bool = False) -> bool:
        self.take_back()  # chunks that are still lent because the driver failed the last time
        if self._memory is None or not self._memory.is_resident:
            return False
        if hard:
            if self.may_retract:
                self._retract_for_copy()
            if self._num_lendable() < self._num_wanted:
                return False
            self._lent = self._empty(self._num_wanted)
        else:
            num_chunks = min(self._num_wanted, self._num_lendable())
            self._lent = self._allocator.withdrawable()[:num_chunks]
            for chunk in self._lent:
                self._allocator.withdraw(chunk)
        return 0 < self._num_wanted == len(self._lent)

    def hand_over(self) -> None:
        if self._memory is not None and self._lent and self._memory.is_resident:
            try:
                self._memory.lend(self._lent)
            except OutOfDeviceMemory as error:
                # The copy then takes the chunks lent so far, and free memory for the rest.
                logger.warning("not all chunks of the KV cache could be lent: %s", error)

    def take_back(self) -> None:
        if self._memory is not None and self._lent:
            self._memory.take_back(self._lent)
        for chunk in self._lent:
            self._allocator.restore(chunk)
        self._lent = []

    def _retract_for_copy(self) -> None:
        """Retract requests until enough chunks for a copy can be lent; none if there never are enough."""
        num_spare = self._allocator.num_pages - self._policy.longest_pages
        if num_spare // self._allocator.pages_per_chunk < self._num_wanted:
            return
        while self._policy.running and self._num_lendable() < self._num_wanted:
            self._policy.retract(self._policy.running[-1], RetractCause.UPDATE)

    def _num_lendable(self) -> int:
        """Chunks that can go while running requests may grow and the longest possible request still fits."""
        num_needed = self._num_live_pages + sum(map(self._num_growth_pages, self._policy.running))
        num_spare = self._allocator.num_pages - max(num_needed, self._policy.longest_pages)
        num_chunks = len(self._allocator.held_by_chunk()) - 1
        return max(0, min(num_spare // self._allocator.pages_per_chunk, num_chunks))

    def _num_growth_pages(self, req: Req) -> int:
        return self._policy.pages_of(min(req.num_to_come, GROWTH_TOKENS)) + self._policy.pages_of(1)

    # ------------------------------------------------------------------------------------ resizing, for good

    @property
    def chunk_bytes(self) -> int:
        assert self._memory is not None
        return self._memory.chunk_bytes

    @property
    def chunk_tokens(self) -> int:
        return self._policy.tokens_of(self._allocator.pages_per_chunk)

    @property
    def num_tokens(self) -> int:
        num_removed = self._allocator.num_pages_of(self._removed)
        return self._policy.tokens_of(self._num_pages_at_start - num_removed)

    @property
    def num_bytes(self) -> int:
        return (self._allocator.num_chunks - len(self._removed)) * self.chunk_bytes

    @property
    def _num_pages_at_start(self) -> int:
        return self._allocator.num_pages + self._allocator.num_withdrawn

    def choose(self, num_tokens: int | None, num_bytes: int | None) -> int:
        if self._memory is None:
            raise RequestRejected(
                "the KV cache keeps its size: this memory_saver_backend cannot take memory out of it", 409
            )
        num_chunks = self._allocator.num_chunks
        # The last chunk may hold fewer tokens than the others.
        most_tokens = self._policy.tokens_of(self._num_pages_at_start)
        if num_tokens is not None:
            num_slots = num_tokens * self._policy.num_groups
            wanted = -(-num_slots // (self._allocator.pages_per_chunk * self._policy.page_size))
            wanted = wanted if num_tokens <= most_tokens else num_chunks + 1
        else:
            assert num_bytes is not None
            wanted = num_bytes // self.chunk_bytes
        least = min(num_chunks, -(-self._policy.longest_pages // self._allocator.pages_per_chunk))
        if not least <= wanted <= num_chunks:
            least_pages = least * self._allocator.pages_per_chunk
            least_tokens = min(self._policy.tokens_of(least_pages), most_tokens)
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
        if num_chunks >= len(self._allocator.held_by_chunk()):
            raise RequestRejected(
                "a weight update has borrowed memory of the KV cache: end or abort it, and try again", 409
            )
        in_the_way = self._in_the_way(num_chunks)
        rids = [req.rid for req in in_the_way]
        pages: set[int] = set()
        num_parked = 0
        # The oldest are parked, as far as the store has room.
        for req in in_the_way if preserve is not Preserve.NONE else []:
            pages.update(self._policy.pages.computed(req))
            if len(pages) > self._policy.page_store.num_free:
                break
            num_parked += 1
        return ShrinkingPlan(num_chunks, rids[:num_parked], rids[num_parked:])

    def save(self, plan: ShrinkingPlan) -> int:
        policy = self._policy
        before = policy.page_store.num_bytes
        owners = [policy.pages.computed(req) for req in self._found(plan.parked)]
        self._parked_slots = policy.page_store.save(owners)
        return policy.page_store.num_bytes - before

    def discard(self) -> None:
        for slots in self._parked_slots:
            self._policy.page_store.drop(slots)
        self._parked_slots = []

    def withdraw(self, plan: ShrinkingPlan) -> None:
        for req, slots in zip(self._found(plan.parked), self._parked_slots, strict=True):
            self._policy.park_request(req, slots)
        self._parked_slots = []
        for req in self._found(plan.retracted):
            self._policy.retract(req, RetractCause.RESIZE)
        self._emptied = self._empty(plan.num_chunks)

    def remove(self, num_chunks: int) -> int:
        assert self._memory is not None
        chunks, self._emptied = self._emptied[:num_chunks], self._emptied[num_chunks:]
        self._removed += chunks
        return self._memory.remove(chunks)

    def add(self, num_chunks: int) -> int:
        assert self._memory is not None
        chunks = [chunk for chunk in sorted(self._removed) if chunk not in self._added][:num_chunks]
        num_bytes = self._memory.add(chunks)
        self._added += chunks
        return num_bytes

    def unadd(self) -> None:
        assert self._memory is not None
        added, self._added = self._added, []
        self._memory.remove(added)

    def restore(self) -> None:
        added, self._added = self._added, []
        for chunk in added:
            self._allocator.restore(chunk)
        self._removed = [chunk for chunk in self._removed if chunk not in added]

    def _found(self, rids: Sequence[str]) -> list[Req]:
        return [req for rid in rids if (req := self._policy.find(rid)) is not None]

    # ----------------------------------------------------------------------------------- resuming, in parts

    def hold_back(self, pages: Sequence[int]) -> None:
        assert not self._held_back, "a resume is under way"
        if self._memory is None:
            return
        held = self._allocator.held_by_chunk()
        num_first = max(1, int(len(held) * FIRST_SHARE))
        first = {*list(held)[:num_first], *map(self._allocator.chunk_of, pages)}
        self._held_back = [chunk for chunk in held if chunk not in first and not held[chunk]]
        self._mapped = set()
        self._num_resumes += 1
        for chunk in self._held_back:
            self._allocator.withdraw(chunk)
        self._memory.remove(self._held_back)

    def next_part(self) -> list[int]:
        return self._held_back[: len(self._allocator.held_by_chunk())]

    def map(self, chunks: Sequence[int] | None = None) -> Slices[None]:
        chunks = self._held_back if chunks is None else chunks
        return self._map([chunk for chunk in chunks if chunk not in self._mapped], self._num_resumes)

    def _map(self, missing: list[int], number: int) -> Slices[None]:
        while missing and number == self._num_resumes:
            assert self._memory is not None
            step = max(1, SLICE_BYTES // self._memory.chunk_bytes)
            part, missing = missing[:step], missing[step:]
            num_bytes = self._memory.add(part)
            self._mapped.update(part)
            yield num_bytes

    def put_back(self, chunks: Sequence[int]) -> None:
        put_back = set(chunks)
        self._held_back = [chunk for chunk in self._held_back if chunk not in put_back]
        for chunk in chunks:
            self._allocator.restore(chunk)

    def give_up(self) -> None:
        self._num_resumes += 1
        if self._memory is not None:
            self._memory.expect([chunk for chunk in self._held_back if chunk not in self._mapped])
        self.put_back(list(self._held_back))

    # ------------------------------------------------------------------------------------- emptying chunks

    @property
    def _num_live_pages(self) -> int:
        """Pages that requests hold, not counting those of the prefix cache alone."""
        allocator = self._allocator
        return allocator.num_pages - allocator.num_free - self._policy.cache.num_evictable_pages

    def _in_the_way(self, num_chunks: int) -> list[Req]:
        """The youngest running requests that must lose their KV to empty this many chunks; oldest first."""
        running, allocator = self._policy.running, self._allocator
        num_left = allocator.num_pages - allocator.num_pages_of(self._sparsest()[:num_chunks])
        num_surplus = self._num_live_pages - num_left
        num_users = Counter(page for req in running for page in self._policy.pages.held(req))
        num_kept = len(running)
        while num_surplus > 0 and num_kept > 0:
            num_kept -= 1
            pages = self._policy.pages.held(running[num_kept])
            num_users.subtract(pages)
            num_surplus -= sum(not num_users[page] for page in pages)
        return running[num_kept:]

    def _empty(self, num_chunks: int) -> list[int]:
        """Take the sparsest chunks out of the pool; no request loses KV. Returns the chunks.

        Pages that only the cache holds are dropped. Live pages move to other chunks, which must have room,
        else AssertionError. If the driver fails to move them, all pages stay where they were.
        """
        cache, allocator = self._policy.cache, self._allocator
        chunks = self._sparsest()[:num_chunks]
        assert len(chunks) == num_chunks, "the lowest chunk stays"
        left = set(chunks)
        cache.drop({page for page in cache.evictable_pages() if allocator.chunk_of(page) in left})
        held = allocator.held_by_chunk()
        num_moved = sum(held[chunk] for chunk in chunks)
        num_free = allocator.num_free - (allocator.num_pages_of(chunks) - num_moved)
        if num_moved > num_free:
            cache.evict(num_moved - num_free)
        if num_moved:
            target_of = allocator.plan_move(chunks)
            self._policy.page_store.move(list(target_of), list(target_of.values()))
            self._policy.relocate(target_of)
        for chunk in chunks:
            allocator.withdraw(chunk)
        return chunks

    def _sparsest(self) -> list[int]:
        """All chunks but the lowest, ordered by: fewest pages in all (a last chunk may be cut short), fewest
        live pages, fewest cached pages, highest place."""
        allocator = self._allocator
        num_held = allocator.held_by_chunk()
        num_live = dict(num_held)
        for page in self._policy.cache.evictable_pages():
            num_live[allocator.chunk_of(page)] -= 1
        return sorted(
            (chunk for chunk in num_held if chunk > 0),
            key=lambda c: (allocator.num_pages_of([c]), num_live[c], num_held[c], -c),
        )
