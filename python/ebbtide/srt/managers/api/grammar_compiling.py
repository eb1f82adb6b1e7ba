"""Grammars compiled by another process, in which each has a fork that the kernel ends at its limits.

A grammar of a few bytes can take hours and all memory of a host, inside a library that nothing else can stop.
The forks share what takes long to make, the library and its view of the vocabulary. Those of different
clients compile in turns. Shapes and limits: see `text.grammar`.
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

# Nearly all grammars compile within the first time. What does not begins again behind others that do not: it
# keeps nobody from a quick one.
QUICK_LIMIT_S: Final = 2.0
COMPILE_LIMIT_S: Final = 20.0
# How many compile at once of either kind.
NUM_QUICK: Final = 2
NUM_SLOW: Final = 2

_ENDED: Final = "grammars cannot be compiled: the process that does it has ended; its log says why"


class FairTurns:
    """Limits what is compiled at once; of the rest, one of each client in turn, its smallest first."""

    def __init__(self, num_at_once: int) -> None:
        self._num_free = num_at_once
        self._waiting: OrderedDict[str, list[tuple[int, asyncio.Future[None]]]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, client: str, size: int) -> AsyncIterator[None]:
        """Wait for a turn, and have it."""
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
    """What several requests may wait for."""

    task: asyncio.Task[bytes]
    num_waiting: int = 0


class CompilerProcess:
    """The process that compiles; started with the first grammar, and again if it has ended."""

    def __init__(self, start: CompilerStart) -> None:
        self._start = start
        self._jobs: socket.socket | None = None
        self._popen: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Its process id; None as long as there is none."""
        return None if self._popen is None else self._popen.pid

    @property
    def has_ended(self) -> bool:
        """Whether it runs no more."""
        return self._popen is not None and self._popen.poll() is not None

    async def compile(self, spec: GrammarSpec, continued_ids: Sequence[int], limit_s: float) -> bytes | None:
        """What ranks load; None: it takes longer than that.

        Raises RequestRejected: 400, as `GrammarCompiler.compile`, or the compiler was ended by its limits;
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
            f"sampling_params.{spec.kind}: does not compile: it goes too deep, or takes more than "
            f"{self._start.memory_bytes} bytes of memory"
        )

    def close(self) -> None:
        """End it."""
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
    """Empty at the end, also where the other side has not read all."""
    try:
        return await reader.read(count)
    except ConnectionError:
        return b""


class GrammarCompiling:
    """Compiles what requests ask for, and keeps the latest. Lives in one event loop."""

    def __init__(self, start: CompilerStart) -> None:
        self._process = CompilerProcess(start)
        self._kept = RecentGrammars()
        self._compiling: dict[tuple[str, tuple[int, ...]], _Compiling] = {}
        self._quick, self._slow = FairTurns(NUM_QUICK), FairTurns(NUM_SLOW)

    async def compiled(self, spec: GrammarSpec, continued_ids: Sequence[int], client: str) -> bytes:
        """What ranks load. Cancelled, it goes on only if others wait for the same.

        Args:
            continued_ids: an output that the ranks will go through before they go on with it.
            client: who asks.

        Raises RequestRejected, EngineError: as `CompilerProcess.compile`; or it takes too long.
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


# The first byte of a message about a job: it has started; then its result, which follows.
STARTED: Final = b"b"
COMPILED: Final = b"c"
REFUSED: Final = b"r"
# Requests that run are more urgent.
NICENESS: Final = 10


@dataclass(frozen=True)
class CompilerStart:
    """Settings of the process. A grammar may take `memory_bytes` to compile."""

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
    """One grammar to be compiled, within `limit_s`. See `GrammarCompiler.compile`."""

    kind: str
    text: str
    continued_ids: list[int]
    limit_s: float


def main() -> None:
    """Serve the parent until it is gone. Arguments are its process id, and the descriptor of the socket."""
    # A signal to the whole process group is for the parent, which may need grammars until it ends.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the forks
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    Path("/proc/self/comm").write_text("ebb-grammar")
    jobs = socket.socket(fileno=int(sys.argv[2]))
    # A fork of the parent's may hold the other end of the socket open.
    parent = os.pidfd_open(int(sys.argv[1]))
    start: CompilerStart = pickle.load(sys.stdin.buffer)
    gc.disable()  # what is imported stays, and the forks have it in common
    tokenizer = load_tokenizer(start.model)
    eos_token_ids = start.model.eos_token_ids | tokenizer.eos_token_ids
    vocabulary = Vocabulary(tokenizer, start.model.vocab_size, eos_token_ids)
    _ = vocabulary.info  # it takes seconds, which no fork is to spend
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
    """Compile a grammar and end."""
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
    """Have the kernel end this process at its limits, or when nobody waits for it any more.

    Returns the flags that the connection had: while it sends, it would be ended too.
    """
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    status = Path("/proc/self/status").read_text().split()
    num_bytes = int(status[status.index("VmData:") + 1]) * 1024 + memory_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, num_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Of all processes of the host this is the one to go.
    Path("/proc/self/oom_score_adj").write_text("1000")
    flags = fcntl.fcntl(connection, fcntl.F_GETFL)
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, fcntl.F_SETFL, flags | os.O_ASYNC)
    # Whoever has hung up before sends no signal.
    ended = select.poll()
    ended.register(connection, select.POLLHUP)
    if ended.poll(0):
        raise SystemExit
    return flags


if __name__ == "__main__":
    main()
