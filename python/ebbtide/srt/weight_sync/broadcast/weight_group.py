"""A process group through which a trainer, its rank 0, broadcasts weights to the ranks of engines.

It is made by hand and not by `torch.distributed`'s registry: any number may exist, by name, with a default
group or without, and each can be torn down alone. Source of the rendezvous: wire_api section 3.3.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Generic, TypeVar

import torch
import torch.distributed

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.model_executor.weight_store import Destination
from ebbtide.srt.weight_sync.broadcast.receive_plan import Layout, Passage, Transfer, landings

logger = logging.getLogger(__name__)

_dist: Any = torch.distributed  # not all of it is exported

T = TypeVar("T")

# A thread looks whether a broadcast has arrived: first quickly, later so that waiting costs next to nothing.
FIRST_LOOK_S: Final = 2.5e-4
LOOK_S: Final = 16e-3
# A device goes from one broadcast to the next by itself: only the end of all of them is looked for.
DEVICE_LOOK_S: Final = 1e-3
# NCCL's own limit must never strike before that of the request, which tears down one group and no more.
NCCL_TIMEOUT: Final = timedelta(days=1)
# The trainer's rank.
SOURCE_RANK: Final = 0
# Longer than leaving takes, unless a peer does not let go. The thread that leaves outlives that.
LEAVE_S: Final = 10.0


class InThread(Generic[T]):
    """A call in a thread of its own, which the end of the process does not wait for: its peer may hang."""

    def __init__(self, name: str, call: Callable[[], T]) -> None:
        self._future: Future[T] = Future()
        threading.Thread(target=self._run, args=(call,), name=name, daemon=True).start()

    @property
    def is_done(self) -> bool:
        return self._future.done()

    def ends_within(self, timeout_s: float) -> bool:
        """Wait for the end, but no longer than this; whether it has come."""
        return bool(wait([self._future], timeout_s).done)

    def result(self) -> T:
        """What the call returned or raised; only once it is done."""
        return self._future.result(timeout=0)

    def _run(self, call: Callable[[], T]) -> None:
        try:
            result = call()
        except BaseException as error:
            # Not with the frames: they hold a connection that is to end, and others wait for that. Whoever
            # drops it last waits as long as a peer likes: neither this thread, nor who asks for the result.
            held = [error.__traceback__]
            threading.Thread(target=_drop, args=(threading.current_thread(), held), daemon=True).start()
            self._future.set_exception(error.with_traceback(None))
        else:
            self._future.set_result(result)


def _drop(user: threading.Thread, held: list[Any]) -> None:
    """Let go of what a thread has used, once it has ended."""
    user.join()
    held.clear()


class Leaving:
    """A group that is being left; it counts as left after a while, whatever its peers do."""

    def __init__(self, name: str, leave: Callable[[], None]) -> None:
        self._thread = InThread(f"leave-{name}", leave)
        self._until_s = time.monotonic() + LEAVE_S

    @property
    def is_done(self) -> bool:
        return self._thread.is_done or time.monotonic() > self._until_s


@dataclass(frozen=True)
class GroupAddress:
    """Where and as whom to join.

    Attributes:
        rank: of this process: the engine's `rank_offset` and, of several ranks, which one it is.
        world_size: trainer and all ranks of all engines.
        backend: "gloo" or "nccl".
    """

    name: str
    host: str
    port: int
    rank: int
    world_size: int
    backend: str

    @property
    def bare_host(self) -> str:
        return self.host.removeprefix("[").removesuffix("]")

    @property
    def url(self) -> str:
        host = self.bare_host
        return f"tcp://[{host}]:{self.port}" if ":" in host else f"tcp://{host}:{self.port}"


@dataclass(frozen=True)
class Member:
    """A process's end of a group: torch's backend, and the store through which its members met."""

    backend: Any
    store: Any


class WeightGroup:
    """One group that has been joined.

    Args:
        member: what `connect` returned.
        device: where what is received goes.

    Attributes:
        has_landed: whether a device was ever made to write to memory that is not the group's.
    """

    def __init__(self, name: str, member: Member, device: torch.device) -> None:
        self.name = name
        self.device = device
        self.why_closed = ""
        self._member: Member | None = member
        self._closed = threading.Event()
        # Held to close, and to do what must not be begun once the group is closed.
        self._lock = threading.Lock()
        self.has_landed = False
        # Broadcasts must not queue behind forward passes, nor these behind broadcasts.
        self._stream = torch.Stream(device) if device.type != "cpu" else None
        # With gloo all have met; NCCL meets in the first broadcast, which may last, and cannot be ended.
        self._has_met = self._stream is None

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    def receive(self, layout: Layout, timeout_s: float) -> Reception:
        """Begin to receive tensors of these shapes and dtypes, one broadcast each, in this order."""

        def transfers() -> list[Transfer]:
            return [Transfer(torch.empty(shape, dtype=dtype, device=self.device)) for shape, dtype in layout]

        return Reception(self, lambda: self._run(transfers, timeout_s, keeps=True))

    def receive_into(
        self, destinations: Callable[[], Sequence[Destination | None]], layout: Layout, timeout_s: float
    ) -> Reception:
        """Begin to receive tensors where they belong; nothing is kept.

        Where it fails, the memory is theirs who own it again once the group was left and `Reception.ends`.

        Args:
            destinations: makes, in another thread, where each goes; None for one that nobody needs.
        """

        def transfers() -> Iterator[Transfer]:
            # gloo goes on writing after a group was left, so what it writes must be ours.
            num_beside = len(layout) if self._stream is None else 0 if self._has_met else 1
            return landings(layout, destinations(), self.device, num_beside=num_beside)

        return Reception(self, lambda: self._run(transfers, timeout_s))

    def send(self, tensors: Callable[[torch.device], list[torch.Tensor]], timeout_s: float) -> Reception:
        """Begin to broadcast tensors, one broadcast each, in this order. For the source's end of a group.

        Args:
            tensors: makes them in another thread, contiguous and on the given device.
        """

        def transfers() -> list[Transfer]:
            return [Transfer(tensor) for tensor in tensors(self.device)]

        return Reception(self, lambda: self._run(transfers, timeout_s, keeps=True))

    def close(self, why: str) -> Leaving:
        """Leave the group, whatever is under way in it. Idempotent."""
        with self._lock:
            if not self.is_closed:
                self.why_closed = why
                self._closed.set()
                logger.info("weight group %s is left: %s", self.name, why)
            # Ending connections may take as long as a peer likes. Whoever drops the backend last waits for
            # that: it must not be this thread.
            members = [self._member] if self._member is not None else []
            self._member = None
        return Leaving(self.name, lambda: abort(members))

    def _run(
        self, transfers: Callable[[], Iterable[Transfer]], timeout_s: float, *, keeps: bool = False
    ) -> list[torch.Tensor]:
        """Make all transfers, in a thread of its own; returns their tensors, if they are to be kept."""
        member = self._member
        if member is None:
            raise GroupLeft(self.why_closed)
        # NCCL meets the others in the first broadcast.
        member.store.set_timeout(timedelta(seconds=timeout_s))
        passage = Passage(member.backend, SOURCE_RANK, timeout_s, keeps=keeps)
        stream = self._stream
        if stream is None:
            self._pass(transfers(), passage)
            return passage.kept
        # A thread begins on the first device, and going back there would take memory on it.
        torch.accelerator.set_device_index(stream.device)
        with stream:
            try:
                self._pass(transfers(), passage)
                # NCCL takes work that failed for completed; its kernel ends when the group is left.
                self._wait_until(stream.record_event().query, passage)
            except BaseException:
                # Kernels that wait for their source end with the group, and write until then.
                abort([member])
                passage.wait_for_kernels()
                stream.synchronize()
                raise
        return passage.kept

    def _pass(self, transfers: Iterable[Transfer], passage: Passage) -> None:
        for transfer in transfers:
            while passage.is_full:
                self._end_oldest(passage, waits=True)
            while passage.must_end_before(transfer):
                self._end_oldest(passage)
            if self._has_met:
                with self._lock:
                    self._require_open()
                    self.has_landed |= transfer.lands
                    passage.begin(transfer)
            else:
                passage.begin(transfer)
                self._has_met = True
        while passage.under_way:
            self._end_oldest(passage)
        self._require_open()

    def _end_oldest(self, passage: Passage, *, waits: bool = False) -> None:
        """Copy what the oldest broadcast brings. On a device that is launched, and not waited for.

        Args:
            waits: whether to wait for the broadcast there too.
        """
        transfer, work = passage.under_way[0]
        if waits or self._stream is None:
            self._wait_until(work.is_completed, passage)
        work.wait()  # With gloo this raises what the broadcast failed with.
        if transfer.destination is not None and not transfer.lands:
            with self._lock:
                self._require_open()
                self.has_landed |= self._stream is not None
                transfer.destination.region.copy_(transfer.destination.part_of(transfer.tensor))
        passage.under_way.popleft()

    def _wait_until(self, is_done: Callable[[], bool], passage: Passage) -> None:
        look_s = FIRST_LOOK_S
        longest_look_s = LOOK_S if self._stream is None else DEVICE_LOOK_S
        while not is_done():
            if self._closed.wait(look_s):
                break
            if time.monotonic() > passage.until_s:
                # Whoever waits for the device, waits for these kernels too.
                self.close("its broadcasts have not ended in time")
            look_s = min(2 * look_s, longest_look_s)
        # Of a communicator that was aborted, work may end without an error.
        self._require_open()

    def _require_open(self) -> None:
        if self.is_closed:
            raise GroupLeft(self.why_closed)


class GroupLeft(Exception):
    """The group was left while it was used, or joined."""


class Reception:
    """Tensors on their way through a group. Given up half-way the group is out of step, and left."""

    def __init__(self, group: WeightGroup, broadcast: Callable[[], list[torch.Tensor]]) -> None:
        self._group = group
        self._thread = InThread(f"broadcast-{group.name}", broadcast)

    @property
    def is_done(self) -> bool:
        return self._thread.is_done

    def ends(self) -> bool:
        """Of a group that was left: whether nothing is written any more to memory that is not the group's.

        Waits for what the device is doing, which ends with the group.
        """
        return not self._group.has_landed or self._thread.ends_within(LEAVE_S)

    def result(self) -> list[torch.Tensor]:
        """What has arrived, if it is kept.

        Raises:
            RequestRejected: 400, the broadcast failed; the group has been left.
        """
        try:
            return self._thread.result()
        except GroupLeft as error:
            reason = str(error)
        except Exception as error:
            reason = f"the broadcast failed: {type(error).__name__}: {error}"[:500]
            self._group.close(reason)
        raise RequestRejected(
            f"nothing of the update is served: the group {self._group.name!r} was left ({reason}). "
            "init_weights_update_group joins a new one"
        )


def connect(address: GroupAddress, timeout_s: float) -> Member:
    """Meet the others; the same keys and the same steps as torch's helper takes for a named group.

    The trainer, rank 0, keeps the store at the address: `host_store`. With gloo all have met when this
    returns; NCCL meets in the first broadcast.
    """
    deadline_s = time.monotonic() + timeout_s
    # Not torch's `rendezvous`: of rank 0 that would make the store as well.
    store = _dist.TCPStore(
        address.bare_host, address.port, address.world_size, False, timedelta(seconds=timeout_s)
    )
    rank, world_size = address.rank, address.world_size
    named = _dist.PrefixStore(f"{address.name}/", _dist.PrefixStore(address.name, store))
    left = timedelta(seconds=max(deadline_s - time.monotonic(), 1e-3))
    named.set_timeout(left)
    if address.backend == "gloo":
        gloo = _dist.ProcessGroupGloo(_dist.PrefixStore("cpu/", named), rank, world_size, timeout=left)
        return Member(gloo, named)
    # What fails in a group is answered by leaving it. torch's watchdogs would end the process or the kernels;
    # in the second case what was not received would look like what was.
    settings = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    options = _dist.ProcessGroupNCCL.Options()
    options._timeout = NCCL_TIMEOUT
    options.is_high_priority_stream = False
    options.group_name = address.name
    try:
        nccl = _dist.ProcessGroupNCCL(_dist.PrefixStore("cuda/", named), rank, world_size, options)
    finally:
        if rank == SOURCE_RANK:
            _restore(before)  # The trainer's own groups keep torch's watchdogs.
    return Member(nccl, named)


def host_store(port: int) -> Any:
    """The store through which a group's members meet, kept by this process while it is referred to.

    Args:
        port: 0 for a free one; `.port` of what is returned says which.
    """
    return _dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False)


def _restore(environment: Mapping[str, str | None]) -> None:
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def abort(members: list[Member]) -> None:
    """End what is under way, with whatever the backend can do; the connections end with its last use."""
    while members:
        with suppress(Exception):
            members.pop().backend.abort()
