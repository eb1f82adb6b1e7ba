"""Opens the shared-memory blocks that a payload refers to, as torch's `file_system` sharing lays them out.

A block is a POSIX shared-memory object: a header of 64 bytes that counts references, then the data.
Serializing adds one reference on the receiver's behalf. The receiver takes it over and drops it when it has
finished with the tensors; the last one to drop removes the object. Source: wire_api section 4.3.

Blocks are mapped without torch's help. torch would connect this process to the sender's shared-memory
manager for good: the manager, and what a sender that was killed has left in it, would live as long as we do.
"""

import fcntl
import mmap
import os
import stat
import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.weight_sync.payload.allowed_globals import StorageRef

HEADER_BYTES: Final = 64
SHARED_MEMORY: Final = Path("/dev/shm")
KEEP_ALIVE: Final = "keep the sending process and its tensors alive until the update is answered"
_COUNT: Final = struct.Struct("=i")


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
            if self._owns_references:
                _drop(handle, len(block.references))


def _name(ref: StorageRef) -> str:
    return f"shared memory {os.fsdecode(ref.handle)}"


def _map(ref: StorageRef) -> torch.UntypedStorage:
    try:
        descriptor = _open(ref.handle)
    except OSError as error:
        raise RequestRejected(f"{_name(ref)} cannot be opened ({error.strerror}): {KEEP_ALIVE}") from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise RequestRejected(f"{_name(ref)} is not what torch makes")
        if found.st_size < HEADER_BYTES + ref.num_bytes:
            held = max(found.st_size - HEADER_BYTES, 0)
            raise RequestRejected(f"{_name(ref)} holds {held} bytes, the payload says {ref.num_bytes}")
        if ref.num_bytes == 0:
            return torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
        memory = mmap.mmap(descriptor, HEADER_BYTES + ref.num_bytes)
    except (OSError, ValueError) as error:
        raise RequestRejected(f"{_name(ref)} cannot be mapped ({error}): {KEEP_ALIVE}") from error
    finally:
        os.close(descriptor)
    # The tensor keeps the mapping: it is undone when the last view of it goes.
    flat = torch.frombuffer(memory, dtype=torch.uint8, count=ref.num_bytes, offset=HEADER_BYTES)
    return flat.untyped_storage()


def _drop(handle: bytes, num_references: int) -> None:
    """Take references off a block's count, and remove the block with the last of them."""
    try:
        descriptor = _open(handle)
    except OSError:
        return  # Somebody has removed it.
    try:
        # Ranks that drop theirs at the same time take turns. The sender keeps its own until they have.
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        [before] = _COUNT.unpack(os.pread(descriptor, _COUNT.size, 0))
        os.pwrite(descriptor, _COUNT.pack(before - num_references), 0)
        if before == num_references:
            object_path(handle).unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _open(handle: bytes) -> int:
    return os.open(object_path(handle), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
