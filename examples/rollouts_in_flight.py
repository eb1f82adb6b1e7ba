"""64 rollouts that stream, while new weights come and the engine sleeps: each of them completes.

    PYTHONPATH=compat:python python examples/rollouts_in_flight.py [--url URL --model-path FOLDER]

First two updates of one call each: one goes on with the KV that the rollouts have, the other has it computed
again. Then all memory is released in the middle of the rollouts, and comes back with other weights. Source:
sequences 4 and 5 of the contract. Needs `requests` and `httpx`. NUM_ROLLOUTS (environment): others than 64.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import served_engine
import tiny_rl
from served_engine import ServedEngine, expect

NUM_STREAMS = int(os.environ.get("NUM_ROLLOUTS", "64"))
# Long enough that none has ended when a request comes in its middle.
NUM_TOKENS = 400
# The chunks of so many streams would be more work than their tokens.
STREAM_INTERVAL = 10
POLL_S = 0.02


class Rollouts:
    """Streams on their way.

    Attributes:
        chunks: the last one of each; each holds everything so far.
    """

    def __init__(self, url: str) -> None:
        self.chunks: list[dict[str, Any]] = [{} for _ in range(NUM_STREAMS)]
        self._http = httpx.AsyncClient(base_url=url, timeout=None, limits=httpx.Limits(max_connections=None))

    async def run(self, meanwhile: Callable[[], Awaitable[None]]) -> list[dict[str, Any]]:
        """Their outputs. `meanwhile` runs when each has its first tokens and none has all."""
        streams = [asyncio.create_task(self._follow(index)) for index in range(NUM_STREAMS)]
        while not all(self.chunks):
            await asyncio.sleep(POLL_S)
        await meanwhile()
        await asyncio.gather(*streams)
        await self._http.aclose()
        return self.chunks

    async def _follow(self, index: int) -> None:
        params = {**tiny_rl.SAMPLING, "max_new_tokens": NUM_TOKENS, "sampling_seed": index}
        params["stream_interval"] = STREAM_INTERVAL
        body = {"input_ids": tiny_rl.PROMPT, "sampling_params": params, "stream": True}
        async with self._http.stream("POST", "/generate", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    self.chunks[index] = json.loads(line.removeprefix("data: "))


def roll_out(engine: ServedEngine, meanwhile: Callable[[], None]) -> list[dict[str, Any]]:
    """The outputs of rollouts in whose middle something is done."""

    async def drive() -> list[dict[str, Any]]:
        return await Rollouts(engine.url).run(lambda: asyncio.to_thread(meanwhile))

    return asyncio.run(drive())


def expect_complete(outputs: list[dict[str, Any]], versions: list[str], num_retractions: int) -> None:
    metas = [output["meta_info"] for output in outputs]
    lengths = {
        (len(output["output_ids"]), output["meta_info"]["finish_reason"]["type"]) for output in outputs
    }
    expect(f"all {len(outputs)} rollouts have their {NUM_TOKENS} tokens", lengths == {(NUM_TOKENS, "length")})
    spans = {tuple(span["version"] for span in meta["weight_versions"]) for meta in metas}
    expect(f"each has tokens by the weights {', '.join(versions)}, in this order", spans == {tuple(versions)})
    retractions = {meta["num_retractions"] for meta in metas}
    expect(f"each had its KV computed again {num_retractions} time(s)", retractions == {num_retractions})


def update_in_flight(engine: ServedEngine, trainer: tiny_rl.Trainer) -> None:
    """Sequence 4: pause, apply and go on in one call; KV kept, then KV flushed."""

    weights = [trainer.next_weights() for _ in range(2)]

    def updates() -> None:
        for version, mode in (("1", "in_place"), ("2", "retract")):
            reply = engine.update(
                weights[int(version) - 1],
                pause_mode=mode,
                flush_cache=mode == "retract",
                weight_version=version,
            )
            num_paused = reply["num_paused_requests"]
            expect(f"{mode}: {num_paused} rollouts stood still for the update", num_paused == NUM_STREAMS)

    print("two updates, each in one call:", flush=True)
    expect_complete(roll_out(engine, updates), ["0", "1", "2"], num_retractions=1)


def sleep_in_the_middle(engine: ServedEngine, trainer: tiny_rl.Trainer) -> None:
    """Sequence 5: release all, resume the weights, update, resume the KV cache."""

    weights = trainer.next_weights()

    def sleep() -> None:
        released = engine.post("/release_memory_occupation")
        expect(
            f"released {sorted(released['tags'])}, {sum(released['freed_bytes'].values())} bytes; "
            f"{released['num_retracted']} rollouts wait",
            released["num_retracted"] == NUM_STREAMS,
        )
        engine.post("/resume_memory_occupation", {"tags": ["weights"]})
        reply = engine.update(weights, weight_version="3")
        expect(
            f"{reply['num_tensors']} tensors came, weights {reply['content']}", reply["content"] == "valid"
        )
        engine.post("/resume_memory_occupation", {"tags": ["kv_cache"]})

    print("asleep in the middle of the rollouts:", flush=True)
    expect_complete(roll_out(engine, sleep), ["2", "3"], num_retractions=1)


def run(engine: ServedEngine, model_path: Path) -> None:
    trainer = tiny_rl.Trainer(model_path)
    engine.post("/update_weights_from_disk", {"model_path": str(model_path), "weight_version": "0"})
    update_in_flight(engine, trainer)
    sleep_in_the_middle(engine, trainer)
    print("engine and trainer agree:", engine.greedy() == trainer.greedy())


if __name__ == "__main__":
    served_engine.main(__doc__, run, max_total_tokens=32768)
