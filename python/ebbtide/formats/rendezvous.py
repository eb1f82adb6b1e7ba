"""How the members of a weight group meet: through a store that the trainer, rank 0, keeps.

Torch's process groups meet as torch's helper has it. vLLM's trainers put the id of an NCCL communicator into
the store, or announce it, and use NCCL alone. Source: wire_api section 3.3, wire_vllm section 2.2.
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

# NCCL's own limit must never strike before that of the request, which tears down one group and no more.
NCCL_TIMEOUT: Final = timedelta(days=1)
CPU: Final = torch.device("cpu")
# The trainer's rank.
SOURCE_RANK: Final = 0
# The first thing that it tells the others.
ID_KEY: Final = "broadcast_from/0/0"


@dataclass(frozen=True)
class GroupAddress:
    """Where and as whom to join.

    Attributes:
        rank: of this process: the engine's `rank_offset` and, of several ranks, which one it is.
        world_size: trainer and all ranks of all engines.
        backend: "gloo" or "nccl", of torch; "raw_nccl", without torch's process groups.
        unique_id: with "raw_nccl", of the communicator; there is no store then. None: it is in the store.
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
    """A process's end of a group: torch's backend, and the store through which its members met, if any."""

    backend: Any
    store: Any | None


def connect(address: GroupAddress, timeout_s: float, device: torch.device = CPU) -> Member:
    """Meet the others; the same keys and the same steps as torch's helper takes for a named group.

    The trainer, rank 0, keeps the store at the address: `host_store`. With gloo all have met when this
    returns, and with raw NCCL; torch's NCCL meets in the first broadcast.

    Args:
        device: of this rank, for raw NCCL.
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


def _store(address: GroupAddress, timeout_s: float) -> Any:
    """The trainer's store. Each client counts as one of `world_size`, and it may wait for all of them.

    torch's own `rendezvous` would have rank 0 make the store as well.
    """
    limit = timedelta(seconds=timeout_s)
    return _dist.TCPStore(address.bare_host, address.port, address.world_size, False, limit)


def _connect_without_torch(address: GroupAddress, timeout_s: float, device: torch.device) -> Member:
    """By NCCL alone, at the address that a communicator's id holds; the trainer's store has the id, if any.

    Raises:
        RequestRejected: 400, what the trainer has put there is no id.
        Exception: torch's or NCCL's, somebody did not come in time.
    """
    until_s = time.monotonic() + timeout_s
    store, unique_id = None, address.unique_id
    if unique_id is None:
        store = _store(address, timeout_s)
        store.set_timeout(timedelta(seconds=max(until_s - time.monotonic(), 1e-3)))
        unique_id = read_id(store.get(ID_KEY))
    if device.index is not None:
        # This thread begins on the first device.
        torch.accelerator.set_device_index(device)
    left_s = until_s - time.monotonic()
    return Member(RawNccl(unique_id, address.rank, address.world_size, device, left_s), store)


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


def read_id(pickled: bytes) -> bytes:
    """The bytes of a pickled `ncclUniqueId`; nothing that the pickle names is imported.

    RequestRejected (400): it is something else.
    """
    found = read_pickle(pickled, _resolve)
    if not isinstance(found, bytes):
        raise RequestRejected("the trainer's store: expected a pickled ncclUniqueId")
    return found


def decode_id(text: str) -> bytes:
    """The bytes of an id in standard base64. RequestRejected (400): it is not one."""
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
