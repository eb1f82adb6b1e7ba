"""The ranks that hold one model between them, and how they add and gather.

A group is an object that is passed in. It is made by hand and not by `torch.distributed`'s registry: there
is no default group, so weight groups and a caller's own groups never meet it.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import torch
import torch.distributed
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from ebbtide.srt.config import ParallelConfig
from ebbtide.srt.distributed.peer_memory import PeerMemory, open_peer_memory
from ebbtide.srt.errors import EngineError

_dist: Any = torch.distributed  # not all of it has types
_c10d: Any = c10d

# Ranks come to a collective within milliseconds of each other, but for kernels that one of them compiles.
# A rank that dies ends the group by its launcher, long before: this is for one that lives and does not come.
COLLECTIVE_TIMEOUT: Final = timedelta(minutes=30)


class ParallelGroup:
    """Ranks that call the same methods in the same order, with tensors of the same shape.

    By itself it is one rank, which holds everything. Or one of several without the others, for what is
    compiled: shapes are right then, numbers are not.
    """

    def __init__(self, size: int = 1, rank: int = 0) -> None:
        self.size, self.rank = size, rank

    def all_reduce_(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place; the same bits on every rank. Returns `x`.

        On a GPU it runs on the current stream, and a CUDA graph may capture it.
        """
        return x

    def add_reduced_(self, x: Tensor, onto: Tensor) -> None:
        """onto += the sum of x over all ranks, of the same shape; x may be written over."""
        onto += x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """The tensors of all ranks in one, along `dim`, in the ranks' order."""
        return x if self.size == 1 else torch.cat([x] * self.size, dim=dim)

    def smallest(self, value: int) -> int:
        """The least of all ranks' values. The host waits for it."""
        return value

    def close(self) -> None:
        """Leave the others, if there are any."""


class TorchGroup(ParallelGroup):
    """Ranks joined by one of torch's backends, `ProcessGroupGloo` or `ProcessGroupNCCL`.

    Attributes:
        peers: what sums short messages; None: the backend sums all of them.
    """

    def __init__(self, backend: Any, rank: int, size: int, device: torch.device) -> None:
        super().__init__(size, rank)
        self.peers: PeerMemory | None = None
        self._backend: Any | None = backend
        # Kept: a device that is full has no room for a number.
        self._least = torch.zeros(1, dtype=torch.int64, device=device)

    def all_reduce_(self, x: Tensor) -> Tensor:
        if self.peers is not None and self.peers.takes(x):
            return self.peers.all_reduce_(x)
        self._all_reduce(x, _c10d.ReduceOp.SUM)
        return x

    def add_reduced_(self, x: Tensor, onto: Tensor) -> None:
        if self.peers is not None and self.peers.takes(x, onto):
            self.peers.all_reduce_(x, onto)
        else:
            onto += self.all_reduce_(x)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        ranks = x.new_empty(self.size, *x.shape)
        options = _c10d.AllgatherOptions()
        options.timeout, options.asyncOp = COLLECTIVE_TIMEOUT, False
        _wait(self._open()._allgather_base(ranks, x.contiguous()[None], options))
        return ranks.flatten(0, 1) if dim == 0 else torch.cat(ranks.unbind(), dim=dim)

    def smallest(self, value: int) -> int:
        self._all_reduce(self._least.fill_(value), _c10d.ReduceOp.MIN)
        return int(self._least.item())

    def close(self) -> None:
        backend, self._backend = self._backend, None
        peers, self.peers = self.peers, None
        if peers is not None:
            # The backend frees memory, for which the device waits until every kernel has ended.
            with suppress(EngineError):
                peers.let_go()
        if backend is not None:
            with suppress(Exception):
                backend.abort()
        if peers is not None:
            peers.close()

    def _all_reduce(self, x: Tensor, operation: Any) -> None:
        options = _c10d.AllreduceOptions()
        # What is not asynchronous runs on the current stream of a GPU, and not on one of the backend's own.
        options.reduceOp, options.timeout, options.asyncOp = operation, COLLECTIVE_TIMEOUT, False
        _wait(self._open().allreduce([x], options))

    def _open(self) -> Any:
        if self._backend is None:
            raise EngineError("the group of tensor-parallel ranks has been left")
        return self._backend


