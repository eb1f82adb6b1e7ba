"""A group that meets through a store of torch, without torch's process groups. Source: wire_vllm 2.2."""

from __future__ import annotations

import pickle
import socket
import uuid
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed

_dist: Any = torch.distributed  # not all of it is exported


@dataclass
class StatelessProcessGroup:
    """One rank of a group.

    Objects are sent as pickles, as in vLLM, so all processes must trust each other and their network.

    Attributes:
        store: hosted by rank 0.
        socket: a listening socket for the store; None: none was given.
        data_expiration_seconds: ignored: objects stay in the store as long as it lives.
    """

    rank: int
    world_size: int
    store: Any
    socket: socket.socket | None = None
    data_expiration_seconds: int = 3600
    # Number of objects sent or received so far, by direction and ranks. It makes the next key.
    _counts: Counter[str] = field(default_factory=Counter)

    @staticmethod
    def create(
        host: str,
        port: int,
        rank: int,
        world_size: int,
        data_expiration_seconds: int = 3600,
        store_timeout: int = 300,
    ) -> StatelessProcessGroup:
        """Join a group through rank 0's store. Rank 0 returns when all have connected."""
        store = _dist.TCPStore(host, port, world_size, rank == 0, timedelta(seconds=store_timeout))
        return StatelessProcessGroup(rank, world_size, store, None, data_expiration_seconds)

    def broadcast_obj(self, obj: Any, src: int) -> Any:
        """Return the object of rank `src`."""
        key = self._next(f"broadcast_from/{src}")
        if self.rank == src:
            self.store.set(key, pickle.dumps(obj))
            return obj
        return pickle.loads(self.store.get(key))

    def send_obj(self, obj: Any, dst: int) -> None:
        self.store.set(self._next(f"send_to/{dst}", f"/{self.rank}"), pickle.dumps(obj))

    def recv_obj(self, src: int) -> Any:
        return pickle.loads(self.store.get(self._next(f"send_to/{self.rank}", f"/{src}")))

    def all_gather_obj(self, obj: Any) -> list[Any]:
        """Return the objects of all ranks, in their order."""
        return [self.broadcast_obj(obj, src) for src in range(self.world_size)]

    def barrier(self) -> None:
        """Return when all ranks have called this."""
        name = f"barrier/{self.broadcast_obj(uuid.uuid4().hex, src=0)}"
        self._count(f"{name}/here", self.world_size)
        self.store.get(f"{name}/here/all")
        # Rank 0 returns last, since the store ends with its process.
        if self.rank != 0:
            self._count(f"{name}/gone", self.world_size - 1)
        elif self.world_size > 1:
            self.store.get(f"{name}/gone/all")

    def _count(self, key: str, most: int) -> None:
        if self.store.add(key, 1) == most:
            self.store.set(f"{key}/all", b"1")

    def _next(self, way: str, ends: str = "") -> str:
        key = f"{way}{ends}/{self._counts[way + ends]}"
        self._counts[way + ends] += 1
        return key
