"""The worked sequences of control_semantics section 4, over HTTP, on a real model, with streams in flight.

In FP8 on two replicas of two ranks, the one with many streams on one rank too; on GPUs on each half of that.
"""

import asyncio
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.checkpoints import make_checkpoint
from fixtures.eight_bits import make_exact_checkpoint
from fixtures.gpu_device import DEVICE
from fixtures.layouts import FOUR_RANKS_FP8, ONE_RANK, ONE_RANK_FP8, TWO_RANKS, TWO_REPLICAS, Layout
from fixtures.references import Reference, check_greedy_spans
from fixtures.rollouts import Streams, buckets, decoded, safetensors_body
from fixtures.servers import Server, running_server

NUM_STREAMS = 64
# Long enough that no stream ends before a control request reaches the engine, however slow this client is.
# A GPU is through with a short stream before a request has reached the server.
MAX_NEW_TOKENS = 900 if DEVICE.is_cuda else 320
CONTEXT = '{"max_position_embeddings": 1024}'
PROMPTS = [
    [(7 * index + position) % 250 for position in range(4 + index % 9)] for index in range(NUM_STREAMS)
]
KV_TOKENS = 65_536 if DEVICE.is_cuda else 32_768
# Of clients: what they read and parse takes longer than what the engine computes.
STREAM_INTERVAL = 5
# Where four ranks share two cores, every token takes them several times as long: so many streams will do.
FEW_STREAMS, FEW_NEW_TOKENS = 8, 80
# Each stream's tokens; of the long ones on a GPU one in four: the reference is on the CPU.
LOOKED_AT_CLOSELY = 4 if DEVICE.is_cuda else 1
ALL_ROWS = 10**6

SEVERAL_RANKS = [TWO_RANKS, TWO_REPLICAS, FOUR_RANKS_FP8] if DEVICE.is_cuda else [FOUR_RANKS_FP8]
# In the gate ranks that divide the heads have FP8 as well, and one rank plays the sequences in the examples
# (test/compat): here it only has the many streams that four ranks on two cores cannot have.
EVERY_LAYOUT = [ONE_RANK, ONE_RANK_FP8, *SEVERAL_RANKS] if DEVICE.is_cuda else SEVERAL_RANKS
MANY_STREAMS = EVERY_LAYOUT if DEVICE.is_cuda else [ONE_RANK, *SEVERAL_RANKS]

on_every_layout = pytest.mark.parametrize("layout", EVERY_LAYOUT, indirect=True)
with_many_streams = pytest.mark.parametrize("layout", MANY_STREAMS, indirect=True)
on_several_ranks = pytest.mark.parametrize("layout", SEVERAL_RANKS, indirect=True)


@pytest.fixture(scope="module")
def layout(request: pytest.FixtureRequest) -> Layout:
    layout: Layout = request.param
    return layout


def checkpoint(tmp_path_factory: pytest.TempPathFactory, layout: Layout, seed: int) -> Path:
    """Quantised, weights are those of the checkpoint bit for bit: the reference is that of any other."""
    make = make_checkpoint if layout.quantization is None else make_exact_checkpoint
    return make(tmp_path_factory.mktemp("model"), "Qwen3ForCausalLM", seed=seed, **DEVICE.checkpoint)


@pytest.fixture(scope="module")
def checkpoint_a(tmp_path_factory: pytest.TempPathFactory, layout: Layout) -> Path:
    return checkpoint(tmp_path_factory, layout, seed=1)


@pytest.fixture(scope="module")
def checkpoint_b(tmp_path_factory: pytest.TempPathFactory, layout: Layout) -> Path:
    return checkpoint(tmp_path_factory, layout, seed=2)


@pytest.fixture(scope="module")
def reference_a(checkpoint_a: Path, layout: Layout) -> Reference:
    return Reference(checkpoint_a, **layout.precision)


@pytest.fixture(scope="module")
def reference_b(checkpoint_b: Path, layout: Layout) -> Reference:
    return Reference(checkpoint_b, **layout.precision)


