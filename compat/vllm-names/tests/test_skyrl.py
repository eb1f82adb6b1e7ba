"""SkyRL's client and its weight sender with `ebbtide serve`, on a CPU, without a vLLM wheel."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("ray")
import torch.distributed as dist
from safetensors.torch import load_file
from vllm.utils import get_open_port

from ebbtide.srt.hf_folder import folder_of

IDS = [50, 81, 72, 261, 90]
# Replaced by empty packages, since the real ones import modules that need a GPU.
PACKAGES = (
    "skyrl",
    "skyrl.backends",
    "skyrl.backends.skyrl_train",
    "skyrl.backends.skyrl_train.inference_servers",
    "skyrl.backends.skyrl_train.weight_sync",
)


@pytest.fixture(scope="module")
def skyrl() -> Iterator[None]:
    """Make SkyRL's modules importable, and this process a trainer of one rank."""
    found = importlib.util.find_spec("skyrl")
    if found is None or not found.submodule_search_locations:
        pytest.skip("skyrl is not installed")
    [root] = found.submodule_search_locations
    with pytest.MonkeyPatch.context() as patch:
        for name in PACKAGES:
            package = ModuleType(name)
            package.__path__ = [os.path.join(root, *name.split(".")[1:])]
            patch.setitem(sys.modules, name, package)
        address = f"tcp://127.0.0.1:{get_open_port()}"
        dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)
        yield
        dist.destroy_process_group()


class Trainer:
    """A trainer's weight sender, in a group with the server after `join`."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._sender: Any = None

    async def join(self) -> None:
        from skyrl.backends.skyrl_train.weight_sync import broadcast_strategy

        num_ranks, _ = await self._client.get_world_size()
        info = broadcast_strategy.BroadcastInitInfo(
            master_addr="127.0.0.1",
            master_port=get_open_port(),
            rank_offset=1,
            world_size=num_ranks + 1,
            override_existing_receiver=True,
        )
        joining = asyncio.create_task(self._client.init_weight_update_communicator(info))
        strategy = broadcast_strategy.BroadcastTransferStrategy
        self._sender = await asyncio.to_thread(strategy.create_sender, info, self._client)
        await joining

    async def send(self, model: str) -> None:
        from skyrl.backends.skyrl_train.weight_sync.base import WeightChunk

        weights = load_file(folder_of(model) / "model.safetensors")
        metadata = {
            "names": list(weights),
            "dtype_names": [str(weight.dtype).removeprefix("torch.") for weight in weights.values()],
            "shapes": [list(weight.shape) for weight in weights.values()],
        }
        chunks = (
            WeightChunk(names=[name], dtypes=[str(one.dtype)], shapes=[list(one.shape)], tensors=[one])
            for name, one in weights.items()
        )
        await self._sender.send_chunks(chunks, weight_metadata=metadata)


async def play(url: str) -> None:
    from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient

    client = RemoteInferenceClient(
        proxy_url=url, server_urls=[url], data_parallel_size=1, model_name=str(folder_of("tiny"))
    )

    async def rollouts() -> list[list[int]]:
        params = {"temperature": 0.0, "max_tokens": 8, "logprobs": 1}
        asked = {"prompt_token_ids": [IDS, IDS], "sampling_params": params, "session_ids": ["a", "b"]}
        answer = await client.generate({**asked, "prompts": None})
        assert [len(row) for row in answer["response_logprobs"]] == [8, 8]
        ids: list[list[int]] = answer["response_ids"]
        return ids

    trainer = Trainer(client)
    before = await rollouts()
    await trainer.join()
    await client.pause_generation()
    waiting = asyncio.create_task(rollouts())
    await trainer.send("tiny-storm")
    await client.reset_prefix_cache()
    assert not waiting.done()
    await client.resume_generation()
    assert await waiting != before
    # The sequence for a trainer on the same GPUs.
    await client.sleep(level=2)
    await client.wake_up(tags=["weights"])
    await trainer.send("tiny")
    await client.wake_up(tags=["kv_cache"])
    assert await rollouts() == before
    await client.teardown()


def test_rollouts_updates_and_sleeps(skyrl: None, url: str) -> None:
    asyncio.run(play(url))
