"""Two ranks of a trainer, and in the process of the first an engine of two replicas of two ranks.

Run as a program with the folder of a model; the first rank prints what it found as JSON.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import httpx
import tiny_rl
import torch.distributed as dist
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.entrypoints.http_server import _GlobalState, app, set_global_state
from sglang.srt.managers.io_struct import (
    GenerateReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightsFromTensorReqInput,
)
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket
from sglang.srt.weight_sync.utils import update_weights
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

TP_SIZE = DP_SIZE = 2


class Adapter:
    """What `update_weights` asks: an engine of this process."""

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager

    async def update_weights_from_tensor(self, request: Any) -> Any:
        return await self._manager.update_weights_from_tensor(request, None)


async def greedy(manager: TokenizerManager) -> list[list[int]]:
    """Of every replica."""
    outputs = []
    for dp_rank in range(DP_SIZE):
        request = GenerateReqInput(
            input_ids=tiny_rl.PROMPT, sampling_params=tiny_rl.GREEDY, routed_dp_rank=dp_rank
        )
        output = await manager.generate_request(request, None).__anext__()
        assert output["meta_info"]["dp_rank"] == dp_rank
        outputs.append(output["output_ids"])
    return outputs


def entries(trainer: tiny_rl.Trainer, num_entries: int) -> tuple[UpdateWeightsFromTensorReqInput, Any]:
    """An update with one bucket for each of so many ranks; and what must live until it is answered."""
    bucket = FlattenedTensorBucket(named_tensors=trainer.next_weights())
    data = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
    serialized = [MultiprocessingSerializer.serialize(data) for _ in range(num_entries)]
    request = UpdateWeightsFromTensorReqInput(
        serialized_named_tensors=serialized, load_format="flattened_bucket", weight_version=str(num_entries)
    )
    return request, bucket


async def with_engine(
    manager: TokenizerManager, trainer: tiny_rl.Trainer, mesh: DeviceMesh
) -> dict[str, Any]:
    """The first rank: each update is followed by what all replicas say, and what they should."""
    found: dict[str, Any] = {"at first": [await greedy(manager), trainer.greedy()]}
    tags = ["kv_cache", "weights"]
    found["released"] = await manager.release_memory_occupation(
        ReleaseMemoryOccupationReqInput(tags=tags), None
    )
    await manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=["weights"]), None)
    weights = trainer.next_weights()
    found["gathered"] = await update_weights(Adapter(manager), weights, "infer_tp", mesh)
    await manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=["kv_cache"]), None)
    found["by the mesh"] = [await greedy(manager), trainer.greedy()]
    for num_entries in (TP_SIZE, TP_SIZE * DP_SIZE):
        request, _alive = entries(trainer, num_entries)
        done, message = await manager.update_weights_from_tensor(request, None)
        assert done, message
        found[f"{num_entries} entries"] = [await greedy(manager), trainer.greedy()]
    request, _alive = entries(tiny_rl.Trainer(Path(sys.argv[1])), 3)
    found["refused"] = await manager.update_weights_from_tensor(request, None)
    found["one rank refuses"] = await refused_by_one_rank(manager)
    found["as before"] = [await greedy(manager), trainer.greedy()]
    found["flushed"] = (await manager.flush_cache()).success
    found["states"] = len(await manager.get_internal_state())
    async with client_of(manager) as client:
        found["version"] = (await client.get("/get_weight_version")).json()["weight_version"]
        found["loads"] = [load["dp_rank"] for load in (await client.get("/v1/loads")).json()["loads"]]
        ranks = (await client.get("/memory_occupation")).json()["ranks"]
        found["ranks"] = [(rank["dp_rank"], rank["tp_rank"]) for rank in ranks]
    return found


async def refused_by_one_rank(manager: TokenizerManager) -> Any:
    """An update that does not fit the last rank alone."""
    weights = tiny_rl.Trainer(Path(sys.argv[1])).next_weights()
    name, tensor = weights[-1]
    wrong = [(name, tensor[:-1].clone())]
    serialized = [MultiprocessingSerializer.serialize(sent) for sent in (weights, weights, weights, wrong)]
    request = UpdateWeightsFromTensorReqInput(serialized_named_tensors=serialized, weight_version="never")
    return await manager.update_weights_from_tensor(request, None)


def client_of(manager: TokenizerManager) -> httpx.AsyncClient:
    """Of the application, which serves the engine of this process."""
    set_global_state(_GlobalState(tokenizer_manager=manager, template_manager=None, scheduler_info=None))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://engine", timeout=60)


async def without_engine(trainer: tiny_rl.Trainer, mesh: DeviceMesh) -> None:
    """The second rank: it has weights to give, and nobody to ask."""
    assert await update_weights(None, trainer.next_weights(), "infer_tp", mesh) is None


def work(rank: int, port: int, model_path: Path) -> None:
    """One rank of the trainer."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=TP_SIZE)
    mesh = init_device_mesh("cpu", (TP_SIZE,), mesh_dim_names=("infer_tp",))
    trainer = tiny_rl.Trainer(model_path)
    if rank > 0:
        asyncio.run(without_engine(trainer, mesh))
    else:
        sizes = {"tp_size": TP_SIZE, "dp_size": DP_SIZE}
        engine = Engine(model_path=str(model_path), **sizes, **tiny_rl.SERVER_ARGUMENTS)
        try:
            found = asyncio.run(with_engine(engine.tokenizer_manager, trainer, mesh))
            # And by the plain methods, which answer with tuples.
            found["from disk"] = engine.update_weights_from_disk(str(model_path))
            found["session"] = [engine.begin_weight_update()[0], engine.end_weight_update()[0]]
        finally:
            engine.shutdown()
        print(json.dumps(found))
    dist.destroy_process_group()


def main() -> None:
    port = tiny_rl.free_port()
    model_path = Path(sys.argv[1])
    second = multiprocessing.get_context("spawn").Process(target=work, args=(1, port, model_path))
    second.start()
    try:
        work(0, port, model_path)
    finally:
        second.join(60)
        second.kill()


if __name__ == "__main__":
    main()
