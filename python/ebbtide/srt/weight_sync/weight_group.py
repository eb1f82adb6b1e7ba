"""Process groups through which a trainer, their rank 0, broadcasts weights to the ranks of engines.

They are made by hand and not by `torch.distributed`'s registry: any number may exist, by name, with a
default group or without, and each can be torn down alone. Source of the rendezvous: wire_api section 3.3.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Generic, TypeVar

import torch
import torch.distributed

from ebbtide.srt.config import ParallelConfig
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.weight_sync.source import ONE_RANK

logger = logging.getLogger(__name__)

_dist: Any = torch.distributed  # not all of it is exported

T = TypeVar("T")

# A thread looks whether a broadcast has arrived: first quickly, later so that waiting costs next to nothing.
FIRST_LOOK_S: Final = 2.5e-4
LOOK_S: Final = 16e-3
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

    def result(self) -> T:
        """What the call returned or raised; only once it is done."""
        return self._future.result(timeout=0)

    def _run(self, call: Callable[[], T]) -> None:
        try:
            result = call()
        except BaseException as error:
            # Not with the frames: they hold a connection that is to end, and others wait for that.
            self._future.set_exception(error.with_traceback(None))
        else:
            self._future.set_result(result)


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
    """

    def __init__(self, name: str, member: Member, device: torch.device) -> None:
        self.name = name
        self.why_closed = ""
        self._device = device
        self._member: Member | None = member
        self._closed = threading.Event()
        # Broadcasts must not queue behind forward passes, nor these behind broadcasts.
        self._stream = torch.Stream(device) if device.type != "cpu" else None

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    def receive(self, layout: Sequence[tuple[tuple[int, ...], torch.dtype]], timeout_s: float) -> Reception:
        """Begin to receive tensors of these shapes and dtypes, one broadcast each, in this order."""

        def empty() -> list[torch.Tensor]:
            return [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in layout]

        return self._start(empty, timeout_s)

    def send(self, tensors: Callable[[torch.device], list[torch.Tensor]], timeout_s: float) -> Reception:
        """Begin to broadcast tensors, one broadcast each, in this order. For the source's end of a group.

        Args:
            tensors: makes them in another thread, contiguous and on the given device.
        """
        return self._start(lambda: tensors(self._device), timeout_s)

    def _start(self, tensors: Callable[[], list[torch.Tensor]], timeout_s: float) -> Reception:
        if self._stream is None:
            return Reception(self, lambda: self._broadcasts(tensors(), timeout_s))
        stream = self._stream

        def on_stream() -> list[torch.Tensor]:
            # A thread begins on the first device, and going back there would take memory on it.
            torch.accelerator.set_device_index(stream.device)
            with stream:
                transferred = self._broadcasts(tensors(), timeout_s)
                # NCCL takes work that failed for completed; its kernel ends when the group is left.
                stream.synchronize()
            if self.is_closed:
                raise _Left(self.why_closed)
            return transferred

        return Reception(self, on_stream)

    def close(self, why: str) -> Leaving:
        """Leave the group, whatever is under way in it. Idempotent."""
        if not self.is_closed:
            self.why_closed = why
            self._closed.set()
            logger.info("weight group %s is left: %s", self.name, why)
        # Ending connections may take as long as a peer likes. Whoever drops the backend last waits for that:
        # it must not be this thread.
        members = [self._member] if self._member is not None else []
        self._member = None
        return Leaving(self.name, lambda: _abort(members))

    def _broadcasts(self, tensors: list[torch.Tensor], timeout_s: float) -> list[torch.Tensor]:
        member = self._member
        if member is None:
            raise _Left(self.why_closed)
        # NCCL meets the others in the first broadcast.
        member.store.set_timeout(timedelta(seconds=timeout_s))
        options = _dist.BroadcastOptions()
        options.rootRank, options.rootTensor = SOURCE_RANK, 0
        options.timeout = timedelta(seconds=timeout_s)
        works = [member.backend.broadcast([tensor], options) for tensor in tensors]
        for work in works:
            look_s = FIRST_LOOK_S
            while not work.is_completed():
                if self._closed.wait(look_s):
                    raise _Left(self.why_closed)
                look_s = min(2 * look_s, LOOK_S)
            work.wait()  # With gloo this raises what the broadcast failed with.
        if self.is_closed:
            # Of a communicator that was aborted, work may end without an error.
            raise _Left(self.why_closed)
        return tensors


class _Left(Exception):
    """The group was left while it was used."""


class Reception:
    """Tensors on their way through a group. Given up half-way the group is out of step, and left."""

    def __init__(self, group: WeightGroup, broadcast: Callable[[], list[torch.Tensor]]) -> None:
        self._group = group
        self._thread = InThread(f"broadcast-{group.name}", broadcast)

    @property
    def is_done(self) -> bool:
        return self._thread.is_done

    def result(self) -> list[torch.Tensor]:
        """What has arrived.

        Raises:
            RequestRejected: 400, the broadcast failed; the group has been left.
        """
        try:
            return self._thread.result()
        except _Left as error:
            reason = str(error)
        except Exception as error:
            reason = f"the broadcast failed: {type(error).__name__}: {error}"[:500]
            self._group.close(reason)
        raise RequestRejected(
            f"nothing was written: the group {self._group.name!r} was left ({reason}). "
            "init_weights_update_group joins a new one"
        )


