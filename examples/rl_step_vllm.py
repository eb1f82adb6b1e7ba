"""RL steps as clients of vLLM make them, over HTTP: TRL, prime-rl and SkyRL, each in its own calls.

    PYTHONPATH=python python examples/rl_step_vllm.py --client trl|prime-rl|skyrl [--steps 2]
        [--model-path MODEL --url http://127.0.0.1:30000]

TRL and SkyRL broadcast their weights. On GPUs that is raw NCCL (`init_info` without `backend`); on a CPU it
is gloo, in a group of torch's: that is the only thing here that vLLM does not know. prime-rl writes a folder.
Needs `requests`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import requests
import tiny_rl
import torch

from ebbtide.formats.rendezvous import GroupAddress, connect, host_store
from ebbtide.formats.weight_group import WeightGroup

TIMEOUT_S, POLL_S = 120, 0.1
SAMPLING = {"max_tokens": tiny_rl.NUM_TOKENS, "ignore_eos": True, "temperature": 1.0}


class Server:
    """The requests that are made to a server."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str) -> Any:
        return self._reply(requests.get(self.url + path, timeout=TIMEOUT_S))

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return self._reply(requests.post(self.url + path, json=body or {}, timeout=TIMEOUT_S))

    def call(self, method: str, **kwargs: Any) -> Any:
        """A method of the workers."""
        return self.post("/collective_rpc", {"method": method, "kwargs": kwargs})["results"]

    def tokens(self, **params: Any) -> list[int]:
        """Token in, token out."""
        body = {"token_ids": tiny_rl.PROMPT, "sampling_params": {**SAMPLING, "logprobs": 0, **params}}
        [choice] = self.post("/inference/v1/generate", body)["choices"]
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
        ids: list[int] = choice["token_ids"]
        return ids

    @staticmethod
    def _reply(response: requests.Response) -> Any:
        if not response.ok:
            raise SystemExit(f"{response.url}: {response.status_code} {response.text}")
        return response.json() if response.content else None


class Broadcast:
    """A trainer's end of a group with the ranks of a server: rank 0, which sends."""

    def __init__(self, server: Server) -> None:
        num_ranks = server.get("/get_world_size")["world_size"]
        self._store = host_store(0)
        place = {"master_address": "127.0.0.1", "master_port": self._store.port, "world_size": num_ranks + 1}
        init_info = {**place, "rank_offset": 1, "backend": "gloo"}
        own = GroupAddress("vllm", "127.0.0.1", self._store.port, 0, num_ranks + 1, "gloo")
        with ThreadPoolExecutor(1) as beside:
            joining = beside.submit(server.post, "/init_weight_transfer_engine", {"init_info": init_info})
            self._group = WeightGroup("vllm", connect(own, TIMEOUT_S), torch.device("cpu"))
            joining.result()

    def send(self, trainer: tiny_rl.Trainer, announce: Callable[[dict[str, Any]], Any]) -> Any:
        """Announce all weights in a request, and broadcast them, packed, while it is under way."""
        named = [(name, tensor.contiguous()) for name, tensor in trainer.named_tensors()]
        info = {
            "names": [name for name, _ in named],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in named],
            "shapes": [list(tensor.shape) for _, tensor in named],
            "packed": True,
        }
        packed = torch.cat([tensor.view(-1).view(torch.uint8) for _, tensor in named])
        with ThreadPoolExecutor(1) as beside:
            answer = beside.submit(announce, info)
            sending = self._group.send(lambda _: [packed], TIMEOUT_S)
            reply = answer.result()
            # This end may learn later than the other that the last of it was sent.
            while not sending.is_done:
                time.sleep(POLL_S)
            sending.result()
        return reply


@dataclass(frozen=True)
class Run:
    """A server, and a trainer that has met it. `folder`: for what it writes."""

    server: Server
    trainer: tiny_rl.Trainer
    broadcast: Broadcast
    folder: Path


