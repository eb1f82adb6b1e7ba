"""Milliseconds to release, resume and update, from 64 MB to 4 GB per tag, against what the memory can do.

From request to reply through `Engine`, and of that what the scheduler itself needed (`duration_ms` of its
reply). Weights are random and KV is empty: only bytes count. Every operation is set against the least that
any engine on this machine would need, by rates measured in the same run, on one core:

- release: unmapping as many bytes of huge pages;
- resume: populating them. Warm: at once after the release. Cold: 10 s later, when a virtual machine has given
  its free pages back to the host (that takes about 2 s) and must get them anew;
- update in place (weights stale after a resume): one copy of every byte;
- staged update (weights that serve): populating the copy, and one copy of every byte.

An update goes the whole way of a trainer's tensors in another process: into shared memory and, by buckets in
one session, on into the weights.
"""

from __future__ import annotations

import argparse
import json
import mmap
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from common import write_result
from transformers import Qwen3Config, Qwen3ForCausalLM

from ebbtide import Engine

MB, GB = 1e6, 1e9
LAYER_BYTES = 64 << 20
KV_TOKENS = 1 << 18  # 64 MiB per layer
MAX_PROBE_BYTES = 1 << 30
BUCKET_BYTES = 512 << 20
NUM_DISTINCT_LAYERS = 8  # more than any cache holds
IDLE_S = 10.0
MADV_POPULATE_WRITE = 23
SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 1024,
    "intermediate_size": 5376,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

Timing = dict[str, float]


