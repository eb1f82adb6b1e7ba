"""Groups in which trainers broadcast weights to this rank, and the sources of what they broadcast.

Tensors are received directly into the weights, or in buffers. Source: wire_api section 3.3.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import torch
from torch import Tensor

from ebbtide.formats import Announcement, packed_slices
from ebbtide.formats.bucket import Places, tensors_in, without_padding
from ebbtide.formats.delta import MAX_ELEMENTS
from ebbtide.formats.rendezvous import GroupAddress, Member, abort, connect
from ebbtide.formats.stored_tensor import whole
from ebbtide.formats.tensor_refs import TensorHeader, dtype_named, tensor_shape
from ebbtide.formats.weight_group import (
    Broadcasts,
    InThread,
    Leaving,
    TensorKinds,
    Transfer,
    WeightGroup,
)
from ebbtide.srt.config import ONE_RANK, Place
from ebbtide.srt.errors import EngineError, RequestRejected
from ebbtide.srt.memory_saver.arena import round_up
from ebbtide.srt.model_executor.weight_copies import Destination
from ebbtide.srt.slices import Slices
from ebbtide.srt.weight_sync.patch import Patch, PatchedWeights
from ebbtide.srt.weight_sync.source import NamedTensor, WeightSource
from ebbtide.srt.weight_sync.sparse_source import (
    DeltaSource,
    PlacedChanges,
    PlacedPatches,
    Placing,
)

# How much later than the request's deadline a broadcast ends that nobody waits for any more.
GRACE_S: Final = 5.0
FORMATS: Final = ("flattened_bucket", "packed", "sparse")
# The most bytes of buffers for tensors that cannot be received directly.
IN_FLIGHT_BYTES: Final = 1 << 30
# NCCL's kernels read and write aligned memory faster.
ALIGNMENT_BYTES: Final = 256


class BroadcastSource(WeightSource):
    """Tensors that a trainer broadcasts. The first call of `arrived` begins to receive them.

    Iterate when `arrived` is True, unless tensors are received in place. If it is closed before that, it
    leaves the group.

    Args:
        chunks: the entries of each broadcast, whose bytes follow each other; None: each has one entry.
    """

    is_sent = True

    def __init__(
        self,
        entries: Sequence[TensorHeader],
        group: WeightGroup,
        *,
        timeout_s: float,
        chunks: Sequence[slice] | None = None,
    ) -> None:
        super().__init__(entries, self._arrived_tensors)
        self._group = group
        self._chunks = chunks
        self._timeout_s = timeout_s
        self._broadcasts: Broadcasts | None = None
        self._destinations: Callable[[], Sequence[Destination | None]] | None = None
        self._tensors: list[torch.Tensor] | None = None

    def can_receive_in_place(self, device: torch.device) -> bool:
        """Whether tensors can be received directly into weights on this device, without a copy."""
        names = {entry.name for entry in self.entries}
        # If a name comes twice, the later tensor must win: copies in order do that. And a single chunk would
        # take as much memory either way.
        is_one_chunk = self._chunks is not None and len(self._chunks) == 1
        is_simple = len(names) == len(self.entries) > 0 and not is_one_chunk
        return is_simple and self._group.device.type == device.type

    def receive_in_place(self, destinations: Callable[[], Sequence[Destination | None]]) -> None:
        """Before the first `arrived`: receive each tensor directly into its destination.

        Args:
            destinations: gives the destinations, and is called in another thread; None for an ignored tensor.
        """
        self._destinations = destinations

    def arrived(self) -> bool:
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
        if self._chunks is None:
            names = [entry.name for entry in self.entries]
            return zip(names, self._tensors, strict=True)
        return itertools.chain.from_iterable(
            tensors_in(flat, without_padding(self.entries[chunk]))
            for chunk, flat in zip(self._chunks, self._tensors, strict=True)
        )

    def close(self) -> None:
        super().close()
        if self._broadcasts is not None and self._tensors is None:
            self._group.close("an update ended before all of its broadcasts had arrived")
        self._broadcasts = None
        self._tensors = None

    def abandon(self) -> bool:
        """Leave the group, and wait for the device; returns whether nothing is written any more."""
        self._group.close("an update ended before all of its broadcasts had arrived")
        return self._broadcasts is None or self._broadcasts.ends()

    def _receive(self, timeout_s: float) -> Broadcasts:
        kinds, destinations, chunks = self._kinds(), self._destinations, self._chunks
        if destinations is None:
            return self._group.receive(kinds, timeout_s)

        def places() -> Sequence[Destination | _Chunk | None]:
            made = destinations()
            if chunks is None:
                return made
            return [_Chunk(without_padding(self.entries[chunk]), made[chunk]) for chunk in chunks]

        return self._group.receive_by(
            lambda count: receive_plan(kinds, places(), self._group.device, num_apart=count), timeout_s
        )

    def _kinds(self) -> TensorKinds:
        if self._chunks is None:
            return [(entry.shape, entry.dtype) for entry in self.entries]
        sizes = [sum(entry.num_bytes for entry in self.entries[chunk]) for chunk in self._chunks]
        return [((size,), torch.uint8) for size in sizes]


def _sparse(
    entries: Sequence[TensorHeader], num_updates: Sequence[int], group: WeightGroup, timeout_s: float
) -> DeltaSource:
    """Patches that a trainer broadcasts: for each tensor, positions as int32, then values."""
    headers = [
        TensorHeader(entry.name, (count,), dtype)
        for entry, count in zip(entries, num_updates, strict=True)
        for dtype in (torch.int32, entry.dtype)
    ]
    parts = BroadcastSource(headers, group, timeout_s=timeout_s)

    def decode() -> Slices[Placing]:
        yield 0

        def place(weights: PatchedWeights) -> PlacedChanges:
            # Gloo receives into host memory, wherever the weights are.
            device = weights.base(torch.uint8).device
            arrived = [whole(tensor).to(device) for _, tensor in parts]
            rows = zip(entries, arrived[::2], arrived[1::2], strict=True)
            patches = [Patch(each.name, each.shape, at, values).checked() for each, at, values in rows]
            return PlacedPatches(patches, weights)

        return place

    return DeltaSource(entries, parts, decode, takes_any_dtype=True)


def open_broadcast(
    announced: Announcement, group: WeightGroup, timeout_s: float
) -> BroadcastSource | DeltaSource:
    """The source of announced broadcasts, or a refusal (400). Nothing is received yet."""
    if announced.load_format not in (None, *FORMATS):
        raise RequestRejected(
            f"load_format: unknown value {announced.load_format[:200]!r}; valid: null, {', '.join(FORMATS)}"
        )
    lengths = {len(announced.names), len(announced.dtypes), len(announced.shapes)}
    if len(lengths) != 1:
        raise RequestRejected(
            f"names, dtypes, shapes: expected one entry per tensor in each, got {len(announced.names)}, "
            f"{len(announced.dtypes)} and {len(announced.shapes)}"
        )
    listed = zip(announced.names, announced.dtypes, announced.shapes, strict=True)
    entries = [
        TensorHeader(
            name,
            tensor_shape(shape, f"shapes: {name[:200]}"),
            dtype_named(dtype.removeprefix("torch."), f"dtypes: {name[:200]}"),
        )
        for name, dtype, shape in listed
    ]
    if announced.load_format == "sparse":
        _check_sparse(entries, announced.num_updates)
        return _sparse(entries, announced.num_updates, group, timeout_s)
    chunks: list[slice] | None = None
    if announced.load_format is not None and entries:
        sizes = [entry.num_bytes for entry in entries]
        is_cut = announced.load_format == "packed"
        chunks = packed_slices(sizes, announced.packed_buffer_bytes if is_cut else sum(sizes))
    return BroadcastSource(entries, group, timeout_s=timeout_s, chunks=chunks)


def _check_sparse(entries: Sequence[TensorHeader], num_updates: Sequence[int]) -> None:
    if len(num_updates) != len(entries):
        raise RequestRejected(
            f"num_updates: expected one per tensor, got {len(num_updates)} for {len(entries)} tensors"
        )
    for entry, count in zip(entries, num_updates, strict=True):
        num_elements = torch.Size(entry.shape).numel()
        if num_elements > MAX_ELEMENTS:
            raise RequestRejected(
                f"{entry.name[:200]}: a patch is of at most {MAX_ELEMENTS} elements: send this tensor whole"
            )
        if count > num_elements:
            raise RequestRejected(
                f"num_updates: {entry.name[:200]}: {count} positions of a tensor of {num_elements} elements"
            )


class _Buffers:
    """Two buffers in turn: one is received into while tensors of the other are copied.

    Args:
        sizes: bytes of all tensors that will be received. A tensor is in one buffer as a whole.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self.round = 0
        padded = [round_up(num_bytes, ALIGNMENT_BYTES) for num_bytes in sizes]
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
        start, self._used_bytes = self._used_bytes, self._used_bytes + round_up(num_bytes, ALIGNMENT_BYTES)
        return piece[start : start + num_bytes].view(dtype).view(shape)


