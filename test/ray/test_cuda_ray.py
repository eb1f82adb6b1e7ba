"""A fleet with a GPU for each replica, and an engine whose ranks share out the GPUs of two bundles."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from fixtures.checkpoints import make_pair
from fixtures.gpu_device import DEVICE, used_bytes_of
from fixtures.references import Reference
from fixtures.servers import wait_until
from safetensors.torch import load_file

from ebbtide.ray import RayEngine, RayFleet

NUM_GPUS = 2
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < NUM_GPUS, reason="needs two CUDA GPUs"),
]

GIB = 1 << 30
PROMPTS = [[3, 1, 4, 1, 5], list(range(40)), [200], [7] * 20]
NUM_TOKENS = 200
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
WEIGHTS = "model.safetensors"
RETURN_S = 200.0


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("checkpoints"), **DEVICE.checkpoint)


@pytest.fixture(scope="module")
def are_best(checkpoints: tuple[Path, Path]) -> Callable[[int, Any], bool]:
    """Whether outputs for `PROMPTS`, in turns, are greedy ones of the first or of the second weights."""
    references = [Reference(path) for path in checkpoints]

    def are(which: int, outputs: list[dict[str, Any]]) -> bool:
        prompts = PROMPTS * (len(outputs) // len(PROMPTS))
        return all(
            len(one["output_ids"]) == NUM_TOKENS and references[which].accepts(prompt, one["output_ids"])
            for prompt, one in zip(prompts, outputs, strict=True)
        )

    return are


def test_a_replica_is_killed_and_comes_back_to_its_gpu(
    cluster: None, checkpoints: tuple[Path, Path], are_best: Callable[[int, Any], bool]
) -> None:
    with RayFleet(
        NUM_GPUS, model_path=str(checkpoints[0]), max_total_tokens=1 << 16, skip_tokenizer_init=True
    ) as fleet:
        weights = list(load_file(checkpoints[1] / WEIGHTS).items())
        # What serves by then is on no disk: it was sent.
        fleet.update_weights_from_tensor(weights, weight_version="1")
        outputs: list[dict[str, Any]] = []
        rollout = threading.Thread(
            target=lambda: outputs.extend(fleet.generate(input_ids=PROMPTS * 16, sampling_params=GREEDY))
        )
        rollout.start()
        wait_until(lambda: fleet.status()[1]["num_live"] > 0, "the second one works")
        time.sleep(0.1)
        ray.kill(fleet.engines[1].actor)
        rollout.join()
        assert sum(one["meta_info"]["num_moves"] for one in outputs) > 0
        assert are_best(1, outputs)
        fleet.wait_for_all(RETURN_S)
        assert [one["num_deaths"] for one in fleet.status()] == [0, 1]
        assert fleet.engines[1].weight_version == "1"
        assert are_best(1, fleet.engines[1].generate(input_ids=PROMPTS, sampling_params=GREEDY))


def test_an_engine_of_two_ranks_in_two_bundles(
    cluster: None, checkpoints: tuple[Path, Path], are_best: Callable[[int, Any], bool]
) -> None:
    with RayEngine(
        model_path=str(checkpoints[0]),
        tp=NUM_GPUS,
        bundles=[{"GPU": 1}] * NUM_GPUS,
        skip_tokenizer_init=True,
    ) as engine:
        assert are_best(0, engine.generate(input_ids=PROMPTS, sampling_params=GREEDY))
        before = [used_bytes_of(index) for index in range(NUM_GPUS)]
        engine.release_memory_occupation()
        freed = [used - used_bytes_of(index) for index, used in enumerate(before)]
        assert min(freed) > GIB
        engine.resume_memory_occupation(["weights"])
        engine.update_weights_from_tensor(list(load_file(checkpoints[1] / WEIGHTS).items()))
        engine.resume_memory_occupation()
        assert are_best(1, engine.generate(input_ids=PROMPTS, sampling_params=GREEDY))
