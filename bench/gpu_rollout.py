"""Measures tokens per second of rollouts as in reinforcement learning, with default flags.

- `grpo`, `grpo_4096`: 64 prompts with 8 samples each, at temperature 1 with logprobs. Output lengths are
  log-normal (median 245, sigma 0.85, cut at 2,048), the same in every run. Output tokens of whole calls
  count.
- `update`: the first of these with an update of all weights in the middle, `pause_mode=in_place`, as a share
  of runs without one.
- `batches`: greedy batches, and the same with options of samplers and trainers, as a share of the greedy
  batches in the same run. `many`: 1,024 requests.
- `prefill`: prompts with one output token each; `prompt_logprobs`: the same with the prompts' logprobs.
- `decode`: decoding with long contexts; the time of a call for one token, for the prefill, is subtracted.
- `gaps`: gaps between chunks, of all streams together. `first`: time to the first token of single requests
  while 256 others decode.
- `streams`: 256 streams of `Engine` while all of them decode, and the CPU time of their process per token,
  including the intake of requests. Python's garbage collector is on, as in all parts.
- `http`: concurrent requests to a server, as a share of the same through `Engine`.
- `stop_strings`: an engine with a tokenizer, with and without stop strings.

The limit of decode steps is the time to read their bytes at the best measured rate: `read_bytes_per_s`, of a
sum over 4 GiB. All parts with `--runs 1` take about four minutes on one H200.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
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
    running_server,
    synchronize,
)
from gpu_goals import GOALS, ROLLOUT_PREFIXES
from gpu_throughput import least_seconds
from http_load import clients, run_load
from numpy.typing import NDArray
from rollout_calls import NUM_PROMPTS, NUM_SAMPLES, RL, Rollouts, output_lens

from ebbtide import Engine

GREEDY: tuple[dict[str, Any], dict[str, Any]] = ({"temperature": 0.0}, {})
ASKED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "t1": (RL, {}),
    "rl": (RL, {"return_logprob": True}),
    "topp": (RL | {"top_p": 0.95, "top_k": 50}, {"return_logprob": True}),
    "top20": (RL, {"return_logprob": True, "top_logprobs_num": 20}),
    "prompt_logprobs": (RL, {"return_logprob": True, "logprob_start_len": 0}),
    "penalties": (RL | {"frequency_penalty": 0.2, "repetition_penalty": 1.1}, {"return_logprob": True}),
}
"""Sampling parameters and request fields, by the name of the row."""
KINDS = (*ASKED, "stop_strings")
BATCHES = {1: (128, 256), 32: (256, 256), 256: (512, 256)}
MANY = (1024, (256, 256))
PREFILLS = {"16x8192": (16, 8192), "128x1024": (128, 1024), "16x16384": (16, 16_384)}
DECODES = {
    "64x4k": (64, 4096, 128),
    "64x8k": (64, 8192, 128),
    "16x16k": (16, 16_384, 128),
    "16x32k": (16, 32_768, 128),
    # Log-normal lengths with this median, cut at 64 and 8,000.
    "256xuneven": (256, 545, 192),
}
GAPS = {64: (256, 256), 256: (512, 256)}
NUM_FIRST = 16
HTTP_SIZES = (256, 1024)
# Strings that random outputs do not contain.
STOP_STRINGS = ["<stop>", "\n\nHuman:", "</answer>"]
UPDATE_AFTER_S = 3.0


def measure_reading(device: str, *, tiny: bool) -> list[float]:
    """Rates of a sum over memory that is not in a cache, in bytes per second."""
    values = torch.ones((1 << 20) if tiny else 4 * GIB // 4, dtype=torch.float32, device=device)
    rates = []
    for _ in range(6):
        synchronize(device)
        started = time.perf_counter()
        for _ in range(3):
            values.sum()
        synchronize(device)
        rates.append(3 * values.nbytes / (time.perf_counter() - started))
    return rates


def lengths(args: argparse.Namespace) -> NDArray[np.int64]:
    return np.minimum(output_lens(NUM_PROMPTS), 16) if args.tiny else output_lens(NUM_PROMPTS * NUM_SAMPLES)


def row_key(args: argparse.Namespace, name: str) -> str:
    """The key of a row. It has the model's prefix, except rows of the 8B model that are not of batches."""
    prefix = ROLLOUT_PREFIXES[args.model]
    is_batch = name in ("b1024_rl", *(f"b{size}" for size in BATCHES)) or name.rpartition("_b")[0] in KINDS
    return f"rollout.{prefix}_{name}" if is_batch or prefix != "llama" else f"rollout.{name}"


