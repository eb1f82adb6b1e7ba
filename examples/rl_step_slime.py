"""RL steps as slime drives SGLang, colocated: the engine gives all of its memory to the trainer and back.

    PYTHONPATH=compat:python python examples/rl_step_slime.py [--steps 3] [--model-path FOLDER]

The server is a process made of `launch_server`; all else goes over HTTP, in slime's order: release all,
train, resume the weights, pause, flush, buckets, continue, resume the rest. Needs `requests`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import tiny_rl
from served_engine import POLL_S, Refused, ServedEngine, started_server


def roll_out(engine: ServedEngine, step: int) -> list[dict[str, Any]]:
    seeds = range(step * tiny_rl.NUM_ROLLOUTS, (step + 1) * tiny_rl.NUM_ROLLOUTS)
    params = [{**tiny_rl.SAMPLING, "sampling_seed": seed} for seed in seeds]
    body = {"input_ids": [tiny_rl.PROMPT] * len(seeds), "sampling_params": params, "return_logprob": True}
    outputs: list[dict[str, Any]] = engine.post("/generate", body)
    return outputs


def flush(engine: ServedEngine) -> None:
    """Empty the cache: asked again until nothing holds on to it."""
    while True:
        try:
            engine.get("/flush_cache")
            return
        except Refused:
            time.sleep(POLL_S)


def update(engine: ServedEngine, trainer: tiny_rl.Trainer, version: int) -> int:
    """All weights, between a pause and its end; returns how many buckets they made."""
    engine.post("/pause_generation")
    flush(engine)
    buckets = list(tiny_rl.buckets(trainer.named_tensors()))
    for bucket in buckets:
        engine.update(bucket, flush_cache=False, weight_version=str(version))
    engine.post("/continue_generation")
    return len(buckets)


def rl_step(engine: ServedEngine, trainer: tiny_rl.Trainer, step: int) -> None:
    outputs = roll_out(engine, step)
    versions = {output["meta_info"]["weight_version"] for output in outputs}
    freed = sum(engine.post("/release_memory_occupation")["freed_bytes"].values())
    reward = trainer.learn([output["output_ids"] for output in outputs])
    print(f"step {step}: mean reward {reward:.3f} of rollouts by weights {versions}", flush=True)
    mapped = engine.post("/resume_memory_occupation", {"tags": ["weights"]})["mapped_bytes"]
    num_buckets = update(engine, trainer, step + 1)
    rest = engine.post("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})["mapped_bytes"]
    print(
        f"  slept with {freed} bytes given back; took {sum(mapped.values())} for the weights, which came in "
        f"{num_buckets} buckets, then {sum(rest.values())} for the rest",
        flush=True,
    )


def run(model_path: Path, num_steps: int) -> None:
    """The loop: the weights that the server starts with are version 0."""
    trainer = tiny_rl.Trainer(model_path)
    with started_server(model_path) as engine:
        for step in range(num_steps):
            rl_step(engine, trainer, step)
        print("engine and trainer agree:", engine.greedy() == trainer.greedy())


if __name__ == "__main__":
    tiny_rl.main(__doc__, run)
