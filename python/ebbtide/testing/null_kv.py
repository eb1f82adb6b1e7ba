"""Device memory that is only counted, and a KV cache whose pages contain token ids instead of KV."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from ebbtide.srt.errors import OutOfDeviceMemory
from ebbtide.srt.mem_cache import WHOLE, Windows, first_needed
from ebbtide.srt.mem_cache.page_allocator import PageIds, PageTable
from ebbtide.srt.mem_cache.state_slots import StateSlots

# Page ids with gaps: every fifth id is unused, as in a pool whose chunks are not filled by whole pages.
PAGE_IDS = PageIds(per_chunk=4, stride=5)
# Chunks that a second copy of the weights takes.
NUM_WEIGHT_CHUNKS = 2
CHUNK_BYTES = 300
_NOTHING = -1
# Added to token ids once per group of layers, so that the groups' pages differ.
_GROUP = 1 << 32


class NullKV:
    """A KV cache whose pages contain the tokens of which they would have the KV, for each group of layers.

    `compute` asserts that pages and states are those of the request's own tokens.

    Attributes:
        tokens: contents of pages, int64 [page ids, page_size].
        states: contents of the states' pages: the tokens before the state; None: lost.
    """

    def __init__(
        self,
        table: PageTable,
        page_size: int,
        num_pages: int,
        windows: Windows = WHOLE,
        slots: StateSlots | None = None,
    ) -> None:
        self.slots = slots
        self.states: dict[int, tuple[int, ...] | None] = {}
        num_chunks = -(-num_pages // PAGE_IDS.per_chunk)
        self.tokens = np.full((num_chunks * PAGE_IDS.stride, page_size), _NOTHING, dtype=np.int64)
        self._table, self._windows = table, windows

    def compute(self, row: int, tokens: Sequence[int], start: int, end: int) -> None:
        """Run a pass over tokens `start` to `end` of the request in a row of the page table."""
        page_size = self.tokens.shape[1]
        for group, window in enumerate(self._windows):
            first = first_needed(start, window, page_size)
            begin = first * page_size if window is None else max(0, start + 1 - window)
            pages = self._table.arrays[group, row, first : -(-end // page_size)]
            held = self.tokens[pages].reshape(-1)
            kept = held[begin - first * page_size : start - first * page_size]
            expected = [token + group * _GROUP for token in tokens[begin:start]]
            assert kept.tolist() == expected, "pages do not hold the KV of a request's tokens"
            new = np.array(tokens[start:end], dtype=np.int64) + group * _GROUP
            held[start - first * page_size : end - first * page_size] = new
            self.tokens[pages] = held.reshape(-1, page_size)
        for page in () if self.slots is None else self.slots.pages(row):
            is_its_own = start == 0 or self.states.get(page) == tuple(tokens[:start])
            assert is_its_own, "a slot does not hold the state of a request's tokens"
            self.states[page] = tuple(tokens[:end])

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy states, for each pair of source and target slot."""
        for source, target in pairs:
            assert self.slots is not None
            for page, copy in zip(self.slots.pages(source), self.slots.pages(target), strict=True):
                self.states[copy] = self.states.get(page)

    def lose(self, chunks: Sequence[int] | None = None) -> None:
        """Lose the contents of these chunks; None: of all memory."""
        if chunks is None:
            self.tokens[:] = _NOTHING
            self.states.clear()
        for chunk in chunks or ():
            self.tokens[chunk * PAGE_IDS.stride : (chunk + 1) * PAGE_IDS.stride] = _NOTHING


