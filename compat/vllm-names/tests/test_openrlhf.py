"""OpenRLHF's rollout actor and executor with an engine on a CPU. The rest of its package needs GPUs."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("ray")
import vllm
from safetensors.torch import load_file
from transformers import AutoTokenizer
from vllm.utils import get_open_port

from ebbtide.srt.hf_folder import folder_of

MODEL, OTHER = folder_of("tiny"), folder_of("tiny-storm")
PROMPT = "One two three"


@pytest.fixture
def actor_kind(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class of the actor, outside of Ray."""
    found = importlib.util.find_spec("openrlhf")
    if found is None or not found.submodule_search_locations:
        pytest.skip("openrlhf is not installed")
    [root] = found.submodule_search_locations
    for name in ("openrlhf", "openrlhf.utils", "openrlhf.trainer", "openrlhf.trainer.ray"):
        # Empty packages, since the real ones import deepspeed and more.
        package = ModuleType(name)
        package.__path__ = [os.path.join(root, *name.split(".")[1:])]
        monkeypatch.setitem(sys.modules, name, package)
    from openrlhf.trainer.ray import vllm_engine

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("RAY_ADDRESS", "none")
    return vllm_engine.RolloutRayActor.__ray_metadata__.modified_class


async def start(kind: Any) -> Any:
    """Make an actor as `create_vllm_engines` does, but on a CPU."""
    actor = kind.__new__(kind)
    await actor.__init__(
        model=str(MODEL),
        enforce_eager=True,
        worker_extension_cls="openrlhf.trainer.ray.vllm_worker_wrap.WorkerWrap",
        tensor_parallel_size=1,
        seed=1,
        distributed_executor_backend="uni",
        max_model_len=512,
        enable_prefix_caching=True,
        dtype="float32",
        trust_remote_code=True,
        full_determinism=False,
        gpu_memory_utilization=None,
        bundle_indices=None,
        num_gpus=0,
        enable_sleep_mode=True,
        logprobs_mode="processed_logprobs",
        max_logprobs=1,
        device="cpu",
        additional_config={"ebbtide": {"max_total_tokens": 4096}},
    )
    return actor


async def join(actor: Any) -> Any:
    """Let the actor join a group; returns the trainer's end of it."""
    from openrlhf.utils.distributed_util import stateless_init_process_group

    port = get_open_port()
    joining = asyncio.create_task(
        actor.init_process_group("127.0.0.1", port, 1, 2, "openrlhf", backend="nccl", use_ray=False)
    )
    group = await asyncio.to_thread(stateless_init_process_group, "127.0.0.1", port, 0, 2, "cpu")
    await joining
    return group


async def broadcast(actor: Any, group: Any) -> None:
    """Send weights as the policy actor's `broadcast_to_vllm` does."""
    resetting = asyncio.create_task(actor.reset_prefix_cache())
    weights = load_file(OTHER / "model.safetensors")
    for count, (name, weight) in enumerate(weights.items(), 1):
        taking = asyncio.create_task(
            actor.update_weight(
                name, dtype=weight.dtype, shape=weight.shape, empty_cache=count == len(weights)
            )
        )
        await asyncio.to_thread(group.broadcast, weight, 0)
        await taking
    await resetting


async def play(kind: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(MODEL))
    params = vllm.SamplingParams(
        temperature=0.0,
        top_p=1.0,
        top_k=-1,
        max_tokens=8,
        min_tokens=1,
        skip_special_tokens=False,
        logprobs=1,
    )
    actor = await start(kind)

    async def responses(num_samples: int = 1) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = await actor.generate_responses(
            PROMPT, "label", params, 64, tokenizer, num_samples=num_samples
        )
        return found

    try:
        first, second = await responses(2)
        assert first["observation_tokens"] == second["observation_tokens"]
        [(begin, end)] = first["action_ranges"]
        assert end == len(first["observation_tokens"]) == len(first["rollout_log_probs"])
        assert all(logprob < 0 for logprob in first["rollout_log_probs"][begin:])
        group = await join(actor)
        await actor.sleep(level=1)
        await actor.wake_up(["weights"])
        await broadcast(actor, group)
        await actor.wake_up()
        [after] = await responses()
        assert after["observation_tokens"] != first["observation_tokens"]
        await actor.pause_generation()
        waiting = asyncio.create_task(responses())
        while actor.get_num_unfinished_requests() != 1:
            await asyncio.sleep(0.01)
        await actor.resume_generation()
        assert (await waiting)[0]["observation_tokens"] == after["observation_tokens"]
    finally:
        actor.llm.shutdown()


def test_rollouts_sleeps_and_updates(actor_kind: Any) -> None:
    asyncio.run(play(actor_kind))
