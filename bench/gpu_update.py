"""What 64 decoding streams notice of new weights that a trainer on the same GPU sends.

A server, and a trainer in another process whose CUDA tensors it takes by CUDA IPC. 64 streams of a 128-token
prompt; when each has 250 tokens, the gaps between their chunks are watched for a window, then the update is
sent and a window of the same length is watched from there. Per stream the longest gap of a window counts; the
figure is the median over the streams. Each run has streams and prompts of its own.

- in_place, one call: all tensors by name, `pause_mode=in_place`, `flush_cache=false`;
- in_place, buckets: a session of flattened buckets of 512 MB, committed the same way;
- retract: one call with `pause_mode=retract` and `flush_cache=true`. The re-prefill alone is measured by such
  a call without any tensors. An update takes its time until it retracts, in which the streams grow: that call
  comes after as long a time, so that there is as much to prefill.

The client reads bytes and clocks, parses nothing and collects no garbage, so that the gaps are the engine's.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
from common import undisturbed
from gpu_common import Report, Server, Shape, engine_args, model_folder, parse, parser_of, running_server
from gpu_machine import Machine
from gpu_trainer import Trainer

from ebbtide.trainer.payload_encoding import serialize

MODEL = "llama8b"
NUM_STREAMS = 64
PROMPT_LEN, TOKENS_BEFORE, MAX_NEW_TOKENS = 128, 250, 1536
ALLOWED_BEYOND_MS = 3.0
BUCKET_BYTES = 512 << 20
RUN_TIMEOUT_S = 120.0
WINDOW_S = {"in_place": 1.0, "in_place_buckets": 2.0, "retract": 2.0, "re_prefill": 2.0}


class Stream(asyncio.Protocol):
    """One streamed request on a connection of its own; notes when each piece of the answer came."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._transport: Any = None
        self.times: list[float] = []
        self.num_chunks = 0
        self.end: str | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        # The head of the response comes by itself and holds no chunk.
        num_chunks = data.count(b"data: {")
        if num_chunks:
            self.times.append(time.perf_counter())
            self.num_chunks += num_chunks
        elif b"HTTP/1.1" in data[:9] and b" 200 " not in data[:20]:
            self.end = data.decode(errors="replace")
        if b"data: [DONE]" in data:
            self.end = "it ended: it had too few tokens to come"

    def connection_lost(self, exc: Exception | None) -> None:
        self.end = self.end or f"the connection was lost: {exc}"

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def longest_gap_ms(self, start: float, end: float) -> float:
        """The longest of the gaps that ended between these times."""
        gaps = self.gaps_ms(start, end)
        if not gaps:
            raise RuntimeError("a stream got nothing in a whole window")
        return max(gaps)

    def longest_gap_start(self, start: float, end: float) -> float:
        """When the longest of the gaps that ended between these times began."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return max((after - before, before) for before, after in pairs if start < after <= end)[1]

    def gaps_ms(self, start: float, end: float) -> list[float]:
        pairs = zip(self.times, self.times[1:], strict=False)
        return [(after - before) * 1e3 for before, after in pairs if start < after <= end]


async def open_streams(url: str, prompts: list[list[int]], max_new_tokens: int) -> list[Stream]:
    host, port = urlsplit(url).hostname, urlsplit(url).port
    loop = asyncio.get_running_loop()
    streams = []
    for prompt in prompts:
        params = {"temperature": 0.0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
        body = json.dumps({"input_ids": prompt, "sampling_params": params, "stream": True}).encode()
        head = f"POST /generate HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        request = head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body
        stream = Stream(request)
        await loop.create_connection(lambda stream=stream: stream, host, port)
        streams.append(stream)
    return streams


def check(streams: Sequence[Stream]) -> None:
    for stream in streams:
        if stream.end is not None:
            raise RuntimeError(f"a stream did not go on: {stream.end[:300]}")


class Bench:
    """The server under test, its trainer and a client for control requests.

    Attributes:
        staging_s: how long an update takes until it retracts.
    """

    def __init__(
        self, args: argparse.Namespace, shape: Shape, server: Server, trainer: Trainer | None
    ) -> None:
        self._args = args
        self._shape = shape
        self._server = server
        self._trainer = trainer
        self._rng = np.random.default_rng(0)
        self._client = httpx.AsyncClient(base_url=server.url, timeout=300)
        self.num_streams = 4 if args.tiny else NUM_STREAMS
        self.staging_s = 0.0

    async def __aenter__(self) -> Bench:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.aclose()

    async def post(self, path: str, **body: Any) -> dict[str, Any]:
        response = await self._client.post(path, json=body)
        if response.status_code != 200:
            raise RuntimeError(f"{path}: {response.status_code} {response.text[:500]}")
        reply: dict[str, Any] = response.json()
        return reply

    async def run(self, kind: str) -> dict[str, Any]:
        """One run on streams of its own."""
        tokens_before, window_s = (10, 0.3) if self._args.tiny else (TOKENS_BEFORE, WINDOW_S[kind])
        max_new_tokens = 3000 if self._args.tiny else MAX_NEW_TOKENS
        prompts = self._rng.integers(0, self._shape["vocab_size"], (self.num_streams, PROMPT_LEN)).tolist()
        streams = await open_streams(self._server.url, prompts, max_new_tokens)
        try:
            with undisturbed():
                async with asyncio.timeout(RUN_TIMEOUT_S):
                    return await self._watch(kind, streams, tokens_before, window_s)
        finally:
            for stream in streams:
                stream.close()
            await self.post("/abort_request", abort_all=True, report=True)
            await self.post("/continue_generation")
            await self.post("/flush_cache", timeout_s=10.0)

    async def _watch(
        self, kind: str, streams: Sequence[Stream], tokens_before: int, window_s: float
    ) -> dict[str, Any]:
        """Two windows, the update at the begin of the second."""
        while min(stream.num_chunks for stream in streams) < tokens_before:
            check(streams)
            await asyncio.sleep(0.005)
        action = await self._prepared(kind)
        before = time.perf_counter()
        await asyncio.sleep(window_s)
        sent = time.perf_counter()
        reply = await action()
        answered = time.perf_counter()
        await asyncio.sleep(max(0.0, window_s - (answered - sent)))
        # Gaps that are open at the end of the window must end to be seen.
        counts = [stream.num_chunks for stream in streams]
        while any(stream.num_chunks == count for stream, count in zip(streams, counts, strict=True)):
            check(streams)
            await asyncio.sleep(0.005)
        check(streams)
        return self._figures(streams, (before, sent, answered), reply)

    def _figures(
        self, streams: Sequence[Stream], times: tuple[float, float, float], reply: dict[str, Any]
    ) -> dict[str, Any]:
        before, sent, answered = times
        end = time.perf_counter()
        normal = [stream.longest_gap_ms(before, sent) for stream in streams]
        during = [stream.longest_gap_ms(sent, end) for stream in streams]
        usual = [gap for stream in streams for gap in stream.gaps_ms(before, sent)]
        return {
            "normal_longest_gap_ms": statistics.median(normal),
            "longest_gap_ms": statistics.median(during),
            "beyond_ms": statistics.median(during) - statistics.median(normal),
            "median_gap_ms": statistics.median(usual),
            "worst_stream_ms": max(during),
            "latency_ms": (answered - sent) * 1e3,
            "gap_begins_ms": statistics.median(
                (stream.longest_gap_start(sent, end) - sent) * 1e3 for stream in streams
            ),
            "window_s": sent - before,
            "reply": {
                key: reply.get(key)
                for key in ("staged", "stall_ms", "duration_ms", "num_bytes", "num_tensors", "message")
            },
        }

    @property
    def trainer(self) -> Trainer:
        assert self._trainer is not None, "this bench has no trainer"
        return self._trainer

    async def _prepared(self, kind: str) -> Callable[[], Awaitable[dict[str, Any]]]:
        """What is then timed. A trainer has its payload ready when it sends it."""
        match kind:
            case "re_prefill":
                return self._update_nothing
            case "in_place_buckets":
                return self._session
            case _:
                flush = kind == "retract"
                payload = base64.b64encode(await asyncio.to_thread(self.trainer.payload)).decode()
                return lambda: self.post(
                    "/update_weights_from_tensor",
                    serialized_named_tensors=[payload],
                    pause_mode=kind,
                    flush_cache=flush,
                )

    async def _update_nothing(self) -> dict[str, Any]:
        await asyncio.sleep(self.staging_s)
        return await self.post(
            "/update_weights_from_tensor",
            serialized_named_tensors=[base64.b64encode(serialize([])).decode()],
            pause_mode="retract",
            flush_cache=True,
        )

    async def _session(self) -> dict[str, Any]:
        count = await asyncio.to_thread(self.trainer.num_buckets, BUCKET_BYTES)
        await self.post("/begin_weight_update")
        for index in range(count):
            payload = await asyncio.to_thread(self.trainer.bucket, index)
            await self.post(
                "/update_weights_from_tensor",
                serialized_named_tensors=[base64.b64encode(payload).decode()],
                load_format="flattened_bucket",
                flush_cache=False,
            )
        return await self.post("/end_weight_update", pause_mode="in_place", flush_cache=False)


async def measure(report: Report, bench: Bench, num_runs: int, kinds: Sequence[str]) -> dict[str, Any]:
    """All runs of every kind, after one that does not count."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for kind in kinds:
        with report.attempt(f"update.{kind}" if kind != "re_prefill" else "update.retract"):
            await bench.run(kind)
            runs[kind] = [await bench.run(kind) for _ in range(num_runs)]
            if kind == "retract":
                bench.staging_s = statistics.median(run["gap_begins_ms"] for run in runs[kind]) / 1e3
            for run in runs[kind]:
                print(
                    f"  {kind}: longest gap {run['longest_gap_ms']:.2f} ms, normally "
                    f"{run['normal_longest_gap_ms']:.2f} (median gap {run['median_gap_ms']:.2f}), call "
                    f"{run['latency_ms']:.1f} ms, stall {run['reply']['stall_ms']}",
                    flush=True,
                )
    return runs


