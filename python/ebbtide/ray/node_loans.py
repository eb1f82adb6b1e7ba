"""New weights for the ranks of several nodes: each node's ranks open what lies in the memory of their own.

The actor of every node copies the tensors into its machine's shared memory, and says by which entries they
are found there. Together the entries are those of an update: one for each rank, in order.
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
    """What an actor has lent to the ranks of its node."""

    def __init__(self) -> None:
        self._open: dict[str, list[Payload]] = {}
        self._lock = threading.Lock()

    def lend(self, loan: str, tensors: Mapping[int, NamedTensors], takers: Sequence[int]) -> list[bytes]:
        """Copy tensors into shared memory, until `take_back`.

        Args:
            loan: its name.
            tensors: by a key of the caller's.
            takers: the key of what each rank of this node takes.

        Returns an entry for each of them. Raises RequestRejected: shared memory is short, or they are no
        plain tensors; nothing is lent.
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
        """The update has been answered. Idempotent."""
        with self._lock:
            shared = self._open.pop(loan, [])
        _close(shared)


class StoreEncoder(PayloadEncoder):
    """Puts (name, tensor) pairs into Ray's store, once for all engines that are to read them there."""

    def __init__(self) -> None:
        super().__init__("cpu")

    def encode(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], *, keep_mapped: bool = False
    ) -> Payload:
        """As `PayloadEncoder.encode`; a reference stands for the entries, and the tensors may change."""
        stored: Any = ray.put([(name, _on_host(tensor)) for name, tensor in named_tensors])
        return Payload([stored])


class NodeLoans(PayloadEncoder):
    """Makes the payloads of an engine whose ranks are on several nodes.

    Args:
        own: lends on node 0, in this process.
        others: the actors of the other nodes, in order.
        num_ranks: of all nodes, which have equally many.
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
        """As `PayloadEncoder.encode`: the same for all. It always goes by way of the host."""
        return self.encode_each([[(name, _on_host(tensor)) for name, tensor in named_tensors]])

    def encode_each(self, by_tp_rank: Sequence[NamedTensors]) -> Payload:
        """A payload in which each rank takes its own, as all replicas do; or all of them the only one.

        Blocks until all nodes have lent; if one fails, none does any more.
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
                # The others are waited for: what they lend later nobody would take back.
                failures.append(error)
        payload = Payload(entries, release=partial(self._take_back, loan))
        if failures:
            payload.close()
            raise failures[0]
        return payload

    def _take_back(self, loan: str) -> None:
        self._own.take_back(loan)
        for actor in self._others:
            # One that has died has nothing any more.
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
