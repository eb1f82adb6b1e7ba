"""What an engine process is to the system: its open files, its heap, and whether it sees torch."""

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

# More than the interpreter freezes by itself: Python 3.12 some hundreds of objects that never die.
NUM_FROZEN_BY_OWNER: Final = 10_000


def freeze_heap() -> None:
    """Take what the process has built so far out of the collector's sight.

    To be called when a process has started. A full collection would walk all of it, modules included, for
    tens of milliseconds, in the middle of a step or of everybody's streams.
    """
    gc.collect()
    gc.freeze()


class HeapHold:
    """Freezes the older objects of a process, so that garbage collections skip them, while anybody is inside.

    It is for a process that is not ours, so it thaws afterwards: cycles among those objects that were dropped
    in the meantime are collected then. Freezing takes no time. If the process's owner has frozen the heap
    itself, it stays frozen.
    """

    def __init__(self) -> None:
        self._num_in = 0
        self._is_frozen = False

    def enter(self) -> None:
        """Somebody comes in, who calls `leave`."""
        self._num_in += 1
        if self._num_in == 1 and gc.get_freeze_count() < NUM_FROZEN_BY_OWNER:
            self._is_frozen = True
            gc.freeze()

    def leave(self) -> None:
        self._num_in -= 1
        if self._num_in == 0:
            self.thaw()

    def thaw(self) -> None:
        """Give the heap back, whoever is in. Idempotent."""
        if self._is_frozen:
            self._is_frozen = False
            gc.unfreeze()


class GcClock:
    """How long the collector stops this process, from `start` to `stop`. No two collections run at once.

    `paused_s`: in seconds, all pauses together.
    """

    def __init__(self) -> None:
        self.paused_s = 0.0
        self._began_s = 0.0

    def start(self) -> None:
        gc.callbacks.append(self._note)

    def stop(self) -> None:
        """Idempotent."""
        if self._note in gc.callbacks:
            gc.callbacks.remove(self._note)

    def add(self, generation: int, pause_s: float) -> None:
        """A collection is over. It may have run wherever something is allocated: this must take no lock."""
        self.paused_s += pause_s

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began_s = time.perf_counter()
        else:
            self.add(info["generation"], time.perf_counter() - self._began_s)


# The kernel refuses any limit above this one, also a hard limit from before it was lowered.
SYSTEM_LIMIT = Path("/proc/sys/fs/nr_open")


def raise_file_limit() -> None:
    """Raise it to what the system allows.

    Every client of a server, and every block of shared memory of a payload, is a file that is held open.
    What is usual, 1024, is less than the streams of a rollout.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    system = int(SYSTEM_LIMIT.read_text())
    limit = system if hard == resource.RLIM_INFINITY else min(hard, system)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


@contextmanager
def torch_hidden(trust_remote_code: bool) -> Iterator[None]:
    """Within, torch counts as not installed; transformers, if it is imported here, does without for good.

    To be used in processes of the engine's own. Nothing is hidden where either is imported already, nor from
    code that comes with a model.
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
