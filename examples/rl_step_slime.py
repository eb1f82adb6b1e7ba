"""RL steps as slime drives SGLang, colocated: the engine gives all of its memory to the trainer and back.

    PYTHONPATH=compat:python python examples/rl_step_slime.py [--steps 3] [--model-path FOLDER]

The server is a process made of `launch_server`; all else goes over HTTP, in slime's order: release all,
train, resume the weights, pause, flush, buckets, continue, resume the rest. Needs `requests`.
"""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path
from typing import Any

import requests
import tiny_rl
from sglang.srt.entrypoints.http_server import launch_server
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils import MultiprocessingSerializer, kill_process_tree
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

POLL_S = 0.2


class SlimeEngine:
    """A server, and the requests that are made to it."""

    def __init__(self, server_args: ServerArgs) -> None:
        self.url = server_args.url()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=launch_server, args=(server_args,))
        self._process.start()
        self._poll("/health_generate")
        self._poll("/flush_cache")

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The reply. Raises `HTTPError` where it is a refusal."""
        response = requests.post(self.url + path, json=body or {}, timeout=120)
        response.raise_for_status()
        return response.json()

    def generate(self, seeds: range) -> list[dict[str, Any]]:
        params = [{**tiny_rl.SAMPLING, "sampling_seed": seed} for seed in seeds]
        body = {"input_ids": [tiny_rl.PROMPT] * len(seeds), "sampling_params": params, "return_logprob": True}
        outputs: list[dict[str, Any]] = self.post("/generate", body)
        return outputs

    def update(self, trainer: tiny_rl.Trainer, version: int) -> None:
        """All weights, between a pause and its end."""
        self.post("/pause_generation")
        self._poll("/flush_cache")
        for bucket in tiny_rl.buckets(trainer.named_tensors()):
            flattened = FlattenedTensorBucket(named_tensors=bucket)
            data = {
                "flattened_tensor": flattened.get_flattened_tensor(),
                "metadata": flattened.get_metadata(),
            }
            self.post(
                "/update_weights_from_tensor",
                {
                    "serialized_named_tensors": [MultiprocessingSerializer.serialize(data, output_str=True)],
                    "load_format": "flattened_bucket",
                    "flush_cache": False,
                    "weight_version": str(version),
                },
            )
        self.post("/continue_generation")

    def shutdown(self) -> None:
        assert self._process.pid is not None
        kill_process_tree(self._process.pid)
        self._process.join()

    def _poll(self, path: str) -> None:
        """Return once a GET of it answers 200."""
        while True:
            if not self._process.is_alive():
                raise RuntimeError("the server has ended")
            try:
                if requests.get(self.url + path, timeout=60).status_code == 200:
                    return
            except requests.ConnectionError:
                pass
            time.sleep(POLL_S)


def run(model_path: Path, num_steps: int) -> None:
    """The loop: the weights that the server starts with are version 0."""
    trainer = tiny_rl.Trainer(model_path)
    engine = SlimeEngine(
        ServerArgs(
            model_path=str(model_path),
            port=tiny_rl.free_port(),
            weight_version="0",
            log_level="error",
            **tiny_rl.SERVER_ARGUMENTS,
        )
    )
    try:
        for step in range(num_steps):
            first = step * tiny_rl.NUM_ROLLOUTS
            outputs = engine.generate(range(first, first + tiny_rl.NUM_ROLLOUTS))
            versions = {output["meta_info"]["weight_version"] for output in outputs}
            engine.post("/release_memory_occupation")
            reward = trainer.learn([output["output_ids"] for output in outputs])
            engine.post("/resume_memory_occupation", {"tags": ["weights"]})
            engine.update(trainer, step + 1)
            engine.post("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})
            print(f"step {step}: mean reward {reward:.3f} of rollouts by weights {versions}", flush=True)
        greedy = {"input_ids": tiny_rl.PROMPT, "sampling_params": tiny_rl.GREEDY}
        answer = engine.post("/generate", greedy)
        print("engine and trainer agree:", answer["output_ids"] == trainer.greedy())
    finally:
        engine.shutdown()


if __name__ == "__main__":
    tiny_rl.main(__doc__, run)
