"""Measures the cost of optional features of requests and updates.

- `canary`: an update of one tensor, staged as a whole copy, in place, while 64 streams run: how much longer
  forward passes stall with a canary of 256 tokens than without. Runs of both alternate.
- `short_behind_long`: time to the first token of a prompt of 128 tokens that comes 100 to 130 ms (at a random
  point of a pass) after one of 30,000, as a multiple of the time without the latter.
- `structured_64`: tokens per second of 64 requests of 256 tokens at temperature 1 with a JSON schema, as a
  share of that of requests without one that have the same output lengths: where outputs end early, few
  requests run beside the longest. The tokenizer is synthetic, with the proportions of a real one: single
  bytes, numbers of up to three digits, runs of signs as in JSON, and random words up to the vocabulary size.
- `masks_64`: the same for 64 requests of 256 tokens with top-p and top-k that return sampling masks, in lists
  and in arrays (`masks_arrays_64`).
- `routes_256`: tokens per second of 256 streams of Qwen3-30B-A3B, with 256 tokens in and 64 to 191 out, that
  return routed experts, as a share of that of an engine that does not record them; and the longest gap
  between chunks.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import itertools
import json
import random
import statistics
import string
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_common import SHAPES, Report, Shape, engine_args, model_folder, parse, parser_of

from ebbtide import Engine

PARTS = ("canary", "short", "structured", "masks", "routes")
MOE_MODEL = "qwen30b-a3b"
# Makes most outputs reach the limit of tokens: each of the 100 notes takes some.
SCHEMA = {
    "type": "object",
    "properties": {
        "notes": {"type": "array", "items": {"type": "string"}, "minItems": 100},
        "score": {"type": "number"},
        "ok": {"type": "boolean"},
    },
    "required": ["notes", "score", "ok"],
    "additionalProperties": False,
}
SIGNS = '"""{}[]:,.-\\/()\'<>=;_'
NUM_SIGN_TOKENS = 4000


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer with all bytes, numbers, runs of signs, random words, and an end of sequence."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    rng = random.Random(0)
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    names += [str(number) for number in range(10, min(1000, vocab_size // 4))]
    known = set(names)
    num_signs = min(NUM_SIGN_TOKENS, vocab_size // 32)
    while len(names) < vocab_size - 1:
        is_sign = num_signs > 0
        letters = (SIGNS, rng.randint(2, 4)) if is_sign else (string.ascii_letters, rng.randint(2, 9))
        word = rng.choice(("", "\u0120")) + "".join(rng.choices(letters[0], k=letters[1]))
        if word not in known:
            known.add(word)
            names.append(word)
            num_signs -= is_sign
    vocabulary = {name: token_id for token_id, name in enumerate([*names, "<end>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


class Requests:
    """Sends requests to an engine, each with a new random prompt."""

    def __init__(self, args: argparse.Namespace, engine: Engine, shape: Shape) -> None:
        self.engine = engine
        self.is_tiny: bool = args.tiny
        self.hidden_size: int = shape["hidden_size"]
        self._rng = random.Random(0)
        self._seeds = itertools.count()

    def prompt(self, length: int) -> list[int]:
        return [self._rng.randrange(250) for _ in range(length)]

    async def call(self, length: int, num_tokens: int, *, asks_mask: bool = False, **params: Any) -> Any:
        seed = next(self._seeds)
        given = {"temperature": 1.0, "max_new_tokens": num_tokens, "sampling_seed": seed, **params}
        return await self.engine.async_generate(
            input_ids=self.prompt(length), sampling_params=given, return_sampling_mask=asks_mask
        )

    async def gap(self, length: int, num_tokens: int, *, asks: bool) -> float:
        """The longest time between two chunks of a stream, in seconds."""
        given = {"temperature": 1.0, "max_new_tokens": num_tokens, "ignore_eos": True}
        stream = await self.engine.async_generate(
            input_ids=self.prompt(length), sampling_params=given, return_routed_experts=asks, stream=True
        )
        times = [time.perf_counter() async for _ in stream]
        return max(later - earlier for earlier, later in itertools.pairwise(times))


async def canary(report: Report, requests: Requests, num_runs: int) -> None:
    num_streams, num_tokens = (2, 60) if requests.is_tiny else (64, 2000)
    ids = requests.prompt(8 if requests.is_tiny else 256)
    norm = torch.ones(requests.hidden_size, dtype=torch.bfloat16)
    streams = [
        asyncio.create_task(requests.call(64, num_tokens, ignore_eos=True)) for _ in range(num_streams)
    ]
    stalls: dict[bool, list[float]] = {True: [], False: []}
    for run in range(2 * num_runs + 2):
        has_canary = run % 2 == 0
        reply = await requests.engine.async_update_weights_from_tensor(
            [("model.norm.weight", norm)],
            pause_mode="in_place",
            flush_cache=False,
            canary={"input_ids": ids} if has_canary else None,
        )
        assert reply["staged"], "a canary needs a copy"
        if run >= 2:
            stalls[has_canary].append(reply["stall_ms"])
    await requests.engine.async_abort_request(abort_all=True)
    await asyncio.gather(*streams)
    without = statistics.median(stalls[False])
    runs = [stall - without for stall in stalls[True]]
    report.add("replay.canary_ms", runs, stall_ms=stalls[True], stall_without_ms=stalls[False])


async def short_behind_long(report: Report, requests: Requests, num_runs: int) -> None:
    long_len, delay_s = (60, 0.0) if requests.is_tiny else (30_000, 0.1)
    phases_s = random.Random(1)
    alone, behind, long_s = [], [], []
    for _ in range(2 * num_runs + 1):
        started = time.perf_counter()
        await requests.call(16 if requests.is_tiny else 128, 1)
        alone.append(time.perf_counter() - started)
        long_started = time.perf_counter()
        long = asyncio.create_task(requests.call(long_len, 1))
        await asyncio.sleep(delay_s + phases_s.uniform(0.0, 0.03))
        started = time.perf_counter()
        await requests.call(16 if requests.is_tiny else 128, 1)
        behind.append(time.perf_counter() - started)
        await long
        long_s.append(time.perf_counter() - long_started)
    base = statistics.median(alone[1:])
    report.add(
        "replay.short_behind_long",
        [seconds / base for seconds in behind[1:]],
        alone_ms=[1e3 * seconds for seconds in alone],
        behind_ms=[1e3 * seconds for seconds in behind],
        long_ms=[1e3 * seconds for seconds in long_s],
    )


async def structured(report: Report, requests: Requests, num_runs: int) -> None:
    num_requests, num_tokens = (2, 8) if requests.is_tiny else (64, 256)

    lengths = [num_tokens] * num_requests

    async def rate(*, asks: bool) -> float:
        params = {"json_schema": SCHEMA} if asks else {"ignore_eos": True}
        allowed = [num_tokens] * num_requests if asks else lengths
        started = time.perf_counter()
        answers = await asyncio.gather(*(requests.call(64, length, **params) for length in allowed))
        elapsed_s = time.perf_counter() - started
        lengths[:] = [answer["meta_info"]["completion_tokens"] for answer in answers]
        return sum(lengths) / elapsed_s

    await alternate(report, "replay.structured_64", rate, num_runs, lengths=lengths)


async def masks(report: Report, requests: Requests, num_runs: int) -> None:
    num_requests, num_tokens = (2, 8) if requests.is_tiny else (64, 256)
    params = {"top_p": 0.95, "top_k": 50, "ignore_eos": True}
    as_arrays = {"custom_params": {"return_top_p_token_ids": True}}

    async def rate(*, asks: bool, has_arrays: bool = False) -> float:
        given = params | as_arrays if asks and has_arrays else params
        started = time.perf_counter()
        calls = [
            requests.call(64, num_tokens, asks_mask=asks and not has_arrays, **given)
            for _ in range(num_requests)
        ]
        await asyncio.gather(*calls)
        return num_requests * num_tokens / (time.perf_counter() - started)

    await alternate(report, "replay.masks_64", rate, num_runs)
    await alternate(report, "replay.masks_arrays_64", functools.partial(rate, has_arrays=True), num_runs)


async def alternate(
    report: Report, key: str, rate: Callable[..., Awaitable[float]], num_runs: int, **details: Any
) -> None:
    """Measure rates with and without the feature in turns, and add the row. The first of each is dropped."""
    rates: dict[bool, list[float]] = {True: [], False: []}
    pauses_s = [0.0]

    def time_collector(phase: str, info: dict[str, Any]) -> None:
        pauses_s.append(time.perf_counter() - (0.0 if phase == "start" else pauses_s.pop()))

    gc.callbacks.append(time_collector)
    for run in range(2 * num_runs + 2):
        asks = run % 2 == 0
        tok_s = await rate(asks=asks)
        if run >= 2:
            rates[asks].append(tok_s)
    gc.callbacks.remove(time_collector)
    # In this process, which also runs the engine's API.
    details["longest_collection_ms"] = 1e3 * max(pauses_s)
    print(
        f"  longest garbage collection of the caller: {details['longest_collection_ms']:.1f} ms", flush=True
    )
    plain = statistics.median(rates[False])
    shares = [tok_s / plain for tok_s in rates[True]]
    report.add(key, shares, tok_s=rates[True], plain_tok_s=rates[False], **details)


async def streams(requests: Requests, *, asks: bool) -> tuple[float, float]:
    """Tokens per second of many streams, and the longest gap of any, in seconds."""
    num_streams, length, num_tokens = (2, 16, 8) if requests.is_tiny else (256, 256, 128)
    lengths = [num_tokens // 2 + index * num_tokens // num_streams for index in range(num_streams)]
    started = time.perf_counter()
    gaps = await asyncio.gather(*(requests.gap(length, num, asks=asks) for num in lengths))
    return sum(lengths) / (time.perf_counter() - started), max(gaps)


def routes(report: Report, args: argparse.Namespace) -> None:
    """Measure `routes_256` with two engines, since recording experts is a setting of an engine."""
    found: dict[bool, list[tuple[float, float]]] = {}
    for asks in (False, True):
        with model_folder(args, MOE_MODEL) as (shape, folder):
            given = engine_args(args, folder, enable_return_routed_experts=asks)
            started = time.perf_counter()
            with Engine(**given) as engine:
                print(f"  records={asks}: started in {time.perf_counter() - started:.1f} s", flush=True)
                requests = Requests(args, engine, shape)
                found[asks] = []
                for run in range(args.runs + 1):
                    tok_s, gap_s = asyncio.run(streams(requests, asks=asks))
                    print(
                        f"  records={asks} run={run}: {tok_s:.0f} tok/s, longest gap {1e3 * gap_s:.1f} ms",
                        flush=True,
                    )
                    if run:
                        found[asks].append((tok_s, gap_s))
    plain = statistics.median(tok_s for tok_s, _ in found[False])
    report.add(
        "replay.routes_256",
        [tok_s / plain for tok_s, _ in found[True]],
        tok_s=[tok_s for tok_s, _ in found[True]],
        plain_tok_s=[tok_s for tok_s, _ in found[False]],
        longest_gap_ms=[1e3 * gap for _, gap in found[True]],
        plain_longest_gap_ms=[1e3 * gap for _, gap in found[False]],
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", choices=tuple(SHAPES), default="llama8b")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    args = parse(parser, argv)
    report = Report("gpu_replay", args)

    async def measure(requests: Requests) -> None:
        if "canary" in args.parts:
            with report.attempt("replay.canary_ms"):
                await canary(report, requests, args.runs)
        if "short" in args.parts:
            with report.attempt("replay.short_behind_long"):
                await short_behind_long(report, requests, args.runs)
        if "structured" in args.parts:
            with report.attempt("replay.structured_64"):
                await structured(report, requests, args.runs)
        if "masks" in args.parts:
            with report.attempt("replay.masks_64", "replay.masks_arrays_64"):
                await masks(report, requests, args.runs)

    if "routes" in args.parts:
        if args.tiny:
            report.skip("replay.routes_256", why="the tiny model has no experts")
        else:
            with report.attempt("replay.routes_256"):
                routes(report, args)
    if args.parts == ["routes"]:
        report.finish()
        return
    with model_folder(args, args.model) as (shape, folder):
        write_tokenizer(folder, shape["vocab_size"])
        given = {"max_total_tokens": 4096} if args.tiny else {}
        with Engine(**engine_args(args, folder, skip_tokenizer_init=False, **given)) as engine:
            asyncio.run(measure(Requests(args, engine, shape)))
    report.finish()


if __name__ == "__main__":
    main()
