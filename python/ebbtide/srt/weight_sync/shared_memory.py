"""Opens the shared-memory blocks that a payload refers to, as torch's `file_system` sharing lays them out.

A block is a POSIX shared-memory object: a header of 64 bytes that counts references, then the data.
Serializing adds one reference on the receiver's behalf. The receiver takes it over and drops it when it has
finished with the tensors; the last one to drop removes the object. Source: wire_api section 4.3.
"""

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.weight_sync.references import StorageRef

HEADER_BYTES: Final = 64
SHARED_MEMORY: Final = Path("/dev/shm")
KEEP_ALIVE: Final = "keep the sending process and its tensors alive until the update is answered"


def object_path(handle: bytes) -> Path:
    """Where the shared-memory object of a torch handle (`/torch_<pid>_<n>_<n>`) is found."""
    return SHARED_MEMORY / os.fsdecode(handle).removeprefix("/")


@dataclass(slots=True)
class _Block:
    storage: torch.UntypedStorage
    num_bytes: int
    references: set[StorageRef] = field(default_factory=set)


class SharedBlocks:
    """The shared-memory blocks of one payload, each mapped once.

    Args:
        owns_references: whether this receiver takes over the references that travelled with the payload. When
            several data-parallel replicas open the same payload, exactly one of them does.
    """

    def __init__(self, owns_references: bool) -> None:
        self._owns_references = owns_references
        self._blocks: dict[bytes, _Block] = {}

    def storage(self, ref: StorageRef) -> torch.UntypedStorage:
        """Returns the sender's memory, mapped; raises `RequestRejected` if it is not there."""
        block = self._blocks.get(ref.handle)
        if block is None:
            block = self._blocks[ref.handle] = _Block(_map(ref), ref.num_bytes)
        if block.num_bytes != ref.num_bytes:
            raise RequestRejected(
                f"the payload gives {_name(ref)} two sizes: {block.num_bytes} and {ref.num_bytes} bytes"
            )
        block.references.add(ref)
        return block.storage

    def close(self, unread: Iterable[StorageRef] = ()) -> None:
        """Drops the mappings and the references, also those that travelled unread. Idempotent."""
        if self._owns_references:
            for ref in unread:
                # What cannot be opened holds nothing of the sender's.
                with suppress(RequestRejected):
                    self.storage(ref)
        while self._blocks:
            handle, block = self._blocks.popitem()
            if not object_path(handle).exists():
                # Somebody removed the object under its users. The last user to drop it would try to remove it
                # again, and torch ends the process when that fails: make sure that it is not this one.
                block.storage._shared_incref()  # type: ignore[no-untyped-call]
            elif self._owns_references:
                for _ in block.references:
                    block.storage._shared_decref()


def _name(ref: StorageRef) -> str:
    return f"shared memory {os.fsdecode(ref.handle)}"


def _map(ref: StorageRef) -> torch.UntypedStorage:
    try:
        found = object_path(ref.handle).lstat()
        manager = os.lstat(ref.manager)
    except OSError as error:
        raise RequestRejected(f"{_name(ref)} cannot be opened ({error.strerror}): {KEEP_ALIVE}") from error
    if not stat.S_ISREG(found.st_mode) or not stat.S_ISSOCK(manager.st_mode):
        raise RequestRejected(f"{_name(ref)} or its manager is not what torch makes")
    # torch would enlarge a smaller object instead of refusing it.
    if found.st_size < HEADER_BYTES + ref.num_bytes:
        held = max(found.st_size - HEADER_BYTES, 0)
        raise RequestRejected(f"{_name(ref)} holds {held} bytes, the payload says {ref.num_bytes}")
    try:
        return torch.UntypedStorage._new_shared_filename_cpu(ref.manager, ref.handle, ref.num_bytes)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise RequestRejected(f"{_name(ref)} cannot be opened ({reason}): {KEEP_ALIVE}") from error
