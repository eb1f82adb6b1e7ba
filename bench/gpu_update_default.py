"""Measures updates, releases and resumes with default flags, with the trainer's weights on the same card.

Only the model and the interval of streams' chunks are set, so that the KV pool has its default size, and
there is no free memory for a second copy of the weights. The trainer is another process, which allocates its
tensors after the engine has started (`--trainer first`: before). It shares them by CUDA IPC and makes the
payloads; this process passes them to `Engine`. `--trainer own`: the tensors are this process's, from before
the engine's start; rows `own_*`. `--tp 2` splits the model over two GPUs, each with a rank of the trainer
with all weights; `--one-gpu`: one rank of the trainer on the first GPU, rows `one_gpu_*`; `--model` selects
another model.

- `first_reply`: the first update after a start, without requests; `later_reply`: the median of the next
  three. An engine is started for each run. The trainer is there before it.

- `stall_*`, `reply_*`: greedy streams with 128 random prompt tokens, all past their start phase. One call
  brings all tensors. The stall is the longest gap between two chunks of a stream from a little before the
  call to 0.3 s after its reply, median of the streams. The reply time begins when the trainer is told to
  send; `encode_ms` is the trainer's part. `normal_*` is the same in the 0.3 s between updates, without one.
- `stall_retract_*`: streams with 320 output tokens. The call comes 1.5 s after they were sent, and the
  longest gap is that of a stream's whole life. `start_256` is the same without an update: the prefill of all
  streams.
- `reply_idle`: the same call without requests, immediately after the reply before, so it includes the work
  that follows that reply; `reply_idle_apart`: 0.3 s after it, when CPU and GPU are idle.
- `kept_*`: the same with `keep_mapped`: the trainer's tensors keep their addresses, and stay mapped.
- `buckets_*`: a session of flattened buckets of 512 MB; the reply time is that of the whole session.
- `release_kv`, `resume_kv_*`: the whole KV pool, just freed; `resume_kv_first_token` is the time from the
  call to the first token of a request that waited for it. `driver_*`: the driver's own calls for the same
  bytes, with as much free memory.
- `resize_30gb_down`, `resize_30gb_up`: the cache gives 30 GB to the driver, or takes them again, while 64
  streams run.
- `park_64x2k`: 64 streams with 2,048 prompt tokens; the KV is released with `preserve=live`, and resumed at
  once. The figure is the time from the resume to the next chunk, median of the streams;
  `park_64x2k_re_prefill` is the same with `preserve=none`. The host memory is allocated at the start
  (`kv_park_bytes`).
"""

# mypy: disable-error-code="union-attr"

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import psutil
import torch
from gpu_common import (
    GIB,
    SHAPES,
    TINY,
    Machine,
    Report,
    Shape,
    checkpoint_shapes,
    engine_args,
    model_folder,
    parse,
    parser_of,
)
from gpu_goals import ROLLOUT_PREFIXES
from gpu_occupation import measure_driver
from gpu_trainer_ranks import OwnTensors, TrainerRanks
from watched_streams import LOOK_S, PROMPT_LEN, Streams, repeated, timed

from ebbtide import Engine

BUCKET_BYTES, BUCKETS_AT_ONCE = 512 << 20, 3
# Goal of an update's stall beyond a pass and a copy, if there is no other goal.
BEYOND_COPY_MS = 3.0
PARTS = {
    "first": "first_reply",
    "idle": "reply_idle",
    "in_place": "stall_in_place_64",
    "kept": "kept_reply_idle",
    "retract": "stall_retract_64",
    "buckets": "buckets_reply_idle",
    "resize": "resize_30gb_down",
    "park": "park_64x2k",
    "kv": "release_kv",
}
"""The parts, and the row that gets the error if a part fails."""
PARK_STREAMS, PARK_PROMPT_LEN = 64, 2048
RESIZE_BYTES = 30 * 10**9
# Room for the KV of parked streams, including their output.
PARK_BYTES = 24 * GIB


