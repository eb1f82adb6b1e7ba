"""Calls of an engine as in reinforcement learning, with new random prompts in each call."""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gpu_common import Shape
from numpy.typing import NDArray

from ebbtide import Engine

NUM_PROMPTS, NUM_SAMPLES = 64, 8
MEDIAN_LEN, SIGMA, MAX_LEN = 245, 0.85, 2048
RL: dict[str, Any] = {"temperature": 1.0}


def output_lens(count: int) -> NDArray[np.int64]:
    """Lengths of outputs in tokens: log-normal, the same in every run."""
    drawn = np.random.default_rng(1).lognormal(np.log(MEDIAN_LEN), SIGMA, count)
    return np.clip(drawn, 1, MAX_LEN).astype(np.int64)


class Rollouts:
    """Calls of an engine, with new random prompts."""

    def __init__(self, engine: Engine, shape: Shape) -> None:
        self._engine = engine
        self._vocab_size = shape["vocab_size"]
        self._rng = np.random.default_rng(0)

    def prompts(self, count: int, length: int) -> list[list[int]]:
        prompts: list[list[int]] = self._rng.integers(0, self._vocab_size, (count, length)).tolist()
        return prompts

    def call(
        self, prompts: list[list[int]], lens: Sequence[int], params: dict[str, Any], **fields: Any
    ) -> float:
        """Make a call; returns its seconds."""
        return asyncio.run(self.call_async(prompts, lens, params, **fields))

    async def call_async(
        self, prompts: list[list[int]], lens: Sequence[int], params: dict[str, Any], **fields: Any
    ) -> float:
        asked = [params | {"max_new_tokens": int(length), "ignore_eos": True} for length in lens]
        gc.collect()
        started = time.perf_counter()
        outputs = await self._engine.async_generate(input_ids=prompts, sampling_params=asked, **fields)
        seconds = time.perf_counter() - started
        num_tokens = sum(len(output["output_ids"]) for output in outputs)
        if num_tokens != sum(lens):
            raise RuntimeError(f"{num_tokens} tokens came, {sum(lens)} were asked for")
        return seconds

    def group_prompts(self, prompt_len: int, lens: NDArray[np.int64]) -> list[list[int]]:
        num_samples = len(lens) // NUM_PROMPTS
        return [prompt for prompt in self.prompts(NUM_PROMPTS, prompt_len) for _ in range(num_samples)]

    def grpo(self, prompt_len: int, lens: NDArray[np.int64]) -> float:
        """Output tokens per second of groups of samples."""
        seconds = self.call(self.group_prompts(prompt_len, lens), lens.tolist(), RL, return_logprob=True)
        return float(lens.sum() / seconds)

    def grpo_updated(
        self,
        prompt_len: int,
        lens: NDArray[np.int64],
        weights: list[tuple[str, torch.Tensor]],
        after_s: float,
    ) -> tuple[float, dict[str, Any]]:
        """Output tokens per second with an update in the middle, and the update's reply."""

        async def update() -> dict[str, Any]:
            await asyncio.sleep(after_s)
            return await self._engine.async_update_weights_from_tensor(
                weights, pause_mode="in_place", flush_cache=False
            )

        async def both() -> tuple[float, dict[str, Any]]:
            prompts = self.group_prompts(prompt_len, lens)
            return await asyncio.gather(
                self.call_async(prompts, lens.tolist(), RL, return_logprob=True), update()
            )

        seconds, reply = asyncio.run(both())
        return float(lens.sum() / seconds), reply

    def batch(self, size: int, lens: tuple[int, int], params: dict[str, Any], **fields: Any) -> float:
        """Output tokens per second of a batch."""
        return size * lens[1] / self.call(self.prompts(size, lens[0]), [lens[1]] * size, params, **fields)

    def prefill(self, size: int, length: int, **fields: Any) -> float:
        """Prompt tokens per second of a batch with one output token each."""
        seconds = self.call(self.prompts(size, length), [1] * size, {"temperature": 0.0}, **fields)
        return size * length / seconds

    def decode(self, context_lens: Sequence[int], output_len: int) -> float:
        """Output tokens per second after the prefill. The prompts are cached before."""
        size = len(context_lens)
        prompts = [prompt for length in context_lens for prompt in self.prompts(1, length)]
        greedy = {"temperature": 0.0}
        self.call(prompts, [1] * size, greedy)
        first = self.call(prompts, [1] * size, greedy)
        return size * (output_len - 1) / (self.call(prompts, [output_len] * size, greedy) - first)

    async def stream(self, prompt: list[int], output_len: int) -> list[float]:
        """Read a stream; returns the time of the request, and then those of its chunks."""
        params = RL | {"max_new_tokens": output_len, "ignore_eos": True}
        times = [time.perf_counter()]
        async for _ in await self._engine.async_generate(
            input_ids=prompt, sampling_params=params, return_logprob=True, stream=True
        ):
            times.append(time.perf_counter())
        return times

    async def gaps(self, size: int, lens: tuple[int, int]) -> dict[str, float]:
        """Milliseconds between chunks and to the first one, and this process's CPU time per token.

        "decoding_..." is about gaps that begin after all streams have begun.
        """
        prompts = self.prompts(size, lens[0])
        cpu_s = time.process_time()
        all_times = await asyncio.gather(*(self.stream(prompt, lens[1]) for prompt in prompts))
        cpu_s = time.process_time() - cpu_s
        gaps = np.concatenate([np.diff(times[1:]) for times in all_times]) * 1e3
        begun = np.concatenate([times[1:-1] for times in all_times])
        decoding = gaps[begun >= max(times[1] for times in all_times)]
        return {
            "p50": float(np.percentile(gaps, 50)),
            "p99": float(np.percentile(gaps, 99)),
            "max": float(gaps.max()),
            "first": statistics.median((times[1] - times[0]) * 1e3 for times in all_times),
            "decoding_p50": float(np.percentile(decoding, 50)),
            "decoding_p99": float(np.percentile(decoding, 99)),
            "us_per_token": cpu_s * 1e6 / (size * lens[1]),
        }

    async def first_tokens(self, size: int, lens: tuple[int, int], count: int) -> list[float]:
        """Milliseconds to the first token of consecutive single requests, while a batch decodes."""
        prompts = self.prompts(size, lens[0])
        batch = [asyncio.ensure_future(self.stream(prompt, lens[1])) for prompt in prompts]
        # When this request is done, the whole batch has been admitted.
        await self.stream(prompts[0], 1)
        times = []
        for prompt in self.prompts(count, lens[0]):
            first = await self.stream(prompt, 1)
            times.append((first[1] - first[0]) * 1e3)
        if any(stream.done() for stream in batch):
            raise RuntimeError("the batch ended before the last single request")
        await asyncio.gather(*batch)
        return times