@dataclass(frozen=True)
class _Chunk:
    """Tensors that come as one run of bytes, with their destinations. They are copied from a buffer."""

    places: Places
    destinations: Sequence[Destination | None]

    def write(self, received: Tensor) -> None:
        named = tensors_in(received, self.places)
        for (_, tensor), destination in zip(named, self.destinations, strict=True):
            if destination is not None:
                destination.write(tensor)


def receive_plan(
    kinds: TensorKinds,
    destinations: Sequence[Destination | _Chunk | None],
    device: torch.device,
    *,
    num_apart: int,
) -> Iterator[Transfer]:
    """The transfers that bring tensors to their destinations, in order.

    All memory is allocated before this returns: an allocation could block while a broadcast waits for its
    source.

    Args:
        destinations: None for an ignored tensor.
        num_apart: how many of the first tensors must be received in buffers.
    """
    in_place = [
        index >= num_apart and isinstance(destination, Destination) and destination.is_like(*expected)
        for index, (expected, destination) in enumerate(zip(kinds, destinations, strict=True))
    ]
    sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in kinds]
    buffered = [num_bytes for num_bytes, is_in_place in zip(sizes, in_place, strict=True) if not is_in_place]
    buffers = _Buffers(buffered, device)

    def transfers() -> Iterator[Transfer]:
        rows = zip(kinds, destinations, in_place, sizes, strict=True)
        for (shape, dtype), destination, is_in_place, num_bytes in rows:
            if isinstance(destination, Destination) and is_in_place:
                yield Transfer(destination.region, is_in_place=True, round=buffers.round)
                continue
            room = buffers.take(shape, dtype, num_bytes)
            deliver = None if destination is None else partial(destination.write, room)
            yield Transfer(room, deliver=deliver, round=buffers.round)

    return transfers()


