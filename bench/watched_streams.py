"""Measures gaps in streams of an engine in this process, for example during updates.

The client notes the time of each chunk, and does not read its contents.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np
from gpu_common import Shape

from ebbtide import Engine

PROMPT_LEN, OUTPUT_LEN, SEND_AFTER_S = 128, 320, 1.5
# For streams that decode steadily: tokens of the start phase, which is not measured; seconds of each
# measurement; and seconds before an update that belong to its measurement.
STEADY_TOKENS, LOOK_S, LEAD_S = 16, 0.3, 0.02
# The most tokens of such a stream. It is less if the cache has no room, so that no stream waits for room.
WATCHED_TOKENS = 3_000
# Fields of replies that are kept.
TOLD = ("encode_ms", "staged", "stall_ms", "duration_ms", "stages_ms", "num_tensors", "num_bytes", "message")

Update = Callable[[], Awaitable[dict[str, Any]]]


class Streams:
    """Greedy streams with random prompts.

    Args:
        **fields: further fields of every request.
    """

    def __init__(self, args: argparse.Namespace, engine: Engine, shape: Shape, **fields: Any) -> None:
        self._fields = fields
        self._args = args
        self._engine = engine
        self._vocab_size = shape["vocab_size"]
        self._rng = np.random.default_rng(0)

    def prompts(self, num_prompts: int, num_tokens: int) -> list[list[int]]:
        prompts: list[list[int]] = self._rng.integers(0, self._vocab_size, (num_prompts, num_tokens)).tolist()
        return prompts

    async def read(
        self,
        prompt: list[int],
        started: asyncio.Event,
        times: list[float] | None = None,
        num_tokens: int | None = None,
    ) -> list[float]:
        """Read a stream; returns the times of its chunks. `times` is extended while they come.

        Args:
            num_tokens: length of the output, in which case the stream may be aborted. None: the default
                length, and the stream must end by itself.
        """
        usual = 40 if self._args.tiny else OUTPUT_LEN
        params = {
            "temperature": 0.0,
            "max_new_tokens": usual if num_tokens is None else num_tokens,
            "ignore_eos": True,
        }
        times = [] if times is None else times
        async for chunk in await self._engine.async_generate(
            input_ids=prompt, sampling_params=params, stream=True, **self._fields
        ):
            times.append(time.perf_counter())
            started.set()
            if chunk["meta_info"]["finish_reason"] is not None:
                reason = chunk["meta_info"]["finish_reason"]["type"]
                if reason != "length" and num_tokens is None:
                    raise RuntimeError(f"a stream ended by {reason}")
        return times

    async def in_flight(self, num_streams: int, update: Update | None) -> dict[str, Any]:
        """Run streams once, with an update in the middle; None: without."""
        prompts = self.prompts(4 if self._args.tiny else num_streams, PROMPT_LEN)
        started = asyncio.Event()
        begun = time.perf_counter()
        streams = [asyncio.ensure_future(self.read(prompt, started)) for prompt in prompts]
        run: dict[str, Any] = {}
        if update is not None:
            await started.wait()
            after_s = 0.05 if self._args.tiny else SEND_AFTER_S
            await asyncio.sleep(max(0.0, after_s - (time.perf_counter() - begun)))
            run = await timed(update)
        all_times = await asyncio.gather(*streams)
        gaps = [[after - before for before, after in itertools.pairwise(times)] for times in all_times]
        run["stall_ms"] = statistics.median(max(gap) for gap in gaps) * 1e3
        run["worst_stream_ms"] = max(max(gap) for gap in gaps) * 1e3
        run["median_gap_ms"] = statistics.median(gap for stream in gaps for gap in stream) * 1e3
        run["seconds"] = max(times[-1] for times in all_times) - begun
        await self._engine.async_flush_cache()
        return run

    async def steady(
        self, num_streams: int, updates: Mapping[str, Update]
    ) -> dict[str, list[dict[str, Any]]]:
        """Measure streams that decode steadily, with each of these updates several times, and without.

        Returns the runs by the update's name; those without an update are "normal".
        """
        num_streams = 4 if self._args.tiny else num_streams
        prompts = self.prompts(num_streams, PROMPT_LEN)
        room = (await self._engine.async_server_info())["max_total_num_tokens"] // num_streams
        num_tokens = min(WATCHED_TOKENS, room - PROMPT_LEN - STEADY_TOKENS)
        runs: dict[str, list[dict[str, Any]]] = {}
        while len(runs.get("normal", ())) < self._args.runs + 1:
            looks = await self._watch(prompts, num_tokens, {"normal": None, **updates})
            for name, run in looks:
                runs.setdefault(name, []).append(run)
        return {name: of_name[1 : self._args.runs + 1] for name, of_name in runs.items()}

    async def _watch(
        self, prompts: list[list[int]], num_tokens: int, updates: Mapping[str, Update | None]
    ) -> list[tuple[str, dict[str, Any]]]:
        """Make as many of these measurements as the streams' length allows; returns their names and runs."""
        look_s = 0.05 if self._args.tiny else LOOK_S
        all_times: list[list[float]] = [[] for _ in prompts]
        ignored = asyncio.Event()
        looks: list[tuple[str, dict[str, Any], float, float]] = []
        streams = [
            asyncio.ensure_future(self.read(prompt, ignored, times, num_tokens))
            for prompt, times in zip(prompts, all_times, strict=True)
        ]
        while min(len(times) for times in all_times) < STEADY_TOKENS:
            await asyncio.sleep(0.01)
        for _ in range(self._args.runs + 1):
            num_before = max(len(times) for times in all_times)
            for name, update in updates.items():
                begun = time.perf_counter()
                run = {} if update is None else await timed(update)
                await asyncio.sleep(look_s)
                looks.append((name, run, begun - LEAD_S, time.perf_counter()))
            num_now = max(len(times) for times in all_times)
            # Stop if the next round, of about as many tokens, might exceed the streams' length.
            if num_now + 1.5 * (num_now - num_before) > num_tokens:
                break
        await self._engine.async_abort_request(abort_all=True)
        await asyncio.gather(*streams)
        await self._engine.async_flush_cache()
        return [(name, run | gaps_between(all_times, begun, ended)) for name, run, begun, ended in looks]


