"""What a payload refers to in shared memory: blocks of data, and the counts of references to GPU memory.

Both are laid out as torch's sharing has them. A block is a POSIX shared-memory object: a header of 64 bytes
that counts references, then the data. Serializing adds one reference on the receiver's behalf. The receiver
takes it over and drops it when it has finished with the tensors; the last one to drop removes the object.
References to GPU memory are counted in a file of their own. Source: wire_api sections 4.2 and 4.3.

Blocks are neither mapped nor opened through torch. A block that its sender cuts short would end the process
that has it mapped. And torch would connect this process to the sender's shared-memory manager for good: the
manager, and what a sender that was killed has left in it, would live as long as we do.
"""

import fcntl
import os
import stat
import struct
from contextlib import closing
from functools import lru_cache
from pathlib import Path
from typing import Final, Self

from ebbtide.formats.stored_tensor import read_exactly
from ebbtide.formats.tensor_refs import NUM_COUNTERS, CudaStorageRef, StorageRef
from ebbtide.srt.errors import RequestRejected

HEADER_BYTES: Final = 64
SHARED_MEMORY: Final = Path("/dev/shm")
KEEP_ALIVE: Final = "keep the sending process and its tensors alive until the update is answered"
_COUNT: Final = struct.Struct("=i")
COUNTER: Final = struct.Struct("=q")


# Those of references that come one after the other are counted in one file.
@lru_cache(maxsize=16)
def object_path(handle: bytes) -> Path:
    """Where the shared-memory object of a torch handle (`/torch_<pid>_<n>_<n>`) is found."""
    return SHARED_MEMORY / os.fsdecode(handle).removeprefix("/")


class SharedBlock:
    """A block of shared memory, held open and read by position.

    Raises `RequestRejected` if it is not there, or not what the payload says.
    """

    def __init__(self, handle: bytes, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.references: set[StorageRef] = set()
        self._path = object_path(handle)
        try:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise RequestRejected(f"{self} cannot be opened ({error.strerror}): {KEEP_ALIVE}") from error
        try:
            self._check()
        except RequestRejected:
            os.close(self._descriptor)
            raise

    def read_into(self, room: memoryview, offset: int) -> None:
        """Fill `room` with the bytes from `offset` on.

        Raises:
            RequestRejected: 400, the block is not long enough any more.
        """
        num_bytes = read_exactly(self._descriptor, room, HEADER_BYTES + offset)
        if num_bytes < len(room):
            raise RequestRejected(
                f"{self} was cut short: it ends within the {len(room)} bytes from {offset} on. {KEEP_ALIVE}"
            )

    def close(self) -> None:
        """Let go of it, and leave the references to somebody else."""
        os.close(self._descriptor)

    def drop(self) -> None:
        """Take the references off the block's count, remove it with the last of them, and let go of it."""
        with closing(self):
            # Ranks that drop theirs at the same time take turns. The sender keeps its own until they have.
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            count = os.pread(self._descriptor, _COUNT.size, 0)
            if len(count) < _COUNT.size or not self._path.exists():
                return  # It was cut short, or removed: torch would try to remove it again at a count of 0.
            [before] = _COUNT.unpack(count)
            os.pwrite(self._descriptor, _COUNT.pack(before - len(self.references)), 0)
            if before == len(self.references):
                self._path.unlink(missing_ok=True)

    def __str__(self) -> str:
        return f"shared memory /{self._path.name}"

    def _check(self) -> None:
        found = os.fstat(self._descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise RequestRejected(f"{self} is not what torch makes")
        held_bytes = max(found.st_size - HEADER_BYTES, 0)
        if held_bytes < self.num_bytes:
            raise RequestRejected(f"{self} holds {held_bytes} bytes, the payload says {self.num_bytes}")


class Counters:
    """The sender's counts of references, each file of them opened once. A context manager, or to be closed.

    They are read and written by position: a file that is mapped and then cut short would end the process.
    """

    def __init__(self) -> None:
        self._files: dict[bytes, int | None] = {}

    def add(self, ref: CudaStorageRef, change: int) -> int | None:
        """Add to the count of a reference; returns what it is then, None where there is none to see."""
        if ref.counter_file not in self._files:
            self._files[ref.counter_file] = _opened(ref.counter_file)
        descriptor = self._files[ref.counter_file]
        if descriptor is None:
            return None
        at = HEADER_BYTES + ref.counter_index * COUNTER.size
        found = os.pread(descriptor, COUNTER.size, at)
        if len(found) < COUNTER.size:
            return None
        [value] = COUNTER.unpack(found)
        if change:
            os.pwrite(descriptor, COUNTER.pack(value + change), at)
        return int(value + change)

    def close(self) -> None:
        """Idempotent; it may be used again."""
        while self._files:
            _, descriptor = self._files.popitem()
            if descriptor is not None:
                os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _opened(counter_file: bytes) -> int | None:
    """A file of counts; None where there is none, or not one that torch makes."""
    try:
        descriptor = os.open(object_path(counter_file), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_size < HEADER_BYTES + NUM_COUNTERS * COUNTER.size:
        os.close(descriptor)
        return None
    return descriptor


def is_held(counter_file: bytes) -> bool:
    """Whether a sender holds the lock on a file of counts: the memory stays where it is."""
    try:
        descriptor = os.open(object_path(counter_file), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False