def sized(args: argparse.Namespace, size: int, *lens: int) -> tuple[int, ...]:
    """A number of requests and their lengths, or small ones with `--tiny`."""
    return (2, *(8 for _ in lens)) if args.tiny else (size, *lens)


@dataclass(frozen=True)
class Bench:
    """The state that all parts share. Each part is a method with the part's name in `--parts`."""

    args: argparse.Namespace
    report: Report
    rollouts: Rollouts
    shape: Shape
    machine: Machine

    def key(self, name: str) -> str:
        return row_key(self.args, name)

    def grpo(self, prompt_len: int = 512) -> None:
        key, lens = self.key(f"grpo_{prompt_len}_tok_s"), lengths(self.args)
        with self.report.attempt(key):
            length = 32 if self.args.tiny else prompt_len
            runs = [self.rollouts.grpo(length, lens) for _ in range(self.args.runs)]
            self.report.add(key, runs, output_tokens=int(lens.sum()))

    def grpo_4096(self) -> None:
        self.grpo(4096)

    def update(self) -> None:
        key, lens = self.key("grpo_512_updated"), lengths(self.args)
        with self.report.attempt(key):
            names = checkpoint_shapes(self.shape)
            weights = [
                (name, torch.empty(size, dtype=torch.bfloat16, device=self.args.device).normal_(0, 0.02))
                for name, size in names.items()
            ]
            synchronize(self.args.device)
            length, after_s = (32, 0.1) if self.args.tiny else (512, UPDATE_AFTER_S)
            plain, updated, replies = [], [], []
            for _ in range(self.args.runs):
                plain.append(self.rollouts.grpo(length, lens))
                tok_s, reply = self.rollouts.grpo_updated(length, lens, weights, after_s)
                updated.append(tok_s)
                replies.append({name: reply.get(name) for name in ("staged", "stall_ms", "duration_ms")})
            shares = [one / other for one, other in zip(updated, plain, strict=True)]
            if (plain_key := self.key("grpo_512_tok_s")) not in self.report.rows:
                self.report.add(plain_key, plain, output_tokens=int(lens.sum()))
            self.report.add(key, shares, plain_tok_s=plain, updated_tok_s=updated, replies=replies)

    def batches(self) -> None:
        for size in self.args.batches:
            self._batch(size)

    def _batch(self, size: int) -> None:
        """Measure a batch size: greedy calls and each selected kind of call, in turns."""
        count, *lens = sized(self.args, size, *BATCHES[size])
        pair = (lens[0], lens[1])
        kinds = {"greedy": GREEDY, **{name: ASKED[name] for name in self.args.kinds}}
        keys = {name: self.key(f"{name}_b{size}") for name in self.args.kinds}
        greedy_key = self.key(f"b{size}")
        with self.report.attempt(greedy_key, *keys.values()):
            for params, fields in kinds.values():
                self.rollouts.batch(count, (16, 8), params, **fields)
            tok_s: dict[str, list[float]] = {name: [] for name in kinds}
            for _ in range(self.args.runs):
                for name, (params, fields) in kinds.items():
                    tok_s[name].append(self.rollouts.batch(count, pair, params, **fields))
            limit = count * pair[1] / least_seconds(self.shape, self.machine, count, *pair)
            basis = "bytes of every step at the rate of a copy, or its operations at that of a product"
            self.report.add(greedy_key, tok_s["greedy"], limit=limit, limit_basis=basis)
            for name, key in keys.items():
                shares = [one / greedy for one, greedy in zip(tok_s[name], tok_s["greedy"], strict=True)]
                runs = tok_s[name] if GOALS[key].unit == "tok/s" else shares
                self.report.add(key, runs, tok_s=tok_s[name], shares=shares)

    def many(self) -> None:
        key = self.key("b1024_rl")
        with self.report.attempt(key):
            count, *lens = sized(self.args, MANY[0], *MANY[1])
            runs = [
                self.rollouts.batch(count, (lens[0], lens[1]), RL, return_logprob=True)
                for _ in range(self.args.runs)
            ]
            self.report.add(key, runs)

    def prefill(self) -> None:
        # The limit uses a rate over half a second. Power limits allow less for longer, which is noted too.
        self.machine.measure_sustained(self.args.device, tiny=self.args.tiny)
        for name in self.args.prefills:
            size, length = PREFILLS[name]
            key = self.key(f"prefill_{name}_tok_s")
            with self.report.attempt(key):
                count, long = sized(self.args, size, length)
                runs = [self.rollouts.prefill(count, long) for _ in range(self.args.runs)]
                flops_per_token = self.shape.flops(1, long / 2, 1 / long)
                self.report.add(
                    key,
                    runs,
                    limit=self.machine.flops / flops_per_token,
                    limit_basis="operations at the rate of a large matrix product",
                    tflops=statistics.median(runs) * flops_per_token / 1e12,
                )

    def prompt_logprobs(self) -> None:
        key = self.key("prompt_logprobs_overhead")
        with self.report.attempt(key):
            count, long = sized(self.args, *PREFILLS["128x1024"])
            asked = {"return_logprob": True, "logprob_start_len": 0}
            # The first call of this size allocates memory for its logits, which takes 5 % of its time.
            self.rollouts.prefill(count, long, **asked)
            pairs = [
                (self.rollouts.prefill(count, long), self.rollouts.prefill(count, long, **asked))
                for _ in range(self.args.runs)
            ]
            # Operations of the logits of one position.
            flops = self.shape.flops(0, 0, 1)
            self.report.add(
                key,
                [plain / with_logprobs - 1 for plain, with_logprobs in pairs],
                limit=flops / self.machine.flops * statistics.median(plain for plain, _ in pairs),
                limit_basis="the matrix product of all logits",
                plain_tok_s=[plain for plain, _ in pairs],
                tok_s=[with_logprobs for _, with_logprobs in pairs],
            )

    def decode(self) -> None:
        for name in self.args.decodes:
            sizes = DECODES[name]
            key = self.key(f"decode_{name}_tok_s")
            with self.report.attempt(key):
                count, long, out = sized(self.args, *sizes)
                lens = np.full(count, long)
                if name.endswith("uneven"):
                    lens = (
                        np.exp(np.random.default_rng(1).normal(np.log(long), 1.0, count))
                        .clip(64, 8000)
                        .astype(int)
                    )
                runs = [self.rollouts.decode(lens.tolist(), out) for _ in range(self.args.runs)]
                kv_bytes = sum(self.shape.kv_bytes(length + out // 2) for length in lens.tolist())
                step_bytes = self.shape.decode_weight_bytes(count) + kv_bytes
                self.report.add(
                    key,
                    runs,
                    limit=count * max(self.report.facts["read_bytes_per_s"]) / step_bytes,
                    limit_basis="weights and KV at the best rate seen for reading",
                )

    def gaps(self) -> None:
        for size, lens_of in GAPS.items():
            keys = {what: self.key(f"gap_{what}_b{size}") for what in ("p50", "p99", "max", "first")}
            with self.report.attempt(*keys.values()):
                count, *lens = sized(self.args, size, *lens_of)
                runs = [
                    asyncio.run(self.rollouts.gaps(count, (lens[0], lens[1]))) for _ in range(self.args.runs)
                ]
                for what, key in keys.items():
                    self.report.add(key, [run[what] for run in runs])

    def streams(self) -> None:
        p99, cost = (self.key(f"engine_streams_{what}") for what in ("256_p99_ms", "us_per_token"))
        with self.report.attempt(p99, cost):
            size, prompt_len, output_len = (2, 8, 200) if self.args.tiny else (256, 512, 400)
            runs = [
                asyncio.run(self.rollouts.gaps(size, (prompt_len, output_len))) for _ in range(self.args.runs)
            ]
            self.report.add(
                p99,
                [run["decoding_p99"] for run in runs],
                goal_value=2 * statistics.median(run["decoding_p50"] for run in runs),
                all_runs=runs,
            )
            self.report.add(cost, [run["us_per_token"] for run in runs])

    def first(self) -> None:
        keys = [self.key(f"first_token_under_load_{what}") for what in ("p50", "p99")]
        with self.report.attempt(*keys):
            size, prompt_len, output_len = (2, 8, 200) if self.args.tiny else (256, 512, 400)
            count = 2 if self.args.tiny else NUM_FIRST
            runs = [
                asyncio.run(self.rollouts.first_tokens(size, (prompt_len, output_len), count))
                for _ in range(self.args.runs)
            ]
            for key, percent in zip(keys, (50, 99), strict=True):
                self.report.add(key, [float(np.percentile(run, percent)) for run in runs], all_runs=runs)


def measure_http(report: Report, args: argparse.Namespace, folder: Path, shape: Shape) -> None:
    """Measure calls of an engine, and then the same requests to a server."""
    keys = {
        (size, stream): row_key(args, f"http_{size}{'_streamed' if stream else ''}_share")
        for size in args.http_sizes
        for stream in (False, True)
    }
    with report.attempt(*keys.values()):
        given = {"incremental_streaming_output": True, "max_running_requests": max(HTTP_SIZES)}
        lens_of = {size: sized(args, size, *MANY[1]) for size in args.http_sizes}
        by_engine: dict[int, list[float]] = {}
        with Engine(**engine_args(args, folder, **given, **_pool(args))) as engine:
            rollouts = Rollouts(engine, shape)
            rollouts.batch(8, (64, 16), RL, return_logprob=True)
            for size, (count, *lens) in lens_of.items():
                run = lambda count=count, lens=lens: rollouts.batch(  # noqa: E731
                    count, (lens[0], lens[1]), RL, return_logprob=True
                )
                by_engine[size] = [run() for _ in range(args.reference_runs or args.runs)]
        with clients() as pool, running_server(engine_args(args, folder, **given, **_pool(args))) as server:
            server.wait_ready()
            run_load(pool, server.url, 8, shape["vocab_size"], (64, 16), stream=True)
            for (size, stream), key in keys.items():
                count, *lens = lens_of[size]
                loads = [
                    run_load(pool, server.url, count, shape["vocab_size"], (lens[0], lens[1]), stream=stream)
                    for _ in range(args.runs)
                ]
                tok_s = [load.num_tokens / load.seconds for load in loads]
                ours = statistics.median(by_engine[size])
                report.add(key, [one / ours for one in tok_s], tok_s=tok_s, engine_tok_s=by_engine[size])
                if stream:
                    gaps = [np.percentile(load.gaps_ms, (50, 99)).tolist() for load in loads]
                    firsts = [np.percentile(load.firsts_ms, (50, 100)).tolist() for load in loads]
                    report.add(
                        row_key(args, f"http_{size}_gap_p99_of_median"),
                        [p99 / p50 for p50, p99 in gaps],
                        gaps_ms=gaps,
                        firsts_ms=firsts,
                    )


def measure_stop_strings(report: Report, args: argparse.Namespace, folder: Path, shape: Shape) -> None:
    """Measure stop strings with an engine whose tokenizer has one word for each id."""
    keys = {size: row_key(args, f"stop_strings_b{size}") for size in args.batches}
    with report.attempt(*keys.values()):
        _write_tokenizer(folder, shape["vocab_size"])
        given = engine_args(args, folder, **_pool(args)) | {"skip_tokenizer_init": False}
        with Engine(**given) as engine:
            rollouts = Rollouts(engine, shape)
            for size, key in keys.items():
                count, *lens = sized(args, size, *BATCHES[size])
                pair = (lens[0], lens[1])
                rollouts.batch(8, (64, 16), RL | {"stop": STOP_STRINGS}, return_logprob=True)
                pairs = [
                    (
                        rollouts.batch(count, pair, RL, return_logprob=True),
                        rollouts.batch(count, pair, RL | {"stop": STOP_STRINGS}, return_logprob=True),
                    )
                    for _ in range(args.runs)
                ]
                report.add(key, [stopping / plain for plain, stopping in pairs], tok_s=pairs)


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    model = models.WordLevel({f"w{token_id} ": token_id for token_id in range(vocab_size)}, unk_token="w0 ")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model)).save_pretrained(folder)