class Limits:
    """Rates of this machine's memory, in bytes per second, at the size of the tags (up to 1 GiB)."""

    def __init__(self, tag_bytes: int) -> None:
        self._num_bytes = min(tag_bytes, MAX_PROBE_BYTES)
        self.runs: dict[str, list[float]] = {}

    def measure_warm(self) -> None:
        """Copying, and taking memory that has just been given back."""
        self._measure_copy()
        self._measure_pages("populate")
        self._measure_pages("populate_warm")

    def measure_cold(self) -> None:
        """Taking memory after a pause."""
        self._measure_pages("populate_cold")

    def _measure_copy(self) -> None:
        source = torch.ones(self._num_bytes, dtype=torch.uint8)
        destination = torch.zeros_like(source)
        self._note("copy", lambda: destination.copy_(source))

    def _measure_pages(self, name: str) -> None:
        memory = mmap.mmap(-1, self._num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        self._note(name, lambda: memory.madvise(MADV_POPULATE_WRITE))
        self._note("unmap", memory.close)

    def _note(self, name: str, action: Callable[[], object]) -> None:
        started = time.perf_counter()
        action()
        self.runs.setdefault(name, []).append(self._num_bytes / (time.perf_counter() - started))

    def ms(self, num_bytes: float, *names: str) -> float:
        """The time that these take for so many bytes, one after the other, at their median rates."""
        return sum(num_bytes / statistics.median(self.runs[name]) for name in names) * 1e3


# What bounds each operation.
BOUNDS = {
    "release": ("unmap",),
    "resume, warm": ("populate_warm",),
    "resume, cold": ("populate_cold",),
    "update in place": ("copy",),
    "staged update": ("populate_warm", "copy"),
}


@contextmanager
def engine_of_layers(
    num_layers: int, max_total_tokens: int = KV_TOKENS
) -> Iterator[tuple[Engine, list[tuple[str, torch.Tensor]]]]:
    """An engine with so many layers, of which each adds 64 MiB to either tag; and a trainer's weights."""
    with tempfile.TemporaryDirectory() as folder:
        config = Qwen3Config(**SHAPE, num_hidden_layers=num_layers)
        config.architectures = ["Qwen3ForCausalLM"]
        Path(folder, "config.json").write_text(json.dumps({**config.to_dict(), "dtype": "float32"}))
        with torch.device("meta"):
            shapes = {name: value.shape for name, value in Qwen3ForCausalLM(config).state_dict().items()}
        distinct: dict[tuple[int, torch.Size], torch.Tensor] = {}
        named_tensors = []
        for index, (name, shape) in enumerate(shapes.items()):
            key = (index // 11 % NUM_DISTINCT_LAYERS, shape)  # 11 parameters are a layer
            if key not in distinct:
                distinct[key] = torch.full(shape, 0.01 * (index + 1))
            named_tensors.append((name, distinct[key]))
        with Engine(
            model_path=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_total_tokens=max_total_tokens,
        ) as engine:
            yield engine, named_tensors


def buckets(
    named_tensors: list[tuple[str, torch.Tensor]], max_bytes: int = BUCKET_BYTES
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Consecutive parts of at most `max_bytes`, or of one tensor."""
    bucket: list[tuple[str, torch.Tensor]] = []
    for name, tensor in named_tensors:
        if bucket and sum(one.nbytes for _, one in bucket) + tensor.nbytes > max_bytes:
            yield bucket
            bucket = []
        bucket.append((name, tensor))
    yield bucket


def timed(action: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], float]:
    """The reply and the milliseconds until it came."""
    started = time.perf_counter()
    reply = action()
    return reply, (time.perf_counter() - started) * 1e3


def release(engine: Engine, tag: str) -> Timing:
    reply, latency_ms = timed(lambda: engine.release_memory_occupation([tag]))
    return _timing(reply["freed_bytes"][tag], latency_ms, reply)


def resume(engine: Engine, tag: str) -> Timing:
    reply, latency_ms = timed(lambda: engine.resume_memory_occupation([tag]))
    return _timing(reply["mapped_bytes"][tag], latency_ms, reply)


def _timing(num_bytes: int, latency_ms: float, reply: dict[str, Any]) -> Timing:
    assert num_bytes > 0, reply
    return {"bytes": num_bytes, "latency_ms": latency_ms, "duration_ms": reply["duration_ms"]}


def update(engine: Engine, named_tensors: list[tuple[str, torch.Tensor]], *, staged: bool) -> Timing:
    """All weights in one session. `end_ms`: its last request alone, the commit."""
    started = time.perf_counter()
    engine.begin_weight_update()
    for bucket in buckets(named_tensors):
        engine.update_weights_from_tensor(bucket)
    reply, end_ms = timed(engine.end_weight_update)
    latency_ms = (time.perf_counter() - started) * 1e3
    assert (reply["staged"], reply["content"]) == (staged, "valid"), reply
    return {
        "bytes": reply["num_bytes"],
        "latency_ms": latency_ms,
        "end_ms": end_ms,
        "stall_ms": reply["stall_ms"],
    }


def run_once(
    engine: Engine, named_tensors: list[tuple[str, torch.Tensor]], limits: Limits
) -> dict[str, dict[str, Timing]]:
    """Each operation once, by tag and operation.

    The KV pool makes room before a second copy of the weights is taken: that many bytes are warm then.
    """
    kv: dict[str, Timing] = {"release": release(engine, "kv_cache")}
    kv["resume, warm"] = resume(engine, "kv_cache")
    weights: dict[str, Timing] = {"release": release(engine, "weights")}
    weights["resume, warm"] = resume(engine, "weights")
    weights["update in place"] = update(engine, named_tensors, staged=False)
    release(engine, "kv_cache")
    weights["staged update"] = update(engine, named_tensors, staged=True)
    release(engine, "weights")
    resume(engine, "kv_cache")
    limits.measure_warm()
    release(engine, "kv_cache")
    time.sleep(IDLE_S)
    kv["resume, cold"] = resume(engine, "kv_cache")
    limits.measure_cold()
    resume(engine, "weights")
    return {"weights": weights, "kv_cache": kv}


def measure(num_layers: int, num_runs: int) -> list[dict[str, Any]]:
    """The rows of one size."""
    limits = Limits(num_layers * LAYER_BYTES)
    with engine_of_layers(num_layers) as (engine, named_tensors):
        runs = [run_once(engine, named_tensors, limits) for _ in range(num_runs)]
    return summarize(runs, limits)


def summarize(runs: list[dict[str, dict[str, Timing]]], limits: Limits) -> list[dict[str, Any]]:
    """One row per tag and operation: medians, the bound and the ratio to it, and all runs."""
    rows = []
    for tag, operations in runs[0].items():
        for operation in operations:
            timings = [run[tag][operation] for run in runs]
            medians = {key: statistics.median(timing[key] for timing in timings) for key in timings[0]}
            limit_ms = limits.ms(medians["bytes"], *BOUNDS[operation])
            rows.append(
                {
                    "tag": tag,
                    "operation": operation,
                    "median": medians,
                    "limit_ms": limit_ms,
                    "limit_rates_gb_per_s": {
                        name: [rate / GB for rate in limits.runs[name]] for name in BOUNDS[operation]
                    },
                    "ratio": medians["latency_ms"] / limit_ms,
                    "runs": timings,
                }
            )
    return rows


def print_rows(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        median = row["median"]
        print(
            f"{row['tag']:9s} {median['bytes'] / MB:6.0f} MB  {row['operation']:16s}"
            f"{median['latency_ms']:9.1f} ms  {median['bytes'] / MB / median['latency_ms']:7.1f} GB/s"
            f"  limit {row['limit_ms']:8.1f} ms  ratio {row['ratio']:5.2f}",
            flush=True,
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 4, 16, 64], help="64 MiB per tag each")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = []
    for num_layers in args.layers:
        rows += (of_size := measure(num_layers, args.runs))
        print_rows(of_size)
    path = write_result("occupation", {"idle_s_before_cold": IDLE_S, "operations": rows})
    print(f"written to {path}")


if __name__ == "__main__":
    main()
