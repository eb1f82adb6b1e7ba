"""The trainer's end of a group that broadcasts weights to all ranks of one or more engines.

The trainer is rank 0 and hosts the store. Source of the rendezvous: wire_api section 3.3.
"""

from __future__ import annotations

import itertools
import logging
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal
from uuid import uuid4

import torch

from ebbtide.formats import Announcement
from ebbtide.formats.bucket import FlattenedTensorBucket
from ebbtide.formats.rendezvous import SOURCE_RANK, GroupAddress, connect, host_store
from ebbtide.formats.weight_group import InThread, WeightGroup
from ebbtide.srt.errors import EngineError
from ebbtide.trainer.cuda_ipc import NamedTensors
from ebbtide.trainer.targets import Outcomes, Target, failures_in, outcomes_of

logger = logging.getLogger(__name__)

Backend = Literal["gloo", "nccl"]
# Added to this end's time limit, so that the engines' own limit ends first and their error is reported.
SOURCE_MARGIN_S: Final = 5.0


@dataclass
class Broadcaster:
    """Broadcasts weights in one group of this process and all ranks of all targets.

    The group is made by the first `connect`. A failed broadcast leaves its members out of step, so the group
    is then left, and the next `connect` makes a new one.

    Args:
        backend: None: "nccl" if the first tensor is on a GPU, else "gloo".
        master_address: this process's address, for all targets; None: for each target, the local address of
            the route to it.
        master_port: port of the store; None: a free one.
    """

    _targets: Sequence[Target]
    _backend: Backend | None
    _master_address: str | None
    _master_port: int | None
    _store: Any = field(default=None, init=False)
    _group: WeightGroup | None = field(default=None, init=False)
    # Name of the last group that targets were asked to join. After an interrupt, some may still be in it, so
    # they are asked to leave it before they join the next one.
    _name: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._names = map(f"weight-sender-{uuid4().hex[:12]}-{{}}".format, itertools.count())

    def device_for(self, tensor: torch.Tensor) -> torch.device:
        """The device from which a tensor is broadcast: CPU for gloo; for NCCL its own or the current GPU."""
        backend = self._backend or ("gloo" if tensor.device.type == "cpu" else "nccl")
        if backend == "gloo":
            return torch.device("cpu")
        if tensor.device.type != "cpu":
            return tensor.device
        return torch.device("cuda", torch.accelerator.current_device_index())

    def connect(self, device: torch.device, timeout_s: float) -> Outcomes:
        """Make the group if there is none; returns the failures by target. Nothing is sent yet.

        Args:
            device: the device to broadcast from.

        Raises:
            ValueError: a target has ranks on several hosts, and only a loopback address of this one is known.
            OSError, RuntimeError: the port is not free.
        """
        if self._group is not None:
            return {}
        self._ask_to_leave()
        if self._store is None:
            self._store = host_store(self._master_port or 0)
        with ThreadPoolExecutor(len(self._targets), thread_name_prefix="ebbtide-groups") as pool:
            sizing = {target.name: pool.submit(target.size) for target in self._targets}
            found = outcomes_of(sizing)
            failures: Outcomes = {**failures_in(found)}
            if failures:
                return failures
            sizes: list[Any] = list(found.values())
            own = GroupAddress(
                name=next(self._names),
                host="localhost",
                port=self._store.port,
                rank=SOURCE_RANK,
                world_size=1 + sum(num_ranks for num_ranks, _ in sizes),
                backend="gloo" if device.type == "cpu" else "nccl",
            )
            hosts = [
                self._host_for(target, num_nodes)
                for target, (_, num_nodes) in zip(self._targets, sizes, strict=True)
            ]
            member = InThread(f"join-{own.name}", lambda: connect(own, timeout_s))
            offsets = itertools.accumulate((num_ranks for num_ranks, _ in sizes), initial=1)
            try:
                self._name = own.name
                joining = {
                    target.name: pool.submit(target.join_group, replace(own, host=host, rank=rank), timeout_s)
                    for target, host, rank in zip(self._targets, hosts, offsets, strict=False)
                }
                if _all_succeed(joining, member):
                    self._group = WeightGroup(own.name, member.result(), device)
                    return {}
            finally:
                if self._group is None:
                    self._ask_to_leave()
            failures = {**failures_in(outcomes_of(joining))}
            return failures or self._blamed(member, "the group was not joined")

    def send(self, tensors: NamedTensors, timeout_s: float) -> Outcomes:
        """Broadcast tensors into the targets' sessions; returns each target's reply or failure.

        The tensors may change once this has returned. After a failure the group has been left.

        Raises:
            EngineError: there is no group: call `connect` first.
        """
        group = self._group
        if group is None:
            raise EngineError("there is no group to broadcast in: connect first")
        is_bucket = len(tensors) > 1
        announced = Announcement(
            names=[name for name, _ in tensors],
            dtypes=[str(tensor.dtype) for _, tensor in tensors],
            shapes=[list(tensor.shape) for _, tensor in tensors],
            load_format="flattened_bucket" if is_bucket else None,
        )

        def contiguous(device: torch.device) -> list[torch.Tensor]:
            _wait_for_devices(tensors, device)
            here = [(name, tensor.detach().to(device)) for name, tensor in tensors]
            if is_bucket:
                return [FlattenedTensorBucket(here).get_flattened_tensor()]
            return [tensor.contiguous() for _, tensor in here]

        with ThreadPoolExecutor(len(self._targets), thread_name_prefix="ebbtide-groups") as pool:
            try:
                self._group = None
                broadcast = group.send(contiguous, timeout_s + SOURCE_MARGIN_S)
                calls = {
                    target.name: pool.submit(target.take_broadcast, announced, group.name, timeout_s)
                    for target in self._targets
                }
                if _all_succeed(calls, broadcast):
                    self._group = group
            finally:
                # Broadcasts that a target has not received would be taken for those of the next bucket.
                if self._group is None:
                    group.close("a bucket was not taken by every engine")
                    self._ask_to_leave()
            return outcomes_of(calls)

    def close(self) -> None:
        """Leave the group and drop the store. A later `connect` makes both again."""
        group, self._group = self._group, None
        try:
            self._ask_to_leave()
        finally:
            if group is not None:
                group.close("the sender was closed").wait()
        self._store = self._name = None

    def _ask_to_leave(self) -> None:
        """Ask all targets to leave the group. Failures are ignored: such a target has left, or leaves when
        its connections end."""
        if self._name is not None:
            with ThreadPoolExecutor(len(self._targets), thread_name_prefix="ebbtide-groups") as pool:
                wait([pool.submit(target.leave_group, self._name) for target in self._targets])

    def _host_for(self, target: Target, num_nodes: int) -> str:
        if self._master_address is not None:
            return self._master_address
        host = "127.0.0.1" if target.location is None else _own_address(*target.location)
        if num_nodes > 1 and (host == "::1" or host.startswith("127.")):
            raise ValueError(
                f"master_address: {target.name} has ranks on {num_nodes} hosts. Give the address by "
                "which all of them reach this one"
            )
        return host

    def _blamed(self, thread: InThread[Any], what: str) -> Outcomes:
        try:
            thread.result()
        except Exception as error:
            what = f"{what}: {type(error).__name__}: {error}"[:500]
        return {target.name: EngineError(what) for target in self._targets}


def _all_succeed(calls: Mapping[str, Future[Any]], own: InThread[Any]) -> bool:
    """Wait until all targets' calls and this end are done, or one fails; returns whether all succeeded.

    The first failure ends the wait, since then the other side may wait for its peer for ever.
    """
    done, left = wait([*calls.values(), own.future], return_when=FIRST_EXCEPTION)
    if own.future in done and (error := own.future.exception()) is not None:
        logger.warning("this end of a weight group failed: %s", error)
    return not left and not any(one.exception() for one in done)


def _wait_for_devices(tensors: NamedTensors, current: torch.device) -> None:
    """Wait until the tensors are computed, on whatever streams; then make `current` the current device."""
    for device in {tensor.device for _, tensor in tensors if tensor.device.type != "cpu"}:
        torch.accelerator.set_device_index(device)
        torch.accelerator.synchronize(device)
    if current.type != "cpu":
        torch.accelerator.set_device_index(current)


def _own_address(host: str, port: int) -> str:
    """The local address of the route to a host; 127.0.0.1 if there is no route."""
    with suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)  # On a datagram socket, this only chooses the route.
                return str(probe.getsockname()[0])
    return "127.0.0.1"
