"""Measures broadcast updates on several GPUs of one host. gpu_several.py measures everything else.

- broadcast: a trainer on the GPU after those of the engine sends all weights by NCCL in one request, as
  single tensors, or packed into buffers of 1 GiB. The figure is bytes per time from call to reply, without
  requests. Then the longest gap of 64 streams with an update of single tensors, in_place. The limit is the
  rate of a copy of 4 GiB from one GPU to the other, measured before.
- vllm: the same by vLLM's protocol, with a server: NCCL without torch's groups, single tensors and packed;
  then by handles of a buffer of 1 GiB on each GPU of the engine, which a trainer fills repeatedly. The time
  is from the start of an update to the reply to its finish.
"""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import argparse
import asyncio
import socket
import statistics
import time
from collections.abc import Sequence
from typing import Any

import httpx
import torch
from gpu_common import (
    GB,
    GIB,
    SHAPES,
    Report,
    checkpoint_shapes,
    empty_cache,
    engine_args,
    model_folder,
    parse,
    parser_of,
    running_server,
    synchronize,
)
from gpu_trainer_ranks import BUFFER_BYTES, Shapes, TrainerRanks
from watched_streams import Streams, repeated, timed

from ebbtide import Engine

PARTS = ("broadcast", "vllm")
GROUP = "bench"
NUM_STREAMS = 64
GAP_BEYOND_MS = 5.0
GOAL_OF_COPY = 0.7


# -------------------------------------------------------------------------------------------------- broadcast


class Group:
    """A group of the trainer and the ranks of an engine."""

    def __init__(self, args: argparse.Namespace, engine: Engine, trainer: TrainerRanks) -> None:
        self._engine, self._trainer = engine, trainer
        self._backend, self._dtype = ("nccl", "bfloat16") if args.device == "cuda" else ("gloo", "float32")

    async def join(self, tp_size: int) -> None:
        port, world_size = free_port(), tp_size + 1
        await asyncio.gather(
            self._trainer.join(GROUP, port, world_size, self._backend),
            self._engine.async_init_weights_update_group(
                "127.0.0.1", port, 1, world_size, GROUP, self._backend
            ),
        )

    async def update(self, shapes: Shapes, load_format: str | None, **terms: Any) -> dict[str, Any]:
        """Broadcast all weights in one request; returns the reply."""
        reply, _ = await asyncio.gather(
            self._engine.async_update_weights_from_distributed(
                list(shapes), [self._dtype] * len(shapes), list(shapes.values()), GROUP, load_format, **terms
            ),
            self._trainer.broadcast(load_format),
        )
        return reply


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def copy_gb_per_s(args: argparse.Namespace, there: str) -> list[float]:
    """Rates of copies from the trainer's GPU to the engine's first GPU, in GB/s."""
    num_bytes = (1 << 20) if args.tiny else 4 * GIB
    source = torch.ones(num_bytes, dtype=torch.uint8, device=there)
    target = torch.empty(num_bytes, dtype=torch.uint8, device="cuda:0" if args.device == "cuda" else "cpu")
    rates = []
    for _ in range(5):
        synchronize(args.device)
        started = time.perf_counter()
        target.copy_(source, non_blocking=True)
        synchronize(args.device)
        rates.append(num_bytes / (time.perf_counter() - started) / GB)
    del source, target
    empty_cache(args.device)
    return rates


def measure_broadcast(report: Report, args: argparse.Namespace) -> None:
    tp_size = args.tp
    copies = copy_gb_per_s(args, _gpu_behind(args))
    for name in args.shapes:
        keys = [_sent_key(args, f"broadcast{how}", name) for how in ("", "_packed", "_gap")]
        with report.attempt(*keys), model_folder(args, name) as (shape, folder):
            sizes: dict[str, Any] = {
                "max_total_tokens": 32_768 if args.tiny else NUM_STREAMS * 2048,
                "max_running_requests": NUM_STREAMS,
                "incremental_streaming_output": True,
                "tp_size": tp_size,
            }
            shapes = checkpoint_shapes(shape)
            with (
                Engine(**engine_args(args, folder, **sizes)) as engine,
                TrainerRanks(shapes, args.device, 1, first_gpu=tp_size) as trainer,
            ):
                idle, steady = asyncio.run(
                    broadcasts(args, Group(args, engine, trainer), Streams(args, engine, shape), shapes)
                )
                num_bytes = trainer.num_bytes
            for key, runs in zip(keys, idle, strict=False):
                report.add(
                    key,
                    [num_bytes / run["reply_ms"] * 1e3 / GB for run in runs],
                    goal_value=GOAL_OF_COPY * max(copies),
                    limit=max(copies),
                    limit_basis="a copy of 4 GiB between the two GPUs",
                    copies=copies,
                    all_runs=runs,
                )
            normal_ms = statistics.median(run["stall_ms"] for run in steady["normal"])
            report.add(
                keys[2],
                [run["stall_ms"] for run in steady["broadcast"]],
                goal_value=normal_ms + GAP_BEYOND_MS,
                limit=normal_ms,
                limit_basis="the longest gap of the same streams in 0.3 s without an update",
                all_runs=steady,
            )


