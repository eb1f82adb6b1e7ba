"""Measures delta updates with 1, 3 and 10 percent changed weights, from a trainer on the same GPU.

The trainer is this process. Codes and values are shared by CUDA IPC through `Engine`, in one request per
update.

- `idle_*`: time of an update from call to reply, without requests. The reply's stages are listed beside it,
  and the time outside of them, for encoding, messages and their threads.
- `stall_*`: the longest gap of each of 64 streams, median of the streams, as in `gpu_update_default`.
  `normal` is the same without an update.
- `bytes_*`: bytes sent per changed element.
- `sender_*`: time in which the trainer finds and encodes the changes.

At the end, checksums show whether the weights are bit for bit those of a full update.
"""

# mypy: disable-error-code="arg-type, misc"

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from gpu_common import (
    GIB,
    SHAPES,
    TINY,
    Report,
    Shape,
    checkpoint_shapes,
    engine_args,
    model_folder,
    parse,
    parser_of,
    synchronize,
)
from watched_streams import Streams, Update, repeated, timed

from ebbtide import Engine
from ebbtide.trainer.buckets import Bucket, ServedWeights

MODEL, NUM_STREAMS = "llama8b", 64
SHARES = {"1": 0.01, "3": 0.03, "10": 0.1}
"""Shares of changed weights, by the percentage in the rows' names."""

Weights = list[tuple[str, torch.Tensor]]


class Trainer:
    """A trainer's weights, some of which change in each step, and the copy of what was sent."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.served = ServedWeights()
        self.num_bytes = sum(tensor.nbytes for _, tensor in weights)
        self._step = 0

    def whole(self) -> Iterator[Bucket]:
        yield Bucket(0, self.weights)

    def train(self, share: float) -> None:
        """Change one bit of a share of all elements, drawn at random."""
        for _, tensor in self.weights:
            bits = tensor.view(torch.int16).view(-1)
            for piece in torch.split(bits, 1 << 26):
                piece ^= (torch.rand(len(piece), device=piece.device) < share).to(torch.int16)

    def changes(self) -> tuple[Bucket, float]:
        """The changes since the last update, and the milliseconds to find and encode them."""
        device = self.weights[0][1].device.type
        synchronize(device)
        began = time.perf_counter()
        [bucket] = list(self.served.changes(self.whole()))
        synchronize(device)
        return bucket, (time.perf_counter() - began) * 1e3

    def version(self) -> str:
        self._step += 1
        return str(self._step)


class DeltaBench:
    """The engine under test, and the trainer."""

    def __init__(self, args: argparse.Namespace, engine: Engine, shape: Shape, trainer: Trainer) -> None:
        self._args = args
        self._engine = engine
        self.streams = Streams(args, engine, shape)
        self.trainer = trainer

    async def send_whole(self) -> None:
        version = self.trainer.version()
        list(self.trainer.served.changes(self.trainer.whole()))
        await self._engine.async_update_weights_from_tensor(self.trainer.weights, weight_version=version)
        self.trainer.served.commit(version)

    def next_update(self, share: float) -> tuple[Update, dict[str, Any]]:
        """Make the next update; returns a function that sends it, and measurements of making it.

        Updates must be sent in the order in which they were made.
        """
        trainer = self.trainer
        trainer.train(share)
        bucket, sender_ms = trainer.changes()
        changed = bucket.changed
        assert changed is not None
        num_changed = sum(each.num_changed for each in changed)
        version = trainer.version()
        trainer.served.commit(version)

        async def update() -> dict[str, Any]:
            reply: dict[str, Any] = await self._engine.async_update_weights_from_tensor(
                bucket.tensors,
                load_format="sparse",
                changed=changed,
                base_version=bucket.base_version,
                weight_version=version,
                pause_mode="in_place",
                flush_cache=False,
            )
            return reply

        return update, {"sender_ms": sender_ms, "bytes_each": bucket.num_bytes / num_changed}

    async def idle_run(self, share: float) -> dict[str, Any]:
        update, told = self.next_update(share)
        synchronize(self._args.device)
        return {**told, **_with_outside(await timed(update))}

    async def amid_streams(self, share: float) -> list[dict[str, Any]]:
        """Measure updates while streams decode. They are made before, since finding changes takes the GPU."""
        updates = [self.next_update(share)[0] for _ in range(self._args.runs + 1)]
        runs = await self.streams.steady(NUM_STREAMS, {"delta": lambda: updates.pop(0)()})
        return [_with_outside(run) for run in runs["delta"]]

    async def is_exact(self) -> bool:
        """Whether a full update of the same weights changes nothing."""
        before = (await self._engine.async_check_weights(action="checksum"))["per_engine_checksum"]
        await self.send_whole()
        return bool(
            before == (await self._engine.async_check_weights(action="checksum"))["per_engine_checksum"]
        )


def _with_outside(run: dict[str, Any]) -> dict[str, Any]:
    stages_ms = run["reply"]["stages_ms"]
    return {**run, "parts_ms": {**stages_ms, "outside": run["reply_ms"] - sum(stages_ms.values())}}


async def measure(report: Report, bench: DeltaBench, args: argparse.Namespace) -> None:
    await bench.send_whole()
    normal = await bench.streams.steady(NUM_STREAMS, {})
    report.add("delta.normal", [run["stall_ms"] for run in normal["normal"]], all_runs=normal["normal"])
    for percent, share in SHARES.items():
        idle = await repeated(args.runs, lambda share=share: bench.idle_run(share))
        streams = await bench.amid_streams(share)
        report.add(f"delta.idle_{percent}", [run["reply_ms"] for run in idle], all_runs=idle)
        report.add(f"delta.stall_{percent}", [run["stall_ms"] for run in streams], all_runs=streams)
        report.add(f"delta.bytes_{percent}", [run["bytes_each"] for run in idle])
        report.add(f"delta.sender_{percent}", [run["sender_ms"] for run in idle])
        for label, runs in (("idle", idle), ("64 streams", streams)):
            parts = [
                f"{name} {statistics.median(run['parts_ms'][name] for run in runs):.2f}"
                for name in runs[0]["parts_ms"]
            ]
            print(f"  {percent} % changed, {label}: {', '.join(parts)} ms", flush=True)
    if not await bench.is_exact():
        raise RuntimeError("the weights are not bit for bit those of the full update")


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(parser_of(__doc__), argv)
    report = Report("gpu_delta", args)
    shape = TINY if args.tiny else SHAPES[MODEL]
    weights = [
        (name, torch.empty(size, dtype=torch.bfloat16, device=args.device).normal_(0, 0.02))
        for name, size in checkpoint_shapes(shape).items()
    ]
    trainer = Trainer(weights)
    list(trainer.served.changes(trainer.whole()))
    trainer.served.commit(trainer.version())
    # Leaves memory for the trainer's copy, and for finding 10 percent of changes, on the same card.
    given: dict[str, Any] = {"max_total_tokens": 32_768} if args.tiny else {"mem_fraction_static": 0.45}
    if args.device == "cpu":
        given["dtype"] = "bfloat16"
    with (
        report.attempt("delta.idle_1"),
        model_folder(args, MODEL) as (_, folder),
        Engine(**engine_args(args, folder, incremental_streaming_output=True, **given)) as engine,
    ):
        bench = DeltaBench(args, engine, shape, trainer)
        print(f"trainer {trainer.num_bytes / GIB:.1f} GiB", flush=True)
        asyncio.run(measure(report, bench, args))
    report.finish()


if __name__ == "__main__":
    main()
