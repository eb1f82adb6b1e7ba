"""Keeps contents of KV pages in host memory while the pool has no room or no memory for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from ebbtide.srt.mem_cache.kv_pool import KVPool
from ebbtide.srt.memory_saver.backup import PIECE_BYTES, HostBuffer
from ebbtide.srt.memory_saver.virtual_memory.cuda import CudaHostPinning

# Memory that is not pinned is quick to allocate, so it is taken in smaller pieces, and given back.
UNPINNED_PIECE_BYTES = 16 << 20


class HostPageStore:
    """Keeps the contents of pages in slots, and copies them back to any pages: see `control.PageStore`.

    Host memory is taken piece by piece. Pinned memory is kept, since pinning takes seconds, and so is what
    `allocate` took. Other memory is given back from the end when its slots are dropped.

    Args:
        pool: resident whenever pages are saved or restored.
        max_bytes: the most host memory that may be held.
        pinning: `Device.host_pinning`.
    """

    def __init__(self, pool: KVPool, max_bytes: int, pinning: CudaHostPinning | None = None) -> None:
        self._pool = pool
        self._pinning = pinning
        self._page_bytes, self._word = pool.layout.page_bytes, pool.layout.word
        num_state_pages = 0 if pool.states is None else pool.states.slots.num_pages
        self._max_slots = min(max_bytes // self._page_bytes, pool.num_pages + num_state_pages)
        piece_bytes = UNPINNED_PIECE_BYTES if pinning is None else PIECE_BYTES
        self._slots_per_buffer = max(1, min(piece_bytes // self._page_bytes, self._max_slots))
        self._keeps_buffers = pinning is not None
        self._buffers: list[HostBuffer] = []
        self._free = list(range(self._max_slots - 1, -1, -1))
        self.num_bytes = 0
        self._num_users: Counter[int] = Counter()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> None:
        """Take all memory now, and keep it, so that no release waits for it."""
        self._keeps_buffers = True
        self._allocate(self._max_slots)

    def save(self, owners: Sequence[Sequence[int]]) -> list[list[int]]:
        """See `control.PageStore`. A page of several owners takes one slot, until the last owner drops it."""
        pages = list(dict.fromkeys(page for owner in owners for page in owner))
        assert len(pages) <= len(self._free), f"{len(pages)} pages are kept where {len(self._free)} have room"
        slots = sorted(self._free, reverse=True)[len(self._free) - len(pages) :][::-1]
        self._allocate(max(slots, default=-1) + 1)
        for part, room in self._runs(slots):
            room.copy_(self._pool.read(pages[part]), non_blocking=self._is_pinned)
        for buffer in self._buffers[:1]:
            buffer.synchronize()
        taken = set(slots)
        self._free = [slot for slot in self._free if slot not in taken]
        self.num_bytes += len(slots) * self._page_bytes
        slot_of = dict(zip(pages, slots, strict=True))
        kept = [[slot_of[page] for page in owner] for owner in owners]
        for owner_slots in kept:
            self._num_users.update(owner_slots)
        return kept

    def restore(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        """See `control.PageStore`. The copies are queued behind earlier work."""
        for part, room in self._runs(slots):
            self._pool.write(pages[part], room.to(self._pool.device, non_blocking=self._is_pinned))

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._pool.move(sources, targets)

    def drop(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._num_users[slot] -= 1
            assert self._num_users[slot] >= 0, f"slot {slot} is dropped twice"
            if not self._num_users[slot]:
                del self._num_users[slot]
                self._free.append(slot)
                self.num_bytes -= self._page_bytes
        if not self._keeps_buffers:
            num_used = max(self._num_users, default=-1) // self._slots_per_buffer + 1
            while len(self._buffers) > num_used:
                self._buffers.pop().close()

    def close(self) -> None:
        """Give the host memory back. Idempotent."""
        for buffer in self._buffers:
            buffer.close()
        self._buffers = []

    @property
    def _is_pinned(self) -> bool:
        return all(buffer.is_pinned for buffer in self._buffers)

    def _runs(self, slots: Sequence[int]) -> Iterator[tuple[slice, torch.Tensor]]:
        """Adjacent slots of one buffer at a time: their places in `slots`, and their memory."""
        step = self._slots_per_buffer
        start = 0
        while start < len(slots):
            first, end = slots[start], start + 1
            while end < len(slots) and slots[end] == slots[end - 1] + 1 and slots[end] % step:
                end += 1
            shape = (end - start, self._page_bytes // self._word.itemsize)
            buffer = self._buffers[first // step]
            yield slice(start, end), buffer.view(first % step * self._page_bytes, shape, self._word)
            start = end

    def _allocate(self, num_slots: int) -> None:
        """Take memory for slots 0 to `num_slots` - 1."""
        while len(self._buffers) * self._slots_per_buffer < num_slots:
            num_bytes = self._slots_per_buffer * self._page_bytes
            buffer = HostBuffer(self._pool.arena.tag, num_bytes, self._pinning)
            buffer.allocate()
            self._buffers.append(buffer)
