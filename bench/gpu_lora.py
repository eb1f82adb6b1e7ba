"""Measures the cost of LoRA adapters in decode steps, and the effect of loading a new version on streams.

`lora.share_…`: speed of decode steps whose requests have adapters, evenly spread over as many as the row
says, as a share of the speed without adapters. Rounds of both alternate in one engine, in CUDA graphs.
Adapters have rank 32 on all products of Llama-3.1-8B (`lora.moe_share_b32`: rank 16, on attention and experts
of Qwen3-30B-A3B).

`lora.load_…`: loading a version from tensors on the card while 64 streams decode with the version before: the
time from call to reply, and the longest gap of a stream beyond that without a load.
`lora.fetch_first_token_ms`: time to the first token of a request whose adapter is in host memory, beyond that
of one whose adapter is on the card.
"""

# mypy: disable-error-code="arg-type"

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from gpu_common import Report, Shape, engine_args, model_folder, parse, parser_of
from numpy.typing import NDArray
from watched_streams import Streams

from ebbtide import Engine
from ebbtide.srt.config import resolve
from ebbtide.srt.device import open_device
from ebbtide.srt.hf_folder import adapter_config
from ebbtide.srt.mem_cache.page_allocator import PageAllocator
from ebbtide.srt.memory_saver.saver import open_memory_saver
from ebbtide.srt.model_executor.batch_plan import SAMPLED_BEFORE, BatchPlan, PendingStep, SampleSpec
from ebbtide.srt.model_executor.builder import build_model_runner
from ebbtide.srt.sampling_params import SamplingParams
from ebbtide.srt.server_args import ServerArgs

PARTS = ("share", "moe", "load", "fetch")
RANK, MOE_RANK = 32, 16
PROMPT_LEN, STEPS, PREFILLED_TOKENS = 256, 48, 4096
# Batch size and adapters of each row.
SHARES = {"share_b1": (1, 1), "share_b32": (32, 1), "share_b256_4": (256, 4), "share_b256_32": (256, 32)}
NUM_STREAMS = 64


