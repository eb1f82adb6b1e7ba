"""What a scrape of the metrics costs an engine under a storm. On a CPU, with a null runner: nothing computes.

Streams run without end, and control operations come between them. Windows with `--rate` scrapes a second and
without take turns; every text is parsed. Told are the CPU time of the API process that a scrape takes, as a
share of a second (a scrape a second is many times what Prometheus asks for), and the tokens per second.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from typing import Any

from common import write_result
from prometheus_client.parser import text_string_to_metric_families

from ebbtide.testing.null_engine import NullEngine

GOAL_SHARE = 0.01


class Storm:
    """Streams, and what disturbs them.

    Attributes:
        num_tokens: of all streams so far.
    """

    def __init__(self, engine: NullEngine) -> None:
        self._engine = engine
        self.num_tokens = 0

    async def stream(self, index: int) -> None:
        params = {"max_new_tokens": 400, "ignore_eos": True}
        while True:
            chunks = await self._engine.async_generate(
                input_ids=[index + 1, 2, 3], sampling_params=params, stream=True
            )
            async for _ in chunks:
                self.num_tokens += 1

    async def disturb(self) -> None:
        version = 0
        while True:
            version += 1
            await self._engine.async_pause_generation("in_place")
            await self._engine.async_update_weights_from_disk(
                "1", weight_version=str(version), flush_cache=False
            )
            await self._engine.async_continue_generation()
            await asyncio.sleep(0.2)


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    rates: dict[bool, list[float]] = {True: [], False: []}
    cpu_ms: list[float] = []
    num_samples = 0
    with NullEngine(enable_metrics=True) as engine:
        storm = Storm(engine)
        tasks = [asyncio.create_task(storm.stream(index)) for index in range(args.streams)]
        tasks.append(asyncio.create_task(storm.disturb()))
        await asyncio.sleep(2)
        for window in range(2 * args.runs):
            is_scraped = window % 2 == 1
            started, tokens_before = time.perf_counter(), storm.num_tokens
            while (now := time.perf_counter()) - started < args.window_s:
                if is_scraped:
                    loads = await engine._service.loads()
                    cpu_before = time.thread_time()
                    text = engine._service.metrics.text(
                        engine._service.state, loads, engine._service.manager.pause
                    )
                    cpu_ms.append(1e3 * (time.thread_time() - cpu_before))
                    num_samples = sum(
                        len(family.samples) for family in text_string_to_metric_families(text.decode())
                    )
                await asyncio.sleep(max(0.0, now + 1 / args.rate - time.perf_counter()))
            rates[is_scraped].append((storm.num_tokens - tokens_before) / (time.perf_counter() - started))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return {
        "cpu_ms": statistics.median(cpu_ms),
        "cpu_ms_range": [min(cpu_ms), max(cpu_ms)],
        "num_scrapes": len(cpu_ms),
        "num_samples": num_samples,
        "tokens_per_s_scraped": rates[True],
        "tokens_per_s": rates[False],
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rate", type=float, default=1.0, help="scrapes a second")
    parser.add_argument("--window-s", type=float, default=5.0)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args(argv)
    found = asyncio.run(measure(args))
    share = found["cpu_ms"] / 1e3
    print(f"a scrape: {found['cpu_ms']:.2f} ms of CPU, {share:.2%} of a second (goal {GOAL_SHARE:.0%})")
    ratio = statistics.median(found["tokens_per_s_scraped"]) / statistics.median(found["tokens_per_s"])
    print(f"tokens per second with {args.rate:g} scrapes a second: {ratio:.3f} of those without")
    settings = {"streams": args.streams, "rate": args.rate, "goal_share": GOAL_SHARE}
    path = write_result("scrape", {**settings, "share_of_a_second": share, "ratio": ratio, **found})
    print(f"written to {path}")


if __name__ == "__main__":
    main()