async def broadcasts(
    args: argparse.Namespace, group: Group, streams: Streams, shapes: Shapes
) -> tuple[list[list[dict[str, Any]]], dict[str, list[dict[str, Any]]]]:
    """Runs without requests, of single tensors and of packed ones; and runs while streams decode."""
    await group.join(args.tp)
    idle = [
        await repeated(args.runs, lambda how=how: timed(lambda: group.update(shapes, how)))  # type: ignore[misc]
        for how in (None, "packed")
    ]
    update = {"broadcast": lambda: group.update(shapes, None, pause_mode="in_place", flush_cache=False)}
    return idle, await streams.steady(NUM_STREAMS, update)


def _gpu_behind(args: argparse.Namespace) -> str:
    return f"cuda:{args.tp}" if args.device == "cuda" else args.device


def _sent_key(args: argparse.Namespace, how: str, name: str) -> str:
    ranks = f"tp{args.tp}_" if args.tp > 1 else ""
    return f"parallel.{ranks}{how}.{name}"


# -------------------------------------------------------------------------------------------- vLLM's protocol


class VllmUpdates:
    """Updates a server by vLLM's protocol.

    Args:
        sender: the trainer on the GPU after those of the server, which sends by NCCL.
        lenders: the trainer's ranks on the server's GPUs, which send handles.
    """

    def __init__(
        self, client: httpx.AsyncClient, args: argparse.Namespace, sender: TrainerRanks, lenders: TrainerRanks
    ) -> None:
        self._client, self._sender, self._lenders = client, sender, lenders
        self._world_size = args.tp + 1
        self._backend, self._dtype = (
            ("raw_nccl", "bfloat16") if args.device == "cuda" else ("gloo", "float32")
        )

    async def post(self, path: str, **body: Any) -> dict[str, Any]:
        response = await self._client.post(path, json=body, timeout=120)
        if response.status_code != 200:
            raise RuntimeError(f"{path}: {response.text[:1000]}")
        reply: dict[str, Any] = response.json()
        return reply

    async def join(self) -> None:
        port = free_port()
        place = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1}
        await asyncio.gather(
            self._sender.join("vllm", port, self._world_size, self._backend),
            self.post("/init_weight_transfer_engine", init_info={**place, "world_size": self._world_size}),
        )

    async def broadcast(self, shapes: Shapes, load_format: str | None) -> dict[str, Any]:
        info = {
            "names": list(shapes),
            "dtype_names": [self._dtype] * len(shapes),
            "shapes": [list(shape) for shape in shapes.values()],
            "packed": load_format == "packed",
            "packed_buffer_size_bytes": BUFFER_BYTES,
        }
        await self.post("/start_weight_update")
        reply, _ = await asyncio.gather(
            self.post("/update_weights", update_info=info), self._sender.broadcast(load_format)
        )
        return reply | await self.post("/finish_weight_update")

    async def lend(self) -> dict[str, Any]:
        """Update by handles of one buffer per GPU, which is filled again when its tensors were read."""
        await self.post("/start_weight_update")
        handles, num_buffers = await self._lenders.start_handles(), 0
        while (info := await self._lenders.fill()) is not None:
            await self.post("/update_weights", update_info={**info, "ipc_handles_pickled": handles})
            num_buffers += 1
        return {"message": f"{num_buffers} buffers"} | await self.post("/finish_weight_update")


def measure_vllm(report: Report, args: argparse.Namespace) -> None:
    tp_size = args.tp
    copies = copy_gb_per_s(args, _gpu_behind(args))
    for name in args.shapes:
        keys = [_sent_key(args, how, name) for how in ("vllm", "vllm_packed", "vllm_handles")]
        with report.attempt(*keys), model_folder(args, name) as (shape, folder):
            sizes = {"max_total_tokens": 32_768, "tp_size": tp_size}
            shapes = checkpoint_shapes(shape)
            with (
                running_server(engine_args(args, folder, **sizes)) as server,
                TrainerRanks(shapes, args.device, tp_size) as lenders,
                TrainerRanks(shapes, args.device, 1, first_gpu=tp_size) as sender,
            ):
                server.wait_ready()
                for key in keys:
                    with report.attempt(key):
                        runs = asyncio.run(_by_vllm(args, server.url, sender, lenders, shapes, key))
                        report.add(
                            key,
                            [sender.num_bytes / run["reply_ms"] * 1e3 / GB for run in runs],
                            limit=max(copies),
                            limit_basis="a copy of 4 GiB between the two GPUs",
                            all_runs=runs,
                        )


async def _by_vllm(
    args: argparse.Namespace, url: str, sender: TrainerRanks, lenders: TrainerRanks, shapes: Shapes, key: str
) -> list[dict[str, Any]]:
    async with httpx.AsyncClient(base_url=url) as client:
        updates = VllmUpdates(client, args, sender, lenders)
        if "handles" in key:
            await updates.post("/init_weight_transfer_engine", init_info={"packed": True})
            return await repeated(args.runs, lambda: timed(updates.lend))
        form = "packed" if "packed" in key else None
        if form is None:
            await updates.join()
        return await repeated(args.runs, lambda: timed(lambda: updates.broadcast(shapes, form)))


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=["llama8b"])
    parser.add_argument("--tp", type=int, choices=(1, 2), default=1, help="tensor-parallel ranks")
    args = parse(parser, argv)
    report = Report("gpu_parallel", args)
    if "broadcast" in args.parts:
        measure_broadcast(report, args)
    if "vllm" in args.parts and args.tp > 1:  # Only several ranks have goals.
        measure_vllm(report, args)
    report.finish()


if __name__ == "__main__":
    main()
