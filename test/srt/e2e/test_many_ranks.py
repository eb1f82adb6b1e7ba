"""Engines of several ranks: they give back, keep and take what one rank would, and die as one."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fixtures.gpu_device import DEVICE
from fixtures.layouts import FOUR_RANKS, ONE_RANK, TWO_RANKS
from fixtures.references import Reference
from fixtures.servers import free_port, is_alive, memory_of_process_exhausted, wait_until

from ebbtide import Engine
from ebbtide.srt.errors import EngineError, RequestRejected

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}
# More than one for each replica, of one page and of several.
PROMPTS = [[3, 1, 4, 1, 5], list(range(40)), [200], list(range(60, 100)), [7] * 20]
# 64 MiB of KV for each of four ranks: more than what a rank is left with where it has no memory.
KV_TOKENS = 1 << 18
SCANT_BYTES = 16 << 20
ARGUMENTS: dict[str, Any] = {"max_total_tokens": KV_TOKENS, "log_level": "error", "skip_tokenizer_init": True}
ARGUMENTS |= DEVICE.server_args
PARKED = [[(17 * index + 5 * position) % 250 for position in range(9 + 6 * index)] for index in range(6)]
DEATH_TIMEOUT_S = 5  # as the contract says


# Each half of them is in the contract's sequences.
LAYOUT = TWO_RANKS if DEVICE.is_cuda else FOUR_RANKS


@pytest.fixture(scope="module", params=[LAYOUT])
def shared_engine(request: pytest.FixtureRequest, checkpoint_a: Path) -> Iterator[Engine]:
    with Engine(model_path=str(checkpoint_a), **ARGUMENTS, **request.param.server_args) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: Engine, checkpoint_a: Path) -> Engine:
    """With the weights of A, whatever the test before left."""
    shared_engine.resume_memory_occupation()
    shared_engine.update_weights_from_disk(str(checkpoint_a), weight_version="a")
    return shared_engine


def assert_serves(engine: Engine, reference: Reference) -> None:
    """On the CPU: exactly the tokens of the model as a whole. On GPUs: as good ones."""
    outputs = [out["output_ids"] for out in engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)]
    if DEVICE.is_cuda:
        assert all(map(reference.accepts, PROMPTS, outputs))
    else:
        assert outputs == [reference.greedy(prompt, GREEDY["max_new_tokens"]) for prompt in PROMPTS]


@pytest.mark.skipif(DEVICE.is_cuda, reason="limits a process, not a GPU")
def test_where_one_rank_has_no_memory_no_replica_resumes(engine: Engine, reference_a: Reference) -> None:
    def states() -> set[str]:
        return {rank["tags"]["kv_cache"]["state"] for rank in engine.memory_occupation()["ranks"]}

    engine.release_memory_occupation(["kv_cache"])
    last = list(pids_of(engine).values())[-1]
    with memory_of_process_exhausted(last, SCANT_BYTES):
        refusal = r"^replica 1: rank 1: not enough device memory for all of kv_cache.*It is released again"
        with pytest.raises(RequestRejected, match=refusal) as refused:
            engine.resume_memory_occupation(["kv_cache"])
        assert refused.value.status == 409
        assert states() == {"released"}
    engine.resume_memory_occupation(["kv_cache"])
    assert states() == {"resident"}
    assert_serves(engine, reference_a)


# ---------------------------------------------------------------------------------------------------- deaths


def pids_of(engine: Engine) -> dict[str, int]:
    """By the names of the processes."""
    replica = (
        "scheduler-dp{dp_rank}-tp{tp_rank}" if engine.server_args.dp_size > 1 else "scheduler-tp{tp_rank}"
    )
    return {replica.format(**rank): rank["pid"] for rank in engine.memory_occupation()["ranks"]}


def assert_dies_of(said: str, waiting: Future[Any], pids: dict[str, int]) -> None:
    """What waits fails with the reason, in time, and no process is left."""
    error = waiting.exception(timeout=DEATH_TIMEOUT_S)
    assert isinstance(error, EngineError)
    assert str(error) == said
    wait_until(lambda: not any(is_alive(pid) for pid in pids.values()), "all have gone", DEATH_TIMEOUT_S)


# The last one that takes the shared engine: it is gone after it.
def test_a_rank_that_dies_in_mid_decode_ends_the_engine(engine: Engine) -> None:
    pids = pids_of(engine)
    last = engine.server_args.dp_size - 1
    chunks = engine.generate(
        input_ids=[1, 2, 3],
        sampling_params={**GREEDY, "max_new_tokens": 250},
        routed_dp_rank=last,
        stream=True,
    )
    victim = list(pids)[-1]
    next(chunks)
    # The other rank of its replica now waits in a collective.
    os.kill(pids[victim], signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(list, chunks)
        os.kill(pids[victim], signal.SIGKILL)
        assert_dies_of(f"the {victim} process was ended by SIGKILL", waiting, pids)
    with pytest.raises(EngineError, match=victim):
        engine.generate(input_ids=[1], sampling_params=GREEDY)


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
            return_logprob=True,
            stream=True,
        ):
            if last["meta_info"]["completion_tokens"] >= 3:
                has_begun.set()
        return last

    streams = [asyncio.ensure_future(one(*pair)) for pair in zip(prompts, begun, strict=True)]
    await asyncio.gather(*(event.wait() for event in begun))
    await interrupt()
    return await asyncio.gather(*streams)


@pytest.mark.parametrize("prompts", [PARKED[-1:], PARKED], ids=["one", "six"])
def test_parked_requests_end_as_if_the_engine_had_never_slept(
    two_ranks: Engine, checkpoint_a: Path, prompts: list[list[int]]
) -> None:
    engine = two_ranks
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


# The last one that takes this engine.
def test_a_rank_that_dies_in_mid_update_ends_the_engine(two_ranks: Engine, reference_a: Reference) -> None:
    engine = two_ranks
    if engine.server_args.tp_size == 1:
        pytest.skip("is of several ranks")
    pids = pids_of(engine)
    engine.begin_weight_update()
    engine.update_weights_from_tensor(list(reference_a.weights().items())[:5])
    # No trainer is there: every rank waits for it.
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(
            engine.init_weights_update_group, "127.0.0.1", free_port(), 1, 3, "group", "gloo"
        )
        wait_until(lambda: engine.server_info()["weight_update"]["session_open"], "the session is open")
        os.kill(pids["scheduler-tp1"], signal.SIGKILL)
        assert_dies_of("the scheduler-tp1 process was ended by SIGKILL", waiting, pids)
