"""verl's replica, configuration and training side control an engine through the plugin, on a CPU with Ray."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")
import httpx
import ray
from ebbtide_verl.server import EbbtideServer, prompt_logprobs, steps_of
from ebbtide_verl.settings import engine_arguments
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import get_rollout_replica_class

from ebbtide.srt.hf_folder import folder_of

MODEL = str(folder_of("tiny"))
PROMPT = [1, 300, 301, 302]


def rollout_config(**changes: Any) -> RolloutConfig:
    fields: dict[str, Any] = {
        "name": "ebbtide",
        "dtype": "float32",
        "prompt_length": 64,
        "response_length": 16,
        "max_model_len": 128,
        "tensor_model_parallel_size": 1,
        "free_cache_engine": True,
        "engine_kwargs": {"ebbtide": {"max_total_tokens": 4096, "device": "cpu"}},
    }
    return RolloutConfig(**{**fields, **changes})


class Trainer:
    """A training worker of one rank, with the plugin's `TrainerSide`."""

    def start(self, config: RolloutConfig, model_config: HFModelConfig) -> None:
        import torch.distributed as dist

        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29577")
        dist.init_process_group("gloo")
        self._side = get_rollout_class("ebbtide")(config, model_config, None)

    async def ask(self, method: str, *arguments: Any) -> None:
        await getattr(self._side, method)(*arguments)

    async def send(self, folder: str, global_steps: int, rename: str = "") -> None:
        from safetensors.torch import load_file

        weights = load_file(f"{folder}/model.safetensors")
        named = ((rename or name, tensor.float()) for name, tensor in weights.items())
        await self._side.update_weights(named, global_steps=global_steps)


class Setup:
    """A replica, and a trainer that shares its device."""

    def __init__(self) -> None:
        config, model_config = rollout_config(), HFModelConfig(path=MODEL)
        self.trainer = ray.remote(Trainer).remote()
        ray.get(self.trainer.start.remote(config, model_config))
        self.replica = get_rollout_replica_class("ebbtide")(0, config, model_config, gpus_per_node=1)
        asyncio.run(self.replica.init_hybrid(SimpleNamespace(workers=[self.trainer])))

    def generate(self, **params: Any) -> Any:
        asked = {"temperature": 0.0, "max_tokens": 8, "logprobs": True, **params}
        return ray.get(self.replica.server_handle.generate.remote(PROMPT, asked, os.urandom(8).hex()))

    def tell(self, *arguments: Any) -> None:
        ray.get(self.trainer.ask.remote(*arguments))

    def send(self, *arguments: Any, **more: Any) -> None:
        ray.get(self.trainer.send.remote(*arguments, **more))


@pytest.fixture(scope="module")
def setup() -> Iterator[Setup]:
    # Ray's workers import this module too.
    paths = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
    ray.init(num_cpus=4, include_dashboard=False, runtime_env={"env_vars": paths})
    yield Setup()
    ray.shutdown()


def test_a_step_sleeps_wakes_and_takes_the_weights_of_the_trainer(setup: Setup) -> None:
    # The first weights are random, and have no step.
    assert setup.generate().extra_fields == {"global_steps": None}
    setup.send(MODEL, 2)
    before = setup.generate()
    assert len(before.token_ids) == len(before.log_probs) == 8
    setup.tell("release")
    setup.tell("resume", ["weights"])
    setup.send(str(folder_of("tiny-storm")), 3)
    setup.tell("resume", ["kv_cache"])
    after = setup.generate()
    assert after.token_ids != before.token_ids
    assert after.extra_fields == {"global_steps": 3, "min_global_steps": 3, "max_global_steps": 3}
    setup.send(MODEL, 4)
    again = setup.generate()
    assert again.token_ids == before.token_ids
    assert again.log_probs == pytest.approx(before.log_probs, abs=1e-5)


