"""A trainer for benchmarks: each rank is a process with all weights on its own GPU, which it shares.

As in frameworks whose trainer and engine share GPUs, every rank encodes its own tensors, and only small
payloads are sent to the process with the engine, one for each of the engine's ranks, on the same GPU.
"""

# mypy: disable-error-code="arg-type, attr-defined, no-any-return, no-untyped-call"

from __future__ import annotations

import asyncio
import base64
import ctypes
import itertools
import multiprocessing
import pickle
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from datetime import timedelta
from multiprocessing.connection import Connection
from types import SimpleNamespace, TracebackType
from typing import Any, Self

START_TIMEOUT_S = 400.0
BUFFER_BYTES = 1 << 30

Shapes = Mapping[str, tuple[int, ...]]


class ncclUniqueId(ctypes.Structure):
    """The id of a communicator, pickled under the name that vLLM's ranks know."""

    _fields_ = (("internal", ctypes.c_byte * 128),)


class TrainerRanks:
    """The processes of a trainer.

    Args:
        shapes: of the tensors, by checkpoint name. They are bfloat16 on a GPU, else float32.
        device: "cuda": each rank has a GPU, from `first_gpu` on; or "cpu".
        num_ranks: ranks of the engine, each of which gets an entry.
        num_lenders: ranks of the trainer: the same number, or one whose tensors all ranks of the engine read.

    Attributes:
        num_bytes: bytes of the tensors on each rank.
    """

    def __init__(
        self,
        shapes: Shapes,
        device: str,
        num_ranks: int,
        num_lenders: int | None = None,
        *,
        first_gpu: int = 0,
    ) -> None:
        indices = range(first_gpu, first_gpu + num_ranks)
        devices = [f"cuda:{index}" if device == "cuda" else device for index in indices]
        per_lender = [devices] if num_lenders == 1 else [[one] for one in devices]
        self._devices = devices
        self._ranks = [_Rank(dict(shapes), readers) for readers in per_lender]
        self._lenders = self._ranks
        self.num_bytes = max(rank.wait_started() for rank in self._ranks)
        self._dropped: list[asyncio.Future[Any]] = []

    async def payloads(self, *, kept: bool = False) -> tuple[list[Any], float]:
        """Encode all tensors; returns an entry for each rank, and the slowest rank's milliseconds.

        The tensors are shared until `answered`.

        Args:
            kept: as `keep_mapped` of `Engine`.
        """
        entries = await asyncio.gather(*(rank.ask("payload", kept) for rank in self._lenders))
        return [one for sent, _ in entries for one in sent], max(encode_ms for _, encode_ms in entries)

    async def answered(self) -> None:
        await asyncio.gather(*(rank.ask("answered") for rank in self._lenders))

    async def lend_from_one(self) -> None:
        """From now on, let all ranks of the engine read the tensors of rank 0."""
        await self._ranks[0].ask("lend_to", self._devices)
        self._lenders = self._ranks[:1]

    async def join(self, group: str, port: int, world_size: int, backend: str) -> None:
        """Let rank 0 join a group as its first member and host the store. "raw_nccl": as vLLM's trainers."""
        await self._ranks[0].ask("join", group, port, world_size, backend)

    async def broadcast(self, load_format: str | None) -> None:
        """Broadcast all tensors of rank 0 to its group, one by one (None) or "packed"."""
        await self._ranks[0].ask("broadcast", load_format)

    async def start_handles(self) -> str:
        """Make a buffer on each GPU; returns their handles as vLLM's trainers send them."""
        handles = await asyncio.gather(*(rank.ask("start_handles") for rank in self._ranks))
        return base64.b64encode(pickle.dumps(dict(handles))).decode()

    async def fill(self) -> dict[str, Any] | None:
        """Copy the next tensors to every buffer; returns their `update_info`, None after the last."""
        infos = await asyncio.gather(*(rank.ask("fill") for rank in self._ranks))
        return infos[0]

    async def forget(self) -> None:
        """Stop sharing memory that stayed mapped."""
        await asyncio.gather(*(rank.ask("forget") for rank in self._lenders))

    async def start_buckets(self, max_bytes: int) -> None:
        await asyncio.gather(*(rank.ask("start_buckets", max_bytes) for rank in self._ranks))

    async def next_bucket(self) -> list[bytes] | None:
        """The next flattened bucket, an entry for each rank; None after the last.

        It lives until its `drop_bucket`: each call of that drops the oldest bucket.
        """
        entries = await asyncio.gather(*(rank.ask("next_bucket") for rank in self._ranks))
        return None if None in entries else entries

    def drop_bucket(self) -> None:
        """Drop the oldest bucket, without waiting for that."""
        self._dropped += [rank.ask("drop_bucket") for rank in self._ranks]

    async def end_buckets(self) -> None:
        """Wait until all dropped buckets are freed."""
        await asyncio.gather(*self._dropped)
        self._dropped.clear()

    async def reserved_bytes(self) -> int | None:
        """Bytes that torch has reserved on rank 0's GPU; None: on a CPU."""
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
    """A rank's process, for its owner. Requests are answered in order.

    Args:
        readers: devices of the engine's ranks that read its tensors; the first is its own.
    """

    def __init__(self, shapes: Shapes, readers: list[str]) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, shapes, readers), daemon=True)
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
        if future.done():  # Cancelled.
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


def _answer_calls(pipe: Connection, start: Callable[[], _Worker], told: Callable[[_Worker], object]) -> None:
    """Start a worker, send `told(worker)`, and answer calls until the other end closes the pipe.

    Each answer is a pair: (whether it succeeded, the result or the traceback).
    """
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


