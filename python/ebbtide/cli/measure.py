"""`ebbtide bench`: measures the speed of a running server, and how an update slows its streams."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ebbtide.cli.server import AsJson, Key, Url, asking, console, table_of, telling_why_it_waits
from ebbtide.client import DEFAULT_URL, Client

Count = Annotated[int, typer.Option(min=1)]

# The longest wait until all streams have begun, before an update is requested.
MOST_WAIT_S = 0.3


@dataclass(frozen=True)
class StreamLoad:
    """Streams that begin together, each with this many tokens of prompt and output."""

    num_streams: int
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Figures:
    """Measurements of one run, at the client. Times are in milliseconds.

    Attributes:
        first_token_ms: time to first token, median of all streams.
        gap_ms, gap_p99_ms: time between chunks of a stream, median and 99th percentile of all streams.
        longest_gap_ms: the longest gap of each stream, median of all streams.
        update_reply_ms: time from the request for an update to its reply; None: no update.
        update_stall_ms: the longest time without a forward pass, as the server reports it; None: no update.
        streams_of_both_versions: number of streams with tokens of more than one version.
    """

    tokens_per_s: float
    first_token_ms: float
    gap_ms: float
    gap_p99_ms: float
    longest_gap_ms: float
    update_reply_ms: float | None = None
    update_stall_ms: float | None = None
    streams_of_both_versions: int = 0


def bench(
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
    streams: Count = 16,
    prompt_tokens: Count = 64,
    output_tokens: Count = 64,
    runs: Count = 3,
    update: Annotated[
        str | None,
        typer.Option(
            help="Folder of a checkpoint: also measure updates by it under these streams. Its weights stay."
        ),
    ] = None,
) -> None:
    """Measure a server: tokens per second, gaps in streams, and with --update how an update changes these."""
    load = StreamLoad(streams, prompt_tokens, output_tokens)
    folder = str(Path(update).resolve()) if update is not None and Path(update).exists() else update
    with asking(url, key) as client, telling_why_it_waits(client):
        rows = asyncio.run(_measure(client, load, runs, folder))
        if as_json:
            lists = {name: [asdict(one) for one in figures] for name, figures in rows.items()}
            console.print_json(
                json.dumps({"server": client.model_info(), "load": asdict(load), "runs": lists})
            )
        else:
            console.print(_table(rows))


async def _measure(
    client: Client, load: StreamLoad, runs: int, folder: str | None
) -> dict[str, list[Figures]]:
    """Do all runs; returns their figures by kind. The first run of each kind warms up and is dropped."""
    vocab_size = (await client.async_model_info())["vocab_size"]
    rows = {}
    kinds = {"streams": None} | ({} if folder is None else {"streams and an update": folder})
    for name, weights in kinds.items():
        rounds = [await _round(client, load, vocab_size, weights) for _ in range(runs + 1)]
        rows[name] = rounds[1:]
    return rows


async def _round(client: Client, load: StreamLoad, vocab_size: int, folder: str | None) -> Figures:
    began_s = time.perf_counter()
    began = asyncio.Semaphore(0)
    reading = [asyncio.create_task(_read(client, load, vocab_size, began)) for _ in range(load.num_streams)]
    reply_ms = stall_ms = None
    if folder is not None:
        # So that the update comes while streams run. A server without room for all lets some wait longer.
        with suppress(TimeoutError):
            async with asyncio.timeout(MOST_WAIT_S):
                for _ in reading:
                    await began.acquire()
        asked_s = time.perf_counter()
        version = f"bench-{asked_s:.3f}"
        answer = await client.async_update_weights_from_disk(
            folder, flush_cache=False, weight_version=version, pause_mode="in_place"
        )
        reply_ms, stall_ms = 1000 * (time.perf_counter() - asked_s), answer["stall_ms"]
    read = await asyncio.gather(*reading)
    took_s = time.perf_counter() - began_s
    gaps = [[1000 * (after - at) for at, after in pairwise(times)] for times, _ in read]
    every = sorted(gap for one in gaps for gap in one) or [0.0]
    return Figures(
        tokens_per_s=load.num_streams * load.output_tokens / took_s,
        first_token_ms=statistics.median(1000 * (times[0] - began_s) for times, _ in read),
        gap_ms=statistics.median(every),
        gap_p99_ms=every[int(0.99 * (len(every) - 1))],
        longest_gap_ms=statistics.median(max(one, default=0.0) for one in gaps),
        update_reply_ms=reply_ms,
        update_stall_ms=stall_ms,
        streams_of_both_versions=sum(len(versions) > 1 for _, versions in read),
    )


async def _read(
    client: Client, load: StreamLoad, vocab_size: int, began: asyncio.Semaphore
) -> tuple[list[float], set[str]]:
    """Read a stream; returns the times of its chunks, and the versions that sampled it.

    Args:
        began: released at the first chunk.
    """
    prompt = [random.randrange(vocab_size) for _ in range(load.prompt_tokens)]
    params: dict[str, Any] = {"max_new_tokens": load.output_tokens, "ignore_eos": True, "temperature": 1.0}
    times: list[float] = []
    versions: set[str] = set()
    async for chunk in await client.async_generate(
        input_ids=prompt, sampling_params=params, return_logprob=True, stream=True
    ):
        if not times:
            began.release()
        times.append(time.perf_counter())
        versions.update(span["version"] for span in chunk["meta_info"]["weight_versions"])
    return times, versions


def _table(rows: dict[str, list[Figures]]) -> Table:
    """A table of each figure's median, minimum and maximum over the runs."""
    table = table_of("", *rows, right=rows)
    for figure in Figures.__dataclass_fields__:
        cells = []
        for figures in rows.values():
            values = sorted(getattr(one, figure) for one in figures if getattr(one, figure) is not None)
            middle = statistics.median(values) if values else 0.0
            cells.append(f"{middle:,.1f} ({values[0]:,.1f} to {values[-1]:,.1f})" if values else "")
        table.add_row(figure.replace("_per_s", "/s").replace("_", " "), *cells)
    return table
