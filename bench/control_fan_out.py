"""Measures control requests by number of replicas: time to the reply, and CPU time of the API process.

The replicas are schedulers with null parts in one process. Each is a thread with the real loop and its own
ZMQ channels. The manager and the data-parallel controller are those of the API process, and all messages are
real. Here all replicas share this machine's cores, so the time to the reply is an upper bound; what counts is
the API process's CPU time per call.

Memory and weights are null parts. An update has real references to as many tensors as Llama-3.1-8B has, which
are not opened: one entry for all replicas, or one for each. Another update has its data in the body, for as
many replicas as this machine has memory for.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import psutil
import torch
import uvloop
import zmq
from common import RESULTS, write_result

from ebbtide.srt.config import EngineConfig
from ebbtide.srt.managers.api.data_parallel_controller import DataParallelController
from ebbtide.srt.managers.api.request_limits import RequestLimits
from ebbtide.srt.managers.assembly import assemble_scheduler
from ebbtide.srt.managers.control.weights import WritePlan
from ebbtide.srt.managers.io_struct import (
    AbortReq,
    AnyControlRequest,
    ContinueGenerationReqInput,
    ManagerInput,
    PauseGenerationReqInput,
    PauseMode,
    PingReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromTensorReqInput,
    WeightUpdateRequest,
)
from ebbtide.srt.managers.scheduling.lockstep import open_rank_channels
from ebbtide.srt.managers.tokenizer_manager import TokenizerManager
from ebbtide.srt.managers.wire.channel import ChannelAddresses, Receiver, Sender
from ebbtide.srt.slices import Slices
from ebbtide.testing import NullRunner, NullWeights
from ebbtide.testing.null_engine import null_parts
from ebbtide.testing.null_runner import POOL_TOKENS, null_args, null_config
from ebbtide.trainer.payload_encoding import serialize_tensors

NUM_LAYERS = 32
LAYER_TENSORS = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    "input_layernorm",
    "post_attention_layernorm",
)
# Two sockets for each replica; ZMQ's default limit is 1,023.
MAX_SOCKETS = 8192
MAX_RUNNING_REQUESTS = 8
DATA_BYTES = 8 << 20
MAX_REPLICAS_OF_DATA = 64
NUM_GENERATIONS = 200
PROMPT_LEN = 512
TIMEOUT_S = 300.0


# --------------------------------------------------------------------------------------------- the replicas


class ReferencedWeights(NullWeights):
    """Null weights that accept any entry without opening it."""

    def open(self, request: WeightUpdateRequest) -> Slices[WritePlan]:
        if isinstance(request, UpdateWeightsFromTensorReqInput):
            assert any(request.serialized_named_tensors)
            request = UpdateWeightFromDiskReqInput(model_path="1")
        return super().open(request)


def run_replica(config: EngineConfig, addresses: ChannelAddresses, started: threading.Semaphore) -> None:
    """Run a replica of one rank. Does not return."""
    inbox, outputs = open_rank_channels(config, addresses)
    parts = null_parts(config, ReferencedWeights(NullRunner()))
    scheduler = assemble_scheduler(config, parts, inbox, outputs)
    started.release()
    scheduler.run()


def host_replicas(config: EngineConfig, replicas: Sequence[ChannelAddresses], pipe: Connection) -> None:
    """Run replicas, each in a thread, until the other end of the pipe is closed; then end the process."""
    _allow_many_files()
    zmq.Context.instance().set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    started = threading.Semaphore(0)
    for dp_rank, addresses in enumerate(replicas):
        mine = replace(config, parallel=replace(config.parallel, dp_rank=dp_rank))
        threading.Thread(target=run_replica, args=(mine, addresses, started), daemon=True).start()
    for _ in replicas:
        started.acquire()
    pipe.send("ready")
    pipe.poll(None)
    os._exit(0)


def _allow_many_files() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


# ------------------------------------------------------------------------------------------ the API process


class CountingInbox:
    """The manager's channel, which counts received bytes while `num_bytes` is not None."""

    def __init__(self, inner: Receiver[ManagerInput]) -> None:
        self._inner = inner
        self.num_bytes: int | None = None

    async def receive_async(self) -> list[ManagerInput]:
        messages = await self._inner.receive_async()
        if self.num_bytes is not None:
            self.num_bytes += sum(len(msgspec.msgpack.encode(message)) for message in messages)
        return messages

    def close(self) -> None:
        self._inner.close()