def _serve(pipe: Connection, shapes: Shapes, readers: list[str]) -> None:
    _answer_calls(pipe, lambda: _Worker(shapes, readers), lambda worker: worker.num_bytes)


def random_tensors(shapes: Shapes, device: str) -> list[tuple[str, Any]]:
    import torch

    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return [
        (name, torch.empty(shape, dtype=dtype, device=device).normal_(0, 0.02))
        for name, shape in shapes.items()
    ]


class OwnTensors:
    """A trainer in the engine's process, which gives its tensors to `Engine`."""

    def __init__(self, shapes: Shapes, device: str) -> None:
        self._tensors = random_tensors(shapes, device)
        self.num_bytes = sum(tensor.nbytes for _, tensor in self._tensors)

    async def payloads(self, *, kept: bool = False) -> tuple[list[Any], float]:
        """The tensors; the engine encodes them."""
        return self._tensors, 0.0

    async def answered(self) -> None:
        """Does nothing: the tensors are this process's own."""

    async def reserved_bytes(self) -> int | None:
        """Bytes of the tensors."""
        return self.num_bytes

    def close(self) -> None:
        self._tensors.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Worker:
    def __init__(self, shapes: Shapes, readers: list[str]) -> None:
        import torch

        from ebbtide.trainer.payload_encoding import PayloadEncoder

        device = self._device = readers[0]
        if device != "cpu":
            torch.cuda.set_device(device)
        self._weights = random_tensors(shapes, device)
        self._synchronize()
        self.num_bytes = sum(tensor.nbytes for _, tensor in self._weights)
        self._encoder = PayloadEncoder(readers, len(readers))
        self._lent = ExitStack()
        self._rest: Iterator[Any] = iter(())
        self._buckets: deque[Any] = deque()
        self._group: Any = None
        self._buffer: Any = None

    def payload(self, kept: bool) -> tuple[list[bytes], float]:
        begun = time.perf_counter()
        sent = self._lent.enter_context(self._encoder.encode(self._weights, keep_mapped=kept))
        return sent.entries, (time.perf_counter() - begun) * 1e3

    def answered(self) -> None:
        self._lent.close()

    def lend_to(self, readers: list[str]) -> None:
        from ebbtide.trainer.payload_encoding import PayloadEncoder

        self._encoder = PayloadEncoder(readers, len(readers))

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

    def start_handles(self) -> tuple[str, Any]:
        import torch
        from torch.multiprocessing.reductions import reduce_tensor

        if self._buffer is None:
            self._buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8, device=self._device)
        self._rest = iter(self._weights)
        return str(torch.cuda.get_device_properties(self._device).uuid), reduce_tensor(self._buffer)[1]

    def fill(self) -> dict[str, Any] | None:
        import torch

        named: list[tuple[str, Any]] = []
        sizes: list[int] = []
        for name, tensor in self._rest:
            if sum(sizes) + tensor.nbytes > BUFFER_BYTES:
                self._rest = itertools.chain([(name, tensor)], self._rest)
                break
            named.append((name, tensor))
            sizes.append(tensor.nbytes)
        if not named:
            return None
        flat = [tensor.reshape(-1).view(torch.uint8) for _, tensor in named]
        torch.cat(flat, out=self._buffer[: sum(sizes)])
        self._synchronize()
        return {
            "names": [name for name, _ in named],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in named],
            "shapes": [list(tensor.shape) for _, tensor in named],
            "tensor_sizes": sizes,
        }

    def join(self, name: str, port: int, world_size: int, backend: str) -> None:
        import torch.distributed as dist
        from torch.distributed import distributed_c10d

        if backend == "raw_nccl":
            self._group = self._joined_raw(port, world_size)
            return
        # As frameworks do: a named group, with or without a default group, by torch's private helper.
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

    def _joined_raw(self, port: int, world_size: int) -> Any:
        import torch

        from ebbtide.formats.nccl import RawNccl, make_unique_id
        from ebbtide.formats.rendezvous import ID_KEY, host_store

        unique_id = make_unique_id()
        self._store = host_store(port)
        self._store.set(ID_KEY, pickle.dumps(ncclUniqueId.from_buffer_copy(unique_id)))
        return RawNccl(unique_id, 0, world_size, torch.device(self._device), START_TIMEOUT_S)

    def broadcast(self, load_format: str | None) -> None:
        import torch
        import torch.distributed as dist

        from ebbtide.formats import packed_slices

        tensors = [tensor for _, tensor in self._weights]
        if load_format == "packed":
            flat = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
            chunks = packed_slices([one.nbytes for one in flat], BUFFER_BYTES)
            tensors = (torch.cat(flat[chunk]) for chunk in chunks)  # type: ignore[assignment]
        if isinstance(self._group, dist.ProcessGroup):
            works = [dist.broadcast(tensor, 0, group=self._group, async_op=True) for tensor in tensors]
        else:
            options = SimpleNamespace(rootRank=0, timeout=timedelta(seconds=START_TIMEOUT_S))
            works = [self._group.broadcast([tensor], options) for tensor in tensors]
        for work in works:
            work.wait()
        self._synchronize()

    def reserved_bytes(self) -> int | None:
        import torch

        return torch.cuda.memory_reserved() if self._device != "cpu" else None

    def _synchronize(self) -> None:
        import torch

        if self._device != "cpu":
            torch.cuda.synchronize()