@pytest.fixture(scope="module")
def server(checkpoint_a: Path, layout: Layout) -> Iterator[Server]:
    arguments = [
        *layout.flags,
        "--max-total-tokens",
        str(KV_TOKENS),
        "--max-running-requests",
        str(NUM_STREAMS),
    ]
    arguments += ["--json-model-override-args", CONTEXT, "--skip-tokenizer-init", "--log-level", "warning"]
    with running_server(checkpoint_a, *arguments) as server:
        yield server


@pytest.fixture(autouse=True)
def weights_a(server: Server, checkpoint_a: Path) -> Iterator[None]:
    """Each test begins, whatever the one before left, with the weights of A and everything resident."""
    post(server, "/abort_weight_update")
    post(server, "/resume_memory_occupation")
    post(server, "/update_weights_from_disk", {"model_path": str(checkpoint_a), "weight_version": "a"})
    post(server, "/continue_generation")
    yield
    assert server.process.poll() is None, server.log


def post(server: Server, path: str, body: Mapping[str, Any] | None = None, *, status: int = 200) -> Any:
    return decoded(server.post(path, dict(body or {})), status)


def get(server: Server, path: str, *, status: int = 200) -> Any:
    return decoded(server.get(path), status)


def rollout(server: Server, layout: Layout, most: int = NUM_STREAMS) -> Streams:
    """As many streams as the contract says, or `most`; fewer and shorter ones where ranks share cores."""
    is_wide = DEVICE.is_cuda or layout.num_ranks == 1
    num_streams, max_new_tokens = (NUM_STREAMS, MAX_NEW_TOKENS) if is_wide else (FEW_STREAMS, FEW_NEW_TOKENS)
    prompts = PROMPTS[: min(most, num_streams)]
    return Streams(str(server.client.base_url), prompts, max_new_tokens, STREAM_INTERVAL)


def check_all(
    streams: Streams,
    outputs: list[dict[str, Any]],
    references: Mapping[str, Reference],
    *,
    recomputes_kv: bool,
) -> None:
    """Every stream came to its end, in contiguous spans, with the tokens of the weights that it names."""
    for index, (prompt, output) in enumerate(zip(streams.prompts, outputs, strict=True)):
        meta = output["meta_info"]
        assert meta["finish_reason"] == {"type": "length", "length": streams.max_new_tokens}
        spans = meta["weight_versions"]
        assert spans[0]["start"] == 0
        assert spans[-1]["end"] == streams.max_new_tokens == len(output["output_ids"])
        assert all(one["end"] == next_one["start"] for one, next_one in itertools.pairwise(spans))
        if index % LOOKED_AT_CLOSELY == 0:
            check_greedy_spans(references, prompt, output, recomputes_kv=recomputes_kv)


def greedy(server: Server, prompt: list[int], dp_rank: int | None = None) -> list[int]:
    params = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": params, "routed_dp_rank": dp_rank}
    output = post(server, "/generate", body)
    assert len(output["output_ids"]) == 12
    return list(output["output_ids"])


def assert_holds(server: Server, layout: Layout, reference: Reference) -> None:
    """These weights bit for bit on every rank of a replica; and every replica says what they say."""
    for name, tensor in reference.weights().items():
        held = post(server, "/get_weights_by_name", {"name": name, "truncate_size": ALL_ROWS})
        assert held == tensor.tolist(), name
    for dp_rank in range(layout.dp_size):
        assert reference.accepts(PROMPTS[2], greedy(server, PROMPTS[2], dp_rank))


