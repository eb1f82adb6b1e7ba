"""Engines of several ranks: they give back, keep and take what one rank would, and die as one."""

import asyncio
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fixtures.gpu_device import DEVICE
from fixtures.layouts import ONE_RANK, TWO_RANKS
from fixtures.references import Reference
from fixtures.servers import free_port, is_alive, wait_until

from ebbtide import Engine
from ebbtide.srt.errors import EngineError

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}
ARGUMENTS: dict[str, Any] = {"max_total_tokens": 1 << 16, "log_level": "error", "skip_tokenizer_init": True}
ARGUMENTS |= DEVICE.server_args
PARKED = [[(17 * index + 5 * position) % 250 for position in range(9 + 6 * index)] for index in range(6)]


# ---------------------------------------------------------------------------------------------------- deaths


def pids_of(engine: Engine) -> dict[str, int]:
    """By the names of the processes."""
    ranks = engine.memory_occupation()["ranks"]
    return {f"scheduler-tp{rank['tp_rank']}": rank["pid"] for rank in ranks}


def assert_dies_of(said: str, waiting: Future[Any], pids: dict[str, int]) -> None:
    """What waits fails with the reason, in time, and no process is left."""
    error = waiting.exception()
    assert isinstance(error, EngineError)
    assert str(error).startswith(said)
    wait_until(lambda: not any(is_alive(pid) for pid in pids.values()), "all have gone")


# ------------------------------------------------------------------------------------------------- two ranks


# On one GPU they are one.
@pytest.fixture(scope="module", params=[ONE_RANK, TWO_RANKS] if DEVICE.is_cuda else [TWO_RANKS])
def two_ranks(request: pytest.FixtureRequest, checkpoint_a: Path) -> Iterator[Engine]:
    with Engine(model_path=str(checkpoint_a), **ARGUMENTS, **request.param.server_args) as engine:
        yield engine


async def rollouts(engine: Engine, prompts: list[list[int]], interrupt: Any) -> list[dict[str, Any]]:
    """Prompts as streams; `interrupt` is awaited once each has its first tokens."""
    begun = [asyncio.Event() for _ in prompts]

    async def one(prompt: list[int], has_begun: asyncio.Event) -> dict[str, Any]:
        last: dict[str, Any] = {}
        async for last in await engine.async_generate(
            input_ids=prompt,
            sampling_params={**GREEDY, "max_new_tokens": 120},
            stream=True,
        ):
            if last["meta_info"]["completion_tokens"] >= 3:
                has_begun.set()
        return last

    streams = [asyncio.ensure_future(one(*pair)) for pair in zip(prompts, begun, strict=True)]
    await asyncio.gather(*(event.wait() for event in begun))
    await interrupt()
    return await asyncio.gather(*streams)


def test_parked_requests_end_as_if_the_engine_had_never_slept(two_ranks: Engine, checkpoint_a: Path) -> None:
    engine, prompts = two_ranks, PARKED
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


# The last one: the engine ends.
def test_a_rank_that_dies_ends_the_engine_in_mid_decode_and_in_mid_update(
    two_ranks: Engine, reference_a: Reference
) -> None:
    engine = two_ranks
    if engine.server_args.tp_size == 1:
        pytest.skip("is of several ranks")
    pids = pids_of(engine)
    engine.begin_weight_update()
    engine.update_weights_from_tensor(list(reference_a.weights().items())[:5])
    params = {**GREEDY, "max_new_tokens": 250}
    chunks = engine.generate(input_ids=[1, 2, 3], sampling_params=params, stream=True)
    next(chunks)
    with ThreadPoolExecutor(2) as pool:
        # No trainer is there: every rank waits for it.
        joining = pool.submit(
            engine.init_weights_update_group, "127.0.0.1", free_port(), 1, 3, "group", "gloo"
        )
        wait_until(lambda: engine.server_info()["weight_update"]["session_open"], "the session is open")
        # The other rank now waits in a collective.
        os.kill(pids["scheduler-tp1"], signal.SIGSTOP)
        decoding = pool.submit(list, chunks)
        os.kill(pids["scheduler-tp1"], signal.SIGKILL)
        for waiting in (joining, decoding):
            assert_dies_of("the scheduler-tp1 process was ended by SIGKILL", waiting, pids)
    with pytest.raises(EngineError, match="scheduler-tp1"):
        engine.generate(input_ids=[1], sampling_params=GREEDY)