def trl_step(run: Run, step: int) -> None:
    """As its trainers with `vllm_mode="server"`: nothing runs during the update, so nothing is paused."""
    server, trainer = run.server, run.trainer
    assert server.get("/server_info?config_format=json")["vllm_config"]["weight_transfer_config"]
    model = server.get("/v1/models")["data"][0]["id"]
    body = {**SAMPLING, "model": model, "prompt": [tiny_rl.PROMPT], "n": tiny_rl.NUM_ROLLOUTS, "top_k": 0}
    body |= {"logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True}
    choices = server.post("/v1/completions", body)["choices"]
    learn(trainer, [choice["token_ids"] for choice in choices], step)
    server.post("/start_weight_update")
    run.broadcast.send(trainer, lambda info: server.post("/update_weights", {"update_info": info}))
    server.post("/finish_weight_update")
    server.post("/reset_prefix_cache")


def prime_rl_step(run: Run, step: int) -> None:
    """Rollouts are in flight while a folder is read: they are frozen with their KV, and go on."""
    server, trainer = run.server, run.trainer
    with ThreadPoolExecutor(tiny_rl.NUM_ROLLOUTS) as clients:
        rollouts = [clients.submit(server.tokens, seed=seed) for seed in range(tiny_rl.NUM_ROLLOUTS)]
        learn(trainer, [rollout.result() for rollout in rollouts], step)
        in_flight = clients.submit(server.tokens, max_tokens=200)
        weights = run.folder / f"step_{step + 1}"
        trainer.model.save_pretrained(weights)
        server.post("/pause?mode=keep&clear_cache=false")
        server.post("/update_weights", {"weight_dir": str(weights)})
        server.post("/resume")
        assert len(in_flight.result()) == 200
    assert server.get("/weight_info")["weight_version"] == str(step + 1)


def skyrl_step(run: Run, step: int) -> None:
    """Not colocated: by methods of the workers, of which a server knows a closed list."""
    server, trainer = run.server, run.trainer
    rollouts = [server.tokens(seed=seed) for seed in range(tiny_rl.NUM_ROLLOUTS)]
    learn(trainer, rollouts, step)
    server.post("/pause?mode=keep&clear_cache=false")
    server.call("skyrl_start_weight_update", is_checkpoint_format=True)
    run.broadcast.send(trainer, lambda info: server.call("update_weights_nccl", update_info=info))
    server.call("skyrl_finish_weight_update")
    server.post("/reset_prefix_cache", {"reset_running_requests": True})
    server.post("/resume")


def learn(trainer: tiny_rl.Trainer, rollouts: list[list[int]], step: int) -> None:
    print(f"step {step}: mean reward {trainer.learn(rollouts):.3f} of {len(rollouts)} rollouts", flush=True)


STEPS = {"trl": trl_step, "prime-rl": prime_rl_step, "skyrl": skyrl_step}


@contextmanager
def started_server(model_path: Path) -> Iterator[Server]:
    port = tiny_rl.free_port()
    flags = ["--skip-tokenizer-init", "--max-total-tokens", "8192", "--log-level", "error"]
    arguments = ["--model-path", str(model_path), "--port", str(port), *flags]
    process = subprocess.Popen([sys.executable, "-m", "ebbtide.launch_server", *arguments])
    server = Server(f"http://127.0.0.1:{port}")
    try:
        while not is_healthy(server):
            if process.poll() is not None:
                raise SystemExit("the server did not start")
            time.sleep(POLL_S)
        yield server
    finally:
        process.terminate()
        process.wait()


def is_healthy(server: Server) -> bool:
    try:
        return requests.get(f"{server.url}/health", timeout=TIMEOUT_S).ok
    except requests.ConnectionError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--client", choices=tuple(STEPS), required=True)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument(
        "--model-path", type=Path, help="a folder like that of make_tiny_model (default: made)"
    )
    parser.add_argument("--url", help="a server of that model (default: started)")
    given = parser.parse_args()
    if given.url and not given.model_path:
        parser.error("--url needs --model-path: the model that is served there")
    with TemporaryDirectory() as folder:
        model_path = given.model_path or tiny_rl.make_tiny_model(Path(folder) / "model")
        trainer = tiny_rl.Trainer(model_path)
        with nullcontext(Server(given.url)) if given.url else started_server(model_path) as server:
            run = Run(server, trainer, Broadcast(server), Path(folder))
            for step in range(given.steps):
                STEPS[given.client](run, step)
            print("engine and trainer agree:", server.tokens(temperature=0.0) == trainer.greedy(), flush=True)


if __name__ == "__main__":
    main()
