"""RL steps as AReaL drives SGLang: rollouts are interrupted by new weights, and go on by themselves.

    PYTHONPATH=compat:python python examples/rl_step_areal.py [--steps 3] [--model-path FOLDER]

The server is started by its command line, and new weights come as a checkpoint folder. A pause ends what is
running; each client sends its prompt again, with the tokens that it has, until it has all of them.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import tiny_rl

POLL_S = 0.1
# So long that the pause comes in their middle.
NUM_LONG = 8
LONG_TOKENS = 400


class RemoteEngine:
    """The client's side: AReaL is given the address of a server."""

    def __init__(self, url: str) -> None:
        self.http = httpx.AsyncClient(base_url=url, timeout=120)
        self.version = 0
        self._may_generate = asyncio.Event()
        self._may_generate.set()

    async def wait_healthy(self, server: subprocess.Popen[bytes]) -> None:
        while server.poll() is None:
            try:
                if (await self.http.request("GET", "/health", json={})).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(POLL_S)
        raise RuntimeError("the server has ended")

    async def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The reply. Raises `HTTPStatusError` where it is a refusal."""
        response = await self.http.post(path, json=body or {})
        response.raise_for_status()
        return response.json() if response.content else None

    async def agenerate(
        self, params: dict[str, Any], max_new_tokens: int, seed: int
    ) -> tuple[list[int], list[int], int]:
        """One rollout: its tokens, the version of each, and how often it was interrupted."""
        tokens: list[int] = []
        versions: list[int] = []
        num_interruptions = 0
        while True:
            await self._may_generate.wait()
            sampling = {**params, "max_new_tokens": max_new_tokens - len(tokens), "sampling_seed": seed}
            output = await self.post(
                "/generate",
                {
                    "input_ids": tiny_rl.PROMPT + tokens,
                    "image_data": [],
                    "sampling_params": sampling,
                    "return_logprob": True,
                    "stream": False,
                },
            )
            meta = output["meta_info"]
            tokens += [token for _, token, _ in meta["output_token_logprobs"]]
            versions += [self.version] * (len(tokens) - len(versions))
            if meta["finish_reason"]["type"] != "abort":
                return tokens, versions, num_interruptions
            num_interruptions += 1

    async def update_weights(self, folder: Path, version: int) -> None:
        self._may_generate.clear()
        await self.post("/pause_generation")
        body = {"model_path": str(folder), "abort_all_requests": True, "weight_version": version}
        await self.post("/update_weights_from_disk", body)
        self.version = version
        await self.post("/continue_generation")
        self._may_generate.set()


async def rl_step(engine: RemoteEngine, trainer: tiny_rl.Trainer, step: int, folder: Path) -> None:
    """Learn from short rollouts, and interrupt long ones by the update."""
    seeds = range(step * tiny_rl.NUM_ROLLOUTS, (step + 1) * tiny_rl.NUM_ROLLOUTS)
    long = [
        asyncio.create_task(engine.agenerate(tiny_rl.SAMPLING, LONG_TOKENS, seed))
        for seed in seeds[:NUM_LONG]
    ]
    # First come, first served: when these are back, the long ones are under way.
    short = (engine.agenerate(tiny_rl.SAMPLING, tiny_rl.NUM_TOKENS, seed) for seed in seeds)
    outputs = [tokens for tokens, _, _ in await asyncio.gather(*short)]
    reward = trainer.learn(outputs)
    path = folder / f"step-{step + 1}"
    trainer.model.save_pretrained(path)
    await engine.update_weights(path, step + 1)
    rollouts = await asyncio.gather(*long)
    interrupted = sum(num_interruptions for _, _, num_interruptions in rollouts)
    complete = all(len(tokens) == len(versions) == LONG_TOKENS for tokens, versions, _ in rollouts)
    print(f"step {step}: mean reward {reward:.3f}, then weights {engine.version}", flush=True)
    print(f"  {interrupted} rollouts were interrupted, all complete: {complete}", flush=True)


async def drive(url: str, server: subprocess.Popen[bytes], model_path: Path, num_steps: int) -> None:
    trainer = tiny_rl.Trainer(model_path)
    engine = RemoteEngine(url)
    await engine.wait_healthy(server)
    for step in range(num_steps):
        await rl_step(engine, trainer, step, model_path.parent)
    greedy, _, _ = await engine.agenerate(tiny_rl.GREEDY, tiny_rl.NUM_TOKENS, seed=0)
    print("engine and trainer agree:", greedy == trainer.greedy())
    await engine.http.aclose()


def run(model_path: Path, num_steps: int) -> None:
    """The loop, with a server of its own."""
    port = tiny_rl.free_port()
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model_path)]
    command += ["--port", str(port), "--skip-tokenizer-init", "--max-total-tokens", "16384"]
    server = subprocess.Popen([*command, "--log-level", "error"])
    try:
        asyncio.run(drive(f"http://127.0.0.1:{port}", server, model_path, num_steps))
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    tiny_rl.main(__doc__, run)
