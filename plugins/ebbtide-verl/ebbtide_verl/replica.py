"""A rollout replica of verl: a Ray actor with an engine, on the GPUs of verl's workers."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.utils.device import get_visible_devices_keyword
from verl.workers.rollout.replica import RolloutReplica

from ebbtide_verl.server import EbbtideServer
from ebbtide_verl.settings import refuse


def server_name(replica_rank: int, kind: str = "", suffix: str = "") -> str:
    """The Ray name of a replica's actor, by which the trainer's workers find it."""
    return f"ebbtide_server_{kind}{replica_rank}{suffix}"


class EbbtideReplica(RolloutReplica):  # type: ignore[misc]
    """One engine of `tensor_model_parallel_size` × `data_parallel_size` ranks.

    Raises:
        ValueError: settings that are not supported. Nothing was started.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        refuse(self.config, self.model_config, self.nnodes)

    async def launch_servers(self) -> None:
        """Start the actor on the workers' node, with the GPUs that they see."""
        visible = get_visible_devices_keyword()
        placed = await asyncio.gather(
            *(worker.__ray_call__.remote(_place, visible) for worker in self.workers)
        )
        gpus = sorted({int(one) for _, given in placed for one in given.split(",") if one.strip()})
        kind = "reward_" if self.is_reward_model else "teacher_" if self.is_teacher_model else ""
        server = (
            ray.remote(EbbtideServer)
            .options(
                name=server_name(self.replica_rank, kind, self.name_suffix),
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=placed[0][0], soft=False),
                # The actor asks Ray for no GPU: it uses those of the workers.
                runtime_env={"env_vars": {visible: ",".join(map(str, gpus))}} if gpus else None,
                max_concurrency=self.max_concurrency,
            )
            .remote(self.config, self.model_config, self.rollout_mode, self.replica_rank)
        )
        self._server_address = await server.launch_server.remote()
        self._server_handle = server
        self.servers.append(server)


def _place(worker: Any, visible: str) -> tuple[str, str]:
    """The node of a worker, and its value of the environment variable `visible`. Runs in the worker."""
    return ray.get_runtime_context().get_node_id(), os.environ.get(visible, "")
