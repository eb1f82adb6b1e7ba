"""A trainer in a process of its own, on the same device: it holds new weights, and hands out payloads."""

from __future__ import annotations

import json
import multiprocessing
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

START_TIMEOUT_S = 120.0

Worker = TypeVar("Worker")


class Trainer:
    """The process, with its own copy of the weights of a model folder.

    Attributes:
        num_bytes: of that copy.
        num_tensors: in it.
    """

    def __init__(self, folder: Path, device: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, str(folder), device), daemon=True)
        self._process.start()
        theirs.close()
        self.num_bytes, self.num_tensors = self._answer(START_TIMEOUT_S)

    def payload(self) -> bytes:
        """All weights by name, for one update; they stay as they are until `drop`."""
        payload: bytes = self._ask("payload")
        return payload

    def num_buckets(self, max_bytes: int) -> int:
        count: int = self._ask("split", max_bytes)
        return count

    def bucket(self, index: int) -> bytes:
        """A flattened bucket; valid until the next one is asked for."""
        payload: bytes = self._ask("bucket", index)
        return payload

    def join(self, name: str, port: int, world_size: int, backend: str) -> None:
        """Become rank 0 of a group that engines join; returns when all are there."""
        self._ask("join", name, port, world_size, backend)

    def headers(self) -> tuple[list[str], list[str], list[list[int]]]:
        """Names, dtypes and shapes of all weights, in the order of `broadcast`."""
        names, dtypes, shapes = self._ask("headers")
        return names, dtypes, shapes

    def broadcast(self) -> float:
        """Send all weights to the group; returns the seconds that it took this side."""
        seconds: float = self._ask("broadcast")
        return seconds

    def drop(self) -> None:
        """Give the memory of the weights back to the device."""
        self._ask("drop")

    def hold(self) -> None:
        """Have new weights again, after `drop`."""
        self._ask("hold")

    def _ask(self, command: str, *values: Any) -> Any:
        self._pipe.send((command, *values))
        return self._answer(60)

    def _answer(self, timeout_s: float) -> Any:
        if not self._pipe.poll(timeout_s):
            raise RuntimeError(f"the trainer did not answer within {timeout_s:g} s")
        try:
            is_fine, answer = self._pipe.recv()
        except EOFError:
            raise RuntimeError("the trainer process ended") from None
        if not is_fine:
            raise RuntimeError(f"the trainer failed: {answer}")
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pipe.close()
        # Not `join`: it waits for a pipe that helpers of torch inherit from the process.
        deadline_s = time.monotonic() + 20
        while self._process.is_alive():
            if time.monotonic() > deadline_s:
                self._process.kill()
            time.sleep(0.01)


def _serve(pipe: Connection, folder: str, device: str) -> None:
    answer_calls(
        pipe, lambda: _Worker(Path(folder), device), lambda worker: (worker.num_bytes, len(worker.weights))
    )


def answer_calls(pipe: Connection, start: Callable[[], Worker], told: Callable[[Worker], object]) -> None:
    """Start, tell of it, and do what is asked until the other end goes: (whether it went well, what came)."""
    try:
        worker = start()
        pipe.send((True, told(worker)))
    except Exception:
        pipe.send((False, traceback.format_exc()))
        return
    while True:
        try:
            command, *values = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, getattr(worker, command)(*values)))
        except Exception:
            pipe.send((False, traceback.format_exc()))


class _Worker:
    def __init__(self, folder: Path, device: str) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        if device != "cpu":
            torch.cuda.set_device(device if ":" in device else f"{device}:0")
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        tied = json.loads((folder / "config.json").read_text()).get("tie_word_embeddings")
        self._device = device
        self._shapes = {
            name: parameter.shape
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if not (tied and name == "lm_head.weight")
        }
        self.weights: list[tuple[str, torch.Tensor]] = []
        self.hold()
        self.num_bytes = sum(tensor.nbytes for _, tensor in self.weights)
        self._buckets: list[list[tuple[str, torch.Tensor]]] = []
        self._held: Any = None
        self._group: Any = None

    def hold(self) -> None:
        import torch

        for name, shape in self._shapes.items():
            tensor = torch.empty(shape, dtype=torch.bfloat16, device=self._device)
            self.weights.append((name, tensor.fill_(1) if "norm" in name else tensor.normal_(0, 0.02)))
        self._synchronize()

    def payload(self) -> bytes:
        from ebbtide.trainer.payload_encoding import serialize

        return serialize(self.weights)

    def split(self, max_bytes: int) -> int:
        self._buckets, size = [], max_bytes + 1
        for name, tensor in self.weights:
            if size + tensor.nbytes > max_bytes:
                self._buckets.append([])
                size = 0
            self._buckets[-1].append((name, tensor))
            size += tensor.nbytes
        return len(self._buckets)

    def bucket(self, index: int) -> bytes:
        from ebbtide.formats.bucket import FlattenedTensorBucket
        from ebbtide.trainer.payload_encoding import serialize_bucket

        self._held = None
        self._collect()
        self._held = FlattenedTensorBucket(self._buckets[index])
        payload = serialize_bucket(self._held)
        self._synchronize()
        return payload

    def join(self, name: str, port: int, world_size: int, backend: str) -> None:
        import torch.distributed as dist
        from torch.distributed import distributed_c10d

        # As frameworks do it: a group by name, beside a default one or without, by torch's private helper.
        timeout = timedelta(seconds=START_TIMEOUT_S)
        store, rank, size = next(dist.rendezvous(f"tcp://127.0.0.1:{port}", 0, world_size, timeout=timeout))
        group, _ = distributed_c10d._new_process_group_helper(
            size,
            rank,
            [],
            dist.Backend(backend),
            dist.PrefixStore(name, store),
            group_name=name,
            timeout=timeout,
        )
        distributed_c10d._world.pg_group_ranks[group] = {member: member for member in range(size)}
        self._group = group

    def headers(self) -> tuple[list[str], list[str], list[list[int]]]:
        names = [name for name, _ in self.weights]
        dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in self.weights]
        return names, dtypes, [list(tensor.shape) for _, tensor in self.weights]

    def broadcast(self) -> float:
        import torch.distributed as dist

        started = time.perf_counter()
        works = [dist.broadcast(tensor, 0, group=self._group, async_op=True) for _, tensor in self.weights]
        for work in works:
            work.wait()
        self._synchronize()
        return time.perf_counter() - started

    def drop(self) -> None:
        import torch

        self.weights, self._buckets, self._held = [], [], None
        self._collect()
        if self._device != "cpu":
            torch.cuda.empty_cache()

    def _synchronize(self) -> None:
        import torch

        if self._device != "cpu":
            torch.cuda.synchronize()

    def _collect(self) -> None:
        import torch

        if self._device != "cpu":
            torch.cuda.ipc_collect()
