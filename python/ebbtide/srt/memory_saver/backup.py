"""Memory of a tag that can be released and resumed, with a backup in host memory of what must survive."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress

import torch

from ebbtide.srt.errors import EngineError, OutOfDeviceMemory
from ebbtide.srt.memory_saver import MemoryTag
from ebbtide.srt.memory_saver.arena import Arena
from ebbtide.srt.memory_saver.virtual_arena import VirtualArena
from ebbtide.srt.memory_saver.virtual_memory.cuda import CudaHostPinning
from ebbtide.srt.memory_saver.virtual_memory.host import HostVirtualMemory

logger = logging.getLogger(__name__)

# The buffer is allocated, pinned and copied in pieces of this size, so that no call blocks the driver for
# long. A copy may not cross from one pinned piece into the next, so all three use the same pieces.
PIECE_BYTES = 256 << 20


class HostBuffer:
    """Host memory for copies from and to a device, pinned if that makes copies faster.

    Args:
        num_bytes: taken by `allocate`, and kept until `close`.
        pinning: None: pinning would gain nothing.

    Attributes:
        is_pinned: whether copies from and to a device are asynchronous.
    """

    def __init__(self, tag: MemoryTag, num_bytes: int, pinning: CudaHostPinning | None = None) -> None:
        self._arena = VirtualArena(tag, num_bytes, HostVirtualMemory(), PIECE_BYTES)
        self._pinning = pinning
        self._pins = ExitStack()  # unpins the pieces
        self.is_pinned = False

    @property
    def num_bytes(self) -> int:
        return self._arena.resident_bytes

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor at `offset` bytes, which may not cross a multiple of `PIECE_BYTES`."""
        return self._arena.view(offset, shape, dtype)

    def allocate(self) -> None:
        """Take and pin the memory, unless that is done already. OutOfDeviceMemory: no room; none is taken."""
        self._arena.resume()
        if self._pinning is None or self.is_pinned:
            return
        try:
            with ExitStack() as pins:
                for offset in range(0, self._arena.virtual_bytes, PIECE_BYTES):
                    address = self._arena.address + offset
                    self._pinning.pin(address, min(PIECE_BYTES, self._arena.virtual_bytes - offset))
                    pins.callback(self._pinning.unpin, address)
                self._pins = pins.pop_all()
            self.is_pinned = True
        except EngineError as error:
            logger.warning("host copy of %s: not pinned, copies will be slower: %s", self._arena.tag, error)
            self._pinning = None

    def synchronize(self) -> None:
        if self._pinning is not None:
            self._pinning.synchronize()

    def close(self) -> None:
        self._pins.close()
        self.is_pinned = False
        self._arena.close()


class ArenaMemory:
    """An arena whose contents are lost when it is released.

    Args:
        trim: called after a release; `Device.trim`: it frees memory that torch keeps for reuse.
        is_needed: whether a forward pass needs this memory.
    """

    keeps_contents: bool = False

    def __init__(
        self, arena: Arena, trim: Callable[[], None] | None = None, *, is_needed: bool = True
    ) -> None:
        self.is_needed = is_needed
        self._arena = arena
        self._trim = trim

    @property
    def virtual_bytes(self) -> int:
        return self._arena.virtual_bytes

    @property
    def resident_bytes(self) -> int:
        return self._arena.resident_bytes

    @property
    def backup_bytes(self) -> int:
        return 0

    def prepare_release(self, keep: bool) -> None:
        """Do nothing: the contents do not survive a release."""
        assert not keep, "only weights are kept"

    def release(self) -> int:
        freed_bytes = self._arena.release()
        if self._trim is not None:
            self._trim()
        return freed_bytes

    def resume(self) -> int:
        return self._arena.resume()


class BackedUpMemory(ArenaMemory):
    """An arena whose contents can be kept in host memory while it is released.

    The host memory is allocated once, and kept. Contents that have not changed are not copied again.

    Args:
        generation: gives a number that rises with every change of the contents.
        pinning: of the device; None: no pinning. With pinning and `keeps_contents`, the host memory is
            allocated in the background from now on, since pinning takes seconds.
        keeps_contents: whether a release keeps the contents if its request does not say.
    """

    def __init__(
        self,
        arena: Arena,
        generation: Callable[[], int],
        pinning: CudaHostPinning | None = None,
        *,
        keeps_contents: bool,
    ) -> None:
        super().__init__(arena)
        self.keeps_contents = keeps_contents
        self._is_saved = False
        self._generation = generation
        self._held_generation: int | None = None
        self._buffer = HostBuffer(arena.tag, arena.num_bytes, pinning)
        self._allocation: threading.Thread | None = None
        if keeps_contents and pinning is not None:
            self._allocation = threading.Thread(target=self._allocate, name="host-backup", daemon=True)
            self._allocation.start()

    @property
    def backup_bytes(self) -> int:
        return self._buffer.num_bytes

    def prepare_release(self, keep: bool) -> None:
        """Copy the contents to the host if they are to be kept, unless this generation is there already."""
        if keep:
            self._arena.require_resident()
            self._save(self._generation())
        self._is_saved = keep

    def resume(self) -> int:
        mapped_bytes = super().resume()
        if self._is_saved:
            self._copy(to_host=False)
        return mapped_bytes

    def _save(self, generation: int) -> None:
        if generation == self._held_generation:
            return
        if self._allocation is not None:
            self._allocation.join()
        self._buffer.allocate()
        self._held_generation = None  # until the copy is complete
        self._copy(to_host=True)
        self._held_generation = generation

    def _copy(self, *, to_host: bool) -> None:
        for offset in range(0, self._arena.num_bytes, PIECE_BYTES):
            shape = (min(PIECE_BYTES, self._arena.num_bytes - offset),)
            piece, room = (part.view(offset, shape, torch.uint8) for part in (self._arena, self._buffer))
            source, destination = (piece, room) if to_host else (room, piece)
            destination.copy_(source, non_blocking=self._buffer.is_pinned)
        self._buffer.synchronize()

    def _allocate(self) -> None:
        with suppress(OutOfDeviceMemory):  # the first save tries again, and reports it
            self._buffer.allocate()


class JointMemory:
    """Two memories of one tag, released and resumed together. The second always keeps its contents.

    Args:
        first: the main memory of the tag; the release request says whether its contents are kept.
    """

    is_needed = True

    def __init__(self, first: BackedUpMemory, second: BackedUpMemory) -> None:
        self.keeps_contents = first.keeps_contents
        self._first, self._second = first, second

    @property
    def virtual_bytes(self) -> int:
        return self._first.virtual_bytes + self._second.virtual_bytes

    @property
    def resident_bytes(self) -> int:
        return self._first.resident_bytes + self._second.resident_bytes

    @property
    def backup_bytes(self) -> int:
        return self._first.backup_bytes + self._second.backup_bytes

    def prepare_release(self, keep: bool) -> None:
        self._second.prepare_release(keep=True)
        self._first.prepare_release(keep)

    def release(self) -> int:
        return self._first.release() + self._second.release()

    def resume(self) -> int:
        """As `ArenaMemory.resume`: both or neither."""
        mapped_bytes = self._second.resume()
        try:
            return mapped_bytes + self._first.resume()
        except OutOfDeviceMemory:
            self._second.release()
            raise
