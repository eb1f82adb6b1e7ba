"""Grammars compiled by another process, those of different clients in turns.

Shapes and limits: see `text.grammar`; what ends a compile: see `text.grammar_process`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import socket
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import msgspec

from ebbtide.srt.errors import EngineError, RequestRejected
from ebbtide.srt.managers.text.grammar import RecentGrammars
from ebbtide.srt.managers.text.grammar_process import BEGUN, COMPILED, CompileJob, CompilerStart
from ebbtide.srt.sampling_params import GrammarSpec
from ebbtide.version import SOURCE_ROOT

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
    """So many at once; of those that wait, one of each client after the other, its smallest first."""

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
            if await _read(reader, 1) != BEGUN:
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
        module = "ebbtide.srt.managers.text.grammar_process"
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