@on_every_layout
def test_1_multi_stage_awake(server: Server, reference_a: Reference, reference_b: Reference) -> None:
    prompt = PROMPTS[3]
    assert reference_a.accepts(prompt, greedy(server, prompt))
    for tag in ("kv_cache", "weights"):
        reply = post(server, "/release_memory_occupation", {"tags": [tag]})
        tags = get(server, "/memory_occupation")["tags"]
        assert reply["freed_bytes"][tag] == tags[tag]["virtual_bytes"]
        assert tags[tag]["resident_bytes"] == 0
    assert post(server, "/resume_memory_occupation", {"tags": ["weights"]})["weights"]["content"] == "stale"
    for bucket in buckets(reference_b.weights(), 3):
        reply = post(server, "/update_weights_from_tensor", safetensors_body(bucket, weight_version="b"))
        assert reply["staged"] is False
    assert (reply["content"], reply["num_missing"]) == ("valid", 0)
    assert post(server, "/flush_cache")["fully_flushed"]
    post(server, "/resume_memory_occupation", {"tags": ["kv_cache"]})
    assert reference_b.accepts(prompt, greedy(server, prompt))


@on_every_layout
def test_3_the_order_of_miles(
    server: Server, layout: Layout, reference_a: Reference, reference_b: Reference
) -> None:
    async def run() -> None:
        async with rollout(server, layout) as streams:
            await streams.all_past(5)
            paused = await streams.post("/pause_generation", {"mode": "retract"})
            assert (paused["num_retracted"], paused["num_running"]) == (len(streams.prompts), 0)
            assert (await streams.post("/flush_cache"))["fully_flushed"]
            await streams.post("/begin_weight_update")
            for bucket in buckets(reference_b.weights(), 3):
                reply = await streams.post("/update_weights_from_tensor", safetensors_body(bucket))
                assert reply["committed"] is False
            reply = await streams.post("/end_weight_update", {"weight_version": "b"})
            assert (reply["committed"], reply["weight_version"]) == (True, "b")
            await streams.post("/continue_generation")
            outputs = await streams.finish()
            check_all(streams, outputs, {"a": reference_a, "b": reference_b}, recomputes_kv=True)
            assert all(len(output["meta_info"]["weight_versions"]) == 2 for output in outputs)

    asyncio.run(run())


@with_many_streams
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_4_in_flight_single_call(
    server: Server, layout: Layout, reference_a: Reference, reference_b: Reference, mode: str
) -> None:
    flush = mode == "retract"
    body = safetensors_body(reference_b.weights(), pause_mode=mode, flush_cache=flush, weight_version="b")

    async def run() -> None:
        async with rollout(server, layout) as streams:
            await streams.all_past(5)
            reply = await streams.post("/update_weights_from_tensor", body)
            assert (reply["staged"], reply["num_paused_requests"]) == (True, len(streams.prompts))
            outputs = await streams.finish()
            check_all(streams, outputs, {"a": reference_a, "b": reference_b}, recomputes_kv=flush)
            for output in outputs:
                meta = output["meta_info"]
                assert [span["version"] for span in meta["weight_versions"]] == ["a", "b"]
                assert meta["kv_weight_versions"] == ["a", "b"]
                assert meta["num_retractions"] == int(flush)

    asyncio.run(run())


@on_every_layout
def test_5_sleep_in_the_middle_of_a_rollout(
    server: Server, layout: Layout, reference_a: Reference, reference_b: Reference
) -> None:
    async def run() -> None:
        async with rollout(server, layout) as streams:
            await streams.all_past(5)
            assert (await streams.post("/release_memory_occupation"))["num_retracted"] == len(streams.prompts)
            await streams.post("/resume_memory_occupation", {"tags": ["weights"]})
            body = safetensors_body(reference_b.weights(), weight_version="b")
            await streams.post("/update_weights_from_tensor", body)
            await streams.post("/resume_memory_occupation", {"tags": ["kv_cache"]})
            outputs = await streams.finish()
            check_all(streams, outputs, {"a": reference_a, "b": reference_b}, recomputes_kv=True)

    asyncio.run(run())


