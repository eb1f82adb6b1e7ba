"""Child processes of the engine, in the process that starts them; some are started early.

Importing torch, and transformers for a tokenizer, takes most of an engine's start. So the ranks import them
while their parent still reads the configuration.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from ebbtide.srt.config import ParallelConfig
from ebbtide.srt.entrypoints.launch.console import StageLine
from ebbtide.srt.entrypoints.launch.placement import local_ranks
from ebbtide.srt.entrypoints.launch.process import (
    DUMP_SIGNAL,
    LOOKS_PER_LIMIT,
    STOP_SIGNALS,
    ProcessStart,
    Pulse,
)
from ebbtide.srt.errors import HUNG_EXIT_STATUS, ConfigurationError, EngineError
from ebbtide.srt.kernel_cache import kernel_variables
from ebbtide.srt.server_args import ServerArgs
from ebbtide.version import SOURCE_ROOT

logger = logging.getLogger(__name__)

# A process is lost after this many checks in a row without a sign of life. That is before the processes that
# wait for it, perhaps on other nodes, reach their time limit.
_LOOKS_UNTIL_LOST: Final = 8
# After this many, it is blamed if another process has already failed.
_LOOKS_UNTIL_SUSPECT: Final = 2
_STATES: Final = {
    "T": "it is stopped (SIGSTOP)",
    "t": "it is stopped by a debugger",
    "D": "it waits in the kernel",
}
_STOPPED: Final = frozenset("Tt")

# Environment variables that torch's libraries read when they are loaded. The user's settings win.
LIBRARY_DEFAULTS = {
    # Threads that spin while they wait for each other take cores from other processes.
    "OMP_WAIT_POLICY": "passive",
    # oneDNN caches compiled code for each number of rows, by default for 1,000. With batches of all sizes
    # memory grew by 10 MB per 1,000 requests.
    "LRU_CACHE_CAPACITY": "64",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
}


_KILLED = "; perhaps by the kernel, because memory ran out (see dmesg and the container's limit)"
# Modules that early processes import: all ranks, ranks with a tokenizer, and ranks on a GPU.
PRELOAD: Final = ("ebbtide.srt.managers.scheduler_process",)
PRELOAD_TOKENIZER: Final = ("transformers.models.auto.tokenization_auto", "xgrammar")
PRELOAD_CUDA: Final = (
    "cuda.bindings.driver",
    "flashinfer",
    "ebbtide.srt.layers.attention.flashinfer_kernels",
    "ebbtide.srt.layers.small_batch.kernels",
    "ebbtide.srt.model_executor.graph_runner",
    "ebbtide.srt.model_executor.sampling.kernel",
)


class ChildProcess:
    """A process of the engine, and the pipe over which it reports its start.

    Args:
        name: in logs and errors.
        defaults: environment variables, unless the user has set them.
        environment: environment variables, even if the user has set them.
        preload: modules that it imports while it waits for `begin`.

    Attributes:
        pulse: its signs of life.
        sentinel: a pidfd, which becomes readable when it ends.
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
        self._send(start)

    def _send(self, message: object) -> None:
        try:
            self.pipe.send(message)
        except OSError:
            # It has already died; `receive_report` raises the reason.
            logger.debug("%s took no arguments", self.name)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def receive_report(self, stages: StageLine) -> dict[str, Any] | None:
        """Wait for a report. Returns the facts of a process that is ready; None: it reported a stage.

        Raises:
            ConfigurationError: it cannot start with this configuration.
            EngineError: it has ended.
        """
        try:
            report: dict[str, Any] = self.pipe.recv()
        except (EOFError, OSError):
            raise EngineError(f"the start failed: {self.describe_end()}") from None
        match report.pop("status"):
            case "stage":
                stages.show(self.name, **report)
                return None
            case "ready":
                return report
            case "failed":
                raise ConfigurationError(report["message"])
            case _:
                raise EngineError(f"the start of the {self.name} process failed: {report['message']}")

    def describe_end(self) -> str:
        """Wait for the end, and say how it ended, with its last message if it sent one."""
        status = self._popen.wait()
        if status < 0:
            number = signal.Signals(-status)
            hint = _KILLED if number is signal.SIGKILL else ""
            return f"the {self.name} process was ended by {number.name}{hint}"
        return f"the {self.name} process ended with exit code {status}{self._last_words()}"

    @property
    def was_ended_by_signal(self) -> bool:
        """Whether it has ended by a signal."""
        status = self._popen.poll()
        return status is not None and status < 0

    @property
    def has_ended(self) -> bool:
        return self._popen.poll() is not None

    @property
    def was_hung(self) -> bool:
        """Whether its own watchdog has ended it."""
        return self._popen.poll() == HUNG_EXIT_STATUS

    def dump_stacks(self) -> None:
        """Make it write the stacks of its threads to stderr. A stopped process does not."""
        # The stacks do not contain the process's name.
        logger.error("where every thread of the %s process stands:", self.name)
        self._popen.send_signal(DUMP_SIGNAL)

    def kill(self) -> None:
        """Kill it. It needs no cleanup, and ignores SIGINT and SIGTERM."""
        self._popen.kill()

    def close(self) -> None:
        """Wait until it has ended, and close its pipe and descriptors."""
        self._popen.wait()
        self.pipe.close()
        self.pulse.close()
        os.close(self.sentinel)

    def _last_words(self) -> str:
        words = ""
        # Unread stages may come first, since kernels are compiled in the background after the start.
        with contextlib.suppress(EOFError, OSError):
            while self.pipe.poll():
                words = self.pipe.recv().get("message", words)
        return f": {words}" if words else ""


