"""Compiles grammars in another process: a fork of it compiles each, and the kernel ends it at its limits.

A grammar of a few bytes can take hours and all memory of a host to compile, and the library that does it
cannot be stopped in any other way. The forks share the library and its view of the vocabulary, which take
long to make. Clients take turns. Shapes and limits: see `text.grammar`.
"""

from __future__ import annotations

import asyncio
import fcntl
import gc
import logging
import os
import pickle
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import msgspec

from ebbtide.srt.errors import EngineError, RequestRejected
from ebbtide.srt.managers.text.grammar import (
    MAX_COMPILE_MEMORY_BYTES,
    GrammarCompiler,
    RecentGrammars,
    Vocabulary,
)
from ebbtide.srt.managers.text.tokenizer import load_tokenizer
from ebbtide.srt.sampling_params import GrammarSpec
from ebbtide.version import SOURCE_ROOT

if TYPE_CHECKING:
    from ebbtide.srt.config import EngineConfig, ModelConfig

logger = logging.getLogger(__name__)

# Seconds. Nearly all grammars compile within the first limit. One that does not starts again, with the second
# limit, in a queue of such slow ones: so it never delays a quick one for long.
QUICK_LIMIT_S: Final = 2.0
COMPILE_LIMIT_S: Final = 20.0
# How many quick and how many slow ones are compiled at once.
NUM_QUICK: Final = 2
NUM_SLOW: Final = 2

_ENDED: Final = "grammars cannot be compiled: the process that does it has ended; its log says why"


