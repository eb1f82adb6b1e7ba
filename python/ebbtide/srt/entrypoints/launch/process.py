"""The inside of an engine process: how it begins, gives signs of life, and ends with its parent.

`launcher` starts it as `python -m` with its arguments over a pipe. The start method of multiprocessing would
import the caller's `__main__` once more: a script without a guard would start engines without end.
Imports of ours wait until the caller's `sys.path` is in place.

A process that is stopped, or whose threads all wait for one that never lets go, cannot say so itself. Those
that wait for it notice first, and would be blamed: so its parent looks for signs of life.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import logging
import multiprocessing
import os
import select
import shutil
import signal
import sys
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ebbtide.srt.config import EngineConfig
    from ebbtide.srt.managers.wire.channel import ChannelAddresses

logger = logging.getLogger(__name__)

# A process that gets it writes where its threads stand.
DUMP_SIGNAL = signal.SIGUSR1
# They go to all processes of a terminal, a service or a job, and are the parent's affair alone: it may have
# requests to serve to their end.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
LOOKS_PER_LIMIT: Final = 10
_BEATS_PER_LIMIT: Final = 2 * LOOKS_PER_LIMIT


@dataclass(frozen=True)
class ProcessStart:
    """What a process gets at its start.

    Attributes:
        target: `module:function`, called as `function(config, addresses, ready)`. It sends dictionaries over
            `ready`: any number with `status: "stage"`, `what`, `number` and `total`, as `StageLine.show` has
            them, then one with `status: "ready"`, or `status: "failed"` and a `message`.
        socket_folder: removed by whoever outlives the parent, if the parent could not.
    """

    name: str
    target: str
    config: EngineConfig
    addresses: ChannelAddresses
    socket_folder: str


def child_main(start: ProcessStart, ready: Connection, pulse: int) -> int:
    """Run the target; returns the exit status. What it fails with goes to the parent over `ready`."""
    multiprocessing.current_process().name = start.name
    # The kernel keeps 15 letters of a name: a rank is "ebb-dp0-tp1".
    Path("/proc/self/comm").write_text(f"ebb-{start.name.removeprefix('scheduler-')}"[:15])
    from ebbtide.srt.entrypoints.launch.console import configure_logging
    from ebbtide.srt.errors import EbbtideError

    configure_logging(start.config.server_args, start.name)
    faulthandler.register(DUMP_SIGNAL, all_threads=True)
    start_beating(pulse, start.config.server_args.watchdog_timeout)

    try:
        module, function = start.target.split(":")
        run = getattr(importlib.import_module(module), function)
        gc.freeze()
        gc.enable()
        run(start.config, start.addresses, ready)
    except EbbtideError as error:
        _last_words(ready, "failed", str(error))
        return 1
    except Exception as error:
        logger.critical("the process ends", exc_info=error)
        _last_words(ready, "crashed", f"{type(error).__name__}: {error}")
        return 1
    return 0


def _last_words(ready: Connection, status: str, message: str) -> None:
    try:
        ready.send({"status": status, "message": message})
    except OSError:
        logger.error("the parent process has ended and will not read: %s", message)


def start_beating(descriptor: int, limit_s: float) -> None:
    """Give signs of life to the parent's `Pulse`, from a thread, until the process ends.

    `limit_s`: the shortest limit that a `PulseWatch` of the parent has.
    """

    def beat() -> None:
        while True:
            os.eventfd_write(descriptor, 1)
            time.sleep(limit_s / _BEATS_PER_LIMIT)

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()


class Pulse:
    """The signs of life of one process, as its parent sees them; `num_missed`: looks in a row without one.

    They are counted by the kernel: a parent that does not look keeps nobody waiting.
    """

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.num_missed = 0

    def look(self) -> None:
        try:
            os.eventfd_read(self.descriptor)
            self.num_missed = 0
        except BlockingIOError:
            self.num_missed += 1

    def close(self) -> None:
        os.close(self.descriptor)


class ParentWatch:
    """Ends this process as soon as its parent has, and removes the sockets, which the parent could not.

    So too where the other end of the pipe is closed: the parent was interrupted, and has lost its object.
    """

    def __init__(self, parent_pid: int, pipe: int) -> None:
        self.socket_folder: str | None = None
        try:
            self._parent = os.pidfd_open(parent_pid)
        except ProcessLookupError:
            self._end()
        # The id was the parent's when it was opened, if it is still: ids are used again.
        if os.getppid() != parent_pid:
            self._end()
        self._ends = select.poll()
        self._ends.register(self._parent, select.POLLIN)
        self._ends.register(pipe, 0)  # it says of every one that it hangs up
        threading.Thread(target=self._wait, name="parent-watch", daemon=True).start()

    def _wait(self) -> None:
        self._ends.poll()
        self._end()

    def _end(self) -> None:
        if self.socket_folder is not None:
            shutil.rmtree(self.socket_folder, ignore_errors=True)
        os._exit(1)


def main() -> int:
    """Take over from `launcher`.

    Arguments are its process id, the descriptors of the pipe and of the signs of life, and a name for `ps`.
    """
    # What is imported stays: to look through it for garbage, again and again, takes a sixth of a start.
    gc.disable()
    # Imports take many seconds: the parent may end in the middle of them.
    descriptor, pulse = int(sys.argv[2]), int(sys.argv[3])
    watch = ParentWatch(int(sys.argv[1]), descriptor)
    for inherited in (descriptor, pulse):
        os.set_inheritable(inherited, False)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # They were blocked until now.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    pipe: Connection = Connection(descriptor)
    try:
        sys.path[:] = pipe.recv()
        for module in pipe.recv():
            # What cannot be imported says so where it is needed.
            with contextlib.suppress(Exception):
                importlib.import_module(module)
        start = pipe.recv()
    except EOFError:
        return 1
    watch.socket_folder = start.socket_folder
    # The module is imported, not used as `__main__`, so that classes and loggers exist once.
    process = importlib.import_module("ebbtide.srt.entrypoints.launch.process")
    return process.child_main(start, pipe, pulse)  # type: ignore[no-any-return]


if __name__ == "__main__":
    sys.exit(main())
