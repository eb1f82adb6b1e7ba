"""Rollouts through `Engine`: what each request gives alone, whatever else runs."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from fixtures.checkpoints import EOS_ID, GEMMA3, make_checkpoint
from fixtures.gpu_device import DEVICE

from ebbtide import Engine

# Between two ways to cut the same work, in float32.
LOGPROB_TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Some layers see a window that is shorter than most prompts, the others everything."""
    path = make_checkpoint(
        tmp_path_factory.mktemp("sharded"), "Gemma3ForCausalLM", seed=5, shards=2, **GEMMA3
    )
    with Engine(model_path=str(path), max_total_tokens=8192, **DEVICE.server_args) as engine:
        yield engine


def logprobs_of(triples: Sequence[Sequence[Any]]) -> torch.Tensor:
    return torch.tensor([triple[0] for triple in triples])


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=LOGPROB_TOLERANCE)


def assert_same_output(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Same tokens for the same reason, same logprobs but for rounding."""
    assert actual["output_ids"] == expected["output_ids"]
    assert actual["text"] == expected["text"]
    ours, theirs = actual["meta_info"], expected["meta_info"]
    assert ours["finish_reason"] == theirs["finish_reason"]
    assert len(ours["output_token_logprobs"]) == len(actual["output_ids"])
    assert_near(logprobs_of(ours["output_token_logprobs"]), logprobs_of(theirs["output_token_logprobs"]))
    for name in ("output_top_logprobs", "output_token_ids_logprobs"):
        assert (name in ours) == (name in theirs)
        for one, other in zip(ours.get(name, ()), theirs.get(name, ()), strict=True):
            assert [triple[1] for triple in one] == [triple[1] for triple in other]
            assert_near(logprobs_of(one), logprobs_of(other))


def mixed_request(index: int) -> dict[str, Any]:
    """Request `index` of a mixed lot: a few in every way to sample, of every length."""
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 20},
        {"min_p": 0.02, "stop_token_ids": list(range(100, 120))},
        {"frequency_penalty": 0.5, "presence_penalty": 0.3, "repetition_penalty": 1.1},
        {"logit_bias": {str(EOS_ID): 4.0, "7": 2.0}, "min_new_tokens": 4},
        {"top_p": 0.8, "top_k": 50, "min_p": 0.01, "stop": ["qu", *"abcdefghijkl"]},
    ]
    params = {"max_new_tokens": 4 + 5 * index % 17, "sampling_seed": 1000 * index, **ways[index % len(ways)]}
    params["n"] = 3 if index % 10 == 9 else 1
    prompt = [(index * index + 3 * position) % 256 for position in range(1 + 7 * index % 60)]
    asked = {"top_logprobs_num": index // 3 % 3, "token_ids_logprob": [9, 3][: index // 9 % 3]}
    return {"input_ids": prompt, "sampling_params": params, "return_logprob": True, **asked}


def flat(answers: Sequence[Any]) -> list[dict[str, Any]]:
    """The outputs of requests, some of which have several."""
    return [output for answer in answers for output in (answer if isinstance(answer, list) else [answer])]


def test_50_requests_at_once_give_what_each_gives_alone(engine: Engine) -> None:
    requests = [mixed_request(index) for index in range(50)]
    alone = [engine.generate(**request) for request in requests]

    async def ask(index: int, request: dict[str, Any]) -> Any:
        if index % 2:
            return await engine.async_generate(**request)
        request["sampling_params"]["stream_interval"] = 1 + index // 2 % 3
        chunks = {
            chunk.get("index", 0): chunk
            async for chunk in await engine.async_generate(**request, stream=True)
        }
        return [chunks[sample] for sample in sorted(chunks)]

    async def run() -> list[Any]:
        return await asyncio.gather(*(ask(*request) for request in enumerate(requests)))

    outputs, expected = flat(asyncio.run(run())), flat(alone)
    assert len(outputs) == 60
    for output, one in zip(outputs, expected, strict=True):
        assert_same_output(output, one)
    reasons = [output["meta_info"]["finish_reason"] for output in outputs]
    assert {reason["type"] for reason in reasons} == {"stop", "length"}
    assert {type(reason["matched"]) for reason in reasons if "matched" in reason} == {int, str}