class Joining:
    """A group that is being joined; `poll` until it is true, and `close`."""

    def __init__(self, groups: WeightGroups, address: GroupAddress, timeout_s: float, replaced: bool) -> None:
        self.replaced = replaced
        self.address = address
        self._groups = groups
        self._timeout_s = timeout_s
        self._given_up: str | None = None
        self._group: WeightGroup | None = None
        self._thread = InThread(f"join-{address.name}", self._join)

    def poll(self) -> bool:
        """Whether the group has been joined.

        Raises:
            RequestRejected: 400, it could not be, within the time that there was.
        """
        if self._given_up is not None:
            raise RequestRejected(f"group {self.address.name!r} was not joined: {self._given_up}")
        if not self._thread.is_done:
            return False
        try:
            member = self._thread.result()
        except Exception as error:
            raise RequestRejected(
                f"group {self.address.name!r} at {self.address.url} was not joined as rank "
                f"{self.address.rank} of {self.address.world_size} within {self._timeout_s:g} s: "
                f"{type(error).__name__}: {error}"[:1000]
            ) from error
        if self._group is None:
            device = self._groups.buffer_device(self.address)
            self._group = WeightGroup(self.address.name, member, device)
            self._groups.add(self._group)
        return True

    def close(self, why: str = "the request ended") -> None:
        """Give it up, unless it has been joined. The thread ends when its time is up."""
        if self._group is None and self._given_up is None:
            self._given_up = why
        self._groups.forget(self)

    def _join(self) -> Member:
        member = connect(self.address, self._timeout_s)
        if self._given_up is not None:
            _abort([member])
            raise _Left(self._given_up)
        return member


class WeightGroups:
    """The groups of this rank, by name.

    Args:
        device: of this rank. With NCCL what is received goes there, with gloo to host memory.
        place: which of the engine's ranks this is. All of them join every group.
    """

    def __init__(self, device: torch.device, place: ParallelConfig = ONE_RANK) -> None:
        self._device = device
        self._place = place
        self._groups: dict[str, WeightGroup] = {}
        self._joining: dict[str, Joining] = {}

    @property
    def names(self) -> list[str]:
        return sorted(name for name, group in self._groups.items() if not group.is_closed)

    def join(self, address: GroupAddress, timeout_s: float) -> Joining:
        """Begin to join. A live group of that name is left first.

        Raises:
            RequestRejected: 400, a field is wrong; 409, a group of that name is just being joined.
        """
        self._check(address, timeout_s)
        if address.name in self._joining:
            raise RequestRejected(
                f"a group {address.name!r} is just being joined: wait, or destroy_weights_update_group first",
                409,
            )
        replaced = self.leave(address.name, "another group of that name is joined") is not None
        joining = self._joining[address.name] = Joining(self, address, timeout_s, replaced)
        return joining

    def get(self, name: str) -> WeightGroup:
        """The live group of this name.

        Raises:
            RequestRejected: 400, there is none.
        """
        group = self._groups.get(name)
        if group is not None and not group.is_closed:
            return group
        why = f" (left: {group.why_closed})" if group is not None else ""
        known = ", ".join(map(repr, self.names)) or "none"
        raise RequestRejected(
            f"group_name: there is no group {name!r}{why}; known: {known}. init_weights_update_group first"
        )

    def leave(self, name: str, why: str) -> Leaving | None:
        """Leave the group of that name, or stop joining it; None if there is none."""
        joining = self._joining.get(name)
        if joining is not None:
            joining.close(why)
        group = self._groups.get(name)
        if group is None or group.is_closed:
            return None if joining is None else Leaving(name, lambda: None)
        return group.close(why)

    def add(self, group: WeightGroup) -> None:
        """A group has been joined."""
        self._groups[group.name] = group

    def forget(self, joining: Joining) -> None:
        """It is not being joined any more."""
        if self._joining.get(joining.address.name) is joining:
            del self._joining[joining.address.name]

    def buffer_device(self, address: GroupAddress) -> torch.device:
        return self._device if address.backend == "nccl" else torch.device("cpu")

    def _check(self, address: GroupAddress, timeout_s: float) -> None:
        if not address.name:
            raise RequestRejected("group_name: expected a name, got an empty one")
        if not address.host:
            raise RequestRejected("master_address: expected an address, got an empty one")
        if not 0 < address.port < 1 << 16:
            raise RequestRejected(f"master_port: expected 1..65535, got {address.port}")
        num_ranks = self._place.num_ranks
        rank_offset = address.rank - self._place.rank
        if not 0 < rank_offset <= address.world_size - num_ranks:
            raise RequestRejected(
                f"rank_offset: expected 1..{address.world_size - num_ranks} (rank 0 is the trainer's, the "
                f"engine has {num_ranks}, world_size is {address.world_size}), got {rank_offset}"
            )
        if not timeout_s > 0:
            raise RequestRejected(f"timeout_s: expected more than 0 seconds, got {timeout_s}")
        if address.backend == "nccl" and self._device.type != "cuda":
            raise RequestRejected("backend 'nccl': this engine runs on the CPU, expected 'gloo'")


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


def _abort(members: list[Member]) -> None:
    """End what is under way, with whatever the backend can do; the connections end with its last use."""
    while members:
        with suppress(Exception):
            members.pop().backend.abort()
