"""Pages of the KV pool in host memory, while the pool is released."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ebbtide.srt.mem_cache.kv_pool import KVPool
from ebbtide.srt.memory_saver.backup import PIECE_BYTES, HostBuffer, HostPinning


class HostPageStore:
    """Keeps the contents of pages, and brings them back to the same pages.

    Host memory is taken a piece of `PIECE_BYTES` at a time, and kept: pinning it takes seconds.

    Args:
        pool: resident whenever pages are saved or restored.
        max_bytes: how much may be held.
        pinning: `Device.host_pinning`.
    """

    def __init__(self, pool: KVPool, max_bytes: int, pinning: HostPinning | None = None) -> None:
        self.max_pages = min(max_bytes // pool.layout.page_bytes, pool.num_pages)
        self._pool = pool
        self._pinning = pinning
        self._buffers: list[HostBuffer] = []
        self._pages: Sequence[int] = ()

    @property
    def num_bytes(self) -> int:
        """What the pages held now take."""
        return len(self._pages) * self._pool.layout.page_bytes

    def allocate(self) -> None:
        """Take all of the memory now, so that no release waits for it."""
        step = self._pages_per_buffer
        for number in range(-(-self.max_pages // step)):
            self._buffer(number)

    def save(self, pages: Sequence[int]) -> None:
        """Copy these pages to the host, in place of what was held before.

        Raises:
            OutOfDeviceMemory: the host has no room; nothing is held.
        """
        self._pages = ()
        for part, room in self._parts(pages):
            room.copy_(self._pool.read(part), non_blocking=self._is_pinned)
        self._synchronize()
        self._pages = tuple(pages)

    def restore(self) -> None:
        """Copy them back to where they were."""
        for part, room in self._parts(self._pages):
            self._pool.write(part, room.to(self._pool.device, non_blocking=self._is_pinned))
        self._synchronize()

    def drop(self) -> None:
        """They are needed no more."""
        self._pages = ()

    def close(self) -> None:
        """Give the host memory back. Idempotent."""
        self.drop()
        for buffer in self._buffers:
            buffer.close()
        self._buffers = []

    @property
    def _is_pinned(self) -> bool:
        return all(buffer.is_pinned for buffer in self._buffers)

    def _parts(self, pages: Sequence[int]) -> Iterator[tuple[Sequence[int], torch.Tensor]]:
        """The pages by the buffer, and room for them there."""
        step = self._pages_per_buffer
        for number, start in enumerate(range(0, len(pages), step)):
            part = pages[start : start + step]
            shape = (len(part), self._pool.layout.page_bytes // self._pool.layout.dtype.itemsize)
            yield part, self._buffer(number).view(0, shape, self._pool.layout.dtype)

    @property
    def _pages_per_buffer(self) -> int:
        return max(1, min(PIECE_BYTES // self._pool.layout.page_bytes, self.max_pages))

    def _buffer(self, number: int) -> HostBuffer:
        if number == len(self._buffers):
            num_bytes = self._pages_per_buffer * self._pool.layout.page_bytes
            buffer = HostBuffer(self._pool.arena.tag, num_bytes, self._pinning)
            buffer.allocate()
            self._buffers.append(buffer)
        return self._buffers[number]

    def _synchronize(self) -> None:
        for buffer in self._buffers[:1]:
            buffer.synchronize()
