"""Memory that all ranks make sure of before a forward pass: in the middle of it none could stop alone."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from ebbtide.srt.model_executor.batch_plan import PassOutOfMemory

if TYPE_CHECKING:
    from ebbtide.srt.device import Device
    from ebbtide.srt.distributed.parallel_group import ParallelGroup

# The most that is kept beyond what a pass takes.
SPARE_BYTES: Final = 128 << 20


@dataclass(eq=False)
class PassRoom:
    """The memory that torch keeps on every rank for passes to compute in.

    All ranks must call the same methods between the same passes, or they would wait for each other for ever.

    Args:
        token_bytes: bytes that a pass takes per token; the same on all ranks.
        row_bytes: bytes that it takes per row of logits; the same on all ranks.
    """

    _device: Device
    _group: ParallelGroup
    token_bytes: int
    row_bytes: int
    _room_bytes: int = field(default=0, init=False)

    def forget(self) -> None:
        """Let the next pass check for memory again. All ranks must call it between the same passes."""
        self._room_bytes = 0

    def make(self, num_tokens: int, num_rows: int) -> None:
        """Make sure of memory for a pass, and of up to half as much more, so that growing passes ask seldom.

        The host waits for all ranks only if a pass takes more than all passes since the last `forget`.

        PassOutOfMemory: a rank has too little. All ranks raise it, and none keeps any memory.
        """
        needed_bytes = num_tokens * self.token_bytes + num_rows * self.row_bytes
        if needed_bytes <= self._room_bytes:
            return
        room_bytes = needed_bytes + min(needed_bytes // 2, SPARE_BYTES)
        lacking = sys.maxsize
        if not self._device.make_room(room_bytes):
            self._device.trim()
            lacking = self._device.free_bytes() * self._group.size + self._group.rank
        lacking = self._group.smallest(lacking)
        if lacking < sys.maxsize:
            self._room_bytes = 0
            self._device.trim()
            free_bytes, rank = divmod(lacking, self._group.size)
            raise PassOutOfMemory(f"rank {rank} has no room for {room_bytes} bytes; {free_bytes} are free")
        self._room_bytes = room_bytes