class Bench:
    """The engine under test, and the trainer.

    Attributes:
        ranks: the trainer's ranks.
    """

    ranks: TrainerRanks | OwnTensors

    def __init__(self, args: argparse.Namespace, engine: Engine, shape: Shape) -> None:
        self._args = args
        self._engine = engine
        self.streams = Streams(args, engine, shape)

    async def update(self, pause_mode: str | None, *, flush: bool, kept: bool = False) -> dict[str, Any]:
        entries, encode_ms = await self.ranks.payloads(kept=kept)
        reply = await self._engine.async_update_weights_from_tensor(
            entries, pause_mode=pause_mode, flush_cache=flush
        )
        await self.ranks.answered()
        return reply | {"encode_ms": encode_ms}

    async def first_updates(self) -> list[dict[str, Any]]:
        """Time the first four updates of an engine that has served one request."""
        await self.streams.read([1], asyncio.Event(), num_tokens=2)
        return [await timed(lambda: self.update(None, flush=True)) for _ in range(4)]

    async def session(self, pause_mode: str | None) -> dict[str, Any]:
        """Update all weights by a session of buckets, while the next one is packed."""
        await self._engine.async_begin_weight_update()
        await self.ranks.start_buckets(BUCKET_BYTES)
        stages_ms: Counter[str] = Counter()
        sent: deque[asyncio.Future[dict[str, Any]]] = deque()

        async def answer() -> None:
            stages_ms.update((await sent.popleft())["stages_ms"])
            self.ranks.drop_bucket()

        while (entries := await self.ranks.next_bucket()) is not None:
            if len(sent) == BUCKETS_AT_ONCE:
                await answer()
            update = self._engine.async_update_weights_from_tensor(
                entries, load_format="flattened_bucket", flush_cache=False
            )
            sent.append(asyncio.ensure_future(update))
        while sent:
            await answer()
        reply = await self._engine.async_end_weight_update(pause_mode=pause_mode, flush_cache=False)
        stages_ms.update({f"end_{name}": ms for name, ms in reply["stages_ms"].items()})
        await self.ranks.end_buckets()
        return reply | {"stages_ms": dict(stages_ms)}

    async def left(self) -> dict[str, int | None]:
        """Bytes that are free, that the engine has outside its arenas, and that torch has in the trainer."""
        device = (await self._engine.async_memory_occupation())["device"]
        trainer = await self.ranks.reserved_bytes()
        left = {"free": device["free_bytes"], "engine": device["unmanaged_bytes"], "trainer": trainer}
        print(f"    left: {left}, descriptors: {descriptors()}", flush=True)
        return left

    async def park(self, preserve: str) -> dict[str, Any]:
        """Release the KV while streams with long prompts run, and resume it."""
        count, length = (4, 64) if self._args.tiny else (PARK_STREAMS, PARK_PROMPT_LEN)
        prompts = self.streams.prompts(count, length)
        begun = [asyncio.Event() for _ in prompts]
        all_times: list[list[float]] = [[] for _ in prompts]
        streams = [
            asyncio.ensure_future(self.streams.read(*one))
            for one in zip(prompts, begun, all_times, strict=True)
        ]
        await asyncio.gather(*(event.wait() for event in begun))
        sent = time.perf_counter()
        release = await self._engine.async_release_memory_occupation(["kv_cache"], preserve=preserve)
        released = time.perf_counter()
        await self._engine.async_resume_memory_occupation(["kv_cache"])
        resumed = time.perf_counter()
        await asyncio.gather(*streams)
        firsts = [min(at for at in times if at > released) - released for times in all_times]
        await self._engine.async_flush_cache()
        return {
            "first_token_ms": statistics.median(firsts) * 1e3,
            "last_stream_ms": max(firsts) * 1e3,
            "release_ms": (released - sent) * 1e3,
            "resume_ms": (resumed - released) * 1e3,
            "reply": {key: release.get(key) for key in ("num_parked", "parked_bytes", "num_retracted")},
        }

    async def resize(self, num_bytes: int) -> dict[str, Any]:
        return await self._engine.async_resize_memory_occupation(num_bytes=num_bytes)

    async def kv_cycle(self) -> dict[str, Any]:
        """Release all KV and resume it at once, while a request waits for it."""
        sent = time.perf_counter()
        freed = (await self._engine.async_release_memory_occupation(["kv_cache"]))["freed_bytes"]["kv_cache"]
        released = time.perf_counter()
        started = asyncio.Event()
        [prompt] = self.streams.prompts(1, PROMPT_LEN)
        waiting = asyncio.ensure_future(self.streams.read(prompt, started))
        await asyncio.sleep(0.005)
        resumed = time.perf_counter()
        resume = asyncio.ensure_future(self._engine.async_resume_memory_occupation(["kv_cache"]))
        await started.wait()
        first_token = time.perf_counter()
        await resume
        done = time.perf_counter()
        await waiting
        return {
            "release_ms": (released - sent) * 1e3,
            "first_token_ms": (first_token - resumed) * 1e3,
            "all_ms": (done - resumed) * 1e3,
            "bytes": freed,
        }


def descriptors() -> dict[int, int]:
    """Number of open files of this process and its children, by pid."""
    me = psutil.Process()
    return {process.pid: process.num_fds() for process in (me, *me.children(recursive=True))}


