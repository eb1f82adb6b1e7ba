"""A process group through which a trainer, its rank 0, broadcasts weights to the ranks of engines.

It is not in `torch.distributed`'s registry: any number may exist, by name, and each can be torn down alone.
Both ends use it; what is sent, and where it is received, is decided elsewhere.
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

# A thread looks whether a broadcast has arrived: first quickly, later so that waiting costs next to nothing.
FIRST_LOOK_S: Final = 2.5e-4
LOOK_S: Final = 16e-3
# A device goes from one broadcast to the next by itself: only the end of all of them is looked for.
DEVICE_LOOK_S: Final = 1e-3
# More would fill the driver's queue while the first waits for its source, and hold up other launches.
MAX_UNDER_WAY: Final = 128
# Longer than leaving takes, unless a peer does not let go. The thread that leaves outlives that.
LEAVE_S: Final = 10.0

T = TypeVar("T")
_dist: Any = torch.distributed  # not all of it is exported


class InThread(Generic[T]):
    """A call in a thread of its own, which the end of the process does not wait for: its peer may hang."""

    def __init__(self, name: str, call: Callable[[], T]) -> None:
        self.future: Future[T] = Future()
        threading.Thread(target=self._run, args=(call,), name=name, daemon=True).start()

    @property
    def is_done(self) -> bool:
        return self.future.done()

    def ends_within(self, timeout_s: float) -> bool:
        return bool(wait([self.future], timeout_s).done)

    def result(self) -> T:
        """What the call returned or raised; only once it is done."""
        return self.future.result(timeout=0)

    def _run(self, call: Callable[[], T]) -> None:
        try:
            result = call()
        except BaseException as error:
            # The frames are taken off it: they hold a connection that is to end, and others wait for that.
            # Whoever drops it last waits as long as a peer likes: neither this thread, nor who asks for the
            # result.
            held = [error.__traceback__]
            threading.Thread(target=_drop, args=(threading.current_thread(), held), daemon=True).start()
            self.future.set_exception(error.with_traceback(None))
        else:
            self.future.set_result(result)


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

    def wait(self) -> None:
        """Wait until it is done: a process that ends while its thread is in torch is aborted."""
        self._thread.ends_within(max(0.0, self._until_s - time.monotonic()))


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

    Attributes:
        under_way: those that were begun and not yet seen to their end, the oldest first.
        kept: the tensors, if they are to be kept.
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

    def wait_for_kernels(self) -> None:
        """Have the current stream wait for all that was launched, however it ends."""
        for _, work in self.under_way:
            with suppress(Exception):
                work.wait()
        self.under_way.clear()


class WeightGroup:
    """One group that has been joined. `device`: where what is received goes.

    Attributes:
        writes_outside: whether a device was ever made to write to memory that is not the group's.
    """

    def __init__(self, name: str, member: Member, device: torch.device) -> None:
        self.name = name
        self.device = device
        self.why_closed = ""
        self._member: Member | None = member
        self._closed = threading.Event()
        self._look: InThread[None] | None = None
        # Held to close, and to do what must not be begun once the group is closed.
        self._lock = threading.Lock()
        self.writes_outside = False
        # Broadcasts must not queue behind forward passes, nor these behind broadcasts.
        self._stream = torch.Stream(device) if device.type != "cpu" else None
        # With gloo all have met; NCCL meets in the first broadcast, which may last, and cannot be ended.
        self._has_met = self._stream is None

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    def receive(self, kinds: TensorKinds, timeout_s: float) -> Broadcasts:
        """Begin to receive tensors of these shapes and dtypes, one broadcast each, in this order."""

        def transfers() -> list[Transfer]:
            return [Transfer(torch.empty(shape, dtype=dtype, device=self.device)) for shape, dtype in kinds]

        return Broadcasts(self, lambda: self._run(transfers, timeout_s, keeps=True))

    def receive_by(self, plan: Callable[[int], Iterable[Transfer]], timeout_s: float) -> Broadcasts:
        """Begin to receive tensors as a plan says; nothing is kept.

        Where it fails, the memory is theirs who own it again once the group was left and `Broadcasts.ends`.

        Args:
            plan: makes the transfers, in another thread. Its argument says how many of the first tensors it
                must have received in memory of its own, and copy from there.
        """

        def transfers() -> Iterable[Transfer]:
            # gloo goes on writing after a group was left, so what it writes must be ours.
            return plan(sys.maxsize if self._stream is None else 0 if self._has_met else 1)

        return Broadcasts(self, lambda: self._run(transfers, timeout_s))

    def send(self, tensors: Callable[[torch.device], list[torch.Tensor]], timeout_s: float) -> Broadcasts:
        """Begin to broadcast tensors, one broadcast each, in this order. For the source's end of a group.

        `tensors` makes them in another thread, contiguous and on the given device.
        """
        return Broadcasts(
            self, lambda: self._run(lambda: map(Transfer, tensors(self.device)), timeout_s, keeps=True)
        )

    def close(self, why: str) -> Leaving:
        """Leave the group, whatever is under way in it. Idempotent."""
        with self._lock:
            if not self.is_closed:
                self.why_closed = why
                self._closed.set()
                logger.info("left weight group %s: %s", self.name, why)
            # Ending connections may take as long as a peer likes. Whoever drops the backend last waits for
            # that: it must not be this thread.
            members = [self._member] if self._member is not None else []
            self._member = None
        return Leaving(self.name, lambda: abort(members))

    def leave_if_abandoned(self) -> None:
        """Begin to look, in another thread, whether the trainer keeps the store; leave the group if not.

        A trainer that ends between two updates says nothing: its connections would stay for good.
        """
        member = self._member
        if member is None or member.store is None or not (self._look is None or self._look.is_done):
            return
        store = member.store

        def look() -> None:
            try:
                store.check(["any"])  # Which key does not matter: the store answers, or is gone.
            except RuntimeError as error:
                self.close(f"the store that its trainer kept is gone: {type(error).__name__}")

        self._look = InThread(f"look-{self.name}", look)

    def _run(
        self, transfers: Callable[[], Iterable[Transfer]], timeout_s: float, *, keeps: bool = False
    ) -> list[torch.Tensor]:
        """Make all transfers; returns their tensors, if they are to be kept."""
        member = self._member
        if member is None:
            raise GroupLeft(self.why_closed)
        # NCCL meets the others in the first broadcast.
        if member.store is not None:
            member.store.set_timeout(timedelta(seconds=timeout_s))
        queue = BroadcastQueue(member.backend, SOURCE_RANK, timeout_s, keeps=keeps)
        stream = self._stream
        if stream is None:
            self._transfer_all(transfers(), queue)
            return queue.kept
        # A thread begins on the first device, and going back there would take memory on it.
        torch.accelerator.set_device_index(stream.device)
        with stream:
            try:
                self._transfer_all(transfers(), queue)
                # NCCL takes work that failed for completed; its kernel ends when the group is left.
                self._wait_until(stream.record_event().query, queue)
            except BaseException:
                # Kernels that wait for their source end with the group, and write until then.
                abort([member])
                queue.wait_for_kernels()
                stream.synchronize()
                raise
        return queue.kept

    def _transfer_all(self, transfers: Iterable[Transfer], queue: BroadcastQueue) -> None:
        for transfer in transfers:
            while len(queue.under_way) >= MAX_UNDER_WAY:
                self._end_oldest(queue, waits=True)
            # The oldest may use memory that this one is received in.
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
        """Copy what the oldest broadcast brings.

        On a device that is launched, and waited for only if `waits`.
        """
        transfer, work = queue.under_way[0]
        if waits or self._stream is None:
            self._wait_until(work.is_completed, queue)
        work.wait()  # With gloo this raises what the broadcast failed with.
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
                # Whoever waits for the device, waits for these kernels too.
                self.close("its broadcasts have not ended in time")
            look_s = min(2 * look_s, longest_look_s)
        # Work may end without an error where its communicator was aborted.
        self._require_open()

    def _require_open(self) -> None:
        if self.is_closed:
            raise GroupLeft(self.why_closed)


class GroupLeft(Exception):
    """The group was left while it was used, or joined."""


class Broadcasts(InThread[list[torch.Tensor]]):
    """Tensors on their way through a group. Given up half-way, the group is out of step, and left."""

    def __init__(self, group: WeightGroup, broadcast: Callable[[], list[torch.Tensor]]) -> None:
        self._group = group
        super().__init__(f"broadcast-{group.name}", broadcast)

    def ends(self) -> bool:
        """Wait for what the device is doing.

        Whether a group that was left writes no more to others' memory.
        """
        return not self._group.writes_outside or self.ends_within(LEAVE_S)

    def result(self) -> list[torch.Tensor]:
        """Once it is done: what has arrived, if it is kept.

        RequestRejected (400): it failed; the group was left.
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