def adapter_tensors(shape: Shape, rank: int, device: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of an adapter on all products of a model, with PEFT's names and layout of experts."""
    hidden, head_dim = shape["hidden_size"], shape["head_dim"]
    q_size, kv_size = shape["num_attention_heads"] * head_dim, shape["num_key_value_heads"] * head_dim
    num_experts = shape.num_experts
    modules = {
        "self_attn.q_proj": (hidden, q_size, 1),
        "self_attn.k_proj": (hidden, kv_size, 1),
        "self_attn.v_proj": (hidden, kv_size, 1),
        "self_attn.o_proj": (q_size, hidden, 1),
    }
    if num_experts:
        inner = shape["moe_intermediate_size"]
        modules["mlp.experts.base_layer"] = (hidden, 2 * inner, num_experts)
        modules["mlp.experts"] = (inner, hidden, num_experts)
    else:
        inner = shape["intermediate_size"]
        modules |= {f"mlp.{name}": (hidden, inner, 1) for name in ("gate_proj", "up_proj")}
        modules["mlp.down_proj"] = (inner, hidden, 1)
    for layer in range(shape["num_hidden_layers"]):
        for module, (num_inputs, num_outputs, count) in modules.items():
            prefix = f"base_model.model.model.layers.{layer}.{module}.lora_"
            a = torch.randn(count * rank, num_inputs, device=device, dtype=torch.bfloat16) / num_inputs**0.5
            b = torch.randn(num_outputs, count * rank, device=device, dtype=torch.bfloat16) / 64
            yield prefix + "A.weight", a
            yield prefix + "B.weight", b


def config_of(rank: int) -> dict[str, Any]:
    return {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}


class Decoding:
    """A model runner with dummy weights, and requests that decode."""

    def __init__(self, args: argparse.Namespace, shape: Shape, arguments: dict[str, Any], rank: int) -> None:
        config = resolve(ServerArgs(**arguments))
        self._device = open_device(config.runtime.device)
        saver = open_memory_saver(config.server_args.memory_saver_backend, self._device)
        self.runner = build_model_runner(config, self._device, saver)
        pool = self.runner.kv_pool
        self._pages = PageAllocator(pool.num_pages, pool.layout.page_ids)
        self._page_size = config.cache.page_size
        self._steps, self._prompt_len = (4, 32) if args.tiny else (STEPS, PROMPT_LEN)
        slots = self.runner.adapters
        assert slots is not None
        tensors = dict(adapter_tensors(shape, rank, self._device.name))
        described = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
        fit = slots.fit(adapter_config(config_of(rank)), described)
        for slot in range(slots.num_slots):
            slots.write(slot, fit, tensors.items())
        self._device.synchronize()
        self._rng = np.random.default_rng(0)
        self._vocab_size = shape["vocab_size"]
        self._rows: list[int] = []

    def close(self) -> None:
        self.runner.kv_pool.arena.close()
        self.runner.weight_store.arena.close()

    def grow(self, batch_size: int) -> None:
        """Add requests with computed prompts, until there are `batch_size`."""
        num_pages = -(-(self._prompt_len + self._steps + 1) // self._page_size)
        new = []
        while len(self._rows) < batch_size:
            row = self.runner.page_table.allocate_row()
            for group in range(len(self.runner.page_table.arrays)):
                pages = self._pages.allocate(num_pages)
                assert pages is not None, "the KV cache is too small"
                self.runner.page_table.write(row, 0, pages, group)
            self._rows.append(row)
            new.append(row)
        at_once = max(1, PREFILLED_TOKENS // self._prompt_len)
        for first in range(0, len(new), at_once):
            rows = new[first : first + at_once]
            tokens_T = self._rng.integers(0, self._vocab_size, self._prompt_len * len(rows))
            self.runner.launch(self._plan(rows, tokens_T, 0, self._prompt_len, None)).wait()

    def step_ms(self, batch_size: int, adapters_R: NDArray[np.int32] | None) -> float:
        """Milliseconds per decode step, over many steps that are launched as the scheduler does it."""
        rows = self._rows[:batch_size]
        before_T = np.full(batch_size, SAMPLED_BEFORE, dtype=np.int64)
        in_flight: PendingStep | None = None
        started = time.perf_counter()
        for number in range(self._steps):
            launched = self.runner.launch(
                self._plan(rows, before_T, self._prompt_len + number, 1, adapters_R)
            )
            if in_flight is not None:
                in_flight.wait()
            in_flight = launched
        assert in_flight is not None
        in_flight.wait()
        return (time.perf_counter() - started) / self._steps * 1e3

    def _plan(
        self,
        rows: Sequence[int],
        tokens_T: NDArray[np.int64],
        start: int,
        num_new: int,
        adapters_R: NDArray[np.int32] | None,
    ) -> BatchPlan:
        count = len(rows)
        params = SamplingParams(temperature=0.0)
        return BatchPlan(
            input_ids_T=tokens_T,
            page_rows_R=np.array(rows, dtype=np.int32),
            starts_R=np.full(count, start, dtype=np.int32),
            num_new_R=np.full(count, num_new, dtype=np.int32),
            samples_R=np.ones(count, dtype=np.bool_),
            num_outputs_R=np.full(count, start, dtype=np.int64),
            specs=[SampleSpec(params, 0, frozenset(), [], []) for _ in rows],
            adapters_R=adapters_R,
        )


def measure_share(
    args: argparse.Namespace, report: Report, key: str, decoding: Decoding, batch_size: int, num_adapters: int
) -> None:
    batch_size = min(batch_size, 8) if args.tiny else batch_size
    decoding.grow(batch_size)
    adapters_R = (np.arange(batch_size) % num_adapters).astype(np.int32)
    steps: dict[str, list[float]] = {"without_ms": [], "with_ms": []}
    for _ in range(max(args.runs, 1) * 3 + 1):
        steps["without_ms"].append(decoding.step_ms(batch_size, None))
        steps["with_ms"].append(decoding.step_ms(batch_size, adapters_R))
    steps = {name: runs[1:] for name, runs in steps.items()}
    shares = [before / after for before, after in zip(*steps.values(), strict=True)]
    medians = {name: statistics.median(runs) for name, runs in steps.items()}
    report.add(f"lora.{key}", shares, **medians, num_adapters=num_adapters, step_runs=steps)


def shares(args: argparse.Namespace, report: Report) -> None:
    keys = [key for key in SHARES if args.rows is None or key in args.rows]
    with report.attempt(*(f"lora.{key}" for key in keys)), model_folder(args, args.model) as (shape, folder):
        batch_size = max(SHARES[key][0] for key in keys)
        num_slots = max(SHARES[key][1] for key in keys)
        lora = {"enable_lora": True, "max_lora_rank": RANK, "max_loras_per_batch": num_slots}
        sizes = {
            "max_running_requests": batch_size,
            "cuda_graph_bs": sorted({SHARES[key][0] for key in keys}),
        }
        room = batch_size * (PROMPT_LEN + STEPS + 64)
        arguments = engine_args(args, folder, max_total_tokens=room, **sizes, **lora)
        decoding = Decoding(args, shape, arguments, RANK)
        for key in keys:
            with report.attempt(f"lora.{key}"):
                measure_share(args, report, key, decoding, *SHARES[key])
        decoding.close()


def moe_share(args: argparse.Namespace, report: Report) -> None:
    with report.attempt("lora.moe_share_b32"), model_folder(args, "qwen30b-a3b") as (shape, folder):
        lora = {"enable_lora": True, "max_lora_rank": MOE_RANK, "max_loras_per_batch": 1}
        sizes = {"max_running_requests": 32, "cuda_graph_bs": [32], "max_total_tokens": 32_768}
        decoding = Decoding(args, shape, engine_args(args, folder, **sizes, **lora), MOE_RANK)
        measure_share(args, report, "moe_share_b32", decoding, 32, 1)
        decoding.close()


def loads(args: argparse.Namespace, report: Report) -> None:
    """Measure loads of a version from tensors on the card while streams decode with the version before."""
    keys = ("lora.load_reply_ms", "lora.load_gap_ms")
    with report.attempt(*keys), model_folder(args, args.model) as (shape, folder):
        lora = {"enable_lora": True, "max_lora_rank": RANK, "max_loras_per_batch": 8}
        with Engine(**engine_args(args, folder, incremental_streaming_output=True, **lora)) as engine:
            print("the engine has started", flush=True)
            tensors = dict(adapter_tensors(shape, RANK, args.device))

            async def load(*, keep_mapped: bool = False) -> dict[str, Any]:
                return await engine.async_load_lora_adapter_from_tensors(
                    "policy", tensors, config_of(RANK), keep_mapped=keep_mapped
                )

            async def measure() -> dict[str, list[dict[str, Any]]]:
                await load()
                streams = Streams(args, engine, shape, lora_path="policy")
                updates = {"load": load, "kept": partial(load, keep_mapped=True)}
                return await streams.steady(NUM_STREAMS, updates)

            runs = asyncio.run(measure())
        normal = statistics.median(run["stall_ms"] for run in runs["normal"])
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        # The same with memory that stays mapped.
        kept_ms = [(run["reply_ms"], run["stall_ms"] - normal) for run in runs["kept"]]
        report.add(keys[0], [run["reply_ms"] for run in runs["load"]], num_bytes=num_bytes, kept_ms=kept_ms)
        report.add(
            keys[1],
            [run["stall_ms"] - normal for run in runs["load"]],
            normal_gap_ms=normal,
            step_runs=runs,
        )


def fetches(args: argparse.Namespace, report: Report) -> None:
    """Measure the time to the first token of a request whose adapter was evicted to host memory."""
    key = "lora.fetch_first_token_ms"
    with report.attempt(key), model_folder(args, args.model) as (shape, folder):
        lora = {"enable_lora": True, "max_lora_rank": RANK, "max_loras_per_batch": 1}
        with Engine(**engine_args(args, folder, **lora)) as engine:
            print("the engine has started", flush=True)
            tensors = dict(adapter_tensors(shape, RANK, args.device))
            # One more adapter than slots, of which there is one more than the adapters of a batch.
            names = ("a", "b", "c")
            for name in names:
                engine.load_lora_adapter_from_tensors(name, tensors, config_of(RANK))
            prompt = list(range(1, PROMPT_LEN + 1))

            def first_token_ms(name: str) -> float:
                engine.flush_cache()
                started = time.perf_counter()
                params = {"temperature": 0.0, "max_new_tokens": 1}
                engine.generate(input_ids=prompt, sampling_params=params, lora_path=name)
                return (time.perf_counter() - started) * 1e3

            fetched, resident = [], []
            for _ in range(3 * args.runs + 1):
                for name in names:
                    fetched.append(first_token_ms(name))
                    resident.append(first_token_ms(name))
        there = statistics.median(resident[3:])
        report.add(key, [one - there for one in fetched[3:]], resident_ms=there)


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rows", nargs="+", choices=SHARES, help="of the part share (default: all)")
    parser.add_argument("--model", default="llama8b")
    args = parse(parser, argv)
    report = Report("gpu_lora", args)
    report.facts |= {"model": args.model, "rank": RANK, "moe_rank": MOE_RANK, "prompt_len": PROMPT_LEN}
    for name, part in (("share", shares), ("moe", moe_share), ("load", loads), ("fetch", fetches)):
        if name in args.parts:
            part(args, report)
    report.finish()


if __name__ == "__main__":
    main()