class FairTurns:
    """Limits how many grammars are compiled at once.

    The others wait. Clients take turns, and each client's smallest grammar comes first.
    """

    def __init__(self, num_at_once: int) -> None:
        self._num_free = num_at_once
        self._waiting: OrderedDict[str, list[tuple[int, asyncio.Future[None]]]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, client: str, size: int) -> AsyncIterator[None]:
        """Wait for a turn and hold it while the context lasts. `size` is the length of the grammar."""
        if self._num_free:
            self._num_free -= 1
        else:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(client, []).append((size, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():
                    self._pass_on()
                raise
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            client, turns = self._waiting.popitem(last=False)
            live = [one for one in turns if not one[1].done()]
            if live:
                smallest = min(live, key=lambda one: one[0])
                smallest[1].set_result(None)
                live.remove(smallest)
                if live:
                    self._waiting[client] = live
                return
        self._num_free += 1


@dataclass(slots=True)
class _Compiling:
    """A grammar that is being compiled, and how many requests wait for it."""

    task: asyncio.Task[bytes]
    num_waiting: int = 0


class CompilerProcess:
    """The process that compiles grammars. The first grammar starts it, as does the first after it ended."""

    def __init__(self, start: CompilerStart) -> None:
        self._start = start
        self._jobs: socket.socket | None = None
        self._popen: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The process id; None: it has not been started."""
        return None if self._popen is None else self._popen.pid

    @property
    def has_ended(self) -> bool:
        """Whether it has been started and has ended."""
        return self._popen is not None and self._popen.poll() is not None

    async def compile(self, spec: GrammarSpec, continued_ids: Sequence[int], limit_s: float) -> bytes | None:
        """Compile a grammar into the bytes that ranks load; None: it took longer than `limit_s`.

        Raises:
            RequestRejected: as `GrammarCompiler.compile`; or it took too much memory or recursed too deep.
            EngineError: the process does not start.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._running(), [b"j"], [theirs.fileno()])
            except OSError:
                ours.close()
                raise EngineError(_ENDED) from None
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        try:
            writer.write(
                msgspec.msgpack.encode(CompileJob(spec.kind, spec.text, list(continued_ids), limit_s))
            )
            writer.write_eof()
            if await _read(reader, 1) != STARTED:
                raise EngineError(_ENDED)
            began_s = time.monotonic()
            kind, answer = await _read(reader, 1), await _read(reader)
        finally:
            writer.close()
        if kind == COMPILED:
            return answer
        if kind:
            raise RequestRejected(answer.decode())
        if time.monotonic() - began_s >= limit_s:
            return None
        raise RequestRejected(
            f"sampling_params.{spec.kind}: does not compile: it recurses too deeply, or takes more than "
            f"{self._start.memory_bytes} bytes of memory"
        )

    def close(self) -> None:
        """End the process. Idempotent."""
        if self._jobs is not None and self._popen is not None:
            self._jobs.close()
            self._popen.kill()
            self._popen.wait()
        self._jobs = self._popen = None

    def _running(self) -> socket.socket:
        if self.has_ended:
            logger.error("the process that compiles grammars has ended, and is started again")
            self.close()
        if self._jobs is not None:
            return self._jobs
        self._jobs, theirs = socket.socketpair()
        root = str(SOURCE_ROOT)
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        module = "ebbtide.srt.managers.api.grammar_compiling"
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(os.getpid()), str(theirs.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": path},
            )
        assert self._popen.stdin is not None
        with self._popen.stdin as stdin:
            stdin.write(pickle.dumps(self._start))
        return self._jobs


async def _read(reader: asyncio.StreamReader, count: int = -1) -> bytes:
    """Read up to `count` bytes, or all; empty at the end, even if the other side closed with data unread."""
    try:
        return await reader.read(count)
    except ConnectionError:
        return b""


class GrammarCompiling:
    """Compiles the grammars of requests, and keeps the latest. For use in one event loop."""

    def __init__(self, start: CompilerStart) -> None:
        self._process = CompilerProcess(start)
        self._kept = RecentGrammars()
        self._compiling: dict[tuple[str, tuple[int, ...]], _Compiling] = {}
        self._quick, self._slow = FairTurns(NUM_QUICK), FairTurns(NUM_SLOW)

    async def compiled(self, spec: GrammarSpec, continued_ids: Sequence[int], client: str) -> bytes:
        """Compile a grammar into the bytes that ranks load, or wait for another request's compilation of it.

        If this is cancelled, the compilation goes on only if others wait for it.

        Args:
            continued_ids: the output so far, which the ranks will advance the grammar through.
            client: who sends the request; clients take turns.

        Raises:
            RequestRejected: as `CompilerProcess.compile`; or it takes longer than `COMPILE_LIMIT_S`.
            EngineError: as `CompilerProcess.compile`.
        """
        kept = self._kept.get(spec.key)
        if kept is not None and not continued_ids:
            return kept
        key = spec.key, tuple(continued_ids)
        if key not in self._compiling:
            self._compiling[key] = _Compiling(asyncio.create_task(self._compile(spec, continued_ids, client)))
        compiling = self._compiling[key]
        compiling.num_waiting += 1
        try:
            compiled = await asyncio.shield(compiling.task)
        finally:
            compiling.num_waiting -= 1
            if compiling.num_waiting == 0:
                compiling.task.cancel()
                del self._compiling[key]
        if self._kept.get(spec.key) is None:
            self._kept.add(spec.key, compiled)
        return compiled

    def close(self) -> None:
        """End the process."""
        self._process.close()

    async def _compile(self, spec: GrammarSpec, continued_ids: Sequence[int], client: str) -> bytes:
        for turns, limit_s in ((self._quick, QUICK_LIMIT_S), (self._slow, COMPILE_LIMIT_S)):
            async with turns.turn(client, len(spec.text)):
                compiled = await self._process.compile(spec, continued_ids, limit_s)
            if compiled is not None:
                return compiled
        raise RequestRejected(
            f"sampling_params.{spec.kind}: it was not compiled within {COMPILE_LIMIT_S:g} s"
        )


# A fork answers a job with `STARTED`; then with `COMPILED` or `REFUSED`, followed by the bytes or the error.
STARTED: Final = b"b"
COMPILED: Final = b"c"
REFUSED: Final = b"r"
# Compiling has a lower priority than the engine's processes: requests that run are more urgent.
NICENESS: Final = 10


@dataclass(frozen=True)
class CompilerStart:
    """Settings of the process.

    Attributes:
        has_whitespace: whether JSON may have any whitespace between its parts.
        most_whitespace: the most characters of it in one place; None: no limit.
        memory_bytes: the most memory that compiling one grammar may take.
    """

    model: ModelConfig
    has_whitespace: bool
    most_whitespace: int | None
    memory_bytes: int = MAX_COMPILE_MEMORY_BYTES

    @classmethod
    def of(cls, config: EngineConfig) -> Self:
        args = config.server_args
        has_whitespace = not args.constrained_json_disable_any_whitespace
        return cls(config.model, has_whitespace, args.constrained_json_max_whitespace_cnt)


class CompileJob(msgspec.Struct, frozen=True):
    """A grammar to be compiled within `limit_s` seconds. See `GrammarCompiler.compile`."""

    kind: str
    text: str
    continued_ids: list[int]
    limit_s: float


def main() -> None:
    """Serve the parent until it ends. Arguments: its process id, and the file descriptor of the socket."""
    # Signals to the whole process group are for the parent, which may need grammars until it ends.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the forks
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    Path("/proc/self/comm").write_text("ebb-grammar")
    jobs = socket.socket(fileno=int(sys.argv[2]))
    # Watch the parent itself: the socket may not close with it, if a fork of it holds the other end open.
    parent = os.pidfd_open(int(sys.argv[1]))
    start: CompilerStart = pickle.load(sys.stdin.buffer)
    gc.disable()  # what is imported lives on, in memory that the forks share
    tokenizer = load_tokenizer(start.model)
    eos_token_ids = start.model.eos_token_ids | tokenizer.eos_token_ids
    vocabulary = Vocabulary(tokenizer, start.model.vocab_size, eos_token_ids)
    _ = vocabulary.info  # takes seconds: made here once, and not in each fork
    gc.freeze()
    gc.enable()
    compiler = GrammarCompiler(vocabulary, start.has_whitespace, start.most_whitespace)
    while parent not in select.select([jobs.fileno(), parent], [], [])[0]:
        _, descriptors, _, _ = socket.recv_fds(jobs, 1, 1)
        if not descriptors:
            return
        if os.fork() == 0:
            os.nice(NICENESS)
            jobs.close()
            _work(compiler, start.memory_bytes, socket.socket(fileno=descriptors[0]))
        os.close(descriptors[0])


def _work(compiler: GrammarCompiler, memory_bytes: int, connection: socket.socket) -> None:
    """Compile one grammar in a fork, answer, and end the fork."""
    try:
        with connection.makefile("rb") as given:
            job = msgspec.msgpack.decode(given.read(), type=CompileJob)
        connection.sendall(STARTED)
        flags = _limit(job.limit_s, memory_bytes, connection)
        try:
            compiled = compiler.compile(GrammarSpec(job.kind, job.text), job.continued_ids)
            answer = COMPILED + compiled
        except RequestRejected as error:
            answer = REFUSED + error.message.encode()
        fcntl.fcntl(connection, fcntl.F_SETFL, flags)
        connection.sendall(answer)
    finally:
        os._exit(0)


def _limit(limit_s: float, memory_bytes: int, connection: socket.socket) -> int:
    """Have the kernel end this process at its limits, or when the other end of the connection is closed.

    Returns:
        The flags that the connection had. Set them again before sending, which would end this process too.
    """
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    status = Path("/proc/self/status").read_text().split()
    num_bytes = int(status[status.index("VmData:") + 1]) * 1024 + memory_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, num_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # If the host runs out of memory, this is the process to kill.
    Path("/proc/self/oom_score_adj").write_text("1000")
    flags = fcntl.fcntl(connection, fcntl.F_GETFL)
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, fcntl.F_SETFL, flags | os.O_ASYNC)
    # If it was closed before, no signal comes.
    ended = select.poll()
    ended.register(connection, select.POLLHUP)
    if ended.poll(0):
        raise SystemExit
    return flags


if __name__ == "__main__":
    main()
