"""The process that compiles grammars: each in a fork of its own, which the kernel ends at its limits.

A grammar of a few bytes can take hours and all memory of a host, inside a library that nothing else can stop.
The forks share what takes long to make, the library and its view of the vocabulary. `grammar_compiler` starts
this with `python -m`, gives its start over the standard input, and the socket of each job over a socket.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import resource
import select
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import msgspec

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.text.grammar import (
    MAX_COMPILE_MEMORY_BYTES,
    GrammarCompiler,
    JsonWhitespace,
    Vocabulary,
)
from ebbtide.srt.managers.text.tokenizer import load_tokenizer
from ebbtide.srt.sampling_params import GrammarSpec

if TYPE_CHECKING:
    from ebbtide.srt.config import EngineConfig, ModelConfig

# The first byte of a message about a job: it has started; then its result, which follows.
BEGUN: Final = b"b"
COMPILED: Final = b"c"
REFUSED: Final = b"r"
# Requests that run are more urgent.
NICENESS: Final = 10


@dataclass(frozen=True)
class CompilerStart:
    """Settings of the process. A grammar may take `memory_bytes` to compile."""

    model: ModelConfig
    revision: str | None
    whitespace: JsonWhitespace
    memory_bytes: int = MAX_COMPILE_MEMORY_BYTES

    @classmethod
    def of(cls, config: EngineConfig) -> Self:
        args = config.server_args
        is_free = not args.constrained_json_disable_any_whitespace
        whitespace = JsonWhitespace(is_free, args.constrained_json_max_whitespace_cnt)
        return cls(config.model, args.revision, whitespace)


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
    os.nice(NICENESS)
    tokenizer = load_tokenizer(start.model, start.revision)
    eos_token_ids = start.model.eos_token_ids | tokenizer.eos_token_ids
    compiler = GrammarCompiler(Vocabulary(tokenizer, start.model.vocab_size, eos_token_ids), start.whitespace)
    compiler.open()
    while parent not in select.select([jobs.fileno(), parent], [], [])[0]:
        _, descriptors, _, _ = socket.recv_fds(jobs, 1, 1)
        if not descriptors:
            return
        if os.fork() == 0:
            jobs.close()
            _work(compiler, start.memory_bytes, socket.socket(fileno=descriptors[0]))
        os.close(descriptors[0])


def _work(compiler: GrammarCompiler, memory_bytes: int, connection: socket.socket) -> None:
    """Compile a grammar and end."""
    try:
        with connection.makefile("rb") as given:
            job = msgspec.msgpack.decode(given.read(), type=CompileJob)
        connection.sendall(BEGUN)
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
    return flags


if __name__ == "__main__":
    main()