def _pool(args: argparse.Namespace) -> dict[str, Any]:
    return {"max_total_tokens": 32_768} if args.tiny else {}


BENCH_PARTS = (
    "grpo",
    "grpo_4096",
    "update",
    "batches",
    "many",
    "prefill",
    "prompt_logprobs",
    "decode",
    "gaps",
    "streams",
    "first",
)
ENGINE_PARTS = {"http": measure_http, "stop_strings": measure_stop_strings}


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parts = (*BENCH_PARTS, *ENGINE_PARTS)
    parser.add_argument("--model", choices=tuple(ROLLOUT_PREFIXES), default="llama8b")
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    parser.add_argument(
        "--batches", nargs="+", type=int, choices=tuple(BATCHES), default=list(BATCHES), help="their sizes"
    )
    parser.add_argument("--prefills", nargs="+", choices=tuple(PREFILLS), default=list(PREFILLS))
    parser.add_argument("--decodes", nargs="+", choices=tuple(DECODES), default=list(DECODES))
    parser.add_argument(
        "--http-sizes", nargs="+", type=int, choices=HTTP_SIZES, default=HTTP_SIZES, help="requests at once"
    )
    parser.add_argument(
        "--kinds", nargs="*", choices=tuple(ASKED), default=list(ASKED), help="beside greedy batches"
    )
    parser.add_argument("--reference-runs", type=int, help="of `Engine` beside HTTP (default: --runs)")
    args = parse(parser, argv)
    machine = Machine.measure(args.device, tiny=args.tiny)
    report = Report("gpu_rollout", args)
    report.facts["machine"] = machine.runs
    report.facts["read_bytes_per_s"] = measure_reading(args.device, tiny=args.tiny)
    shape = TINY if args.tiny else SHAPES[args.model]
    with model_folder(args, args.model) as (_, folder):
        chosen = [part for part in args.parts if part in BENCH_PARTS]
        if chosen:
            with (
                report.attempt(row_key(args, "grpo_512_tok_s")),
                Engine(**engine_args(args, folder, **_pool(args))) as engine,
            ):
                rollouts = Rollouts(engine, shape)
                # A first batch, for compilation and allocation.
                rollouts.batch(8, (64, 16), RL, return_logprob=True)
                bench = Bench(args, report, rollouts, shape, machine)
                for part in chosen:
                    getattr(bench, part)()
        for part, measure in ENGINE_PARTS.items():
            if part in args.parts:
                measure(report, args, folder, shape)
    report.finish()


if __name__ == "__main__":
    main()
