"""The rendezvous of a weight group: its members meet through a store of the trainer, which is rank 0.

Process groups of torch meet in the way of torch's helper for named groups. Trainers of vLLM use NCCL without
torch, and put the communicator's id into the store, or send it in a request. Source: wire_api section 3.3,
wire_vllm section 2.2.
"""

from __future__ import annotations

import base64
import binascii
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch.distributed

from ebbtide.formats.nccl import UNIQUE_ID_BYTES, RawNccl
from ebbtide.formats.pickle_reader import Global, read_pickle
from ebbtide.srt.errors import RequestRejected

_dist: Any = torch.distributed  # not all of it is exported

# Longer than the limit of any request: that one ends one group only, and torch's must not come first.
NCCL_TIMEOUT: Final = timedelta(days=1)
CPU: Final = torch.device("cpu")
# The trainer's rank.
SOURCE_RANK: Final = 0
# The store's key for the communicator's id.
ID_KEY: Final = "broadcast_from/0/0"


@dataclass(frozen=True)
class GroupAddress:
    """Address of a group, and this process's rank in it.

    Attributes:
        host, port: of the trainer's store.
        rank: of an engine's process: the request's `rank_offset` plus its number among the engine's ranks.
        world_size: number of members: the trainer and all ranks of all engines.
        backend: "gloo" or "nccl" of torch; "raw_nccl": NCCL without torch's process groups.
        unique_id: the communicator's id, with "raw_nccl" and without a store; None: there is a store.
    """

    name: str
    host: str
    port: int
    rank: int
    world_size: int
    backend: str
    unique_id: bytes | None = None

    @property
    def bare_host(self) -> str:
        return self.host.removeprefix("[").removesuffix("]")

    @property
    def url(self) -> str:
        host = self.bare_host
        return f"tcp://[{host}]:{self.port}" if ":" in host else f"tcp://{host}:{self.port}"


@dataclass(frozen=True)
class Member:
    """A process's end of a group: the backend, and the store through which its members met, or None."""

    backend: Any
    store: Any | None


def connect(address: GroupAddress, timeout_s: float, device: torch.device = CPU) -> Member:
    """Join a group, with the keys and steps of torch's helper for named groups.

    The trainer, rank 0, hosts the store at the address by `host_store`. When this returns, all members of a
    gloo or raw NCCL group have met; those of torch's NCCL meet in the first broadcast.

    Args:
        timeout_s: how long to wait for the other members.
        device: of this rank, for raw NCCL.

    Raises:
        RequestRejected: 400, the store does not have a valid id for raw NCCL.
        Exception: of torch or NCCL, such as a timeout.
    """
    if address.backend == "raw_nccl":
        return _connect_without_torch(address, timeout_s, device)
    deadline_s = time.monotonic() + timeout_s
    store = _store(address, timeout_s)
    rank, world_size = address.rank, address.world_size
    named = _dist.PrefixStore(f"{address.name}/", _dist.PrefixStore(address.name, store))
    left = timedelta(seconds=max(deadline_s - time.monotonic(), 1e-3))
    named.set_timeout(left)
    if address.backend == "gloo":
        gloo = _dist.ProcessGroupGloo(_dist.PrefixStore("cpu/", named), rank, world_size, timeout=left)
        return Member(gloo, named)
    # Without torch's watchdogs: on a failure they would end the process, or end the kernels so that tensors
    # which were not received would look received. Here the group is left instead.
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
            _restore(before)  # In the trainer, its own groups keep torch's watchdogs.
    return Member(nccl, named)


def _store(address: GroupAddress, timeout_s: float) -> Any:
    """Connect to the trainer's store, as one of `world_size` clients, for which it may wait.

    Not by torch's `rendezvous`, where rank 0 would make a store itself.
    """
    limit = timedelta(seconds=timeout_s)
    return _dist.TCPStore(address.bare_host, address.port, address.world_size, False, limit)


def _connect_without_torch(address: GroupAddress, timeout_s: float, device: torch.device) -> Member:
    """Join a communicator of raw NCCL, whose id comes with the address or is in the trainer's store.

    Raises:
        RequestRejected: 400, the store does not have a valid id.
        Exception: of torch or NCCL, such as a timeout.
    """
    until_s = time.monotonic() + timeout_s
    store, unique_id = None, address.unique_id
    if unique_id is None:
        store = _store(address, timeout_s)
        store.set_timeout(timedelta(seconds=max(until_s - time.monotonic(), 1e-3)))
        unique_id = read_id(store.get(ID_KEY))
    if device.index is not None:
        # A new thread's current device is the first one.
        torch.accelerator.set_device_index(device)
    left_s = until_s - time.monotonic()
    return Member(RawNccl(unique_id, address.rank, address.world_size, device, left_s), store)


def host_store(port: int) -> Any:
    """Host the store through which a group's members meet; it lives as long as the returned object.

    Args:
        port: 0: a free one, which is the returned object's `port`.
    """
    return _dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False)


def _restore(environment: Mapping[str, str | None]) -> None:
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def abort(members: list[Member]) -> None:
    """Abort the members' backends, and empty the list. Connections end when the last reference is dropped."""
    while members:
        with suppress(Exception):
            members.pop().backend.abort()


def read_id(pickled: bytes) -> bytes:
    """Read a pickled `ncclUniqueId`, without importing what the pickle names.

    Raises:
        RequestRejected: 400, it is something else.
    """
    found = read_pickle(pickled, _resolve)
    if not isinstance(found, bytes):
        raise RequestRejected("the trainer's store: expected a pickled ncclUniqueId")
    return found


def decode_id(text: str) -> bytes:
    """Decode an NCCL id from standard base64. RequestRejected (400): it is not one."""
    try:
        found = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        found = b""
    if len(found) != UNIQUE_ID_BYTES:
        raise RequestRejected(f"expected {UNIQUE_ID_BYTES} bytes of an NCCL id in standard base64")
    return found


def _resolve(module: str, name: str) -> object:
    if (module, name) == ("_ctypes", "_unpickle"):
        return Global("_ctypes._unpickle", _unpickled)
    if name == "ncclUniqueId":
        return Global(name)
    raise RequestRejected(f"the trainer's store: a pickled ncclUniqueId does not name {module}.{name}"[:300])


def _unpickled(arguments: tuple[object, ...]) -> bytes:
    match arguments:
        case (Global(name="ncclUniqueId"), ({}, bytes(found))) if len(found) == UNIQUE_ID_BYTES:
            return found
    raise RequestRejected(f"the trainer's store: expected an ncclUniqueId of {UNIQUE_ID_BYTES} bytes")
