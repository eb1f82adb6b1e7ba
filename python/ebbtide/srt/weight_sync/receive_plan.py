"""Where broadcast tensors are received: straight where they belong, or in buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from ebbtide.formats.bucket import Places, tensors_in
from ebbtide.formats.weight_group import TensorKinds, Transfer
from ebbtide.srt.model_executor.weight_copies import Destination

# How much may be on its way at a time of what cannot be received where it belongs.
IN_FLIGHT_BYTES: Final = 1 << 30
# NCCL's kernels read and write aligned memory faster.
ALIGNMENT_BYTES: Final = 256


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


def receive_plan(
    kinds: TensorKinds,
    destinations: Sequence[Destination | None],
    device: torch.device,
    *,
    num_apart: int,
) -> Iterator[Transfer]:
    """The transfers that bring tensors to their destinations, in order; None for what nobody needs.

    All memory is taken before this returns: taking it while a broadcast waits for its source could wait too.

    Args:
        num_apart: how many of the first tensors must be received in buffers.
    """
    in_place = [
        index >= num_apart and destination is not None and destination.is_like(*expected)
        for index, (expected, destination) in enumerate(zip(kinds, destinations, strict=True))
    ]
    sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in kinds]
    buffered = [num_bytes for num_bytes, is_in_place in zip(sizes, in_place, strict=True) if not is_in_place]
    buffers = _Buffers(buffered, device)

    def transfers() -> Iterator[Transfer]:
        rows = zip(kinds, destinations, in_place, sizes, strict=True)
        for (shape, dtype), destination, is_in_place, num_bytes in rows:
            if destination is not None and is_in_place:
                yield Transfer(destination.region, is_in_place=True, round=buffers.round)
                continue
            room = buffers.take(shape, dtype, num_bytes)
            deliver = None if destination is None else partial(destination.write, room)
            yield Transfer(room, deliver=deliver, round=buffers.round)

    return transfers()


def packed_plan(
    chunks: Sequence[Places],
    destinations: Sequence[Sequence[Destination | None]],
    device: torch.device,
) -> Iterator[Transfer]:
    """As `receive_plan`, of chunks that hold tensors one behind the other: all received in buffers."""
    sizes = [chunk[-1][1] + chunk[-1][0].num_bytes for chunk in chunks]
    buffers = _Buffers(sizes, device)

    def transfers() -> Iterator[Transfer]:
        for chunk, places, num_bytes in zip(chunks, destinations, sizes, strict=True):
            room = buffers.take((num_bytes,), torch.uint8, num_bytes)
            yield Transfer(room, deliver=partial(_deliver_chunk, chunk, places, room), round=buffers.round)

    return transfers()


def _deliver_chunk(chunk: Places, destinations: Sequence[Destination | None], received: Tensor) -> None:
    for (_, tensor), destination in zip(tensors_in(received, chunk), destinations, strict=True):
        if destination is not None:
            destination.write(tensor)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
