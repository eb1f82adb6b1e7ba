"""Settings of an engine process: its limit of open files, garbage collection, and hiding torch."""

from __future__ import annotations

import gc
import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

# More than Python 3.12 itself freezes, which is some hundreds of objects.
NUM_FROZEN_BY_OWNER: Final = 10_000


def freeze_heap() -> None:
    """Hide all existing objects from the garbage collector. Call it when a process has started.

    Else a full collection would scan all of them, modules included, for tens of milliseconds, which delays a
    step or all streams.
    """
    gc.collect()
    gc.freeze()


class HeapHold:
    """Freezes the older objects of a process, so that garbage collections skip them, while it has users.

    It is for a process that is not ours, so it thaws afterwards: cycles among those objects that were dropped
    in the meantime are collected then. Freezing takes no time. If the process's owner has frozen the heap
    itself, it stays frozen.
    """

    def __init__(self) -> None:
        self._num_in = 0
        self._is_frozen = False

    def enter(self) -> None:
        """Add a user, which must call `leave`."""
        self._num_in += 1
        if self._num_in == 1 and gc.get_freeze_count() < NUM_FROZEN_BY_OWNER:
            self._is_frozen = True
            gc.freeze()

    def leave(self) -> None:
        self._num_in -= 1
        if self._num_in == 0:
            self.thaw()

    def thaw(self) -> None:
        """Unfreeze the heap, even if there are users. Idempotent."""
        if self._is_frozen:
            self._is_frozen = False
            gc.unfreeze()


class GcClock:
    """Measures the pauses of this process by the garbage collector, from `start` to `stop`.

    `paused_s`: sum of all pauses.
    """

    def __init__(self) -> None:
        self.paused_s = 0.0
        self._began_s = 0.0

    def start(self) -> None:
        gc.callbacks.append(self._note)

    def stop(self) -> None:
        """Stop measuring. Idempotent."""
        if self._note in gc.callbacks:
            gc.callbacks.remove(self._note)

    def add(self, generation: int, pause_s: float) -> None:
        """Add the pause of a collection. It must take no lock, since collections run at any allocation."""
        self.paused_s += pause_s

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began_s = time.perf_counter()
        else:
            self.add(info["generation"], time.perf_counter() - self._began_s)


# The kernel's limit of limits. A hard limit may be larger, if it was set before this one was lowered.
SYSTEM_LIMIT = Path("/proc/sys/fs/nr_open")


def raise_file_limit() -> None:
    """Raise the limit of open files to what the system allows.

    Every client of a server, and every shared memory block of a payload, is an open file. The usual limit,
    1024, is less than the streams of a rollout.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    system = int(SYSTEM_LIMIT.read_text())
    limit = system if hard == resource.RLIM_INFINITY else min(hard, system)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


@contextmanager
def torch_hidden(trust_remote_code: bool) -> Iterator[None]:
    """Within, torch counts as not installed. If transformers is imported here, it stays without torch.

    Use it only in the engine's own processes. Does nothing if either is already imported, or if code that
    comes with the model may run.
    """
    if trust_remote_code or not sys.modules.keys().isdisjoint({"torch", "transformers"}):
        yield
        return
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["torch"]