class _Joining(InThread[list[Member]]):
    """A thread that joins a group. It ends at its time limit at the latest, even if it was given up.

    The result is a list with the member, until somebody takes it out.
    """

    def __init__(self, address: GroupAddress, timeout_s: float, device: torch.device) -> None:
        self.given_up = ""
        super().__init__(f"join-{address.name}", lambda: [connect(address, timeout_s, device)])

    def give_up(self, why: str) -> None:
        """Leave the group when it is joined, unless somebody has taken the member."""
        self.given_up = self.given_up or why
        self.future.add_done_callback(_leave)


def _leave(joined: Future[list[Member]]) -> None:
    if joined.exception() is None and joined.result():
        # In a thread: leaving takes as long as the peers let it.
        InThread("leave", partial(abort, joined.result()))


@dataclass
class Memberships:
    """The weight groups of this rank, by name. NCCL receives on `device`, gloo in host memory."""

    _device: torch.device
    _place: Place = ONE_RANK
    # Also closed groups, until another one of the same name is joined.
    groups: dict[str, WeightGroup] = field(default_factory=dict, init=False)
    _joining: dict[str, _Joining] = field(default_factory=dict, init=False)

    @property
    def names(self) -> list[str]:
        return sorted(name for name, group in self.groups.items() if not group.is_closed)

    def join(self, address: GroupAddress, timeout_s: float) -> Slices[None]:
        """Join a group, yielding until all members are there. If it is ended early, joining is given up.

        A live group of that name is left first, and then all groups whose trainers have ended.

        RequestRejected: at once, if the address is invalid (400) or a group of that name is being joined
            (409); later (400), if the group was not joined in time, or was left meanwhile.
        """
        self._check(address)
        if address.name in self._joining:
            raise RequestRejected(
                f"a group {address.name!r} is just being joined: wait, or destroy_weights_update_group first",
                409,
            )
        self.leave(address.name, "another group of that name is joined")
        for group in self.groups.values():
            group.leave_if_abandoned()
        device = torch.device("cpu") if address.backend == "gloo" else self._device
        joining = self._joining[address.name] = _Joining(address, timeout_s, device)

        def join() -> Slices[None]:
            try:
                while not joining.is_done and not joining.given_up:
                    yield 0
                if joining.given_up:
                    raise RequestRejected(f"group {address.name!r} was not joined: {joining.given_up}")
                try:
                    member = joining.result().pop()
                except Exception as error:
                    raise RequestRejected(
                        f"group {address.name!r} at {address.url} was not joined as rank {address.rank} of "
                        f"{address.world_size} within {timeout_s:g} s: {type(error).__name__}: {error}"[:1000]
                    ) from error
                self.groups[address.name] = WeightGroup(address.name, member, device)
            finally:
                joining.give_up("the request ended")
                if self._joining.get(address.name) is joining:
                    del self._joining[address.name]

        return join()

    def get(self, name: str) -> WeightGroup:
        """The live group of this name; RequestRejected (400) if there is none."""
        group = self.groups.get(name)
        if group is not None and not group.is_closed:
            return group
        why = f" (left: {group.why_closed})" if group is not None else ""
        known = ", ".join(map(repr, self.names)) or "none"
        raise RequestRejected(
            f"group_name: there is no group {name!r}{why}; known: {known}. init_weights_update_group first"
        )

    def leave(self, name: str, why: str) -> Leaving | None:
        """Leave the group of that name, or stop joining it; None if there is none."""
        joining = self._joining.pop(name, None)
        if joining is not None:
            joining.give_up(why)
        group = self.groups.get(name)
        if group is None or group.is_closed:
            return None if joining is None else Leaving(name, lambda: None)
        return group.close(why)

    def _check(self, address: GroupAddress) -> None:
        is_met_by_id = address.unique_id is not None
        if not address.host and not is_met_by_id:
            raise RequestRejected("master_address: expected an address, got an empty one")
        if not 0 < address.port < 1 << 16 and not is_met_by_id:
            raise RequestRejected(f"master_port: expected 1..65535, got {address.port}")
        num_ranks = self._place.num_ranks
        rank_offset = address.rank - self._place.rank
        if not 0 < rank_offset <= address.world_size - num_ranks:
            raise RequestRejected(
                f"rank_offset: expected 1..{address.world_size - num_ranks} (rank 0 is the trainer's, the "
                f"engine has {num_ranks}, world_size is {address.world_size}), got {rank_offset}"
            )
        if address.backend != "gloo" and self._device.type != "cuda":
            raise RequestRejected(
                f"backend {address.backend!r}: this engine runs on the CPU, expected 'gloo'"
            )
