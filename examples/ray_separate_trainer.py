"""A trainer and a fleet of replicas as actors of a Ray cluster; one replica dies in mid-rollout.

    python examples/ray_separate_trainer.py [--steps 3] [--model-path FOLDER]
    ray job submit --working-dir . -- python examples/ray_separate_trainer.py     # in a cluster

Needs `pip install "ebbtide[ray]"`. With EXAMPLE_DEVICE=cuda each replica takes a GPU, and the trainer another
one, or a CPU core if there is none left.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import ray
import tiny_rl

from ebbtide.ray import RayFleet

NUM_REPLICAS = 2
ON_GPU = os.environ.get("EXAMPLE_DEVICE") == "cuda"


@ray.remote(num_cpus=1)
class TrainerActor:
    """A trainer in a process of its own, on whichever node has room."""

    def __init__(self, model_path: Path) -> None:
        self._trainer = tiny_rl.Trainer(model_path)
        if ray.get_gpu_ids():
            self._trainer.model.cuda()

    def learn(self, outputs: list[list[int]]) -> float:
        """One step; returns the mean reward."""
        return self._trainer.learn(outputs)

    def weights(self) -> list[tuple[str, Any]]:
        """What the replicas are to serve next."""
        return [(name, tensor.cpu()) for name, tensor in self._trainer.named_tensors()]

    def greedy(self) -> list[int]:
        """What they are to answer then."""
        return self._trainer.greedy()


def roll_out(fleet: RayFleet, step: int) -> list[dict[str, Any]]:
    """Sampled outputs, by as many replicas as live."""
    seeds = range(step * tiny_rl.NUM_ROLLOUTS, (step + 1) * tiny_rl.NUM_ROLLOUTS)
    outputs: list[dict[str, Any]] = fleet.generate(
        input_ids=[tiny_rl.PROMPT] * len(seeds),
        sampling_params=[{**tiny_rl.SAMPLING, "sampling_seed": seed} for seed in seeds],
    )
    return outputs


def kill_at_work(fleet: RayFleet, slot: int) -> None:
    """Kill a replica as soon as it works on something."""
    while fleet.status()[slot]["num_live"] == 0:
        time.sleep(0.01)
    ray.kill(fleet.engines[slot].actor)


def run(model_path: Path, num_steps: int) -> None:
    """The loop; in step 1 a replica is killed while it works."""
    ray.init(
        num_cpus=None if "RAY_ADDRESS" in os.environ else NUM_REPLICAS + 2,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), _path()])}},
        log_to_driver=False,
    )
    has_gpu_left = ray.cluster_resources().get("GPU", 0) > NUM_REPLICAS
    trainer = TrainerActor.options(num_gpus=1 if ON_GPU and has_gpu_left else 0).remote(model_path)
    arguments = {"model_path": str(model_path), "weight_version": "0", **tiny_rl.SERVER_ARGUMENTS}
    with RayFleet(NUM_REPLICAS, device="cuda" if ON_GPU else "cpu", **arguments) as fleet:
        for step in range(num_steps):
            if step == 1:
                threading.Thread(target=kill_at_work, args=(fleet, 1)).start()
            outputs = roll_out(fleet, step)
            moved = sum(output["meta_info"]["num_moves"] for output in outputs)
            versions = sorted({output["meta_info"]["weight_version"] for output in outputs})
            reward = ray.get(trainer.learn.remote([output["output_ids"] for output in outputs]))
            print(f"step {step}: mean reward {reward:.3f} of {len(outputs)} rollouts by weights {versions}")
            if moved:
                print(f"  {moved} of them went on elsewhere when their replica died")
            reply = fleet.update_weights_from_tensor(
                ray.get(trainer.weights.remote()), weight_version=str(step + 1), pause_mode="retract"
            )
            print(f"  version {reply['weight_version']} serves on {', '.join(reply['replicas'])}")
        fleet.wait_for_all(120)
        checksums = [
            one["per_engine_checksum"] for one in fleet.check_weights("checksum")["replicas"].values()
        ]
        print(f"{len(checksums)} replicas serve, all with the same weights: {len(set(checksums)) == 1}")
        answers = [
            engine.generate(input_ids=tiny_rl.PROMPT, sampling_params=tiny_rl.GREEDY)["output_ids"]
            for engine in fleet.engines
        ]
        expected = ray.get(trainer.greedy.remote())
        print("replicas and trainer agree:", all(answer == expected for answer in answers))
    ray.shutdown()


def _path() -> str:
    return os.environ.get("PYTHONPATH", "")


if __name__ == "__main__":
    tiny_rl.main(__doc__, run)
