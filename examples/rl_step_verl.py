"""RL steps as verl drives SGLang: the engine in its process, its HTTP application in its event loop.

    PYTHONPATH=compat:python python examples/rl_step_verl.py [--steps 3] [--model-path FOLDER]

Rollouts, sleep and wake-up are calls of `tokenizer_manager`; weights come over HTTP, by
`sglang.srt.weight_sync.utils.update_weights` on a device mesh. The order: release the KV cache, release the
weights, train, resume the weights, update, flush, resume the KV cache.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
from pathlib import Path
from typing import Any

import httpx
import sglang.srt.entrypoints.engine
import tiny_rl
import torch.distributed as dist
import uvicorn
from sglang.srt.entrypoints.engine import (
    Engine,
    init_tokenizer_manager,
    run_detokenizer_process,
    run_scheduler_process,
)
from sglang.srt.entrypoints.EngineBase import EngineBase
from sglang.srt.entrypoints.http_server import _GlobalState, app, set_global_state
from sglang.srt.managers.io_struct import (
    GenerateReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightsFromTensorReqInput,
)
from sglang.srt.managers.tokenizer_manager import ServerStatus
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils import set_ulimit
from sglang.srt.weight_sync.utils import update_weights
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def _set_envs_and_config(server_args: ServerArgs) -> None:
    set_ulimit()


# An actor is not the main thread: verl puts a function in place that sets no signal handlers.
sglang.srt.entrypoints.engine._set_envs_and_config = _set_envs_and_config


class RolloutServer:
    """The engine, and its HTTP application on a port of the loop that runs."""

    def __init__(self, server_args: ServerArgs) -> None:
        self.url = server_args.url()
        manager, templates, _ports, info, _watchdog = Engine._launch_subprocesses(
            server_args=server_args,
            init_tokenizer_manager_func=init_tokenizer_manager,
            run_scheduler_process_func=run_scheduler_process,
            run_detokenizer_process_func=run_detokenizer_process,
        )
        self.tokenizer_manager = manager
        set_global_state(
            _GlobalState(tokenizer_manager=manager, template_manager=templates, scheduler_info=info)
        )
        config = uvicorn.Config(app, host=server_args.host, port=server_args.port, log_level="error")
        self._http = uvicorn.Server(config)
        self._serving = asyncio.create_task(self._http.serve())
        manager.server_status = ServerStatus.Up

    async def generate(self, sampling_params: dict[str, Any]) -> tuple[list[int], list[float]]:
        """One rollout: token ids and their logprobs."""
        request = GenerateReqInput(
            input_ids=tiny_rl.PROMPT, sampling_params=sampling_params, return_logprob=True, image_data=None
        )
        output = await self.tokenizer_manager.generate_request(request, None).__anext__()
        triples = output["meta_info"]["output_token_logprobs"]
        return [token for _, token, _ in triples], [logprob for logprob, _, _ in triples]

    async def sleep(self, tag: str) -> None:
        obj = ReleaseMemoryOccupationReqInput(tags=[tag])
        await self.tokenizer_manager.release_memory_occupation(obj, None)

    async def wake_up(self, tag: str) -> None:
        obj = ResumeMemoryOccupationReqInput(tags=[tag])
        await self.tokenizer_manager.resume_memory_occupation(obj, None)

    async def shutdown(self) -> None:
        self._http.should_exit = True
        await self._serving
        self.tokenizer_manager.core.shutdown()


class ServerAdapter(EngineBase):
    """The trainer's end, which knows the server by its address."""

    def __init__(self, url: str) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=120)

    async def update_weights_from_tensor(self, request: UpdateWeightsFromTensorReqInput) -> Any:
        body = dataclasses.asdict(request)
        entries = request.serialized_named_tensors
        body["serialized_named_tensors"] = [base64.b64encode(entry).decode() for entry in entries]
        response = await self._http.post("/update_weights_from_tensor", json=body)
        response.raise_for_status()
        return response.json()

    async def flush_cache(self) -> None:
        (await self._http.get("/flush_cache")).raise_for_status()

    async def resident_bytes(self) -> int:
        """Memory of all tags that the engine holds now (Ebbtide's own endpoint)."""
        tags = (await self._http.get("/memory_occupation")).json()["tags"]
        return sum(tag["resident_bytes"] for tag in tags.values())

    async def close(self) -> None:
        await self._http.aclose()

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    release_memory_occupation = resume_memory_occupation = shutdown = generate


async def rl_step(
    server: RolloutServer, adapter: ServerAdapter, trainer: tiny_rl.Trainer, mesh: DeviceMesh, step: int
) -> None:
    seeds = range(step * tiny_rl.NUM_ROLLOUTS, (step + 1) * tiny_rl.NUM_ROLLOUTS)
    rollouts = [server.generate({**tiny_rl.SAMPLING, "sampling_seed": seed}) for seed in seeds]
    outputs = [tokens for tokens, _ in await asyncio.gather(*rollouts)]
    resident = [await adapter.resident_bytes()]
    for tag in ("kv_cache", "weights"):
        await server.sleep(tag)
        resident.append(await adapter.resident_bytes())
    reward = trainer.learn(outputs)
    await server.wake_up("weights")
    resident.append(await adapter.resident_bytes())
    sent = 0
    for bucket in tiny_rl.buckets(trainer.named_tensors()):
        reply = await update_weights(
            engine=adapter,
            params_batch=bucket,
            device_mesh_key="infer_tp",
            device_mesh=mesh,
            flush_cache=False,
        )
        sent += reply["num_tensors"]
    await adapter.flush_cache()
    await server.wake_up("kv_cache")
    resident.append(await adapter.resident_bytes())
    print(f"step {step}: mean reward {reward:.3f}, then {sent} tensors, {reply['content']}", flush=True)
    print(f"  bytes that the engine held, stage by stage: {resident}", flush=True)


async def drive(model_path: Path, num_steps: int) -> None:
    trainer = tiny_rl.Trainer(model_path)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("infer_tp",))
    server = RolloutServer(
        ServerArgs(
            model_path=str(model_path),
            port=tiny_rl.free_port(),
            log_level="error",
            **tiny_rl.SERVER_ARGUMENTS,
        )
    )
    adapter = ServerAdapter(server.url)
    try:
        for step in range(num_steps):
            await rl_step(server, adapter, trainer, mesh, step)
        tokens, _ = await server.generate(tiny_rl.GREEDY)
        print("engine and trainer agree:", tokens == trainer.greedy())
    finally:
        await adapter.close()
        await server.shutdown()


def run(model_path: Path, num_steps: int) -> None:
    """The loop, with a group of this process alone for the mesh."""
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{tiny_rl.free_port()}", rank=0, world_size=1
    )
    try:
        asyncio.run(drive(model_path, num_steps))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    tiny_rl.main(__doc__, run)