def test_weights_that_do_not_fit_change_nothing(setup: Setup) -> None:
    setup.send(MODEL, 5)
    with pytest.raises(ray.exceptions.RayTaskError, match="wrong_name"):
        setup.send(MODEL, 6, rename="wrong_name")
    assert setup.generate().extra_fields["global_steps"] == 5


def test_a_partial_rollout_ends_with_its_tokens_and_generation_goes_on(setup: Setup) -> None:
    asyncio.run(setup.replica.abort_all_requests())
    asyncio.run(setup.replica.resume_generation())
    assert setup.generate().stop_reason == "length"


def test_its_address_is_that_of_an_http_server(setup: Setup) -> None:
    asked = {"input_ids": PROMPT, "sampling_params": {"temperature": 0.0, "max_new_tokens": 8}}
    answer = httpx.post(f"http://{setup.replica.server_address}/generate", json=asked, timeout=60)
    assert answer.json()["output_ids"] == setup.generate().token_ids


@pytest.mark.parametrize(
    ("changes", "gpus_per_node", "named"),
    [
        ({"quantization": "awq"}, 8, "quantization=awq"),
        ({"tensor_model_parallel_size": 2}, 1, "2 nodes: choose"),
        (
            {"expert_parallel_size": 2, "tensor_model_parallel_size": 2},
            8,
            "expert_parallel_size: expected 1",
        ),
        ({"logprobs_mode": "raw_logits"}, 8, "expected one of processed_logprobs, raw_logprobs"),
        ({"scheduling_policy": "priority"}, 8, "engine_kwargs.ebbtide.schedule_policy"),
        ({"full_determinism": True}, 8, "full_determinism: expected False"),
        ({"qat": {"enable": True}}, 8, "qat.enable: expected False"),
    ],
)
def test_what_it_does_not_do_is_refused_by_name_before_a_start(
    changes: dict[str, Any], gpus_per_node: int, named: str
) -> None:
    kind = get_rollout_replica_class("ebbtide")
    with pytest.raises(ValueError, match=named):
        kind(0, rollout_config(**changes), HFModelConfig(path=MODEL), gpus_per_node=gpus_per_node)


def test_settings_reach_the_engine() -> None:
    config = rollout_config(
        enable_prefix_caching=False, seed=7, standalone_gpu_memory_utilization=0.8, gpu_memory_utilization=0.4
    )
    model = HFModelConfig(path=MODEL)
    alone = engine_arguments(config, model, shares_gpus=False, replica_rank=2)
    wanted = {"disable_radix_cache": True, "random_seed": 9, "logprobs_mode": "processed_logprobs"}
    assert alone.items() >= {**wanted, "mem_fraction_static": 0.8, "max_total_tokens": 4096}.items()
    assert engine_arguments(config, model, shares_gpus=True)["mem_fraction_static"] == 0.4


def test_versions_that_are_no_steps_are_not_told_as_such() -> None:
    spans = [{"version": "2"}, {"version": "4"}]
    assert steps_of({"weight_versions": spans}) == {
        "global_steps": 4,
        "min_global_steps": 2,
        "max_global_steps": 4,
    }
    assert steps_of({"weight_versions": [{"version": "default"}]}) == {"global_steps": None}


def test_logprobs_of_a_prompt_have_a_row_for_each_token() -> None:
    meta = {
        "input_token_logprobs": [[None, 5, None], [-0.5, 6, None]],
        "input_top_logprobs": [None, [[-0.1, 9, None]]],
    }
    assert prompt_logprobs(meta, 0) == {"prompt_ids": [[6], [0]], "prompt_logprobs": [[-0.5], [0.0]]}
    assert prompt_logprobs(meta, 1) == {"prompt_ids": [[9], [0]], "prompt_logprobs": [[-0.1], [0.0]]}


def test_images_are_refused() -> None:
    server = EbbtideServer(rollout_config(), HFModelConfig(path=MODEL), None)
    with pytest.raises(ValueError, match="text alone"):
        asyncio.run(server.generate([1], {}, "a", image_data=["x"]))
