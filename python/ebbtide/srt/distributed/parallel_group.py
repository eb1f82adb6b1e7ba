"""The tensor-parallel ranks of one model, and their collectives.

A group is an object that is passed in. It does not use `torch.distributed`'s registry and sets no default
group, so it never conflicts with weight groups or with a caller's own groups.
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

# Ranks reach a collective within milliseconds of each other, unless one of them compiles kernels. If a rank
# dies, its launcher ends the group long before this; the timeout is for a rank that lives and does not come.
COLLECTIVE_TIMEOUT: Final = timedelta(minutes=30)


class ParallelGroup:
    """Ranks that call the same methods in the same order, with tensors of the same shape.

    This class itself communicates with nobody. With size 1 it is the only rank, which holds everything. With
    a larger size it stands for one rank when kernels are compiled ahead: shapes are right, values are not.
    """

    def __init__(self, size: int = 1, rank: int = 0) -> None:
        self.size, self.rank = size, rank

    def all_reduce_(self, x: Tensor) -> Tensor:
        """Sum x over all ranks in place, with the same bits on every rank. Returns `x`.

        On a GPU it runs on the current stream, and a CUDA graph may capture it.
        """
        return x

    def add_reduced_(self, x: Tensor, onto: Tensor) -> None:
        """Add to `onto` the sum of x over all ranks, of the same shape. May overwrite x."""
        onto += x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Concatenate the tensors of all ranks along `dim`, in the order of ranks."""
        return x if self.size == 1 else torch.cat([x] * self.size, dim=dim)

    def smallest(self, value: int) -> int:
        """The smallest of all ranks' values. Blocks the host."""
        return value

    def close(self) -> None:
        """Leave the group. Does nothing if there are no other ranks."""


class TorchGroup(ParallelGroup):
    """Ranks that communicate through one of torch's backends, `ProcessGroupGloo` or `ProcessGroupNCCL`.

    Attributes:
        peers: all-reduces short messages; None: the backend does all of them.
    """

    def __init__(self, backend: Any, rank: int, size: int, device: torch.device) -> None:
        super().__init__(size, rank)
        self.peers: PeerMemory | None = None
        self._backend: Any | None = backend
        # Allocated once, since a full device may have no room for even one number later.
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
            # Aborting frees memory, which waits for all kernels, also those that wait for another rank.
            with suppress(EngineError):
                peers.let_go()
        if backend is not None:
            with suppress(Exception):
                backend.abort()
        if peers is not None:
            peers.close()

    def _all_reduce(self, x: Tensor, operation: Any) -> None:
        options = _c10d.AllreduceOptions()
        # Only a call with asyncOp=False runs on the GPU's current stream, not on one of the backend's own.
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
    """Join the other ranks of this replica, by gloo on a CPU and by NCCL on GPUs. One rank needs no joining.

    Args:
        rendezvous: where the ranks meet, used for this group only: `file:///path` on one host, or
            `tcp://host:port`, an address of rank 0, which listens there.
        uses_peer_memory: whether GPUs all-reduce short messages without NCCL, if the machine allows it.

    EngineError: the ranks did not all come in time.
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
        # Backends connect at the first use. Do it now, not in the first forward pass.
        group.smallest(rank)
        if device.type == "cuda" and uses_peer_memory:
            with torch.accelerator.device_index(device.index):
                group.peers = open_peer_memory(store, rank, size, device)
    except (RuntimeError, OSError) as error:
        # Later lines are a C++ stack trace.
        reason = str(error).partition("\n")[0]
        raise EngineError(
            f"tensor-parallel rank {rank} of {size} did not join the others at {rendezvous} within "
            f"{timeout_s:g} s: {reason}"
        ) from error
    return group


def _store(parallel: ParallelConfig, rendezvous: str, timeout_s: float) -> Any:
    """The store through which the ranks exchange their addresses."""
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
        # Without a socket of ours the store would listen on all addresses of the machine.
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
    """An address at which the others reach this rank. What the host name resolves to may not be reachable."""
    if rendezvous.startswith("file:"):
        return "127.0.0.1"
    host, port = _host_and_port(rendezvous)
    with socket.socket(_family(host, port), socket.SOCK_DGRAM) as probe:
        # Sends nothing: connecting a datagram socket only looks up the route.
        probe.connect((host, port))
        address: str = probe.getsockname()[0]
        return address


def _nccl(store: Any, rank: int, size: int) -> Any:
    # The launcher watches the processes; torch's monitor of NCCL would end one that it takes to be stuck.
    os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"
    # NCCL would register buffers of captured graphs with the other GPUs by their physical memory, which
    # changes when the scratch memory is released and resumed.
    os.environ["NCCL_GRAPH_REGISTER"] = "0"
    options = _dist.ProcessGroupNCCL.Options()
    options._timeout = COLLECTIVE_TIMEOUT
    options.group_name = "tensor_parallel"
    return _dist.ProcessGroupNCCL(store, rank, size, options)


def _wait(work: Any) -> None:
    """Wait for the work: the host waits on a CPU, the current stream on a GPU. None: nothing to wait for."""
    if work is not None:
        work.wait()
