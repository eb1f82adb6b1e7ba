"""A process group in which a trainer, rank 0, broadcasts weights to the ranks of engines.

It is not registered in `torch.distributed`: there may be any number of groups, each of which can be ended by
itself. Both ends use this module; callers decide what is sent, and where it is received.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Generic, TypeAlias, TypeVar

import torch
import torch.distributed
from torch import Tensor

from ebbtide.formats.rendezvous import SOURCE_RANK, Member, abort
from ebbtide.srt.errors import RequestRejected

logger = logging.getLogger(__name__)

# Shape and dtype of each broadcast tensor, in the order of the broadcasts.
TensorKinds: TypeAlias = Sequence[tuple[tuple[int, ...], torch.dtype]]

# A thread polls whether a broadcast has arrived: quickly at first, later so that it costs almost nothing.
FIRST_LOOK_S: Final = 2.5e-4
LOOK_S: Final = 16e-3
# The longest interval of polling on a device, which runs all broadcasts without waiting for the host.
DEVICE_LOOK_S: Final = 1e-3
# The most broadcasts under way. More would fill the driver's queue while the first waits for its source, and
# block other launches.
MAX_UNDER_WAY: Final = 128
# Longer than leaving a group takes, unless a peer hangs. The thread goes on after that.
LEAVE_S: Final = 10.0

T = TypeVar("T")
_dist: Any = torch.distributed  # not all of it is exported


class InThread(Generic[T]):
    """A call in its own daemon thread: process exit does not wait for it, since a peer may hang."""

    def __init__(self, name: str, call: Callable[[], T]) -> None:
        self.future: Future[T] = Future()
        threading.Thread(target=self._run, args=(call,), name=name, daemon=True).start()

    @property
    def is_done(self) -> bool:
        return self.future.done()

    def ends_within(self, timeout_s: float) -> bool:
        return bool(wait([self.future], timeout_s).done)

    def result(self) -> T:
        """Return or raise what the call did. It must be done."""
        return self.future.result(timeout=0)

    def _run(self, call: Callable[[], T]) -> None:
        try:
            result = call()
        except BaseException as error:
            # Remove the traceback: its frames keep a connection alive that must end. Dropping the last
            # reference may block on a peer, so a third thread does it: not this one, nor the caller.
            held = [error.__traceback__]
            threading.Thread(target=_drop, args=(threading.current_thread(), held), daemon=True).start()
            self.future.set_exception(error.with_traceback(None))
        else:
            self.future.set_result(result)


def _drop(user: threading.Thread, held: list[Any]) -> None:
    """Drop the references in `held` when the thread `user` has ended."""
    user.join()
    held.clear()


class Leaving:
    """A group that is being left. After `LEAVE_S` it counts as left, even if a peer hangs."""

    def __init__(self, name: str, leave: Callable[[], None]) -> None:
        self._thread = InThread(f"leave-{name}", leave)
        self._until_s = time.monotonic() + LEAVE_S

    @property
    def is_done(self) -> bool:
        return self._thread.is_done or time.monotonic() > self._until_s

    def wait(self) -> None:
        """Wait until it is done. If the process ended while the thread is in torch, it would be aborted."""
        self._thread.ends_within(max(0.0, self._until_s - time.monotonic()))


@dataclass(frozen=True)
class Transfer:
    """One broadcast.

    Attributes:
        tensor: sent from here, or received here.
        is_in_place: whether `tensor` is memory outside the group, which others read, such as weights.
        deliver: copies what was received to such memory; None: no copy.
        round: of buffers. A round reuses the memory of the round before the last, whose transfers must have
            been received and delivered before it starts.
    """

    tensor: Tensor
    is_in_place: bool = False
    deliver: Callable[[], object] | None = None
    round: int = 0


class BroadcastQueue:
    """The broadcasts of one update.

    Attributes:
        under_way: broadcasts that were begun and have not ended, the oldest first.
        kept: their tensors, if `keeps`.
        until_s: the time limit, on the monotonic clock.
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
        """Launch the next broadcast. If the members have not met yet, this waits for them."""
        tensor = transfer.tensor
        if tensor.is_cpu and tensor.dtype == torch.float8_e4m3fn:
            # gloo has no 8-bit floats.
            tensor = tensor.view(torch.uint8)
        self.under_way.append((transfer, self._backend.broadcast([tensor], self._options)))
        if self._keeps:
            self.kept.append(transfer.tensor)

    def wait_for_kernels(self) -> None:
        """Let the current stream wait for all broadcasts under way, whether they succeed or fail."""
        for _, work in self.under_way:
            with suppress(Exception):
                work.wait()
        self.under_way.clear()


