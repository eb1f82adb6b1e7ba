"""Where broadcast tensors are received: straight where they belong, or in little memory beside it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeAlias

import torch
import torch.distributed
from torch import Tensor

from ebbtide.srt.model_executor.weight_store import Destination

_dist: Any = torch.distributed  # not all of it is exported

# Of what cannot be received where it belongs, this much is on its way at a time.
IN_FLIGHT_BYTES: Final = 1 << 30
# More would fill the driver's queue while the first waits for its source, and hold up other launches.
MAX_UNDER_WAY: Final = 128
# NCCL's kernels read and write aligned memory faster.
ALIGNMENT_BYTES: Final = 256

# Shape and dtype of each broadcast tensor, in the order of the broadcasts.
Layout: TypeAlias = Sequence[tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class Transfer:
    """One broadcast.

    Attributes:
        tensor: what is sent, or where it is received.
        destination: gets a copy of it afterwards; None: nothing does.
        lands: whether `tensor` is the destination itself.
        round: of the buffers. Before the first transfer of a round, those of the round before the last must
            have been received and copied: their memory is used again.
    """

    tensor: Tensor
    destination: Destination | None = None
    lands: bool = False
    round: int = 0


class Passage:
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
        self.under_way.append((transfer, self._backend.broadcast([transfer.tensor], self._options)))
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


class _Buffers:
    """Two pieces of memory in turn: one is received into while what the other holds is copied.

    Args:
        sizes: bytes of all tensors that will be received in them. A tensor lies in one piece.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self.round = 0
        padded = [_padded(num_bytes) for num_bytes in sizes]
        piece_bytes = min(sum(padded), max(IN_FLIGHT_BYTES // 2, *padded, 0))
        num_pieces = 1 if piece_bytes == sum(padded) else 2
        self._pieces = [torch.empty(piece_bytes, dtype=torch.uint8, device=device) for _ in range(num_pieces)]
        self._used_bytes = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, num_bytes: int) -> Tensor:
        """Memory for the next tensor."""
        piece = self._pieces[self.round % len(self._pieces)]
        if self._used_bytes + num_bytes > piece.nbytes:
            self.round += 1
            self._used_bytes = 0
            piece = self._pieces[self.round % len(self._pieces)]
        start, self._used_bytes = self._used_bytes, self._used_bytes + _padded(num_bytes)
        return piece[start : start + num_bytes].view(dtype).view(shape)


def landings(
    layout: Layout,
    destinations: Sequence[Destination | None],
    device: torch.device,
    *,
    num_beside: int,
) -> Iterator[Transfer]:
    """The transfers that bring tensors to their destinations, in order; None for what nobody needs.

    All memory is taken before this returns: taking it while a broadcast waits for its source could wait too.

    Args:
        num_beside: how many of the first tensors must be received beside their destinations.
    """
    straight = [
        index >= num_beside and destination is not None and destination.is_like(*expected)
        for index, (expected, destination) in enumerate(zip(layout, destinations, strict=True))
    ]
    sizes = [_num_bytes(*expected) for expected in layout]
    beside = [num_bytes for num_bytes, lands in zip(sizes, straight, strict=True) if not lands]
    return _transfers(layout, destinations, straight, sizes, _Buffers(beside, device))


def _transfers(
    layout: Layout,
    destinations: Sequence[Destination | None],
    straight: Sequence[bool],
    sizes: Sequence[int],
    buffers: _Buffers,
) -> Iterator[Transfer]:
    rows = zip(layout, destinations, straight, sizes, strict=True)
    for (shape, dtype), destination, lands, num_bytes in rows:
        if lands:
            assert destination is not None
            yield Transfer(destination.region, lands=True, round=buffers.round)
        else:
            room = buffers.take(shape, dtype, num_bytes)
            yield Transfer(room, destination, round=buffers.round)


def _num_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
