"""A trainer's ranks, each a process of its own with all weights on a GPU of its own, which lend them.

As in frameworks whose trainer and engine share GPUs: every rank encodes its own tensors, and only the small
payloads pass to the process that has the engine, one for each of the engine's ranks, of the same GPU.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

from gpu_trainer import START_TIMEOUT_S, answer_calls

Shapes = Mapping[str, tuple[int, ...]]


class TrainerRanks:
    """The processes.

    Args:
        shapes: by checkpoint name. Elements are bfloat16 on a GPU, else float32.
        device: "cuda": rank i has GPU i; or "cpu".

    Attributes:
        num_bytes: of the tensors, on each of the ranks.
    """

    def __init__(self, shapes: Shapes, device: str, num_ranks: int) -> None:
        devices = [f"cuda:{rank}" if device == "cuda" else device for rank in range(num_ranks)]
        self._ranks = [_Rank(dict(shapes), one) for one in devices]
        self.num_bytes = max(rank.wait_started() for rank in self._ranks)
        self._dropped: list[asyncio.Future[Any]] = []

    async def payloads(self, *, kept: bool = False) -> tuple[list[bytes], float]:
        """An update of everything, an entry for each rank, and the most milliseconds a rank encoded.

        The tensors are lent until `answered`; `kept` as `keep_mapped` of `Engine`.
        """
        entries = await asyncio.gather(*(rank.ask("payload", kept) for rank in self._ranks))
        return [entry for entry, _ in entries], max(encode_ms for _, encode_ms in entries)

    async def answered(self) -> None:
        await asyncio.gather(*(rank.ask("answered") for rank in self._ranks))

    async def forget(self) -> None:
        """End what was lent for longer than an update."""
        await asyncio.gather(*(rank.ask("forget") for rank in self._ranks))

    async def start_buckets(self, max_bytes: int) -> None:
        await asyncio.gather(*(rank.ask("start_buckets", max_bytes) for rank in self._ranks))

    async def next_bucket(self) -> list[bytes] | None:
        """A flattened bucket, which lives until as many `drop_bucket`; None behind the last."""
        entries = await asyncio.gather(*(rank.ask("next_bucket") for rank in self._ranks))
        return None if None in entries else entries

    def drop_bucket(self) -> None:
        """Let go of the oldest bucket, without waiting for it."""
        self._dropped += [rank.ask("drop_bucket") for rank in self._ranks]

    async def end_buckets(self) -> None:
        """Wait until every bucket is let go of."""
        await asyncio.gather(*self._dropped)
        self._dropped.clear()

    async def reserved_bytes(self) -> int | None:
        """What torch has taken on a rank's GPU."""
        most: int | None = await self._ranks[0].ask("reserved_bytes")
        return most

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Rank:
    """One process, as its owner sees it. What is asked of it is answered in order."""

    def __init__(self, shapes: Shapes, device: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, shapes, device), daemon=True)
        self._process.start()
        theirs.close()
        self._waiting: deque[asyncio.Future[Any]] = deque()

    def wait_started(self) -> int:
        if not self._pipe.poll(START_TIMEOUT_S):
            raise RuntimeError("a trainer's rank did not start")
        is_fine, answer = self._pipe.recv()
        if not is_fine:
            raise RuntimeError(f"a trainer's rank failed: {answer}")
        return int(answer)

    def ask(self, command: str, *values: Any) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.add_reader(self._pipe.fileno(), self._read, loop)
        future = loop.create_future()
        self._waiting.append(future)
        self._pipe.send((command, *values))
        return future

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            is_fine, answer = self._pipe.recv()
        except EOFError:
            is_fine, answer = False, "its process ended"
        future = self._waiting.popleft()
        if not self._waiting:
            loop.remove_reader(self._pipe.fileno())
        if future.done():  # cancelled
            return
        if is_fine:
            future.set_result(answer)
        else:
            future.set_exception(RuntimeError(f"a trainer's rank failed: {answer}"))

    def close(self) -> None:
        self._pipe.close()
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()


def _serve(pipe: Connection, shapes: Shapes, device: str) -> None:
    answer_calls(pipe, lambda: _Worker(shapes, device), lambda worker: worker.num_bytes)


class _Worker:
    def __init__(self, shapes: Shapes, device: str) -> None:
        import torch

        from ebbtide.trainer.payload_encoding import PayloadEncoder

        self._device = device
        if device != "cpu":
            torch.cuda.set_device(device)
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        self._weights = [
            (name, torch.empty(shape, dtype=dtype, device=device).normal_(0, 0.02))
            for name, shape in shapes.items()
        ]
        self._synchronize()
        self.num_bytes = sum(tensor.nbytes for _, tensor in self._weights)
        self._encoder = PayloadEncoder(device)
        self._lent = ExitStack()
        self._rest: Iterator[Any] = iter(())
        self._buckets: deque[Any] = deque()

    def payload(self, kept: bool) -> tuple[bytes, float]:
        begun = time.perf_counter()
        sent = self._lent.enter_context(self._encoder.encode(self._weights, keep_mapped=kept))
        return sent.payload, (time.perf_counter() - begun) * 1e3

    def answered(self) -> None:
        self._lent.close()

    def forget(self) -> None:
        self._encoder.close()

    def start_buckets(self, max_bytes: int) -> None:
        from ebbtide.formats.bucket import pack_buckets

        self._rest = pack_buckets(self._weights, max_bytes)

    def next_bucket(self) -> bytes | None:
        from ebbtide.trainer.payload_encoding import serialize_bucket

        bucket = next(self._rest, None)
        if bucket is None:
            return None
        payload = serialize_bucket(bucket)
        self._synchronize()
        self._buckets.append(bucket)
        return payload

    def drop_bucket(self) -> None:
        self._buckets.popleft()

    def reserved_bytes(self) -> int | None:
        import torch

        return torch.cuda.memory_reserved() if self._device != "cpu" else None

    def _synchronize(self) -> None:
        import torch

        if self._device != "cpu":
            torch.cuda.synchronize()
