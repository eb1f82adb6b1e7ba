"""RL steps as miles drives SGLang: new weights while rollouts are in flight, as one session, none lost.

    PYTHONPATH=compat:python python examples/rl_step_miles.py [--steps 3] [--model-path FOLDER]

The order is that of miles: pause(retract), flush, begin, buckets, end with the version, continue. Rollouts
begin by one policy and end by the next: each says which tokens are whose. Needs `requests`.
"""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import requests
import tiny_rl
from sglang.srt.entrypoints.http_server import launch_server
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils import MultiprocessingSerializer, kill_process_tree
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

POLL_S = 0.05
NUM_LONG = 8
# Long enough that none has ended when the update comes.
LONG = {**tiny_rl.SAMPLING, "max_new_tokens": 900}


class MilesEngine:
    """A server, and the requests that are made to it."""

    def __init__(self, server_args: ServerArgs) -> None:
        self.url = server_args.url()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=launch_server, args=(server_args,))
        self._process.start()
        while not self._is_healthy():
            time.sleep(POLL_S)

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The reply. Raises `HTTPError` where it is a refusal."""
        response = requests.post(self.url + path, json=body or {}, timeout=120)
        response.raise_for_status()
        return response.json()

    def update(self, trainer: tiny_rl.Trainer, version: int) -> dict[str, Any]:
        """All weights and their version, at one moment for every request; the reply to the commit."""
        self.post("/pause_generation", {"mode": "retract"})
        requests.get(self.url + "/flush_cache", timeout=60).raise_for_status()
        self.post("/begin_weight_update")
        for bucket in tiny_rl.buckets(trainer.named_tensors()):
            flattened = FlattenedTensorBucket(named_tensors=bucket)
            data = {
                "flattened_tensor": flattened.get_flattened_tensor(),
                "metadata": flattened.get_metadata(),
            }
            entry = MultiprocessingSerializer.serialize(data, output_str=True)
            body = {"serialized_named_tensors": [entry], "load_format": "flattened_bucket"}
            self.post("/update_weights_from_tensor", body)
        self.post("/update_weight_version", {"new_version": str(version)})
        reply: dict[str, Any] = self.post("/end_weight_update")
        self.post("/continue_generation")
        return reply

    def shutdown(self) -> None:
        assert self._process.pid is not None
        kill_process_tree(self._process.pid)
        self._process.join()

    def _is_healthy(self) -> bool:
        if not self._process.is_alive():
            raise RuntimeError("the server has ended")
        try:
            return requests.get(self.url + "/health_generate", timeout=60).status_code == 200
        except requests.ConnectionError:
            return False


def roll_out(engine: MilesEngine, seed: int, params: dict[str, Any]) -> dict[str, Any]:
    sampling = {**params, "sampling_seed": seed}
    output: dict[str, Any] = engine.post(
        "/generate", {"input_ids": tiny_rl.PROMPT, "sampling_params": sampling, "return_logprob": True}
    )
    return output


def rl_step(engine: MilesEngine, trainer: tiny_rl.Trainer, step: int, pool: ThreadPoolExecutor) -> None:
    """Learn from short rollouts, and update the engine in the middle of long ones."""
    seeds = range(step * tiny_rl.NUM_ROLLOUTS, (step + 1) * tiny_rl.NUM_ROLLOUTS)
    in_flight: list[Future[dict[str, Any]]] = [
        pool.submit(roll_out, engine, seed, LONG) for seed in seeds[:NUM_LONG]
    ]
    # First come, first served: when these are back, the long ones are under way.
    finished = list(pool.map(lambda seed: roll_out(engine, seed, tiny_rl.SAMPLING), seeds))
    reward = trainer.learn([output["output_ids"] for output in finished])
    reply = engine.update(trainer, step + 1)
    print(f"step {step}: mean reward {reward:.3f}, then weights {reply['weight_version']}", flush=True)
    outputs = [future.result() for future in in_flight]
    kinds = {output["meta_info"]["finish_reason"]["type"] for output in outputs}
    spans = {tuple(span["version"] for span in output["meta_info"]["weight_versions"]) for output in outputs}
    print(f"  {len(outputs)} rollouts went on: ended by {sorted(kinds)}, weights {sorted(spans)}", flush=True)


def run(model_path: Path, num_steps: int) -> None:
    """The loop: the weights that the server starts with are version 0."""
    trainer = tiny_rl.Trainer(model_path)
    arguments = {**tiny_rl.SERVER_ARGUMENTS, "max_total_tokens": 16384}
    engine = MilesEngine(
        ServerArgs(
            model_path=str(model_path),
            port=tiny_rl.free_port(),
            weight_version="0",
            log_level="error",
            **arguments,
        )
    )
    try:
        with ThreadPoolExecutor(NUM_LONG + tiny_rl.NUM_ROLLOUTS) as pool:
            for step in range(num_steps):
                rl_step(engine, trainer, step, pool)
        answer = roll_out(engine, 0, tiny_rl.GREEDY)
        print("engine and trainer agree:", answer["output_ids"] == trainer.greedy())
    finally:
        engine.shutdown()


if __name__ == "__main__":
    tiny_rl.main(__doc__, run)
