"""RL steps as miles drives SGLang: new weights while rollouts are in flight, as one session, none lost.

    PYTHONPATH=compat:python python examples/rl_step_miles.py [--steps 3] [--model-path FOLDER]

The order is that of miles: pause(retract), flush, begin, buckets, version, end, continue. Rollouts begin by
one policy and end by the next: each says which tokens are whose. Needs `requests`.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tiny_rl
from served_engine import ServedEngine, started_server

NUM_LONG = 8
# Long enough that none has ended when the update comes.
LONG = {**tiny_rl.SAMPLING, "max_new_tokens": 400}


def roll_out(engine: ServedEngine, seed: int, params: dict[str, Any]) -> dict[str, Any]:
    sampling = {**params, "sampling_seed": seed}
    output: dict[str, Any] = engine.post(
        "/generate", {"input_ids": tiny_rl.PROMPT, "sampling_params": sampling, "return_logprob": True}
    )
    return output


def update(engine: ServedEngine, trainer: tiny_rl.Trainer, version: int) -> dict[str, Any]:
    """All weights and their version, at one moment for every request; the reply to the commit."""
    paused = engine.post("/pause_generation", {"mode": "retract"})
    print(f"  paused with {paused['num_retracted']} rollouts retracted", flush=True)
    engine.get("/flush_cache")
    engine.post("/begin_weight_update")
    for bucket in tiny_rl.buckets(trainer.named_tensors()):
        engine.update(bucket)
    engine.post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
    reply: dict[str, Any] = engine.post("/end_weight_update")
    engine.post("/continue_generation")
    return reply


def rl_step(engine: ServedEngine, trainer: tiny_rl.Trainer, step: int, pool: ThreadPoolExecutor) -> None:
    """Learn from short rollouts; long ones go on across the update."""
    seeds = range(step * tiny_rl.NUM_ROLLOUTS, (step + 1) * tiny_rl.NUM_ROLLOUTS)
    finished = list(pool.map(lambda seed: roll_out(engine, seed, tiny_rl.SAMPLING), seeds))
    reward = trainer.learn([output["output_ids"] for output in finished])
    print(f"step {step}: mean reward {reward:.3f}", flush=True)
    in_flight: list[Future[dict[str, Any]]] = [
        pool.submit(roll_out, engine, seed, LONG) for seed in seeds[:NUM_LONG]
    ]
    while engine.get("/v1/loads")["aggregate"]["total_running_reqs"] < NUM_LONG:
        time.sleep(0.01)
    reply = update(engine, trainer, step + 1)
    print(f"  {reply['num_tensors']} tensors at once: weights {reply['weight_version']} serve", flush=True)
    outputs = [future.result() for future in in_flight]
    kinds = {output["meta_info"]["finish_reason"]["type"] for output in outputs}
    spans = {tuple(span["version"] for span in output["meta_info"]["weight_versions"]) for output in outputs}
    print(f"  {len(outputs)} rollouts went on: ended by {sorted(kinds)}, weights {sorted(spans)}", flush=True)


def run(model_path: Path, num_steps: int) -> None:
    """The loop: the weights that the server starts with are version 0."""
    trainer = tiny_rl.Trainer(model_path)
    with (
        started_server(model_path, max_total_tokens=16384) as engine,
        ThreadPoolExecutor(NUM_LONG + tiny_rl.NUM_ROLLOUTS) as pool,
    ):
        for step in range(num_steps):
            rl_step(engine, trainer, step, pool)
        print("engine and trainer agree:", engine.greedy() == trainer.greedy())


if __name__ == "__main__":
    tiny_rl.main(__doc__, run)
