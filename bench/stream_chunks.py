"""What chunks of many streams cost the process that serves HTTP or has `Engine`, and how evenly they come.

No model: a pass takes `--pass-ms`, and each of `--streams` streams with logprobs gets a token with every
pass. With `--door http` they are incremental, of `POST /generate`. With `--door engine` this process reads
them: it has imported what a trainer has, and Python's collector is on. `us_per_token` is all CPU time of the
process, so taking its requests in counts too. If it cannot keep up, several tokens come in one chunk.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import socket
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import psutil
from common import write_result
from http_load import clients, run_load

from ebbtide.srt.config import EngineConfig
from ebbtide.srt.entrypoints.http_server import serve
from ebbtide.srt.entrypoints.service import EngineService
from ebbtide.srt.managers.wire.channel import ChannelAddresses
from ebbtide.srt.model_executor.batch_plan import BatchPlan, BeforeMasks, StepResult
from ebbtide.srt.server_args import ServerArgs
from ebbtide.testing.null_engine import (
    VOCAB_SIZE,
    NullEngine,
    null_args,
    null_config,
    run_null_scheduler,
)
from ebbtide.testing.null_runner import NullRunner, NullStep

PROMPT_LENS = {"http": 4, "engine": 512}
POOL_TOKENS = 1 << 22
START_TIMEOUT_S = 120.0


class TimedStep:
    """Ends a pass's time after the one before it."""

    def __init__(self, runner: TimedRunner, step: NullStep) -> None:
        self._runner = runner
        self._step = step

    def wait(self) -> StepResult:
        time.sleep(max(0.0, self._runner.ended_s + self._runner.pass_s - time.perf_counter()))
        self._runner.ended_s = time.perf_counter()
        return self._step.wait()


class TimedRunner(NullRunner):
    """Its passes last as those of a model; what they are given is not checked."""

    def __init__(self, pass_s: float) -> None:
        super().__init__()
        self.pass_s = pass_s
        self.ended_s = 0.0

    def launch(self, plan: BatchPlan, before_masks: BeforeMasks = None) -> TimedStep:  # type: ignore[override]
        return TimedStep(self, super().launch(plan, before_masks))

    def _check_tokens(self, plan: BatchPlan, value: int) -> None:
        pass


def run_timed_scheduler(config: EngineConfig, addresses: ChannelAddresses, ready: Connection) -> None:
    """The scheduler's process. The name of the model says how many milliseconds a pass takes."""
    run_null_scheduler(config, addresses, ready, TimedRunner(float(config.model.path) / 1e3))


TARGETS = {"scheduler": "stream_chunks:run_timed_scheduler"}


def timed_args(num_streams: int, pass_ms: float) -> dict[str, Any]:
    return {
        "model_path": str(pass_ms),
        "max_running_requests": num_streams,
        "max_total_tokens": POOL_TOKENS,
    }


def run_server(port: int, num_streams: int, pass_ms: float) -> None:
    args = null_args(port=port, incremental_streaming_output=True, **timed_args(num_streams, pass_ms))
    serve(lambda: null_config(args), TARGETS)


class TimedEngine(NullEngine):
    """Whose passes last."""

    @classmethod
    def _start(cls, server_args: ServerArgs) -> EngineService:
        return EngineService(null_config(server_args), TARGETS)


@contextmanager
def running_server(num_streams: int, pass_ms: float) -> Iterator[tuple[psutil.Process, str]]:
    """The process that serves HTTP, and its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = multiprocessing.get_context("spawn").Process(
        target=run_server, args=(port, num_streams, pass_ms)
    )
    server.start()
    try:
        url = f"http://127.0.0.1:{port}"
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not _is_ready(url):
            if not server.is_alive() or time.monotonic() > deadline_s:
                raise RuntimeError("the server did not start")
            time.sleep(0.2)
        yield psutil.Process(server.pid), url
    finally:
        server.terminate()
        server.join()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5):
            return True
    except OSError:
        return False


def measure_http(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    lens = (PROMPT_LENS["http"], args.tokens)
    with running_server(args.streams, args.pass_ms) as (process, url), clients() as pool:
        run_load(pool, url, 8, VOCAB_SIZE, (lens[0], 16), stream=True)
        for _ in range(args.runs):
            before = process.cpu_times()
            load = run_load(pool, url, args.streams, VOCAB_SIZE, lens, stream=True)
            after = process.cpu_times()
            user_us, system_us = (
                round((getattr(after, kind) - getattr(before, kind)) * 1e6 / load.num_tokens, 1)
                for kind in ("user", "system")
            )
            yield {
                "us_per_token": round(user_us + system_us, 1),
                "system_us_per_token": system_us,
                "gaps_ms": np.percentile(load.gaps_ms, (50, 99)).round(1).tolist(),
                "seconds": round(load.seconds, 2),
            }


def measure_engine(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    import transformers  # noqa: F401
    from gpu_common import Shape
    from rollout_calls import Rollouts

    with TimedEngine(**timed_args(args.streams, args.pass_ms)) as engine:
        rollouts = Rollouts(engine, Shape({"vocab_size": VOCAB_SIZE}))
        asyncio.run(rollouts.gaps(8, (PROMPT_LENS["engine"], 16)))
        for _ in range(args.runs):
            before = [generation["collections"] for generation in gc.get_stats()]
            run = asyncio.run(rollouts.gaps(args.streams, (PROMPT_LENS["engine"], args.tokens)))
            after = [generation["collections"] for generation in gc.get_stats()]
            yield {
                "us_per_token": round(run["us_per_token"], 1),
                "gaps_ms": [round(run[what], 1) for what in ("p50", "p99", "max")],
                "collections": [late - early for early, late in zip(before, after, strict=True)],
            }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--door", choices=("http", "engine"), default="http")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--streams", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=256, help="of each stream")
    parser.add_argument("--pass-ms", type=float, default=45.0)
    args = parser.parse_args(argv)
    measure = measure_engine if args.door == "engine" else measure_http
    rows = []
    for row in measure(args):
        print(row, flush=True)
        rows.append(row)
    given = {"streams": args.streams, "tokens": args.tokens, "pass_ms": args.pass_ms}
    name = "stream_chunks" if args.door == "http" else "stream_chunks_engine"
    print(f"written to {write_result(name, {**given, 'runs': rows})}")


if __name__ == "__main__":
    main()
