"""What the chunks of many streams cost the process that serves HTTP, and how evenly they come.

A server without a model, whose passes take `--pass-ms`, and `--streams` streams of `POST /generate`: they are
incremental, have logprobs, and get a token with every pass. `us_per_token` is all CPU time of the process, so
taking its requests in counts too. If it cannot keep up, several tokens come in one chunk.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection

import numpy as np
import psutil
from common import write_result
from http_load import clients, run_load

from ebbtide.srt.config import EngineConfig
from ebbtide.srt.entrypoints.http_server import serve
from ebbtide.srt.managers.wire.channel import ChannelAddresses
from ebbtide.srt.model_executor.batch_plan import BatchPlan, BeforeMasks, StepResult
from ebbtide.testing.null_engine import VOCAB_SIZE, null_args, null_config, run_null_scheduler
from ebbtide.testing.null_runner import NullRunner, NullStep

PROMPT_LEN = 4
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


def run_server(port: int, num_streams: int, pass_ms: float) -> None:
    args = null_args(
        port=port,
        model_path=str(pass_ms),
        max_running_requests=num_streams,
        max_total_tokens=POOL_TOKENS,
        incremental_streaming_output=True,
    )
    serve(lambda: null_config(args), {"scheduler": "stream_chunks:run_timed_scheduler"})


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


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--streams", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=256, help="of each stream")
    parser.add_argument("--pass-ms", type=float, default=45.0)
    args = parser.parse_args(argv)
    rows = []
    with running_server(args.streams, args.pass_ms) as (process, url), clients() as pool:
        run_load(pool, url, 8, VOCAB_SIZE, (PROMPT_LEN, 16), stream=True)
        for _ in range(args.runs):
            before = process.cpu_times()
            load = run_load(pool, url, args.streams, VOCAB_SIZE, (PROMPT_LEN, args.tokens), stream=True)
            after = process.cpu_times()
            user_us, system_us = (
                round((getattr(after, kind) - getattr(before, kind)) * 1e6 / load.num_tokens, 1)
                for kind in ("user", "system")
            )
            median_ms, longest_hundredth_ms = np.percentile(load.gaps_ms, (50, 99)).round(1).tolist()
            row = {
                "us_per_token": round(user_us + system_us, 1),
                "system_us_per_token": system_us,
                "gaps_ms": [median_ms, longest_hundredth_ms],
                "seconds": round(load.seconds, 2),
            }
            print(row, flush=True)
            rows.append(row)
    given = {"streams": args.streams, "tokens": args.tokens, "pass_ms": args.pass_ms}
    print(f"written to {write_result('stream_chunks', {**given, 'runs': rows})}")


if __name__ == "__main__":
    main()
