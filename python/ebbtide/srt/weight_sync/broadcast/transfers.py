"""Broadcasts of one update, and how many of them are under way."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch.distributed
from torch import Tensor

_dist: Any = torch.distributed  # not all of it is exported

# More would fill the driver's queue while the first waits for its source, and hold up other launches.
MAX_UNDER_WAY: Final = 128


@dataclass(frozen=True)
class Transfer:
    """One broadcast.

    Attributes:
        tensor: what is sent, or where it is received.
        is_in_place: whether `tensor` is memory that was there before and is read by others.
        deliver: copies what was received to such memory; None: nothing does.
        round: of the buffers. Before the first transfer of a round, those of the round before the last must
            have been received and copied: their memory is used again.
    """

    tensor: Tensor
    is_in_place: bool = False
    deliver: Callable[[], object] | None = None
    round: int = 0


class BroadcastQueue:
    """The broadcasts of one update.

    Args:
        backend: torch's.
        timeout_s: how long all of them may take.
        keeps: whether their tensors are to be kept.

    Attributes:
        under_way: those that were begun and not yet seen to their end, the oldest first.
        kept: the tensors.
        until_s: when they must have ended, of the monotonic clock.
    """

    def __init__(self, backend: Any, source_rank: int, timeout_s: float, *, keeps: bool) -> None:
        self.under_way: deque[tuple[Transfer, Any]] = deque()
        self.kept: list[Tensor] = []
        self.until_s = time.monotonic() + timeout_s
        self._backend = backend
        self._keeps = keeps
        self._options = _dist.BroadcastOptions()
        self._options.rootRank, self._options.rootTensor = source_rank, 0
        self._options.timeout = timedelta(seconds=timeout_s)

    def begin(self, transfer: Transfer) -> None:
        """Launch the next one. In a group whose members have not met this waits for them."""
        tensor = transfer.tensor
        if tensor.is_cpu and tensor.dtype == torch.float8_e4m3fn:
            # gloo knows no numbers of 8 bits but integers.
            tensor = tensor.view(torch.uint8)
        self.under_way.append((transfer, self._backend.broadcast([tensor], self._options)))
        if self._keeps:
            self.kept.append(transfer.tensor)

    @property
    def is_full(self) -> bool:
        """Whether the oldest must have ended before another one begins."""
        return len(self.under_way) >= MAX_UNDER_WAY

    def must_end_before(self, transfer: Transfer) -> bool:
        """Whether the oldest uses memory that this one is received in."""
        return bool(self.under_way) and self.under_way[0][0].round < transfer.round - 1

    def wait_for_kernels(self) -> None:
        """Have the current stream wait for all that was launched, however it ends."""
        for _, work in self.under_way:
            with suppress(Exception):
                work.wait()
        self.under_way.clear()
