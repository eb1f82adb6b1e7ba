"""Starting the engine's processes, watching them, and ending them."""

from __future__ import annotations

import logging
import multiprocessing.connection
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import ebbtide
from ebbtide.srt.config import EngineConfig
from ebbtide.srt.entrypoints.process import ProcessStart
from ebbtide.srt.errors import ConfigurationError, EngineError
from ebbtide.srt.managers.channel import ChannelAddresses

logger = logging.getLogger(__name__)

# By name: this process need not import what only the others run.
SCHEDULER = {"scheduler": "ebbtide.srt.managers.scheduler_process:run_scheduler_process"}
DETOKENIZER = {"detokenizer": "ebbtide.srt.managers.detokenizer_manager:run_detokenizer_process"}

# What the kernel takes as the path of a Unix socket.
MAX_SOCKET_PATH_BYTES = 107
# What the libraries under torch read when they are loaded; the user's own settings win.
LIBRARY_DEFAULTS = {
    # Threads that spin while they wait for each other stand still where another process needs a core.
    "OMP_WAIT_POLICY": "passive",
    # oneDNN keeps what it compiled for each number of rows, by default a thousand. Batches come in all
    # sizes: that was 10 MB per 1,000 requests.
    "LRU_CACHE_CAPACITY": "64",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
}
# How torch_memory_saver gets at allocations, where it is the backend: "torch" (unless given), through torch's
# allocator in the regions that are asked for; "preload", by a library that is loaded ahead of CUDA's own.
TMS_HOOK_MODE = "EBBTIDE_TMS_HOOK_MODE"
TERMINATE_TIMEOUT_S = 5.0


class ChildProcess:
    """One process of the engine, and the pipe over which it says how its start went."""

    def __init__(self, start: ProcessStart) -> None:
        self.name = start.name
        self.pipe, theirs = multiprocessing.Pipe()
        with theirs:
            self._popen = _spawn(start.name, theirs, _library_environment(start))
        try:
            self.pipe.send(sys.path)
            self.pipe.send(start)
        except OSError:
            # It has died already: `receive` says how.
            logger.debug("%s took no arguments", self.name)
        self.sentinel = os.pidfd_open(self._popen.pid)

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

    def terminate(self) -> None:
        self._popen.terminate()

    def join(self, deadline_s: float) -> None:
        """Wait for the end, until `deadline_s` on the monotonic clock; then force it."""
        try:
            self._popen.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            logger.warning("the %s process did not end when asked: it is killed", self.name)
            self._popen.kill()
            self._popen.wait()

    def close(self) -> None:
        self.pipe.close()
        os.close(self.sentinel)

    def _last_words(self) -> str:
        try:
            return f": {self.pipe.recv()['message']}" if self.pipe.poll() else ""
        except (EOFError, OSError):
            return ""


def _library_environment(start: ProcessStart) -> dict[str, str]:
    """What one process needs in its environment and the others do not.

    Raises:
        ConfigurationError: the hook mode is none, or the library is not there.
    """
    mode = os.environ.get(TMS_HOOK_MODE, "torch")
    if mode not in ("torch", "preload"):
        raise ConfigurationError(f"{TMS_HOOK_MODE}: expected torch or preload, got {mode!r}")
    if mode == "torch" or start.name not in SCHEDULER or start.config.memory.backend != "torch_memory_saver":
        return {}
    # It imports torch, which this process may do without.
    from ebbtide.srt.memory_saver.torch_memory_saver_adapter import preload_environment

    return preload_environment()


def _spawn(name: str, pipe: Connection, extra: dict[str, str]) -> subprocess.Popen[bytes]:
    environment = LIBRARY_DEFAULTS | os.environ | extra
    root = str(Path(ebbtide.__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
    # Ctrl-C while the interpreter starts must not kill it with a traceback: the mask is inherited.
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "ebbtide.srt.entrypoints.process", name, str(pipe.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[pipe.fileno()],
            env=environment,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


class EngineProcesses:
    """The processes of one engine and the folder of their sockets. `shutdown` ends all of it.

    Args:
        targets: name → `module:function`; see `ProcessStart`. None: those that the config asks for.

    Attributes:
        addresses: where each of them, and the API process, listens.
    """

    def __init__(self, config: EngineConfig, targets: Mapping[str, str] | None = None) -> None:
        if targets is None:
            targets = SCHEDULER if config.model.skip_tokenizer_init else SCHEDULER | DETOKENIZER
        self._owner_pid = os.getpid()
        self._lock = threading.Lock()
        self._children: list[ChildProcess] = []
        self._watcher: threading.Thread | None = None
        self._stop_reader, self._stop_writer = multiprocessing.Pipe(duplex=False)
        self._folder = tempfile.mkdtemp(prefix="ebbtide-")
        try:
            self.addresses = _addresses(self._folder)
            for name, target in targets.items():
                start = ProcessStart(name, target, config, self.addresses, self._owner_pid, self._folder)
                self._children.append(ChildProcess(start))
        except BaseException:
            self.shutdown()
            raise

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name."""
        return {child.name: child.pid for child in self._children}

    def wait_ready(self) -> dict[str, Any]:
        """Return when all are ready, with what they report of the engine, e.g. `max_total_num_tokens`.

        Raises:
            ConfigurationError: the engine cannot start so; the message of the process that says it.
            EngineError: a process died. In either case none is left.
        """
        facts: dict[str, Any] = {}
        starting: dict[Any, ChildProcess] = {child.pipe: child for child in self._children}
        try:
            while starting:
                for pipe in multiprocessing.connection.wait(list(starting)):
                    facts |= starting.pop(pipe).receive_ready()
        except BaseException:
            self.shutdown()
            raise
        return facts

    def watch(self, on_death: Callable[[str], None]) -> None:
        """Call `on_death` with what happened, from a thread, as soon as one of them has ended by itself."""
        self._watcher = threading.Thread(
            target=self._watch, args=(on_death,), name="engine-watch", daemon=True
        )
        self._watcher.start()

    def shutdown(self) -> None:
        """End them, wait until they are gone, remove the sockets. Idempotent, and safe from any thread."""
        # A fork of the owner has inherited this object, but not the processes.
        if os.getpid() != self._owner_pid:
            return
        with self._lock:
            self._stop_writer.close()
            if self._watcher is not None and self._watcher is not threading.current_thread():
                self._watcher.join()
            for child in self._children:
                child.terminate()
            deadline_s = time.monotonic() + TERMINATE_TIMEOUT_S
            for child in self._children:
                child.join(deadline_s)
                child.close()
            self._children = []
            shutil.rmtree(self._folder, ignore_errors=True)

    def _watch(self, on_death: Callable[[str], None]) -> None:
        children: dict[Any, ChildProcess] = {child.sentinel: child for child in self._children}
        # The closing of its other end makes the pipe readable.
        ended = multiprocessing.connection.wait([*children, self._stop_reader])
        if self._stop_reader not in ended:
            on_death(children[ended[0]].describe_end())


def _addresses(folder: str) -> ChannelAddresses:
    paths = [os.path.join(folder, name) for name in ("scheduler", "detokenizer", "manager")]
    if any(len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES for path in paths):
        raise ConfigurationError(
            f"TMPDIR is too long for sockets: {folder} leaves no room within {MAX_SOCKET_PATH_BYTES} bytes"
        )
    return ChannelAddresses(*(f"ipc://{path}" for path in paths))