class NullPageStore:
    """Host memory for `max_pages`. `faults`: exceptions to raise, once each, at "save" or "move"."""

    num_bytes = 0

    def __init__(self, max_pages: int = 12, kv: NullKV | None = None) -> None:
        self._max_pages = max_pages
        self._kv = kv
        self._held: dict[int, Any] = {}
        self._num_users: Counter[int] = Counter()
        self._num_saved = 0
        self.faults: dict[str, Exception] = {}

    @property
    def num_free(self) -> int:
        return self._max_pages - len(self._held)

    def save(self, owners: Sequence[Sequence[int]]) -> list[list[int]]:
        self._fail_at("save")
        slot_of: dict[int, int] = {}
        for page in dict.fromkeys(page for owner in owners for page in owner):
            slot_of[page] = self._num_saved = self._num_saved + 1
            if self._kv is None:
                self._held[slot_of[page]] = []
            elif page in self._kv.states:
                self._held[slot_of[page]] = self._kv.states[page]
            else:
                self._held[slot_of[page]] = self._kv.tokens[page].tolist()
        assert self.num_free >= 0, "more pages are kept than there is room for"
        kept = [[slot_of[page] for page in owner] for owner in owners]
        for slots in kept:
            self._num_users.update(slots)
        self.num_bytes = len(self._held)
        return kept

    def restore(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        for slot, page in zip(slots, pages, strict=True):
            assert slot in self._held, "a page is restored that is not kept"
            if self._kv is None:
                continue
            if self._kv.slots is not None and page >= self._kv.slots.first_page:
                self._kv.states[page] = self._held[slot]
            else:
                self._kv.tokens[page] = self._held[slot]

    def drop(self, slots: Sequence[int]) -> None:
        self._num_users.subtract(slots)
        assert all(self._num_users[slot] >= 0 for slot in slots), "a page is dropped twice"
        self._held = {slot: held for slot, held in self._held.items() if self._num_users[slot] > 0}
        self.num_bytes = len(self._held)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._fail_at("move")
        assert len({*sources, *targets}) == len(sources) + len(targets), "pages overlap"
        if self._kv is not None:
            self._kv.tokens[targets] = self._kv.tokens[sources]

    def _fail_at(self, step: str) -> None:
        error = self.faults.pop(step, None)
        if error is not None:
            raise error


class NullChunks:
    """Chunks of the KV pool that are lent for a second copy of the weights, or removed.

    Attributes:
        lent: chunks that are lent.
        num_spare: number of lent chunks that the copy has not taken.
        removed: chunks that are removed from the pool.
    """

    chunk_bytes = CHUNK_BYTES

    def __init__(self, memory: NullMemory, kv: NullKV) -> None:
        self.lent: set[int] = set()
        self.num_spare = 0
        self.removed: set[int] = set()
        self._memory = memory
        self._kv = kv

    @property
    def is_resident(self) -> bool:
        return self._memory.resident_bytes > 0

    def lend(self, chunks: Sequence[int]) -> None:
        assert self.is_resident, "memory that is not there was lent"
        assert not (self.lent | self.removed) & set(chunks), "a chunk was lent that is not there"
        self.lent.update(chunks)
        self.num_spare += len(chunks)
        self._kv.lose(chunks)

    def take_back(self, chunks: Sequence[int]) -> None:
        returned = self.lent & set(chunks)
        assert len(returned) <= self.num_spare, "a second copy still has what was lent for it"
        self.lent -= returned
        self.num_spare -= len(returned)

    def remove(self, chunks: Sequence[int]) -> int:
        assert not (self.lent | self.removed) & set(chunks), "a chunk was given up that is not there"
        self.removed.update(chunks)
        if not self.is_resident:
            self._memory.wanted_bytes -= len(chunks) * CHUNK_BYTES
            return 0
        self._kv.lose(chunks)
        return self._memory.give(len(chunks) * CHUNK_BYTES)

    def add(self, chunks: Sequence[int]) -> int:
        assert self.is_resident, "a pool without memory grows"
        assert self.removed >= set(chunks), "a chunk was added that is there"
        taken_bytes = self._memory.take(len(chunks) * CHUNK_BYTES)
        self.removed -= set(chunks)
        return taken_bytes

    def expect(self, chunks: Sequence[int]) -> None:
        assert self.removed >= set(chunks)
        self.removed -= set(chunks)
        self._memory.wanted_bytes += len(chunks) * CHUNK_BYTES

    def take_spare(self) -> int:
        """Take spare chunks for a second copy; returns how many."""
        taken = min(self.num_spare, NUM_WEIGHT_CHUNKS)
        self.num_spare -= taken
        return taken

    def return_spare(self, num_chunks: int) -> None:
        """Give back chunks of a second copy."""
        self.num_spare += num_chunks


class NullDevice:
    """Device memory that is only counted. All memory tags of one or more engines share it."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.used_bytes = 0

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.used_bytes

    def take(self, num_bytes: int) -> None:
        if num_bytes > self.free_bytes:
            raise OutOfDeviceMemory(num_bytes, self.free_bytes)
        self.used_bytes += num_bytes


@dataclass(eq=False)
class NullMemory:
    """Memory of a tag on a `NullDevice`. It is resident at the start."""

    _device: NullDevice
    virtual_bytes: int
    _: KW_ONLY
    keeps_contents: bool = False
    is_needed: bool = True
    lose_contents: Callable[[], None] = lambda: None
    backup_bytes: int = 0
    _is_saved: bool = False

    def __post_init__(self) -> None:
        self._device.take(self.virtual_bytes)
        # The bytes that are resident after a resume.
        self.wanted_bytes = self.resident_bytes = self.virtual_bytes

    def prepare_release(self, keep: bool) -> None:
        if keep:
            self.backup_bytes = self.virtual_bytes
        self._is_saved = keep

    def release(self) -> int:
        freed_bytes, self.resident_bytes = self.resident_bytes, 0
        self._device.used_bytes -= freed_bytes
        if not self._is_saved:
            self.lose_contents()
        return freed_bytes

    def resume(self) -> int:
        mapped_bytes = self.wanted_bytes - self.resident_bytes
        self._device.take(mapped_bytes)
        self.resident_bytes = self.wanted_bytes
        return mapped_bytes

    def give(self, num_bytes: int) -> int:
        """Give bytes back to the device; a resume does not take them again. Returns them."""
        self._device.used_bytes -= num_bytes
        self.resident_bytes -= num_bytes
        self.wanted_bytes -= num_bytes
        return num_bytes

    def take(self, num_bytes: int) -> int:
        """Take more bytes from the device, for good; returns them."""
        self._device.take(num_bytes)
        self.resident_bytes += num_bytes
        self.wanted_bytes += num_bytes
        return num_bytes