class CountingSender(Sender[Any]):
    """A channel to a replica, which counts sent bytes while `num_bytes` is not None."""

    num_bytes: int | None = None

    def send(self, message: Any) -> None:
        if self.num_bytes is not None:
            self.num_bytes += len(msgspec.msgpack.encode(message))
        super().send(message)


class Api:
    """The API process's manager; with several replicas, also the data-parallel controller."""

    def __init__(self, config: EngineConfig, replicas: Sequence[ChannelAddresses], method: str) -> None:
        self.senders = [CountingSender(addresses.scheduler) for addresses in replicas]
        self.inbox = CountingInbox(Receiver(replicas[0].manager, ManagerInput))
        limits = RequestLimits.of(config, POOL_TOKENS)
        if len(replicas) == 1:
            self.manager = TokenizerManager(config, self.senders[0], self.inbox, limits, None)
        else:
            controller = DataParallelController(self.senders, self.inbox, 1, method)
            self.manager = TokenizerManager(config, controller, controller, limits, None, controller.place)
        self.manager.start()

    async def call(self, request: AnyControlRequest) -> None:
        await self.manager.control.call(request, TIMEOUT_S)

    async def bytes_of(self, request: AnyControlRequest) -> dict[str, int]:
        """Bytes that a call sends to all replicas, and that it receives."""
        self.inbox.num_bytes = 0
        for sender in self.senders:
            sender.num_bytes = 0
        await self.call(request)
        received, self.inbox.num_bytes = self.inbox.num_bytes, None
        sent = sum(sender.num_bytes or 0 for sender in self.senders)
        for sender in self.senders:
            sender.num_bytes = None
        return {"sent_bytes": sent, "received_bytes": received}


@contextmanager
def hosted(num_replicas: int) -> Iterator[tuple[EngineConfig, list[ChannelAddresses], psutil.Process]]:
    """Run replicas in another process."""
    args = null_args(
        dp_size=num_replicas, enable_weights_cpu_backup=True, max_running_requests=MAX_RUNNING_REQUESTS
    )
    config = null_config(args)
    with tempfile.TemporaryDirectory(prefix="ebb-") as folder:
        replicas = [
            ChannelAddresses(f"ipc://{folder}/{index}", f"ipc://{folder}/m", f"ipc://{folder}/m")
            for index in range(num_replicas)
        ]
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=host_replicas, args=(config, replicas, theirs))
        process.start()
        theirs.close()
        try:
            assert ours.recv() == "ready"
            yield config, replicas, psutil.Process(process.pid)
        finally:
            ours.close()
            process.join()


def payload_of_references() -> bytes:
    """A payload for all tensors of Llama-3.1-8B, with one element each."""
    names = [f"model.layers.{layer}.{name}.weight" for layer in range(NUM_LAYERS) for name in LAYER_TENSORS]
    names += ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    with serialize_tensors([(name, torch.zeros(1)) for name in names]) as shared:
        return shared.payload


def calls(num_replicas: int) -> dict[str, AnyControlRequest]:
    """The requests by name, in an order that restores the state at the end."""
    payload = payload_of_references()
    every, each = [payload], [payload] * num_replicas
    updates = {"one entry": every, "an entry each": each}
    if num_replicas <= MAX_REPLICAS_OF_DATA:
        updates["8 MiB of data"] = [bytes(DATA_BYTES)]
    return {
        "ping": PingReqInput(),
        "pause(retract)": PauseGenerationReqInput(mode=PauseMode.RETRACT),
        "continue": ContinueGenerationReqInput(),
        "release": ReleaseMemoryOccupationReqInput(),
        "resume": ResumeMemoryOccupationReqInput(),
        **{
            f"update, {name}": UpdateWeightsFromTensorReqInput(serialized_named_tensors=entries)
            for name, entries in updates.items()
        },
    }


async def measure_calls(api: Api, hosts: psutil.Process, num_runs: int) -> list[dict[str, Any]]:
    requests = calls(len(api.senders))
    for request in requests.values():
        await api.call(request)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in requests}
    for _ in range(num_runs):
        for name, request in requests.items():
            hosts_before, cpu_before, started = _cpu_s(hosts), time.process_time(), time.perf_counter()
            await api.call(request)
            ended, cpu_after = time.perf_counter(), time.process_time()
            runs[name].append(
                {
                    "acknowledged_ms": (ended - started) * 1e3,
                    "api_cpu_ms": (cpu_after - cpu_before) * 1e3,
                    "replicas_cpu_ms": (_cpu_s(hosts) - hosts_before) * 1e3,
                }
            )
    return [
        {
            "call": name,
            "num_replicas": len(api.senders),
            **await api.bytes_of(requests[name]),
            "median": {key: statistics.median(run[key] for run in rows) for key in rows[0]},
            "runs": rows,
        }
        for name, rows in runs.items()
    ]