async def timed(update: Update) -> dict[str, Any]:
    """Make an update; returns the milliseconds from call to reply, and the reply's kept fields."""
    sent = time.perf_counter()
    reply = await update()
    return {
        "reply_ms": (time.perf_counter() - sent) * 1e3,
        "reply": {key: reply.get(key) for key in TOLD},
    }


async def repeated(num_runs: int, run: Update, *, apart_s: float = 0.0) -> list[dict[str, Any]]:
    """Repeat a run, after a first one that does not count, with a pause of `apart_s` before each."""
    runs = []
    for _ in range(num_runs + 1):
        await asyncio.sleep(apart_s)
        runs.append(await run())
    return runs[1:]


def gaps_between(all_times: list[list[float]], begun: float, ended: float) -> dict[str, Any]:
    """Milliseconds of the streams' gaps that overlap an interval.

    Raises:
        RuntimeError: a stream has no such gap, since it ended before.
    """
    longest, usual = [], []
    for times in all_times:
        inside = [
            after - before for before, after in itertools.pairwise(times) if after > begun and before < ended
        ]
        if not inside:
            raise RuntimeError(f"a stream of {len(times)} chunks had ended before it was looked at")
        longest.append(max(inside))
        usual += inside
    return {
        "gaps_ms": [round(gap * 1e3, 2) for gap in inside],
        "stall_ms": statistics.median(longest) * 1e3,
        "worst_stream_ms": max(longest) * 1e3,
        "median_gap_ms": statistics.median(usual) * 1e3,
    }
