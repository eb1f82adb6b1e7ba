"""An RL loop in one process: the trainer's weights go to the engine after each step, as one update.

    python examples/weight_sender.py [--steps 3] [--model-path FOLDER]

Without `--model-path` a tiny Qwen3 of random weights is made. `WeightSender` is all there is to sending: it
packs the parameters into buckets, and they serve from one moment on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny_rl

from ebbtide import Engine
from ebbtide.trainer import WeightSender


def roll_out(engine: Engine, step: int) -> list[dict[str, Any]]:
    """Sampled outputs of the weights that serve."""
    seeds = range(step * tiny_rl.NUM_ROLLOUTS, (step + 1) * tiny_rl.NUM_ROLLOUTS)
    outputs: list[dict[str, Any]] = engine.generate(
        input_ids=[tiny_rl.PROMPT] * len(seeds),
        sampling_params=[{**tiny_rl.SAMPLING, "sampling_seed": seed} for seed in seeds],
    )
    return outputs


def run(model_path: Path, num_steps: int) -> None:
    """The loop: the weights that the engine starts with are version 0."""
    trainer = tiny_rl.Trainer(model_path)
    with Engine(model_path=str(model_path), weight_version="0", **tiny_rl.SERVER_ARGUMENTS) as engine:
        sender = WeightSender(engine, bucket_bytes=64 << 20)
        for step in range(num_steps):
            outputs = roll_out(engine, step)
            versions = {output["meta_info"]["weight_version"] for output in outputs}
            reward = trainer.learn([output["output_ids"] for output in outputs])
            sent = sender.send(trainer.named_tensors(), version=step + 1)
            print(f"step {step}: mean reward {reward:.3f} of rollouts by weights {versions}")
            print(f"  sent {sent.num_tensors} tensors, {sent.num_bytes} bytes, as version {sent.version}")
        answer = engine.generate(input_ids=tiny_rl.PROMPT, sampling_params=tiny_rl.GREEDY)
        print("engine and trainer agree:", answer["output_ids"] == trainer.greedy())


if __name__ == "__main__":
    tiny_rl.main(__doc__, run)