async def measure_dispatch(api: Api, method: str) -> dict[str, Any]:
    """CPU time to check a generation request, choose its replica and send it. The replicas are paused."""
    await api.call(PauseGenerationReqInput())
    prompt = list(range(PROMPT_LEN))
    runs = []
    for _ in range(NUM_GENERATIONS):
        started = time.process_time()
        fields = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1}}
        generation = await api.manager.prepare(fields)
        runs.append((time.process_time() - started) * 1e6)
        del generation
    await api.call(AbortReq(abort_all=True))
    while api.manager.num_live:
        await asyncio.sleep(0.01)
    await api.call(ContinueGenerationReqInput())
    return {
        "method": method,
        "num_replicas": len(api.senders),
        "median_cpu_us": statistics.median(runs),
        "runs_cpu_us": runs,
    }


async def measure(
    num_replicas: int, method: str, num_runs: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    with hosted(num_replicas) as (config, replicas, hosts):
        api = Api(config, replicas, method)
        try:
            await api.call(PingReqInput())
            return await measure_calls(api, hosts, num_runs), await measure_dispatch(api, method)
        finally:
            await api.manager.close()


def table(results: dict[str, Any]) -> str:
    """The table of docs/scaling.md: CPU time of the API process, and in parentheses the time to the reply."""
    numbers = sorted({row["num_replicas"] for row in results["calls"]})
    by_call: dict[str, dict[int, dict[str, Any]]] = {}
    for row in results["calls"]:
        by_call.setdefault(row["call"], {})[row["num_replicas"]] = row
    lines = [f"| replicas | {' | '.join(map(str, numbers))} |", f"| --- {'| ---: ' * len(numbers)}|"]
    for call, rows in by_call.items():
        cells = [
            "{api_cpu_ms:.3g} ({acknowledged_ms:.3g}) ms".format(**rows[number]["median"])
            if number in rows
            else ""
            for number in numbers
        ]
        lines.append(f"| {call} | {' | '.join(cells)} |")
    for call in ("pause(retract)", "update, one entry"):
        for name, key in (("bytes sent", "sent_bytes"), ("bytes received", "received_bytes")):
            cells = [f"{by_call[call][number][key]:,}" for number in numbers]
            lines.append(f"| {call}: {name} | {' | '.join(cells)} |")
    for method in ("round_robin", "shortest_queue"):
        cells = [f"{row['median_cpu_us']:.0f} µs" for row in results["dispatch"] if row["method"] == method]
        lines.append(f"| a generation, {method} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--runs", type=int, default=20, help="of each call")
    parser.add_argument("--table", action="store_true", help="only print the table of docs/scaling.md")
    args = parser.parse_args(argv)
    if args.table:
        print(table(json.loads((RESULTS / "control_fan_out.json").read_text())["results"]), end="")
        return
    _allow_many_files()
    rows: list[dict[str, Any]] = []
    dispatch: list[dict[str, Any]] = []
    for num_replicas in args.replicas:
        for method in ("round_robin", "shortest_queue"):
            num_runs = args.runs if method == "round_robin" else 1
            found, dispatched = uvloop.run(measure(num_replicas, method, num_runs))
            dispatch.append(dispatched)
            print(f"{num_replicas:4d} replicas, {method}: dispatch {dispatched['median_cpu_us']:.0f} us")
            if method != "round_robin":
                continue
            rows += found
            for row in found:
                median = row["median"]
                print(
                    f"{num_replicas:4d} replicas, {row['call']:22s} {median['acknowledged_ms']:8.2f} ms, "
                    f"API process {median['api_cpu_ms']:7.2f} ms of CPU, {row['sent_bytes']:10,d} bytes out, "
                    f"{row['received_bytes']:8,d} in",
                    flush=True,
                )
    results = {"payload_bytes": len(payload_of_references()), "calls": rows, "dispatch": dispatch}
    print(f"written to {write_result('control_fan_out', results)}")


if __name__ == "__main__":
    main()