def note(report: Report, runs: dict[str, list[dict[str, Any]]], num_bytes: int, machine: Machine) -> None:
    copy_ms = 2 * num_bytes / machine.copy_bytes_per_s * 1e3
    for kind in ("in_place", "in_place_buckets"):
        if kind in runs:
            normal_ms = statistics.median(run["normal_longest_gap_ms"] for run in runs[kind])
            report.add(
                f"update.{kind}",
                [run["longest_gap_ms"] for run in runs[kind]],
                goal_value=normal_ms + ALLOWED_BEYOND_MS,
                limit=normal_ms,
                limit_basis="the longest gap of an equally long window before, in the same streams",
                all_runs=runs[kind],
            )
    if "in_place" in runs:
        report.add(
            "update.call",
            [run["latency_ms"] for run in runs["in_place"]],
            limit=copy_ms,
            limit_basis="one copy of every byte, with nothing else on the device",
        )
    if "retract" in runs and "re_prefill" in runs:
        alone_ms = statistics.median(run["longest_gap_ms"] for run in runs["re_prefill"])
        report.add(
            "update.retract",
            [run["longest_gap_ms"] / alone_ms for run in runs["retract"]],
            limit=1.0,
            limit_basis="the re-prefill alone, of as many tokens",
            re_prefill_ms=alone_ms,
            all_runs={"retract": runs["retract"], "re_prefill": runs["re_prefill"]},
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--kinds", nargs="+", choices=tuple(WINDOW_S), default=list(WINDOW_S))
    args = parse(parser, argv)
    machine = Machine.measure(args.device, tiny=args.tiny)
    report = Report("gpu_update", args)
    report.facts["machine"] = machine.runs
    keys = ("update.in_place", "update.in_place_buckets", "update.retract", "update.call")
    with report.attempt(*keys), model_folder(args, MODEL) as (shape, folder):
        num_tokens = NUM_STREAMS * 2048 if not args.tiny else 32_768
        arguments = engine_args(
            args,
            folder,
            max_total_tokens=num_tokens,
            max_running_requests=NUM_STREAMS,
            incremental_streaming_output=True,
            log_level="warning",
        )
        with running_server(arguments) as server, Trainer(folder, args.device) as trainer:
            server.wait_ready()
            report.facts["trainer_bytes"] = trainer.num_bytes

            async def run() -> dict[str, Any]:
                async with Bench(args, shape, server, trainer) as bench:
                    return await measure(report, bench, args.runs, args.kinds)

            try:
                note(report, asyncio.run(run()), trainer.num_bytes, machine)
            finally:
                report.facts["server_log_end"] = server.log[-4000:]
    report.finish()


if __name__ == "__main__":
    main()
