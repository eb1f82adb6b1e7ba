"""One process of the engine, as the process that starts it sees it; and those that are started early.

Importing torch, and transformers for a tokenizer, is most of an engine's start: the ranks do it beside the
process that starts them, while it still reads the configuration.
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

# After this many looks in a row without a sign the process is given up: before those that wait for it reach
# the limit, which may be on another node.
_LOOKS_UNTIL_LOST: Final = 8
# After this many it is taken for the cause, where another process has given up already.
_LOOKS_UNTIL_SUSPECT: Final = 2
_STATES: Final = {
    "T": "it is stopped (SIGSTOP)",
    "t": "it is stopped by a debugger",
    "D": "it waits in the kernel",
}
_STOPPED: Final = frozenset("Tt")

# The libraries under torch read these when they are loaded; the user's own settings win.
LIBRARY_DEFAULTS = {
    # Threads that spin while they wait for each other stand still where another process needs a core.
    "OMP_WAIT_POLICY": "passive",
    # oneDNN keeps what it compiled for each number of rows, by default a thousand. Batches come in all
    # sizes: that was 10 MB per 1,000 requests.
    "LRU_CACHE_CAPACITY": "64",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
}


_KILLED = "; if nobody killed it, the kernel did for want of memory (dmesg and the container's limit say so)"
# Modules of the ranks, those of ranks with a tokenizer, and those of ranks on a GPU.
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
    """One process of the engine, and the pipe over which it says how its start went.

    Args:
        defaults: what its environment holds unless the user's own says otherwise.
        environment: what its environment holds in any case.
        preload: modules that it imports while it waits for `begin`.
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
            # It has died already: `receive_report` says how.
            logger.debug("%s took no arguments", self.name)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def receive_report(self, stages: StageLine) -> dict[str, Any] | None:
        """What it reports of the engine when it is ready, or None: it has shown a stage. Blocks.

        ConfigurationError: it cannot start so. EngineError: it ended.
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
        """How it ended, with its last words if it left any. Waits for the end."""
        status = self._popen.wait()
        if status < 0:
            number = signal.Signals(-status)
            hint = _KILLED if number is signal.SIGKILL else ""
            return f"the {self.name} process was ended by {number.name}{hint}"
        return f"the {self.name} process ended with exit code {status}{self._last_words()}"

    @property
    def was_ended_by_signal(self) -> bool:
        """Whether it has ended, and not by itself."""
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
        words = ""
        # A stage may lie before them: kernels compile in the background after the start.
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


class PulseWatch:
    """Looks at the signs of life of an engine's processes.

    It counts looks and not seconds: where everything is frozen together, and goes on after hours, nobody is
    at fault. `limit_s`: how long others wait for one of these; a process is given up a little earlier.
    `flag`: its name.
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
        """Which process is to be given up, and how it is; None: all live."""
        return self.suspect if self._silent(_LOOKS_UNTIL_LOST) else None

    @property
    def suspect(self) -> str | None:
        """The same, of one that others may have waited for.

        One that is stopped rather than one that has been silent for longer: it may only lack a turn.
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
    """The ranks of this node, as far as the arguments alone say. Leaving it ends those that nobody took.

    Arguments that are wrong are refused by who reads the configuration: for them there are no processes here.
    """

    def __init__(self, args: ServerArgs) -> None:
        self._children: dict[str, ChildProcess] = {}
        if args.memory_saver_backend == "torch_memory_saver":
            return  # Their environment hangs on more than the arguments.
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
        # FlashInfer looks where its kernels are as it is imported.
        kernels = kernel_variables(args.kernel_cache_dir)
        for name in names:
            self._children[name] = ChildProcess(name, thread_defaults(parallel), kernels, preload)

    @property
    def pids(self) -> dict[str, int]:
        return {name: child.pid for name, child in self._children.items()}

    def take(self, name: str) -> ChildProcess | None:
        """The process of this name, for its new owner; None if there is none."""
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
    """What the process of a rank is called: "scheduler" where it is the only one."""
    if parallel.num_ranks == 1:
        return "scheduler"
    return f"scheduler-tp{tp_rank}" if parallel.dp_size == 1 else f"scheduler-dp{dp_rank}-tp{tp_rank}"


def thread_defaults(parallel: ParallelConfig) -> dict[str, str]:
    """The cores in equal parts, where several ranks would each take all of them."""
    num_ranks = parallel.ranks_per_node
    if num_ranks == 1:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // num_ranks))}
