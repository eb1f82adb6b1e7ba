"""Broadcasts from a trainer to the ranks of an engine, by NCCL on GPUs, by gloo on CPUs."""

from __future__ import annotations

import pickle
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions

from ebbtide.formats.nccl import RawNccl, make_unique_id
from ebbtide.formats.rendezvous import ID_KEY, GroupAddress, connect, read_id
from vllm.distributed.device_communicators.pynccl_wrapper import ncclUniqueId
from vllm.distributed.utils import StatelessProcessGroup

# The timeout of vLLM's stores.
TIMEOUT: Final = timedelta(seconds=300)
# The engine's name for the group of `/init_weight_transfer_engine`. Members of a gloo group meet by it.
GROUP: Final = "vllm"


class PyNcclCommunicator:
    """One rank of a communicator. The constructor waits for the other ranks.

    Args:
        device: of this rank. With "cpu", gloo is used instead of NCCL, as an engine on a CPU expects.
        library_path: ignored: the library that torch has loaded is used.
    """

    def __init__(
        self,
        group: StatelessProcessGroup,
        device: int | str | torch.device,
        library_path: str | None = None,
    ) -> None:
        self.group, self.rank, self.world_size = group, group.rank, group.world_size
        self.device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        self.disabled, self.available = self.world_size == 1, self.world_size > 1
        self._backend: Any = None
        if not self.disabled:
            self._backend = self._by_gloo() if self.device.type == "cpu" else self._by_nccl()

    def broadcast(self, tensor: Tensor, src: int, stream: Any = None) -> None:
        """Send a contiguous tensor, or receive into it.

        Args:
            src: the sending rank.
            stream: to launch it on; None: the current one. On a CPU, this waits until it is done.

        Raises:
            ValueError: the tensor is not contiguous.
        """
        if self.disabled:
            return
        if not tensor.is_contiguous():
            raise ValueError(f"expected a contiguous tensor, got strides {tensor.stride()}")
        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = src, 0, TIMEOUT
        with nullcontext() if stream is None or self.device.type == "cpu" else stream:
            self._backend.broadcast([tensor], options).wait()

    def _by_gloo(self) -> Any:
        store = self.group.store
        here = GroupAddress(GROUP, store.host, store.port, self.rank, self.world_size, "gloo")
        return connect(here, TIMEOUT.total_seconds()).backend

    def _by_nccl(self) -> RawNccl:
        store = self.group.store
        if self.rank == 0:
            unique_id = make_unique_id()
            store.set(ID_KEY, pickle.dumps(ncclUniqueId.from_buffer_copy(unique_id)))
        else:
            unique_id = read_id(store.get(ID_KEY))
        timeout_s = TIMEOUT.total_seconds()
        return RawNccl(unique_id, self.rank, self.world_size, self.device, timeout_s)
