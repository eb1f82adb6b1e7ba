"""Rollouts through `Engine`: what transformers gives, whatever else runs and however the work is cut."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.checkpoints import EOS_ID, GEMMA3, make_checkpoint
from fixtures.gpu_device import DEVICE
from fixtures.references import Reference

from ebbtide import Engine

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}
# Between two implementations in float32, and between two ways to cut the same work.
LOGPROB_TOLERANCE = 1e-4
PROMPTS = [[(31 * index + 7 * position) % 250 for position in range(1 + 11 * index)] for index in range(6)]
# Small enough that eight requests push one another out, and that every prompt above comes in pieces.
TIGHT: dict[str, Any] = {"max_total_tokens": 192, "page_size": 8, "chunked_prefill_size": 10}
TIGHT |= {"disable_radix_cache": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some layers see a window that is shorter than most prompts, the others everything."""
    return make_checkpoint(
        tmp_path_factory.mktemp("sharded"), "Gemma3ForCausalLM", seed=5, shards=2, **GEMMA3
    )


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[Engine]:
    with Engine(model_path=str(checkpoint), max_total_tokens=8192, **DEVICE.server_args) as engine:
        yield engine


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)


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


def check_against_reference(output: dict[str, Any], prompt: list[int], reference: Reference) -> None:
    """Logprobs of prompt and output, of the most likely tokens and of chosen ones."""
    meta, output_ids = output["meta_info"], output["output_ids"]
    # [i, v]: of v at position i; the first has none.
    expected = reference.logprobs([*prompt, *output_ids])[:-1]
    first_output = len(prompt) - 1
    for side, ids, rows in (
        ("input", prompt[1:], expected[:first_output]),
        ("output", output_ids, expected[first_output:]),
    ):
        triples = meta[f"{side}_token_logprobs"]
        top, chosen = meta[f"{side}_top_logprobs"], meta[f"{side}_token_ids_logprobs"]
        if side == "input":
            assert (triples[0], top[0], chosen[0]) == ((None, prompt[0], None), None, None)
            triples, top, chosen = triples[1:], top[1:], chosen[1:]
        assert [triple[1] for triple in triples] == ids
        assert_near(logprobs_of(triples), rows.gather(1, torch.tensor(ids).view(-1, 1)).flatten())
        for row, top_triples, chosen_triples in zip(rows, top, chosen, strict=True):
            assert_near(logprobs_of(top_triples), row.topk(3).values)
            assert [triple[1] for triple in chosen_triples] == [9, 3]
            assert_near(logprobs_of(chosen_triples), row[[9, 3]])


EVERY_LOGPROB: dict[str, Any] = {
    "return_logprob": True,
    "logprob_start_len": 0,
    "top_logprobs_num": 3,
    "token_ids_logprob": [9, 3],
}


def test_greedy_tokens_and_logprobs_are_those_of_transformers(engine: Engine, reference: Reference) -> None:
    outputs = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY, **EVERY_LOGPROB)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output["output_ids"] == reference.greedy(prompt, 24)
        check_against_reference(output, prompt, reference)


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
        {"top_p": 0.8, "top_k": 50, "min_p": 0.01, "stop": ["e", "qu", "s", "1"]},
    ]
    params = {"max_new_tokens": 4 + 5 * index % 17, "sampling_seed": 1000 * index, **ways[index % len(ways)]}
    params["n"] = 3 if index % 10 == 9 else 1
    prompt = [(index * index + 3 * position) % 256 for position in range(1 + 7 * index % 60)]
    asked = {"top_logprobs_num": index // 3 % 3, "token_ids_logprob": [9, 3][: index // 9 % 3]}
    return {"input_ids": prompt, "sampling_params": params, "return_logprob": True, **asked}


def flat(answers: Sequence[Any]) -> list[dict[str, Any]]:
    """The outputs of requests, some of which have several."""
    return [output for answer in answers for output in (answer if isinstance(answer, list) else [answer])]


def test_100_requests_at_once_give_what_each_gives_alone(engine: Engine) -> None:
    requests = [mixed_request(index) for index in range(100)]
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
    assert len(outputs) == 120
    for output, one in zip(outputs, expected, strict=True):
        assert_same_output(output, one)
    reasons = [output["meta_info"]["finish_reason"] for output in outputs]
    assert {reason["type"] for reason in reasons} == {"stop", "length"}
    assert {type(reason["matched"]) for reason in reasons if "matched" in reason} == {int, str}