class WeightGroup:
    """A group that this process has joined.

    Args:
        device: to receive on, or to send from.

    Attributes:
        why_closed: empty while the group is open.
        writes_outside: whether the device was ever told to write to memory outside the group.
    """

    def __init__(self, name: str, member: Member, device: torch.device) -> None:
        self.name = name
        self.device = device
        self.why_closed = ""
        self._member: Member | None = member
        self._closed = threading.Event()
        self._look: InThread[None] | None = None
        # Held during `close`, and to begin what must not begin after it.
        self._lock = threading.Lock()
        self.writes_outside = False
        # A stream of its own, so that broadcasts and forward passes do not wait for each other.
        self._stream = torch.Stream(device) if device.type != "cpu" else None
        # Members of gloo groups have met. Those of NCCL meet in the first broadcast, which may take long and
        # cannot be interrupted.
        self._has_met = self._stream is None

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    def receive(self, kinds: TensorKinds, timeout_s: float) -> Broadcasts:
        """Begin to receive new tensors of these shapes and dtypes, one broadcast each, in this order."""

        def transfers() -> list[Transfer]:
            return [Transfer(torch.empty(shape, dtype=dtype, device=self.device)) for shape, dtype in kinds]

        return Broadcasts(self, lambda: self._run(transfers, timeout_s, keeps=True))

    def receive_by(self, plan: Callable[[int], Iterable[Transfer]], timeout_s: float) -> Broadcasts:
        """Begin to receive tensors into the memory of a plan; none are kept.

        After a failure, the memory may be used again when the group was left and `Broadcasts.ends` is true.

        Args:
            plan: makes the transfers; called in another thread. Its argument is the number of first tensors
                that must be received in buffers, and delivered from there.
        """

        def transfers() -> Iterable[Transfer]:
            # gloo may still write after the group was left, so it gets buffers for all tensors. NCCL gets one
            # for the first broadcast.
            return plan(sys.maxsize if self._stream is None else 0 if self._has_met else 1)

        return Broadcasts(self, lambda: self._run(transfers, timeout_s))

    def send(self, tensors: Callable[[torch.device], list[torch.Tensor]], timeout_s: float) -> Broadcasts:
        """Begin to broadcast tensors, one broadcast each, in this order. Called on the source rank only.

        Args:
            tensors: makes contiguous tensors on the given device; called in another thread.
        """
        return Broadcasts(
            self, lambda: self._run(lambda: map(Transfer, tensors(self.device)), timeout_s, keeps=True)
        )

    def close(self, why: str) -> Leaving:
        """Leave the group, and abort what is under way in it. Idempotent."""
        with self._lock:
            if not self.is_closed:
                self.why_closed = why
                self._closed.set()
                logger.info("left weight group %s: %s", self.name, why)
            # Ending connections may block on a peer. So another thread must drop the last reference to the
            # backend.
            members = [self._member] if self._member is not None else []
            self._member = None
        return Leaving(self.name, lambda: abort(members))

    def leave_if_abandoned(self) -> None:
        """Check in another thread whether the trainer's store is there; leave the group if not.

        Without this, the connections to a trainer that ends between two updates would stay for ever.
        """
        member = self._member
        if member is None or member.store is None or not (self._look is None or self._look.is_done):
            return
        store = member.store

        def look() -> None:
            try:
                store.check(["any"])  # Any key will do: the store answers, or this raises.
            except RuntimeError as error:
                self.close(f"the store that its trainer kept is gone: {type(error).__name__}")

        self._look = InThread(f"look-{self.name}", look)

    def _run(
        self, transfers: Callable[[], Iterable[Transfer]], timeout_s: float, *, keeps: bool = False
    ) -> list[torch.Tensor]:
        """Make all transfers; returns their tensors if `keeps`, else an empty list."""
        member = self._member
        if member is None:
            raise GroupLeft(self.why_closed)
        # The limit for members of NCCL, which meet in the first broadcast.
        if member.store is not None:
            member.store.set_timeout(timedelta(seconds=timeout_s))
        queue = BroadcastQueue(member.backend, SOURCE_RANK, timeout_s, keeps=keeps)
        stream = self._stream
        if stream is None:
            self._transfer_all(transfers(), queue)
            return queue.kept
        # A new thread's current device is the first one, where a context would take memory.
        torch.accelerator.set_device_index(stream.device)
        with stream:
            try:
                self._transfer_all(transfers(), queue)
                # An event, since NCCL reports failed work as completed while its kernel still runs.
                self._wait_until(stream.record_event().query, queue)
            except BaseException:
                # Kernels that wait for their source may write until the group is aborted.
                abort([member])
                queue.wait_for_kernels()
                stream.synchronize()
                raise
        return queue.kept

    def _transfer_all(self, transfers: Iterable[Transfer], queue: BroadcastQueue) -> None:
        for transfer in transfers:
            while len(queue.under_way) >= MAX_UNDER_WAY:
                self._end_oldest(queue, waits=True)
            # The memory of this transfer may be that of two rounds before.
            while queue.under_way and queue.under_way[0][0].round < transfer.round - 1:
                self._end_oldest(queue)
            if self._has_met:
                with self._lock:
                    self._require_open()
                    self.writes_outside |= transfer.is_in_place
                    queue.begin(transfer)
            else:
                queue.begin(transfer)
                self._has_met = True
        while queue.under_way:
            self._end_oldest(queue)
        self._require_open()

    def _end_oldest(self, queue: BroadcastQueue, *, waits: bool = False) -> None:
        """End the oldest broadcast and deliver its tensor.

        On a GPU, both are only launched; the broadcast is awaited if `waits`.
        """
        transfer, work = queue.under_way[0]
        if waits or self._stream is None:
            self._wait_until(work.is_completed, queue)
        work.wait()  # With gloo, raises if the broadcast failed.
        if transfer.deliver is not None:
            with self._lock:
                self._require_open()
                self.writes_outside |= self._stream is not None
                transfer.deliver()
        queue.under_way.popleft()

    def _wait_until(self, is_done: Callable[[], bool], queue: BroadcastQueue) -> None:
        look_s = FIRST_LOOK_S
        longest_look_s = LOOK_S if self._stream is None else DEVICE_LOOK_S
        while not is_done():
            if self._closed.wait(look_s):
                break
            if time.monotonic() > queue.until_s:
                # Leave the group: its kernels would block everything that waits for the device.
                self.close("its broadcasts have not ended in time")
            look_s = min(2 * look_s, longest_look_s)
        # Work of an aborted communicator may end without an error.
        self._require_open()

    def _require_open(self) -> None:
        if self.is_closed:
            raise GroupLeft(self.why_closed)


class GroupLeft(Exception):
    """The group was left while it was used or joined."""


class Broadcasts(InThread[list[torch.Tensor]]):
    """Broadcasts under way in a group. If they end half-way, the group is out of step and must be left."""

    def __init__(self, group: WeightGroup, broadcast: Callable[[], list[torch.Tensor]]) -> None:
        self._group = group
        super().__init__(f"broadcast-{group.name}", broadcast)

    def ends(self) -> bool:
        """Wait for the device; returns whether the group, once left, no longer writes to others' memory."""
        return not self._group.writes_outside or self.ends_within(LEAVE_S)

    def result(self) -> list[torch.Tensor]:
        """The tensors, if they are kept. The broadcasts must be done.

        Raises:
            RequestRejected: 400, they failed, and the group was left.
        """
        try:
            return super().result()
        except GroupLeft as error:
            reason = str(error)
        except Exception as error:
            reason = f"the broadcast failed: {type(error).__name__}: {error}"[:500]
            self._group.close(reason)
        raise RequestRejected(
            f"nothing of the update is served: the group {self._group.name!r} was left ({reason}). "
            "init_weights_update_group joins a new one"
        )
