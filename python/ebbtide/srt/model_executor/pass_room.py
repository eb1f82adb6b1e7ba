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
# What every pass takes, however small it is: partial sums of work that is split among multiprocessors.
FIXED_BYTES: Final = 16 << 20


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

    def make(self, num_tokens: int, num_rows: int, more_bytes: int = 0) -> None:
        """Make sure of memory for a pass.

        If there is more, up to half as much more is kept too, so that growing passes ask seldom.
        The host waits for all ranks only if a pass takes more than all passes since the last `forget`.

        PassOutOfMemory: a rank has too little. All ranks raise it, and none keeps any memory.
        """
        taken_bytes = FIXED_BYTES + num_tokens * self.token_bytes + num_rows * self.row_bytes + more_bytes
        # An eighth more for fragmentation.
        needed_bytes = taken_bytes * 9 // 8
        if needed_bytes <= self._room_bytes:
            return
        sizes = (needed_bytes + min(needed_bytes // 2, SPARE_BYTES), needed_bytes)
        made = next((size for size in sizes if self._device.make_room(size)), None)
        if made is None:
            self._device.trim()
            # Negative, so that it is less than what any rank has made. The rank with the least free wins.
            made = self._device.free_bytes() * self._group.size + self._group.rank - sys.maxsize
        made = self._group.smallest(made)
        self._room_bytes = max(made, 0)
        if made < 0:
            self._device.trim()
            free_bytes, rank = divmod(made + sys.maxsize, self._group.size)
            raise PassOutOfMemory(f"rank {rank} has no room for {needed_bytes} bytes; {free_bytes} are free")
