"""Sends many concurrent requests to `POST /generate`, from several processes so that clients are no limit."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import multiprocessing
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.pool import Pool
from typing import Any
from urllib.parse import urlsplit

import numpy as np

NUM_PROCESSES = 4
# Time for all processes to make their prompts.
LEAD_S = 1.0
TIMEOUT_S = 300.0
# Larger than any chunk with logprobs of many tokens.
BUFFER_BYTES = 1 << 22
TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')


@dataclass(frozen=True)
class Load:
    """Measurements of a load.

    Attributes:
        seconds: from the first request to the end of the last answer.
        num_tokens: output tokens of all requests.
        gaps_ms: times between consecutive chunks of a stream, of all streams; empty without streaming.
        firsts_ms: time to the first chunk of each stream; empty without streaming.
    """

    seconds: float
    num_tokens: int
    gaps_ms: list[float]
    firsts_ms: list[float]


@contextmanager
def clients() -> Iterator[Pool]:
    """Start the client processes. A first small load waits until their imports are done."""
    with multiprocessing.get_context("spawn").Pool(NUM_PROCESSES) as pool:
        yield pool


def run_load(
    pool: Pool, url: str, num_requests: int, vocab_size: int, lens: tuple[int, int], *, stream: bool
) -> Load:
    """Send concurrent requests at temperature 1 with logprobs, each with its own prompt."""
    counts = [len(part) for part in np.array_split(np.arange(num_requests), NUM_PROCESSES)]
    begin_s = time.time() + LEAD_S
    parts = pool.starmap(
        _run_part,
        [(url, count, vocab_size, lens, stream, begin_s, seed) for seed, count in enumerate(counts) if count],
        chunksize=1,
    )
    answers = [answer for part in parts for answer in part]
    gaps = [(after - before) * 1e3 for _, times in answers for before, after in itertools.pairwise(times)]
    return Load(
        max(times[-1] for _, times in answers) - begin_s,
        sum(count for count, _ in answers),
        gaps if stream else [],
        [(times[0] - begin_s) * 1e3 for _, times in answers] if stream else [],
    )


def _run_part(
    url: str, count: int, vocab_size: int, lens: tuple[int, int], stream: bool, begin_s: float, seed: int
) -> list[tuple[int, list[float]]]:
    prompts = np.random.default_rng((seed, int(begin_s))).integers(0, vocab_size, (count, lens[0])).tolist()
    params = {"temperature": 1.0, "max_new_tokens": lens[1], "ignore_eos": True}
    bodies = [
        {"input_ids": prompt, "sampling_params": params, "return_logprob": True, "stream": stream}
        for prompt in prompts
    ]

    # A full garbage collection here would cause gaps in all streams of this process.
    gc.collect()
    gc.disable()

    async def run() -> list[tuple[int, list[float]]]:
        await asyncio.sleep(begin_s - time.time())
        return await asyncio.wait_for(asyncio.gather(*(_ask(url, body) for body in bodies)), TIMEOUT_S)

    return asyncio.run(run())


async def _ask(url: str, body: dict[str, Any]) -> tuple[int, list[float]]:
    """Send a request; returns the number of output tokens, and the times at which chunks came."""
    where = urlsplit(url)
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(where.hostname, where.port, limit=BUFFER_BYTES)
    head = f"POST /generate HTTP/1.1\r\nHost: {where.netloc}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    times: list[float] = []
    last = b""
    while part := await reader.read(BUFFER_BYTES):
        times.append(time.time())
        last = (last + part)[-BUFFER_BYTES:] if not body["stream"] else last[-4096:] + part
    writer.close()
    found = TOKENS.findall(last)
    if not found:
        raise RuntimeError(f"no answer: {last[:500]!r}")
    # Without the time of the response's head.
    return int(found[-1]), times[1:] if body["stream"] and len(times) > 1 else times