def _spawn(
    name: str, descriptors: Sequence[int], defaults: Mapping[str, str], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    whole = {**defaults, **os.environ, **environment}
    root = str(SOURCE_ROOT)
    whole["PYTHONPATH"] = os.pathsep.join(filter(None, [root, whole.get("PYTHONPATH")]))
    # The child inherits the mask: it blocks these signals until it has set them to be ignored.
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


class PulseWatch:
    """Checks the signs of life of an engine's processes.

    It counts checks, not seconds: if the whole machine is suspended for hours, no process is at fault.

    Args:
        limit_s: how long other processes wait for one of these. A process counts as lost a little earlier.
        flag: the limit's flag, for messages.
    """

    def __init__(self, children: Sequence[ChildProcess], limit_s: float, flag: str) -> None:
        self._children = children
        self._limit_s = limit_s
        self._flag = flag
        self._interval_s = limit_s / LOOKS_PER_LIMIT
        self._next_s = time.monotonic() + self._interval_s

    @property
    def left_s(self) -> float:
        return max(0.0, self._next_s - time.monotonic())

    def look(self) -> None:
        if self.left_s > 0:
            return
        self._next_s = time.monotonic() + self._interval_s
        for child in self._children:
            child.pulse.look()

    @property
    def lost(self) -> str | None:
        """A message about a process that is lost; None: there is none."""
        return self.suspect if self._silent(_LOOKS_UNTIL_LOST) else None

    @property
    def suspect(self) -> str | None:
        """A message about a silent process that others may have waited for; None: there is none.

        Stopped processes come first, since one that is silent for longer may only lack CPU time.
        """
        silent = self._silent(_LOOKS_UNTIL_SUSPECT)
        if not silent:
            return None
        states = {child.pid: _state_of(child.pid) for child in silent}
        child = max(silent, key=lambda child: (states[child.pid] in _STOPPED, child.pulse.num_missed))
        silent_s = child.pulse.num_missed * self._interval_s
        state = states[child.pid]
        return (
            f"the {child.name} process has not answered for {silent_s:g} s "
            f"({self._flag} {self._limit_s:g}){f': {_STATES[state]}' if state in _STATES else ''}"
        )

    def _silent(self, num_looks: int) -> list[ChildProcess]:
        return [
            child for child in self._children if child.pulse.num_missed >= num_looks and not child.has_ended
        ]


def _state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]


class EarlyProcesses:
    """Processes for the ranks of this node, started by the arguments alone, before the configuration is read.

    Leaving the block ends those that were not taken. With wrong arguments no process is started; reading the
    configuration then raises the error.
    """

    def __init__(self, args: ServerArgs) -> None:
        self._children: dict[str, ChildProcess] = {}
        if args.memory_saver_backend == "torch_memory_saver":
            return  # their environment depends on more than the arguments
        try:
            parallel = ParallelConfig(
                tp_size=args.tp_size, dp_size=args.dp_size, nnodes=args.nnodes, node_rank=args.node_rank
            )
            names = [rank_name(parallel, *rank) for rank in local_ranks(parallel)]
        except (ConfigurationError, TypeError, ZeroDivisionError):
            return
        on_gpu = args.device != "cpu" and Path("/dev/nvidiactl").exists()
        preload: tuple[str, ...] = PRELOAD
        preload += () if args.skip_tokenizer_init else PRELOAD_TOKENIZER
        preload += PRELOAD_CUDA if on_gpu else ()
        # FlashInfer reads the folder of its kernels when it is imported.
        kernels = kernel_variables(args.kernel_cache_dir)
        for name in names:
            self._children[name] = ChildProcess(name, thread_defaults(parallel), kernels, preload)

    @property
    def pids(self) -> dict[str, int]:
        return {name: child.pid for name, child in self._children.items()}

    def take(self, name: str) -> ChildProcess | None:
        """Take over the process of this name; None: there is none."""
        return self._children.pop(name, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self._children.values():
            child.kill()
        for child in self._children.values():
            child.close()
        self._children = {}


def rank_name(parallel: ParallelConfig, dp_rank: int, tp_rank: int) -> str:
    """The name of a rank's process; "scheduler" if it is the only one."""
    if parallel.num_ranks == 1:
        return "scheduler"
    return f"scheduler-tp{tp_rank}" if parallel.dp_size == 1 else f"scheduler-dp{dp_rank}-tp{tp_rank}"


def thread_defaults(parallel: ParallelConfig) -> dict[str, str]:
    """Environment variables that share the cores between the ranks of this node; empty with one rank."""
    num_ranks = parallel.ranks_per_node
    if num_ranks == 1:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // num_ranks))}
