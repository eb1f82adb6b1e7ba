"""Memory of trainers that stays mapped between updates, as long as they say that it stays where it is.

A payload that says so is kept with its mappings: the next one of the same bytes finds the memory open and
itself decoded. The trainer holds a lock on the file in which its references are counted, and lets go of it
where the memory goes, or with its own end, however that comes.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

from ebbtide.formats.shared_memory import object_path
from ebbtide.formats.tensor_refs import CudaStorageRef
from ebbtide.srt.errors import EngineError
from ebbtide.srt.weight_sync.cuda_memory import CudaIpc, Mapping

logger = logging.getLogger(__name__)

# The buckets of one trainer, and some more: what comes after them takes the place of the oldest.
MAX_PAYLOADS: Final = 256
# How soon memory is let go of that a trainer does not hold on to any more.
LOOK_S: Final = 1.0


class KeptPayload:
    """A payload whose memory stays mapped.

    Attributes:
        refs: to the sender's memory.
        decoded: what the payload describes.
        mapped: see `BorrowedMemory`, in part until it was opened for the first time.
        ends: of the mappings, see `check_extent`.
        notes: what follows from the payload and from where its memory is mapped, for who works it out.
    """

    def __init__(self, refs: Sequence[CudaStorageRef], decoded: object) -> None:
        self.refs = refs
        self.decoded = decoded
        self.mapped: dict[object, Mapping] = {}
        self.ends: dict[int, int] = {}
        self.notes: dict[object, Any] = {}
        self.num_users = 0

    @property
    def has_ended(self) -> bool:
        """Whether nobody holds on to its memory."""
        return not all(is_held(name) for name in {ref.counter_file for ref in self.refs})


class KeptMemory:
    """The payloads that are kept on a rank, the least recently used first."""

    def __init__(self, ipc: CudaIpc) -> None:
        self._ipc = ipc
        self._payloads: dict[bytes, KeptPayload] = {}
        # Ends are seen by a thread, while the loop may be asleep.
        self._lock = threading.Lock()
        self._watch: threading.Thread | None = None

    def __len__(self) -> int:
        return len(self._payloads)

    def take(self, data: bytes) -> KeptPayload | None:
        """The payload of these bytes, in use until `give_back`; None: it is not kept."""
        with self._lock:
            payload = self._payloads.pop(data, None)
            if payload is None:
                return None
            if payload.num_users == 0 and payload.has_ended:
                self._unmap([payload])
                return None
            self._payloads[data] = payload
            payload.num_users += 1
            return payload

    def add(self, data: bytes, refs: Sequence[CudaStorageRef], decoded: object) -> KeptPayload | None:
        """Keep a payload, in use until `give_back`; None: its sender holds nothing."""
        payload = KeptPayload(refs, decoded)
        if not refs or payload.has_ended:
            return None
        payload.num_users = 1
        with self._lock:
            idle = [key for key, one in self._payloads.items() if one.num_users == 0]
            num_over = len(self._payloads) + 1 - MAX_PAYLOADS
            self._unmap([self._payloads.pop(key) for key in idle[: max(0, num_over)]])
            self._payloads[data] = payload
            if self._watch is None:
                self._watch = threading.Thread(target=self._look, name="kept-memory", daemon=True)
                self._watch.start()
        return payload

    def give_back(self, payload: KeptPayload) -> None:
        """It is not in use any more."""
        with self._lock:
            payload.num_users -= 1

    def drop_ended(self) -> None:
        """Unmap what nobody holds on to."""
        with self._lock:
            ended = [key for key, one in self._payloads.items() if one.num_users == 0 and one.has_ended]
            self._unmap([self._payloads.pop(key) for key in ended])

    def _look(self) -> None:
        self._ipc.enter_thread()
        while True:
            time.sleep(LOOK_S)
            self.drop_ended()
            with self._lock:
                if not self._payloads:
                    self._watch = None
                    return

    def _unmap(self, payloads: Iterable[KeptPayload]) -> None:
        for payload in payloads:
            while payload.mapped:
                _, mapping = payload.mapped.popitem()
                try:
                    mapping.close()
                except EngineError as error:
                    logger.warning("memory that a trainer has given up stays mapped: %s", error)


def is_held(counter_file: bytes) -> bool:
    """Whether a sender holds the lock on a file of counts."""
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
