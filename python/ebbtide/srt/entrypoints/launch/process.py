"""The main function of an engine process. The process gives signs of life, and ends with its parent.

`launcher` starts it with `python -m` and sends its arguments over a pipe. multiprocessing's start method
would import the caller's `__main__` again: a script without a guard would start engines without end. The
package's modules are imported only after the caller's `sys.path` has been set.

A process that is stopped or deadlocked cannot report that. Others that wait for it would time out first, and
be blamed. So its parent checks its signs of life.
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

# Makes a process write the stacks of its threads.
DUMP_SIGNAL = signal.SIGUSR1
# Ignored by children: terminals and services send them to all processes, but only the parent handles them,
# for instance by finishing requests first.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
LOOKS_PER_LIMIT: Final = 10
_BEATS_PER_LIMIT: Final = 2 * LOOKS_PER_LIMIT


@dataclass(frozen=True)
class ProcessStart:
    """The arguments of a process.

    Attributes:
        name: of the process, in logs.
        target: `module:function`, called as `function(config, addresses, ready)`. It sends dictionaries over
            `ready`: any number with `status: "stage"` and the arguments of `StageLine.show`: `what`, `number`
            and `total`; then one with `status: "ready"` and facts, or `status: "failed"` and a `message`.
        addresses: of the replica's channels.
        socket_folder: the process removes it if its parent was killed.
    """

    name: str
    target: str
    config: EngineConfig
    addresses: ChannelAddresses
    socket_folder: str


def child_main(start: ProcessStart, ready: Connection, pulse: int) -> int:
    """Run the target. Returns the exit status. An error is sent to the parent over `ready`."""
    multiprocessing.current_process().name = start.name
    # The kernel keeps 15 characters of the name, e.g. "ebb-dp0-tp1".
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
    """Start a thread that gives signs of life until the process ends.

    `descriptor`: of the parent's `Pulse`. `limit_s`: the shortest limit of the parent's `PulseWatch`es.
    """

    def beat() -> None:
        while True:
            os.eventfd_write(descriptor, 1)
            time.sleep(limit_s / _BEATS_PER_LIMIT)

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()


class Pulse:
    """The signs of life of one process, for its parent. `num_missed`: checks in a row without a sign.

    An eventfd counts them, so the process never waits for its parent.
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
    """Ends this process when its parent ends, and removes the sockets, which a killed parent could not do.

    It also ends when the parent closes the pipe, for instance because its start was interrupted.
    """

    def __init__(self, parent_pid: int, pipe: int) -> None:
        self.socket_folder: str | None = None
        try:
            self._parent = os.pidfd_open(parent_pid)
        except ProcessLookupError:
            self._end()
        # Process ids are reused: the pidfd is the parent's only if that still lives.
        if os.getppid() != parent_pid:
            self._end()
        self._ends = select.poll()
        self._ends.register(self._parent, select.POLLIN)
        self._ends.register(pipe, 0)  # hang-ups are always reported
        threading.Thread(target=self._wait, name="parent-watch", daemon=True).start()

    def _wait(self) -> None:
        self._ends.poll()
        self._end()

    def _end(self) -> None:
        if self.socket_folder is not None:
            shutil.rmtree(self.socket_folder, ignore_errors=True)
        os._exit(1)


def main() -> int:
    """Run a process that `launcher` has started.

    Command line: the parent's process id, the descriptors of the pipe and of the `Pulse`, a name for `ps`.
    """
    # Imported objects stay: garbage collections during the imports would take a sixth of the start.
    gc.disable()
    # Watch the parent before the imports, which take many seconds.
    descriptor, pulse = int(sys.argv[2]), int(sys.argv[3])
    watch = ParentWatch(int(sys.argv[1]), descriptor)
    for inherited in (descriptor, pulse):
        os.set_inheritable(inherited, False)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # The parent has blocked them until here.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    pipe: Connection = Connection(descriptor)
    try:
        sys.path[:] = pipe.recv()
        for module in pipe.recv():
            # An import that fails is repeated where the module is needed, and raises there.
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
