"""The weight source for `update_weights_from_distributed`. Source: wire_api section 3.3."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import torch

from ebbtide.srt.errors import EngineError, RequestRejected
from ebbtide.srt.model_executor.weight_store import Destination
from ebbtide.srt.weight_sync.broadcast.announcement import Announcement
from ebbtide.srt.weight_sync.broadcast.receive_plan import receive_plan
from ebbtide.srt.weight_sync.broadcast.weight_group import Broadcasts, Layout, WeightGroup
from ebbtide.srt.weight_sync.payload.bucket import FlattenedTensorBucket, FlattenedTensorMetadata
from ebbtide.srt.weight_sync.source import NamedTensor, TensorHeader, WeightSource

# A request ends at its own deadline; a broadcast that nobody waits for any more ends a little later.
GRACE_S: Final = 5.0


class BroadcastSource(WeightSource):
    """Tensors that a trainer broadcasts.

    Nothing is received before the first `arrived`; iterate once that has returned True, unless it was told to
    receive in place. Closed in between, it leaves the group: nobody could tell which broadcast is the next.
    """

    is_sent = True

    def __init__(
        self, entries: Sequence[TensorHeader], group: WeightGroup, *, as_bucket: bool, timeout_s: float
    ) -> None:
        super().__init__(entries, self._arrived_tensors)
        self._group = group
        self._as_bucket = as_bucket
        self._timeout_s = timeout_s
        self._broadcasts: Broadcasts | None = None
        self._destinations: Callable[[], Sequence[Destination | None]] | None = None
        self._tensors: list[torch.Tensor] | None = None

    def can_receive_in_place(self, device: torch.device) -> bool:
        """Whether tensors can be received where they belong on this device, rather than be copied there."""
        names = {entry.name for entry in self.entries}
        # The later one of two tensors for one place counts, and so it does if they are copied in order.
        is_simple = len(names) == len(self.entries) > 0 and not self._as_bucket
        return is_simple and self._group.device.type == device.type

    def receive_in_place(self, destinations: Callable[[], Sequence[Destination | None]]) -> None:
        """Before the first `arrived`: receive each tensor where it belongs.

        Args:
            destinations: makes, in another thread, where each goes; None for one that nobody needs.
        """
        self._destinations = destinations

    def arrived(self) -> bool:
        """Begin to receive, at the first call; whether everything is here.

        Raises:
            RequestRejected: 400, the broadcast failed; the group has been left.
        """
        if self._tensors is None:
            if self._broadcasts is None:
                self._broadcasts = self._receive(self._timeout_s + GRACE_S)
            if not self._broadcasts.is_done:
                return False
            self._tensors = self._broadcasts.result()
        return True

    def _arrived_tensors(self) -> Iterable[NamedTensor]:
        if self._tensors is None or self._destinations is not None:
            raise EngineError("nothing has arrived yet, or it was received where it belongs")
        if self._as_bucket and self.entries:
            (flat,) = self._tensors
            bucket = FlattenedTensorBucket(flattened_tensor=flat, metadata=_positions(self.entries))
            return bucket.iterate()
        names = [entry.name for entry in self.entries]
        return zip(names, self._tensors, strict=True)

    def close(self) -> None:
        super().close()
        if self._broadcasts is not None and self._tensors is None:
            self._group.close("an update ended before all of its broadcasts had arrived")
        self._broadcasts = None
        self._tensors = None

    def abandon(self) -> bool:
        """Leave the group, whatever has arrived; whether nothing is written to destinations any more.

        Waits for what a device is doing, which ends with the group.
        """
        self._group.close("an update ended before all of its broadcasts had arrived")
        return self._broadcasts is None or self._broadcasts.ends()

    def _receive(self, timeout_s: float) -> Broadcasts:
        layout, destinations, device = self._layout(), self._destinations, self._group.device
        if destinations is None:
            return self._group.receive(layout, timeout_s)
        return self._group.receive_by(
            lambda num_beside: receive_plan(layout, destinations(), device, num_beside=num_beside), timeout_s
        )

    def _layout(self) -> Layout:
        if self._as_bucket and self.entries:
            return [((sum(entry.num_bytes for entry in self.entries),), torch.uint8)]
        return [(entry.shape, entry.dtype) for entry in self.entries]


def open_broadcast(announced: Announcement, group: WeightGroup, timeout_s: float) -> BroadcastSource:
    """The source of what was announced. Nothing is received yet.

    Args:
        timeout_s: how long broadcasts may take.

    Raises:
        RequestRejected: 400, the announcement is not consistent or names an unknown dtype or format.
    """
    if announced.load_format not in (None, "flattened_bucket"):
        raise RequestRejected(
            f"load_format: unknown value {announced.load_format[:200]!r}; valid: null, flattened_bucket"
        )
    lengths = {len(announced.names), len(announced.dtypes), len(announced.shapes)}
    if len(lengths) != 1:
        raise RequestRejected(
            f"names, dtypes, shapes: expected one entry per tensor in each, got {len(announced.names)}, "
            f"{len(announced.dtypes)} and {len(announced.shapes)}"
        )
    listed = zip(announced.names, announced.dtypes, announced.shapes, strict=True)
    entries = [TensorHeader(name, _shape(name, shape), _dtype(name, dtype)) for name, dtype, shape in listed]
    return BroadcastSource(entries, group, as_bucket=announced.load_format is not None, timeout_s=timeout_s)


def _shape(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    if any(size < 0 for size in shape):
        raise RequestRejected(f"shapes: {name[:200]}: expected sizes of 0 or more, got {list(shape)}")
    return tuple(shape)


def _dtype(name: str, spelled: str) -> torch.dtype:
    dtype = getattr(torch, spelled.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise RequestRejected(f"dtypes: {name[:200]}: unknown dtype {spelled[:200]!r}")
    return dtype


def _positions(entries: Sequence[TensorHeader]) -> list[FlattenedTensorMetadata]:
    """Where each tensor lies in the bucket: one behind the other, without padding."""
    positions, start = [], 0
    for entry in entries:
        end = start + entry.num_bytes
        shape = torch.Size(entry.shape)
        positions.append(FlattenedTensorMetadata(entry.name, shape, entry.dtype, start, end, entry.num_bytes))
        start = end
    return positions
