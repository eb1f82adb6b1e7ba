"""Peak device memory while weights update: the engine wakes in stages, or at once.

A trainer in another process holds its own copy of the weights on the same GPU, and the engine sleeps. One
stage: resume weights and KV, update, the trainer gives its copy back. Several stages: resume the weights,
update, the trainer gives its copy back, resume the KV. What the device has in use, of all processes, is
sampled every 2 ms by a process of its own. The figure is the difference of the peaks while weights update
(from the first resume to the reply of the update); the peaks of the whole sequences are in the JSON too.

The limit is the size of the KV pool: it is all that the stages keep from being there at that time.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

from gpu_common import Report, engine_args, model_folder, parse, parser_of, wall_ms
from gpu_machine import GB, GIB
from gpu_trainer import Trainer

from ebbtide import Engine

MODEL = "llama8b"
KV_BYTES = 64 * GIB
PERIOD_S = 0.002


class Watcher:
    """Samples the memory in use, from a process of its own."""

    def __init__(self, device: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_watch, args=(theirs, device), daemon=True)
        self._process.start()
        theirs.close()
        self.source: str = self._pipe.recv()

    def peak(self) -> int:
        """The most that was in use since the last call, in bytes."""
        self._pipe.send("peak")
        peak: int = self._pipe.recv()
        return peak

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _watch(pipe: Connection, device: str) -> None:
    source, used_bytes = _source(device)
    pipe.send(source)
    peak = used_bytes()
    with contextlib.suppress(EOFError):
        while True:
            peak = max(peak, used_bytes())
            if pipe.poll(PERIOD_S):
                pipe.recv()
                pipe.send(max(peak, used_bytes()))
                peak = used_bytes()


def _source(device: str) -> tuple[str, Any]:
    if device != "cuda":
        import psutil

        return "the system's memory", lambda: psutil.virtual_memory().used
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        pynvml.nvmlDeviceGetMemoryInfo(handle)
        return "NVML", lambda: int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
    except Exception:
        import torch

        def used_bytes() -> int:
            free_bytes, total_bytes = torch.cuda.mem_get_info()
            return total_bytes - free_bytes

        return "cudaMemGetInfo, with the context of the process that asks", used_bytes


def run(
    engine: Engine, watcher: Watcher, trainer: Trainer, args: argparse.Namespace, stages: bool
) -> dict[str, Any]:
    """One sequence, from an engine asleep to one that serves the new weights."""
    engine.release_memory_occupation()
    trainer.drop()
    trainer.hold()
    time.sleep(0.0 if args.tiny else 3.0)
    watcher.peak()
    asleep = watcher.peak()
    engine.resume_memory_occupation(["weights"] if stages else ["weights", "kv_cache"])
    reply, update_ms = wall_ms(lambda: engine.update_weights_from_tensor([trainer.payload()]))
    while_updating = watcher.peak()
    trainer.drop()
    watcher.peak()
    engine.resume_memory_occupation()
    after = watcher.peak()
    if reply["content"] != "valid":
        raise RuntimeError(f"the weights are not whole: {reply}")
    output = engine.generate(input_ids=[1, 2, 3], sampling_params={"max_new_tokens": 4, "ignore_eos": True})
    if len(output["output_ids"]) != 4:
        raise RuntimeError(f"the engine does not serve: {output}")
    return {
        "asleep_gb": asleep / GB,
        "while_updating_gb": while_updating / GB,
        "whole_sequence_gb": max(while_updating, after) / GB,
        "update_ms": update_ms,
        "trainer_gb": trainer.num_bytes / GB,
    }


def measure(report: Report, args: argparse.Namespace) -> None:
    with (
        report.attempt("peak_memory.saved"),
        Watcher(args.device) as watcher,
        model_folder(args, MODEL) as (shape, folder),
    ):
        report.facts["used_bytes_by"] = watcher.source
        kv_bytes = (1 << 26) if args.tiny else KV_BYTES
        num_tokens = kv_bytes // shape.kv_bytes_per_token
        arguments = engine_args(args, folder, max_total_tokens=num_tokens, max_running_requests=64)
        with Engine(**arguments) as engine, Trainer(folder, args.device) as trainer:
            tags = engine.memory_occupation()["tags"]
            pool_gb = tags["kv_cache"]["virtual_bytes"] / GB
            run(engine, watcher, trainer, args, stages=True)
            several = [run(engine, watcher, trainer, args, stages=True) for _ in range(args.runs)]
            one = [run(engine, watcher, trainer, args, stages=False) for _ in range(args.runs)]
        pairs = list(zip(one, several, strict=True))
        report.add(
            "peak_memory.saved",
            [at_once["while_updating_gb"] - staged["while_updating_gb"] for at_once, staged in pairs],
            limit=pool_gb,
            limit_basis="the KV pool",
            one_stage=one,
            multi_stage=several,
            relative=[
                1 - staged["while_updating_gb"] / at_once["while_updating_gb"] for at_once, staged in pairs
            ],
        )


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(parser_of(__doc__), argv)
    report = Report("gpu_peak_memory", args)
    measure(report, args)
    report.finish()


if __name__ == "__main__":
    main()
