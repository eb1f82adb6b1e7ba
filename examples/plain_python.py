"""An RL loop with `Engine` in the trainer's process: rollouts go on while new weights come in.

python examples/plain_python.py [--steps 3] [--model-path FOLDER]
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import tiny_rl

from ebbtide import Engine

# Long enough that it has not ended when the next weights come.
LONG_TOKENS = 900


def sampling(seed: int, max_new_tokens: int) -> dict[str, Any]:
    return {**tiny_rl.SAMPLING, "sampling_seed": seed, "max_new_tokens": max_new_tokens}


async def roll_out(engine: Engine, seed: int) -> dict[str, Any]:
    params = sampling(seed, tiny_rl.NUM_TOKENS)
    output: dict[str, Any] = await engine.async_generate(input_ids=tiny_rl.PROMPT, sampling_params=params)
    return output


async def rl_step(engine: Engine, trainer: tiny_rl.Trainer, step: int) -> None:
    """Learn from rollouts of these weights, and give the next ones to a rollout that is under way."""
    seeds = range(step * tiny_rl.NUM_ROLLOUTS, (step + 1) * tiny_rl.NUM_ROLLOUTS)
    outputs = await asyncio.gather(*(roll_out(engine, seed) for seed in seeds))
    reward = await asyncio.to_thread(trainer.learn, [output["output_ids"] for output in outputs])
    long = await engine.async_generate(
        input_ids=tiny_rl.PROMPT, sampling_params=sampling(seeds[0], LONG_TOKENS), stream=True
    )
    await anext(long)
    reply = await engine.async_update_weights_from_tensor(
        trainer.named_tensors(), weight_version=step + 1, pause_mode="retract"
    )
    print(f"step {step}: mean reward {reward:.3f}, then weights {reply['weight_version']}", flush=True)
    *_, last = [chunk async for chunk in long]
    for span in last["meta_info"]["weight_versions"]:
        print(
            f"  a rollout that went on: tokens {span['start']} to {span['end']} by weights {span['version']}"
        )


async def drive(engine: Engine, trainer: tiny_rl.Trainer, num_steps: int) -> None:
    for step in range(num_steps):
        await rl_step(engine, trainer, step)
    answer = await engine.async_generate(input_ids=tiny_rl.PROMPT, sampling_params=tiny_rl.GREEDY)
    print("engine and trainer agree:", answer["output_ids"] == trainer.greedy())


def run(model_path: Path, num_steps: int) -> None:
    """The loop: the weights that the engine starts with are version 0."""
    trainer = tiny_rl.Trainer(model_path)
    with Engine(model_path=str(model_path), weight_version="0", **tiny_rl.SERVER_ARGUMENTS) as engine:
        asyncio.run(drive(engine, trainer, num_steps))


if __name__ == "__main__":
    tiny_rl.main(__doc__, run)
