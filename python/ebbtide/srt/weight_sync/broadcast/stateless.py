"""How vLLM's trainers meet engines: a store of torch's, the id of a communicator in it, and then NCCL alone.

Source: wire_vllm section 2.2.
"""

from __future__ import annotations

import base64
import binascii
import time
from datetime import timedelta
from typing import Any, Final

import torch.distributed

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.weight_sync.broadcast.nccl import UNIQUE_ID_BYTES, RawNccl
from ebbtide.srt.weight_sync.payload.pickle_reader import Global, read_pickle

_dist: Any = torch.distributed  # not all of it is exported

# The first thing that rank 0 tells the others.
ID_KEY: Final = "broadcast_from/0/0"


def join_by_store(
    host: str, port: int, rank: int, world_size: int, device: torch.device, timeout_s: float
) -> tuple[RawNccl, Any]:
    """Meet through the trainer's store; the communicator, and the store.

    Raises:
        RequestRejected: 400, what the trainer has put there is no id.
        Exception: torch's or NCCL's, somebody did not come in time.
    """
    until_s = time.monotonic() + timeout_s
    # Each client counts as one of `world_size`, and the trainer waits for all of them.
    store = _dist.TCPStore(host, port, world_size, False, timedelta(seconds=timeout_s))
    store.set_timeout(timedelta(seconds=max(until_s - time.monotonic(), 1e-3)))
    unique_id = read_id(store.get(ID_KEY))
    return join_by_id(unique_id, rank, world_size, device, until_s - time.monotonic()), store


def join_by_id(
    unique_id: bytes, rank: int, world_size: int, device: torch.device, timeout_s: float
) -> RawNccl:
    """Meet through NCCL alone, at the address that the id holds."""
    if device.index is not None:
        # This thread begins on the first device.
        torch.accelerator.set_device_index(device)
    return RawNccl(unique_id, rank, world_size, device, timeout_s)


def read_id(pickled: bytes) -> bytes:
    """The bytes of a pickled `ncclUniqueId`; nothing that the pickle names is imported.

    Raises:
        RequestRejected: 400, it is something else.
    """
    found = read_pickle(pickled, _resolve)
    if not isinstance(found, bytes):
        raise RequestRejected("the trainer's store: expected a pickled ncclUniqueId")
    return found


def decode_id(text: str) -> bytes:
    """The bytes of an id in standard base64.

    Raises:
        RequestRejected: 400, it is not one.
    """
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
