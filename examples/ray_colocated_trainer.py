"""A trainer and an engine that take turns on the same GPUs, each an actor in the same bundles of Ray's.

    python examples/ray_colocated_trainer.py [--steps 3] [--model-path FOLDER]
    ray job submit --working-dir . -- python examples/ray_colocated_trainer.py    # in a cluster

Needs `pip install "ebbtide[ray]"`; on a GPU with EXAMPLE_DEVICE=cuda. The engine gives its memory back while
the trainer trains, and reads the new weights where they lie: references to them are all that is sent.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import ray
import tiny_rl
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ebbtide.ray import RayEngine
from ebbtide.trainer.payload_encoding import PayloadEncoder

ON_GPU = os.environ.get("EXAMPLE_DEVICE") == "cuda"
# The trainer's half of a GPU; on a CPU each has a core.
SHARE: dict[str, float] = {"num_gpus": 0.5, "num_cpus": 0} if ON_GPU else {"num_cpus": 1}


@ray.remote
class TrainerActor:
    """A trainer on the engine's GPU."""

    def __init__(self, model_path: Path) -> None:
        self._trainer = tiny_rl.Trainer(model_path)
        if ON_GPU:
            self._trainer.model.cuda()
        self._encoder = PayloadEncoder("cuda:0" if ON_GPU else "cpu")

    def learn(self, outputs: list[list[int]]) -> float:
        """One step; returns the mean reward."""
        return self._trainer.learn(outputs)

    def send(self, engine: Any, version: str) -> dict[str, Any]:
        """Have the engine read the weights out of this process; the reply says that it has."""
        with self._encoder.encode(self._trainer.named_tensors()) as payload:
            update = engine.update_weights_from_tensor.remote(payload.entries, weight_version=version)
            reply: dict[str, Any] = ray.get(update)
            return reply

    def greedy(self) -> list[int]:
        """What the engine is to answer then."""
        return self._trainer.greedy()


def run(model_path: Path, num_steps: int) -> None:
    """The loop: release, train, resume the weights, send, resume the rest."""
    ray.init(
        num_cpus=None if "RAY_ADDRESS" in os.environ else 4,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), _path()])}},
        log_to_driver=False,
    )
    group = placement_group([{"GPU": 1} if ON_GPU else {"CPU": 2}])
    where = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=0)
    trainer = TrainerActor.options(scheduling_strategy=where, **SHARE).remote(model_path)
    half = {"gpus_per_rank": 0.5, "mem_fraction_static": 0.4} if ON_GPU else {"device": "cpu"}
    arguments = {"model_path": str(model_path), "weight_version": "0", **tiny_rl.SERVER_ARGUMENTS}
    with RayEngine(placement_group=group, **half, **arguments) as engine:
        for step in range(num_steps):
            outputs = engine.generate(
                input_ids=[tiny_rl.PROMPT] * tiny_rl.NUM_ROLLOUTS, sampling_params=tiny_rl.SAMPLING
            )
            freed = engine.release_memory_occupation()["freed_bytes"]
            reward = ray.get(trainer.learn.remote([output["output_ids"] for output in outputs]))
            engine.resume_memory_occupation(["weights"])
            reply = ray.get(trainer.send.remote(engine.actor, str(step + 1)))
            engine.resume_memory_occupation()
            print(f"step {step}: mean reward {reward:.3f}; {sum(freed.values())} bytes were the trainer's")
            print(f"  version {reply['weight_version']} serves")
        answer = engine.generate(input_ids=tiny_rl.PROMPT, sampling_params=tiny_rl.GREEDY)
        print("engine and trainer agree:", answer["output_ids"] == ray.get(trainer.greedy.remote()))
    ray.shutdown()


def _path() -> str:
    return os.environ.get("PYTHONPATH", "")


if __name__ == "__main__":
    tiny_rl.main(__doc__, run)