def join_parallel_group(
    parallel: ParallelConfig,
    rendezvous: str,
    device: torch.device,
    timeout_s: float,
    *,
    uses_peer_memory: bool = True,
) -> ParallelGroup:
    """Meet the other ranks of this replica: by gloo on a CPU, by NCCL on GPUs. One rank is by itself.

    Args:
        rendezvous: where they meet, and nobody else does or did: `file:///path` on one host, or
            `tcp://host:port`, an address of rank 0, which listens there.
        uses_peer_memory: whether GPUs sum short messages without NCCL, where the machine lets them.

    EngineError: they did not all come in time.
    """
    if parallel.tp_size == 1:
        return ParallelGroup()
    deadline_s = time.monotonic() + timeout_s
    rank, size = parallel.tp_rank, parallel.tp_size
    try:
        store = _store(parallel, rendezvous, timeout_s)
        store.set_timeout(timedelta(seconds=max(deadline_s - time.monotonic(), 1e-3)))
        if device.type == "cpu":
            backend = _gloo(store, rank, size, rendezvous, deadline_s)
        else:
            backend = _nccl(store, rank, size)
        group = TorchGroup(backend, rank, size, device)
        # Connections are made by the first use: here, and not in the first forward pass.
        group.smallest(rank)
        if device.type == "cuda" and uses_peer_memory:
            with torch.accelerator.device_index(device.index):
                group.peers = open_peer_memory(store, rank, size, device)
    except (RuntimeError, OSError) as error:
        # What follows the first line are addresses of torch's functions.
        reason = str(error).partition("\n")[0]
        raise EngineError(
            f"tensor-parallel rank {rank} of {size} did not join the others at {rendezvous} within "
            f"{timeout_s:g} s: {reason}"
        ) from error
    return group


def _store(parallel: ParallelConfig, rendezvous: str, timeout_s: float) -> Any:
    """What the ranks exchange their addresses through."""
    url = urlsplit(rendezvous)
    if url.scheme == "file":
        return _dist.FileStore(str(Path(unquote(url.path))), parallel.tp_size)
    host, port = _host_and_port(rendezvous)
    leads = parallel.tp_rank == 0
    return _dist.TCPStore(
        host,
        port,
        is_master=leads,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        # Without a listener of ours the store would listen at every address of the machine.
        master_listen_fd=(
            socket.create_server((host, port), family=_family(host, port)).detach() if leads else None
        ),
    )


def _host_and_port(rendezvous: str) -> tuple[str, int]:
    url = urlsplit(rendezvous)
    if url.scheme != "tcp" or url.hostname is None or url.port is None:
        raise ValueError(f"rendezvous: expected file:///path or tcp://host:port, got {rendezvous!r}")
    return url.hostname, url.port


def _family(host: str, port: int) -> socket.AddressFamily:
    family, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return family


def _gloo(store: Any, rank: int, size: int, rendezvous: str, deadline_s: float) -> Any:
    options = _dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=max(deadline_s - time.monotonic(), 1e-3))
    address = _own_address(rendezvous)
    options._devices = [_dist.ProcessGroupGloo.create_device(hostname=address)]
    return _dist.ProcessGroupGloo(store, rank, size, options)


def _own_address(rendezvous: str) -> str:
    """Where the others reach this rank: what the machine's name resolves to may be of no use to them."""
    if rendezvous.startswith("file:"):
        return "127.0.0.1"
    host, port = _host_and_port(rendezvous)
    with socket.socket(_family(host, port), socket.SOCK_DGRAM) as probe:
        # Nothing is sent: this asks for the route.
        probe.connect((host, port))
        address: str = probe.getsockname()[0]
        return address


def _nccl(store: Any, rank: int, size: int) -> Any:
    # The launcher watches over the processes; NCCL's own watch would end them when it takes one for stuck.
    os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"
    # Buffers in captured graphs would be opened to the other GPUs by their physical memory, which changes
    # when the scratch memory is released and resumed.
    os.environ["NCCL_GRAPH_REGISTER"] = "0"
    options = _dist.ProcessGroupNCCL.Options()
    options._timeout = COLLECTIVE_TIMEOUT
    options.group_name = "tensor_parallel"
    return _dist.ProcessGroupNCCL(store, rank, size, options)


def _wait(work: Any) -> None:
    """Wait until it is done: the host for a CPU, the current stream for a GPU."""
    if work is not None:
        work.wait()
