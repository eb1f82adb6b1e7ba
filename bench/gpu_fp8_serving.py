"""Serving with a KV cache in FP8, beside one of bfloat16: a Llama-3.1-8B's shape, whole calls of the Engine.

`decode_64` are 64 requests of 8,192 tokens that the prefix cache holds, with 128 tokens to come; its prefill
is the call before, which brought these prompts. Results are written after every engine.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import write_result
from gpu_common import SHAPES, TINY, Shape

from ebbtide import Engine

ENGINES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8_kv": {"kv_cache_dtype": "fp8_e4m3"},
    "fp8_both": {"kv_cache_dtype": "fp8_e4m3", "quantization": "fp8"},
}

NUM_RUNS = 3


class Calls:
    def __init__(self, engine: Engine, shape: Shape) -> None:
        self._engine, self._vocab_size = engine, shape["vocab_size"]

    def prompts(self, count: int, length: int, seed: int) -> list[list[int]]:
        rng = np.random.default_rng(seed)
        prompts: list[list[int]] = rng.integers(0, self._vocab_size, (count, length)).tolist()
        return prompts

    def seconds(self, prompts: list[list[int]], num_tokens: int) -> float:
        params = {"temperature": 0.0, "max_new_tokens": num_tokens, "ignore_eos": True}
        started = time.perf_counter()
        self._engine.generate(input_ids=prompts, sampling_params=params)
        return time.perf_counter() - started


def batch_256(calls: Calls, scale: int) -> dict[str, Any]:
    """Tokens per second of 256 requests of 512 tokens with 256 to come."""
    count, length, new = 256 // scale, 512 // scale, 256 // scale
    calls.seconds(calls.prompts(count, length, 0), 4)
    runs = [calls.seconds(calls.prompts(count, length, seed), new) for seed in range(1, NUM_RUNS + 1)]
    return told(runs, count * new)


def decode_64(calls: Calls, scale: int) -> dict[str, Any]:
    """Tokens per second of 64 requests with 8,192 tokens of context, and of the prompts before."""
    count, length, new = 64 // scale, 8192 // scale, 128 // scale
    prompts = calls.prompts(count, length, 3)
    prefill_s = calls.seconds(prompts, 1)
    # As long as the prompts take which the prefix cache holds; the steps are the rest.
    first_s = min(calls.seconds(prompts, 1) for _ in range(2))
    runs = [calls.seconds(prompts, new) for _ in range(NUM_RUNS)]
    return told(runs, count * new) | {"prefill_tok_s": count * length / prefill_s, "first_token_s": first_s}


def told(runs: list[float], num_tokens: int) -> dict[str, Any]:
    """Tokens per second: the median, the worst, the best, and all."""
    rates = sorted(num_tokens / seconds for seconds in runs)
    return {"tok_s": rates[len(rates) // 2], "worst_tok_s": rates[0], "best_tok_s": rates[-1], "runs": rates}


ROWS = {"batch_256": batch_256, "decode_64": decode_64}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", default=["fp8_kv:batch_256,decode_64", "bf16:batch_256,decode_64"])
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU: checks the script")
    parser.add_argument("--label", default="")
    args = parser.parse_args()
    shape, scale = (TINY, 16) if args.tiny else (SHAPES["llama8b"], 1)
    rows: dict[str, dict[str, Any]] = {}
    for run in args.runs:
        name, _, wanted = run.partition(":")
        with tempfile.TemporaryDirectory(prefix="eb-") as folder:
            path = shape.write(Path(folder) / "model")
            started = time.perf_counter()
            sizes = (
                {"device": "cpu", "max_total_tokens": 16_384} if args.tiny else {"cuda_graph_bs": [64, 256]}
            )
            with Engine(
                model_path=str(path), load_format="dummy", skip_tokenizer_init=True, **sizes, **ENGINES[name]
            ) as engine:
                rows[name] = {"start_s": time.perf_counter() - started}
                for row in wanted.split(","):
                    rows[name][row] = ROWS[row](Calls(engine, shape), scale)
                    print(name, row, rows[name][row], flush=True)
        if not args.tiny:
            write_result(f"gpu_fp8_serving{args.label}", {"engines": rows})


if __name__ == "__main__":
    main()
