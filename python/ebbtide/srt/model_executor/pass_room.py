"""Memory that several ranks have before they begin a forward pass: in its middle none could go back alone."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from ebbtide.srt.model_executor.batch_plan import PassOutOfMemory

if TYPE_CHECKING:
    from ebbtide.srt.device import Device
    from ebbtide.srt.distributed.parallel_group import ParallelGroup

# Room beyond what a pass takes is no more than this.
SPARE_BYTES: Final = 128 << 20


@dataclass(eq=False)
class PassRoom:
    """What torch keeps on every rank for passes to compute in. Ranks ask alike, or would wait for ever.

    Args:
        token_bytes: what a pass takes for each token that it computes; the same on all ranks, as all but the
            device and the group.
        row_bytes: what it takes for each row of logits.
    """

    _device: Device
    _group: ParallelGroup
    token_bytes: int
    row_bytes: int
    _room_bytes: int = field(default=0, init=False)

    def forget(self) -> None:
        """Have the next pass make sure of its room. To be called between the same passes on all ranks."""
        self._room_bytes = 0

    def make(self, num_tokens: int, num_rows: int) -> None:
        """Have room for a pass, and for up to half as much again: passes that grow ask seldom.

        The host waits for all ranks only where a pass takes more than those since the last `forget`.

        PassOutOfMemory: a rank has no room; raised on all of them, and none keeps any.
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