class Measuring:
    """The rows of one engine, part by part."""

    def __init__(
        self, report: Report, bench: Bench, args: argparse.Namespace, prefix: str, copy_ms: float
    ) -> None:
        self._report, self._bench, self._args, self._prefix = report, bench, args, prefix
        self._copy = {
            "limit": copy_ms,
            "limit_basis": "one copy of every byte, with nothing else on the device",
        }

    async def run(self) -> None:
        for part in self._args.parts:
            if part == "first":  # It needs engines of its own.
                continue
            # If a part fails, the others still run.
            with self._report.attempt(self._prefix + PARTS[part]):
                await getattr(self, part)()
            self._report.facts.setdefault("left", {})[part] = await self._bench.left()

    def _note(self, row: str, runs: list[dict[str, Any]], key: str, **limit: Any) -> None:
        self._report.add(self._prefix + row, [run[key] for run in runs], all_runs=runs, **limit)

    def _note_steady(
        self, rows: dict[str, tuple[str, str]], runs: dict[str, list[dict[str, Any]]], **limit: Any
    ) -> None:
        """Add rows. `rows`: by the update's name, the names of the rows of its reply and its stall."""
        normal: dict[str, Any] = {
            "limit": statistics.median(run["stall_ms"] for run in runs["normal"]),
            "limit_basis": "the longest gap of the same streams in 0.3 s without an update",
        }
        goal: dict[str, float] = {}
        if self._args.model not in ("llama8b", "qwen30b-a3b") and limit:
            goal["goal_value"] = normal["limit"] + limit["limit"] + BEYOND_COPY_MS
        for name, (reply, stall) in rows.items():
            self._note(reply, runs[name], "reply_ms", **limit)
            self._note(stall, runs[name], "stall_ms", **normal, **goal, normal_runs=runs["normal"])

    async def idle(self) -> None:
        bench = self._bench
        for row, apart_s in (("reply_idle", 0.0), ("reply_idle_apart", LOOK_S)):
            runs = await repeated(
                self._args.runs,
                lambda: timed(lambda: bench.update(None, flush=True)),
                apart_s=apart_s,
            )
            self._note(row, runs, "reply_ms", **self._copy)

    async def in_place(self) -> None:
        for size in self._args.streams:
            updates = {"in_place": lambda: self._bench.update("in_place", flush=False)}
            runs = await self._bench.streams.steady(size, updates)
            self._note(f"normal_{size}", runs["normal"], "stall_ms")
            rows = {"in_place": (f"reply_in_place_{size}", f"stall_in_place_{size}")}
            self._note_steady(rows, runs, **self._copy)

    async def kept(self) -> None:
        bench = self._bench
        runs = await repeated(
            self._args.runs, lambda: timed(lambda: bench.update(None, flush=True, kept=True))
        )
        self._note("kept_reply_idle", runs, "reply_ms", **self._copy)
        for size in self._args.streams:
            updates = {"kept": lambda: bench.update("in_place", flush=False, kept=True)}
            steady = await bench.streams.steady(size, updates)
            rows = {"kept": (f"kept_reply_in_place_{size}", f"kept_stall_in_place_{size}")}
            self._note_steady(rows, steady, **self._copy)
        await bench.ranks.forget()

    async def retract(self) -> None:
        for size in self._args.streams:
            start = [await self._bench.streams.in_flight(size, None)]
            self._note(f"start_{size}", start, "stall_ms")
            runs = [
                await self._bench.streams.in_flight(size, lambda: self._bench.update("retract", flush=True))
                for _ in range(min(self._args.runs, 3))
            ]
            self._note(f"stall_retract_{size}", runs, "stall_ms")
            self._note(f"reply_retract_{size}", runs, "reply_ms", **self._copy)

    async def buckets(self) -> None:
        bench = self._bench
        runs = await repeated(self._args.runs, lambda: timed(lambda: bench.session(None)))
        self._note("buckets_reply_idle", runs, "reply_ms", **self._copy)
        size = self._args.streams[0]
        steady = await bench.streams.steady(size, {"buckets": lambda: bench.session("in_place")})
        rows = {"buckets": (f"buckets_reply_{size}", f"buckets_stall_{size}")}
        self._note_steady(rows, steady, **self._copy)

    async def resize(self) -> None:
        bench = self._bench
        whole_bytes = self._report.facts["memory"]["tags"]["kv_cache"]["resident_bytes"]
        less_bytes = whole_bytes // 2 if self._args.tiny else whole_bytes - RESIZE_BYTES
        ways = {"down": lambda: bench.resize(less_bytes), "up": lambda: bench.resize(whole_bytes)}
        runs = await bench.streams.steady(self._args.streams[0], ways)
        rows = {way: (f"resize_30gb_{way}", f"resize_30gb_{way}_stall") for way in ways}
        self._note_steady(rows, runs)

    async def park(self) -> None:
        bench, runs = self._bench, min(self._args.runs, 2)
        retracted = await repeated(runs, lambda: bench.park("none"))
        self._note("park_64x2k_re_prefill", retracted, "first_token_ms")
        parked = await repeated(runs, lambda: bench.park("live"))
        half_ms = statistics.median(run["first_token_ms"] for run in retracted) / 2
        self._note("park_64x2k", parked, "first_token_ms", goal_value=half_ms)
        self._note("park_64x2k_release", parked, "release_ms")

    async def kv(self) -> None:
        runs = await repeated(self._args.runs, self._bench.kv_cycle)
        self._note("release_kv", runs, "release_ms")
        self._note("resume_kv_first_token", runs, "first_token_ms")
        self._note("resume_kv_all", runs, "all_ms")


