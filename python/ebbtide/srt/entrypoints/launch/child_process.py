"""One process of the engine, as the process that starts it sees it."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ebbtide
from ebbtide.srt.entrypoints.launch.heartbeat import Pulse
from ebbtide.srt.entrypoints.launch.process import DUMP_SIGNAL, STOP_SIGNALS, ProcessStart
from ebbtide.srt.errors import HUNG_EXIT_STATUS, ConfigurationError, EngineError

logger = logging.getLogger(__name__)

# The libraries under torch read these when they are loaded; the user's own settings win.
LIBRARY_DEFAULTS = {
    # Threads that spin while they wait for each other stand still where another process needs a core.
    "OMP_WAIT_POLICY": "passive",
    # oneDNN keeps what it compiled for each number of rows, by default a thousand. Batches come in all
    # sizes: that was 10 MB per 1,000 requests.
    "LRU_CACHE_CAPACITY": "64",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
}


class ChildProcess:
    """One process of the engine, and the pipe over which it says how its start went.

    Args:
        defaults: what its environment holds unless the user's own says otherwise.
        environment: what its environment holds in any case.
        preload: modules that it imports while it waits for `begin`.

    Attributes:
        pulse: its signs of life, from `begin` on.
    """

    def __init__(
        self,
        name: str,
        defaults: Mapping[str, str],
        environment: Mapping[str, str],
        preload: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.pipe, theirs = multiprocessing.Pipe()
        self.pulse = Pulse()
        with theirs:
            inherited = theirs.fileno(), self.pulse.descriptor
            self._popen = _spawn(name, inherited, {**LIBRARY_DEFAULTS, **defaults}, environment)
        self._send(sys.path)
        self._send(preload)
        self.sentinel = os.pidfd_open(self._popen.pid)

    def begin(self, start: ProcessStart) -> None:
        """Tell it what it is."""
        self._send(start)

    def _send(self, message: object) -> None:
        try:
            self.pipe.send(message)
        except OSError:
            # It has died already: `receive_ready` says how.
            logger.debug("%s took no arguments", self.name)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def receive_ready(self) -> dict[str, Any]:
        """What it reports of the engine when it is ready. Blocks.

        Raises:
            ConfigurationError: it cannot start so.
            EngineError: it ended without saying why, or by an error of ours.
        """
        try:
            report: dict[str, Any] = self.pipe.recv()
        except (EOFError, OSError):
            raise EngineError(f"the start failed: {self.describe_end()}") from None
        match report.pop("status"):
            case "ready":
                return report
            case "failed":
                raise ConfigurationError(report["message"])
            case _:
                raise EngineError(f"the start of the {self.name} process failed: {report['message']}")

    def describe_end(self) -> str:
        """How it ended, with its last words if it left any. Waits for the end."""
        status = self._popen.wait()
        if status < 0:
            return f"the {self.name} process was ended by {signal.Signals(-status).name}"
        return f"the {self.name} process ended with exit code {status}{self._last_words()}"

    def was_ended_by_signal(self, timeout_s: float) -> bool:
        """Whether it has ended, or ends within that time, and not by itself."""
        try:
            return self._popen.wait(timeout_s) < 0
        except subprocess.TimeoutExpired:
            return False

    @property
    def has_ended(self) -> bool:
        return self._popen.poll() is not None

    @property
    def was_hung(self) -> bool:
        """Whether its own watchdog has ended it."""
        return self._popen.poll() == HUNG_EXIT_STATUS

    def dump_stacks(self) -> None:
        """Ask it to write where its threads stand to its standard error. One that is stopped does not."""
        # Stacks do not say whose they are.
        logger.error("where every thread of the %s process stands:", self.name)
        self._popen.send_signal(DUMP_SIGNAL)

    def kill(self) -> None:
        """End it. It has nothing to bring to an end itself, and ignores the signals that ask for that."""
        self._popen.kill()

    def close(self) -> None:
        """Wait until it has gone, and close what it was connected by."""
        self._popen.wait()
        self.pipe.close()
        self.pulse.close()
        os.close(self.sentinel)

    def _last_words(self) -> str:
        try:
            return f": {self.pipe.recv()['message']}" if self.pipe.poll() else ""
        except (EOFError, OSError):
            return ""


def _spawn(
    name: str, descriptors: Sequence[int], defaults: Mapping[str, str], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    whole = {**defaults, **os.environ, **environment}
    root = str(Path(ebbtide.__file__).parents[1])
    whole["PYTHONPATH"] = os.pathsep.join(filter(None, [root, whole.get("PYTHONPATH")]))
    # Blocked while the interpreter starts, ignored from then on: the mask is inherited.
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    arguments = [str(os.getpid()), *map(str, descriptors), name]
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "ebbtide.srt.entrypoints.launch.process", *arguments],
            stdin=subprocess.DEVNULL,
            pass_fds=descriptors,
            env=whole,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
