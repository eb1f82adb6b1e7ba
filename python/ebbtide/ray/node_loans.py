"""Sends new weights to an engine on several nodes, through the shared memory of each node.

Each node's actor copies the tensors to the shared memory of its machine, and returns entries that refer to
them for the ranks of its node. All nodes' entries together, one per rank in order, are those of an update.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import ray
import torch
from ray.exceptions import RayError

from ebbtide.formats.tensor_list import Payload
from ebbtide.ray.errors import translated
from ebbtide.trainer.payload_encoding import PayloadEncoder, serialize_tensors

NamedTensors: TypeAlias = list[tuple[str, torch.Tensor]]


class NodeLender:
    """Lends tensors in shared memory to the ranks of a node."""

    def __init__(self) -> None:
        self._open: dict[str, list[Payload]] = {}
        self._lock = threading.Lock()

    def lend(self, loan: str, tensors: Mapping[int, NamedTensors], takers: Sequence[int]) -> list[bytes]:
        """Copy tensors to shared memory, where they stay until `take_back`; returns an entry for each rank.

        Args:
            loan: name for `take_back`.
            tensors: lists of tensors by any key.
            takers: for each rank of this node, the key of its tensors.

        Raises:
            RequestRejected: not enough shared memory, or not plain tensors. Nothing is lent then.
        """
        shared: dict[int, Payload] = {}
        try:
            for key in dict.fromkeys(takers):
                shared[key] = serialize_tensors(tensors[key], takers.count(key))
        except BaseException:
            _close(shared.values())
            raise
        with self._lock:
            self._open[loan] = list(shared.values())
        entries = {key: iter(one.entries) for key, one in shared.items()}
        return [next(entries[key]) for key in takers]

    def take_back(self, loan: str) -> None:
        """Free a loan, when the update was answered. Idempotent."""
        with self._lock:
            shared = self._open.pop(loan, [])
        _close(shared)


class StoreEncoder(PayloadEncoder):
    """Puts (name, tensor) pairs into Ray's object store, once for all engines."""

    def __init__(self) -> None:
        super().__init__("cpu")

    def encode(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], *, keep_mapped: bool = False
    ) -> Payload:
        """As `PayloadEncoder.encode`, but the only entry is a Ray reference, and the tensors may change."""
        stored: Any = ray.put([(name, _on_host(tensor)) for name, tensor in named_tensors])
        return Payload([stored])


class NodeLoans(PayloadEncoder):
    """Makes payloads for an engine whose ranks are on several nodes.

    Args:
        own: the lender of node 0, in this process.
        others: the actors of the other nodes, in order.
        num_ranks: number of ranks on all nodes together. Each node has the same number.
    """

    def __init__(self, own: NodeLender, others: Sequence[Any], num_ranks: int) -> None:
        super().__init__("cpu")
        self._own = own
        self._others = list(others)
        per_node = num_ranks // (1 + len(others))
        self._ranks = [range(first, first + per_node) for first in range(0, num_ranks, per_node)]

    def encode(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], *, keep_mapped: bool = False
    ) -> Payload:
        """As `PayloadEncoder.encode`: all ranks get the same tensors, always through host memory."""
        return self.encode_each([[(name, _on_host(tensor)) for name, tensor in named_tensors]])

    def encode_each(self, by_tp_rank: Sequence[NamedTensors]) -> Payload:
        """Make a payload in which each rank gets its own tensors, or all ranks the same.

        Blocks until all nodes have lent their copies. If one fails, all copies are freed.

        Args:
            by_tp_rank: tensors by tensor-parallel rank, the same for all replicas; or one list for all ranks.

        Raises:
            RequestRejected: not enough shared memory on a node, or not plain tensors.
            EngineError: an actor failed.
        """
        loan, tensors = uuid.uuid4().hex, dict(enumerate(by_tp_rank))
        takers = [[rank % len(by_tp_rank) for rank in ranks] for ranks in self._ranks]
        lending: list[Callable[[], list[bytes]]] = []
        for node, (actor, keys) in enumerate(zip(self._others, takers[1:], strict=True), 1):
            own = {key: tensors[key] for key in dict.fromkeys(keys)}
            lending.append(partial(_answer, actor.lend.remote(loan, own, keys), node))
        entries: list[bytes] = []
        failures: list[Exception] = []
        lending.insert(0, partial(self._own.lend, loan, tensors, takers[0]))
        for lend in lending:
            try:
                entries += lend()
            except Exception as error:
                # Wait for the others all the same, since what they lend must be taken back.
                failures.append(error)
        payload = Payload(entries, release=partial(self._take_back, loan))
        if failures:
            payload.close()
            raise failures[0]
        return payload

    def _take_back(self, loan: str) -> None:
        self._own.take_back(loan)
        for actor in self._others:
            # Not awaited: an actor that has died has nothing to free.
            actor.take_back.remote(loan)


def _answer(answer: Any, node: int) -> list[bytes]:
    try:
        entries: list[bytes] = ray.get(answer)
    except RayError as error:
        raise translated(error, f"the actor of node {node}") from None
    return entries


def _on_host(tensor: Any) -> Any:
    return tensor.detach().cpu() if isinstance(tensor, torch.Tensor) else tensor


def _close(shared: Iterable[Payload]) -> None:
    for one in shared:
        one.close()
