"""The rollout in verl's training workers, which controls the memory and weights of their replica's engine."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import ray
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.utils import ensure_async_iterator

from ebbtide.formats.bucket import FlattenedTensorBucket
from ebbtide.trainer.payload_encoding import serialize_bucket
from ebbtide_verl.replica import server_name


class TrainerSide(BaseRollout):  # type: ignore[misc]
    """The rollout of a training worker. Only the first worker of each replica sends requests.

    Every worker must read all of `weights`, since a sharded trainer gathers tensors while they are read.
    """

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        rank = int(os.environ["RANK"])
        per_replica = self.config.tensor_model_parallel_size * self.config.data_parallel_size
        self._replica_rank = rank // per_replica if replica_rank == -1 else replica_rank
        self._server: Any = None

    async def resume(self, tags: list[str]) -> None:
        """Let the engine take memory of these tags again: "weights", "kv_cache"."""
        if self._leads:
            await self._actor.resume.remote(tags)

    async def release(self) -> None:
        """Let the engine release the memory of weights and KV cache for the trainer."""
        if self._leads:
            await self._actor.release.remote(["kv_cache", "weights"])

    async def update_weights(
        self,
        weights: Iterable[tuple[str, Tensor]] | AsyncIterator[tuple[str, Tensor]],
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        **_: Any,
    ) -> None:
        """Send all weights in buckets; the engine serves them when it has all of them.

        Args:
            weights: (checkpoint name, whole tensor) pairs.
            wire_format: must be "named_tensors".
            global_steps: version of the weights; None: the version stays.

        Raises:
            NotImplementedError: another wire format.
            RequestRejected: the weights do not fit the engine's model, which keeps serving the old ones. On
                workers other than the first: RuntimeError.
        """
        if wire_format != "named_tensors":
            raise NotImplementedError(f"wire_format={wire_format}: rollout.name=ebbtide takes named_tensors")
        bucket_bytes = int(self.config.checkpoint_engine.update_weights_bucket_megabytes) << 20
        await self._together(lambda: self._actor.begin_update.remote())
        try:
            async for bucket in _buckets(weights, bucket_bytes):
                entries = self._gather(serialize_bucket(bucket))
                # When this returns, the engine has read the bucket, so that it may be freed.
                await self._together(lambda: self._actor.stage.remote(entries))  # noqa: B023
        except BaseException:
            if self._leads:
                await self._actor.abort_update.remote()
            raise
        await self._together(lambda: self._actor.end_update.remote(global_steps))

    async def _together(self, ask: Callable[[], Awaitable[Any]]) -> None:
        """Call `ask` on the first worker; raise on all workers if it fails, so that none waits for ever."""
        error: Exception | None = None
        if self._leads:
            try:
                await ask()
            except Exception as raised:
                error = raised
        outcome = [None if error is None else str(error)]
        dist.broadcast_object_list(outcome, src=self._first_rank, group=self._mesh.get_group())
        if error is not None:
            raise error
        if outcome[0] is not None:
            raise RuntimeError(f"the first worker of this replica was refused: {outcome[0]}")

    def _gather(self, entry: bytes) -> list[bytes]:
        """Gather all workers' entries on the first one, in the order of ranks; returns [] on the others."""
        size = self._mesh.size()
        entries: list[Any] | None = [None] * size if self._leads else None
        dist.gather_object(entry, entries, dst=self._first_rank, group=self._mesh.get_group())
        return entries or []

    @property
    def _mesh(self) -> Any:
        """The device mesh of this replica's workers."""
        if self.device_mesh is None:
            per_replica = self.config.tensor_model_parallel_size * self.config.data_parallel_size
            shape = (dist.get_world_size() // per_replica, per_replica)
            self.device_mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "infer_tp"))
        return self.device_mesh["infer_tp"]

    @property
    def _first_rank(self) -> int:
        return int(self._mesh.mesh.flatten()[0])

    @property
    def _leads(self) -> bool:
        return bool(self._mesh.get_local_rank() == 0)

    @property
    def _actor(self) -> Any:
        if self._server is None:
            self._server = ray.get_actor(server_name(self._replica_rank))
        return self._server


async def _buckets(
    weights: Iterable[tuple[str, Tensor]] | AsyncIterator[tuple[str, Tensor]], bucket_bytes: int
) -> AsyncIterator[FlattenedTensorBucket]:
    """Yield buckets of at most `bucket_bytes`; a larger tensor gets its own. One exists at a time."""
    pending: list[tuple[str, Tensor]] = []
    num_bytes = 0
    async for name, tensor in ensure_async_iterator(weights):
        if pending and num_bytes + tensor.nbytes > bucket_bytes:
            yield FlattenedTensorBucket(pending)
            pending, num_bytes = [], 0
        pending.append((name, tensor.detach()))
        num_bytes += tensor.nbytes
    if pending:
        yield FlattenedTensorBucket(pending)
