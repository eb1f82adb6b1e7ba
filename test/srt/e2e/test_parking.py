"""KV that outlives a release: requests go on as if nothing had happened, bit for bit."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fixtures.gpu_device import DEVICE
from fixtures.layouts import ONE_RANK, TWO_RANKS

from ebbtide import Engine

PROMPTS = [[(17 * index + 5 * position) % 250 for position in range(9 + 6 * index)] for index in range(6)]
PARAMS = {"temperature": 0.0, "max_new_tokens": 120, "ignore_eos": True}


async def rollouts(engine: Engine, prompts: list[list[int]], interrupt: Any) -> list[dict[str, Any]]:
    """Prompts as streams; `interrupt` is awaited once each has its first tokens."""
    begun = [asyncio.Event() for _ in prompts]

    async def one(prompt: list[int], has_begun: asyncio.Event) -> dict[str, Any]:
        last: dict[str, Any] = {}
        async for last in await engine.async_generate(
            input_ids=prompt, sampling_params=PARAMS, return_logprob=True, stream=True
        ):
            if last["meta_info"]["completion_tokens"] >= 3:
                has_begun.set()
        return last

    streams = [asyncio.ensure_future(one(*pair)) for pair in zip(prompts, begun, strict=True)]
    await asyncio.gather(*(event.wait() for event in begun))
    await interrupt()
    return await asyncio.gather(*streams)


@pytest.fixture(scope="module", params=[ONE_RANK, TWO_RANKS] if DEVICE.is_cuda else [TWO_RANKS])
def engine(request: pytest.FixtureRequest, checkpoint_a: Path) -> Iterator[Engine]:
    arguments = {"max_total_tokens": 4096, "skip_tokenizer_init": True, **DEVICE.server_args}
    with Engine(model_path=str(checkpoint_a), **arguments, **request.param.server_args) as engine:
        yield engine


@pytest.mark.parametrize("prompts", [PROMPTS[-1:], PROMPTS], ids=["one", "six"])
def test_parked_requests_end_as_if_the_engine_had_never_slept(
    engine: Engine, checkpoint_a: Path, prompts: list[list[int]]
) -> None:
    replies: list[dict[str, Any]] = []

    async def nothing() -> None:
        await engine.async_flush_cache()

    async def sleep() -> None:
        replies.append(await engine.async_release_memory_occupation(["kv_cache"], preserve="live"))
        report = await engine.async_memory_occupation()
        assert report["tags"]["kv_cache"]["resident_bytes"] == 0
        assert report["tags"]["kv_cache"]["backup_bytes"] == replies[0]["parked_bytes"] > 0
        # The weights of the same values, while the requests are parked: they keep their KV.
        await engine.async_update_weights_from_disk(str(checkpoint_a), flush_cache=False)
        await engine.async_resume_memory_occupation(["kv_cache"])

    engine.flush_cache()
    undisturbed = asyncio.run(rollouts(engine, prompts, nothing))
    engine.flush_cache()
    parked = asyncio.run(rollouts(engine, prompts, sleep))
    assert (replies[0]["num_parked"], replies[0]["num_retracted"]) == (len(prompts), 0)
    for one, other in zip(undisturbed, parked, strict=True):
        assert other["output_ids"] == one["output_ids"]
        assert other["meta_info"]["num_retractions"] == 0
        if len(prompts) == 1:
            # With others it is up to chance how they share the first steps, and with it the last bit.
            logprobs = [reply["meta_info"]["output_token_logprobs"] for reply in (one, other)]
            assert logprobs[0] == logprobs[1]