@on_every_layout
def test_6_retry_storm(server: Server, layout: Layout, reference_a: Reference) -> None:
    async def run() -> None:
        async with rollout(server, layout, 8) as streams:
            await streams.all_past(3)
            storm = [
                ("/pause_generation", {"mode": "in_place"}),
                ("/pause_generation", {"mode": "retract"}),
                ("/continue_generation", {}),
                ("/continue_generation", {}),
                ("/release_memory_occupation", {"tags": ["kv_cache"]}),
                ("/release_memory_occupation", {"tags": ["kv_cache"]}),
                ("/resume_memory_occupation", {"tags": ["kv_cache"]}),
                ("/resume_memory_occupation", {"tags": ["kv_cache"]}),
                ("/resume_memory_occupation", {"tags": ["weights"]}),
                ("/abort_weight_update", {}),
            ]
            for _ in range(4):
                responses = await asyncio.gather(
                    *(streams.client.post(path, json=body) for path, body in storm)
                )
                assert {response.status_code for response in responses} == {200}
            await streams.post("/resume_memory_occupation")
            await streams.post("/continue_generation")
            check_all(streams, await streams.finish(), {"a": reference_a}, recomputes_kv=True)

    asyncio.run(run())


@on_every_layout
def test_7_a_failing_update_leaves_the_old_weights(
    server: Server, layout: Layout, reference_a: Reference, reference_b: Reference, tmp_path: Path
) -> None:
    weights = reference_b.weights()
    wrong_shape = {**weights, "model.norm.weight": weights["model.norm.weight"][:-1]}
    unknown = {**weights, "model.nothing.weight": torch.zeros(3)}

    async def run() -> None:
        async with rollout(server, layout, 16) as streams:
            await streams.all_past(5)
            for bad, name in ((wrong_shape, "model.norm.weight"), (unknown, "model.nothing.weight")):
                body = safetensors_body(bad, pause_mode="in_place", flush_cache=False, weight_version="b")
                reply = await streams.post("/update_weights_from_tensor", body, status=400)
                assert reply["success"] is False
                assert [error["name"] for error in reply["errors"]] == [name]
            canary = {"input_ids": PROMPTS[0]}
            spoilt = {**weights, "model.norm.weight": weights["model.norm.weight"] * torch.nan}
            body = safetensors_body(spoilt, pause_mode="in_place", flush_cache=False, canary=canary)
            reply = await streams.post("/update_weights_from_tensor", body, status=400)
            assert "3 of 3 logprobs are not finite" in reply["message"]
            garbage = {"serialized_named_tensors": ["AAAA"], "load_format": "safetensors"}
            await streams.post("/update_weights_from_tensor", garbage, status=400)
            await streams.post("/update_weights_from_disk", {"model_path": str(tmp_path)}, status=400)
            check_all(streams, await streams.finish(), {"a": reference_a}, recomputes_kv=False)

    asyncio.run(run())
    post(server, "/update_weights_from_tensor", safetensors_body(weights, weight_version="b"))
    assert reference_b.accepts(PROMPTS[2], greedy(server, PROMPTS[2]))


@on_several_ranks
def test_7_a_rank_that_cannot_prepare_is_named_and_none_changes(
    server: Server, layout: Layout, reference_a: Reference, reference_b: Reference
) -> None:
    whole = safetensors_body(reference_b.weights(), flush_cache=False, weight_version="b")
    [image] = whole["serialized_named_tensors"]
    # One for each rank, of which the last is cut off.
    broken = {
        **whole,
        "serialized_named_tensors": [image] * (layout.num_ranks - 1) + [image[: len(image) // 8 * 4]],
    }
    name = "replica 1: " * (layout.dp_size > 1) + "rank 1: " * (layout.tp_size > 1)

    async def run() -> None:
        async with rollout(server, layout, 16) as streams:
            await streams.all_past(3)
            if layout.dp_size > 1:
                # Replicas commit together only what is in a session.
                await streams.post("/begin_weight_update")
            reply = await streams.post("/update_weights_from_tensor", broken, status=400)
            assert reply["message"].startswith(name)
            assert (await streams.post("/abort_weight_update"))["changed"] is False
            check_all(streams, await streams.finish(), {"a": reference_a}, recomputes_kv=False)

    asyncio.run(run())
    assert_holds(server, layout, reference_a)
    post(server, "/update_weights_from_tensor", whole)
    assert_holds(server, layout, reference_b)