def measure_first(report: Report, prefix: str, runs: list[list[dict[str, Any]]]) -> None:
    report.add(f"{prefix}first_reply", [run[0]["reply_ms"] for run in runs], all_runs=runs)
    later = [statistics.median(one["reply_ms"] for one in run[1:]) for run in runs]
    report.add(f"{prefix}later_reply", later)


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", choices=tuple(ROLLOUT_PREFIXES), default="llama8b")
    parser.add_argument("--parts", nargs="+", choices=tuple(PARTS), default=list(PARTS))
    parser.add_argument("--streams", nargs="+", type=int, choices=(64, 256), default=[64, 256])
    parser.add_argument("--trainer", choices=("after", "first", "own"), default="after")
    parser.add_argument("--tp", type=int, choices=(1, 2, 4), default=1, help="ranks: rows tp2_*, tp4_*")
    parser.add_argument("--one-gpu", action="store_true", help="one rank of the trainer, whatever --tp says")
    args = parse(parser, argv)
    # In another process, so that this one, which has the engine, takes no memory on the GPU.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        machine = pool.submit(partial(Machine.measure, tiny=args.tiny), args.device).result()
    report = Report("gpu_update_default", args)
    report.facts["machine"] = machine.runs
    shape = TINY if args.tiny else SHAPES[args.model]
    own = "own_" if args.trainer == "own" else "one_gpu_" if args.one_gpu else ""
    model = "" if args.model == "llama8b" else f"{ROLLOUT_PREFIXES[args.model]}_"
    prefix = "default." + model + (f"tp{args.tp}_" if args.tp > 1 else "") + own
    if args.device == "cuda" and args.tp > torch.cuda.device_count():
        report.skip(prefix + "reply_idle", why=f"it takes {args.tp} GPUs")
        report.finish()
        return
    with report.attempt(prefix + "reply_idle"), model_folder(args, args.model) as (_, folder):
        shapes = checkpoint_shapes(shape)

        def start_trainer() -> TrainerRanks | OwnTensors:
            if args.trainer == "own":
                return OwnTensors(shapes, args.device)
            return TrainerRanks(shapes, args.device, args.tp, num_lenders=1 if args.one_gpu else args.tp)

        first = None if args.trainer == "after" else start_trainer()
        given: dict[str, Any] = {"max_total_tokens": 32_768} if args.tiny else {}
        if args.tp > 1:
            given["tp_size"] = args.tp
        if "park" in args.parts:
            given["kv_park_bytes"] = (64 << 20) if args.tiny else PARK_BYTES
        arguments = engine_args(args, folder, incremental_streaming_output=True, **given)
        if "first" in args.parts:
            first = first or start_trainer()
            firsts = []
            for _ in range(args.runs):
                with Engine(**arguments) as engine:
                    bench = Bench(args, engine, shape)
                    bench.ranks = first
                    firsts.append(asyncio.run(bench.first_updates()))
            measure_first(report, prefix, firsts)
        if args.parts == ["first"]:
            report.finish()
            return
        with Engine(**arguments) as engine, first or start_trainer() as ranks:
            bench = Bench(args, engine, shape)
            bench.ranks = ranks
            report.facts["trainer_bytes"] = ranks.num_bytes
            report.facts["memory"] = engine.memory_occupation()
            copy_ms = 2 * ranks.num_bytes / args.tp / machine.copy_bytes_per_s * 1e3
            print(f"trainer {ranks.num_bytes / GIB:.1f} GiB, {report.facts['memory']}"[:600], flush=True)
            asyncio.run(Measuring(report, bench, args, prefix, copy_ms).run())
        if "kv" in args.parts and args.tp == 1:
            kv_bytes = report.facts["memory"]["tags"]["kv_cache"]["resident_bytes"]
            measure_driver(report, args, prefix, kv_bytes, report.facts["left"]["kv"]["free"])
    report.finish()


if __name__ == "__main__":
    main()
