"""Text in, text out, on real processes: a model that says one text by heart, so every answer is known."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fixtures.gpu_device import DEVICE
from fixtures.scripts import EOS, make_script_checkpoint, script_ids
from fixtures.tokenizers import byte_level

from ebbtide import Engine

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 100}
ENDLESS: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": None, "ignore_eos": True}
PROMPT, *REST = script_ids()
# What the model says after "The", special tokens left out.
SAID = " quick brown fox jumps over the lazy dog🎉é好ж!"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    checkpoint = make_script_checkpoint(tmp_path_factory.mktemp("script"))
    with Engine(model_path=str(checkpoint), max_total_tokens=8192, **DEVICE.server_args) as engine:
        yield engine


def decode(token_ids: list[int]) -> str:
    return byte_level().decode(token_ids, skip_special_tokens=True)


def token_of(piece: str) -> int:
    """The token of the script that is this text."""
    return next(token_id for token_id in REST if byte_level().decode([token_id]) == piece)


def test_text_and_its_tokens_are_the_same_prompt(engine: Engine) -> None:
    by_text = engine.generate("The", GREEDY)
    assert (by_text["text"], by_text["output_ids"]) == (SAID, REST)
    assert by_text["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}
    assert by_text["meta_info"]["completion_tokens"] == len(REST)
    assert by_text["meta_info"]["prompt_tokens"] == 1
    by_ids = engine.generate(input_ids=[PROMPT], sampling_params=GREEDY, return_prompt_token_ids=True)
    assert (by_ids["text"], by_ids["output_ids"], by_ids["prompt_token_ids"]) == (SAID, REST, [PROMPT])


# ------------------------------------------------------------------------------------------------ streaming


@pytest.mark.parametrize("interval", [1, 4])
def test_each_chunk_of_a_stream_repeats_what_was_there(engine: Engine, interval: int) -> None:
    params = {**GREEDY, "stream_interval": interval}
    *chunks, last = engine.generate("The", params, stream=True, return_logprob=True)
    whole = engine.generate("The", GREEDY, return_logprob=True)
    for chunk in chunks:
        assert SAID.startswith(chunk["text"])
        assert chunk["output_ids"] == REST[: chunk["meta_info"]["completion_tokens"]]
        assert chunk["meta_info"]["finish_reason"] is None
    assert (last["text"], last["output_ids"]) == (SAID, REST)
    for key in ("finish_reason", "output_token_logprobs", "weight_versions"):
        assert last["meta_info"][key] == whole["meta_info"][key]


# ----------------------------------------------------------------------------------------------------- ends


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(
    ("stop", "before", "matched"),
    [
        ("brown fox", " quick ", "brown fox"),  # over several tokens
        (["lazy", "over", "zebra"], " quick brown fox jumps ", "over"),  # the first of several
        ("dog🎉", " quick brown fox jumps over the lazy ", "dog🎉"),  # a special token lies in between
    ],
)
def test_a_stop_string_ends_the_text(
    engine: Engine, stop: Any, before: str, matched: str, keep: bool, stream: bool
) -> None:
    params = {**GREEDY, "stop": stop, "no_stop_trim": keep}
    answer = engine.generate("The", params, stream=stream)
    chunks = list(answer) if stream else [answer]
    expected = before + matched if keep else before
    assert all(expected.startswith(chunk["text"]) for chunk in chunks)
    assert chunks[-1]["text"] == expected
    assert chunks[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": matched}
    # The ids go up to the token that completes the match.
    ids = chunks[-1]["output_ids"]
    assert ids == REST[: len(ids)]
    assert matched in decode(ids)
    assert matched not in decode(ids[:-1])


def test_ignore_eos_goes_on_behind_eos_and_stop_tokens(engine: Engine) -> None:
    params = {**GREEDY, "ignore_eos": True, "stop_token_ids": [token_of("ump")]}
    output = engine.generate("The", {**params, "max_new_tokens": 2 * len(REST) + 1})
    assert output["output_ids"] == [*REST, PROMPT, *REST]
    assert output["text"] == f"{SAID}The{SAID}"
    stopped = engine.generate("The", {**params, "stop": ["!The"]})
    assert stopped["text"] == SAID.removesuffix("!")


def test_min_new_tokens_masks_eos_and_stop_tokens_but_no_stop_string(engine: Engine) -> None:
    near_the_end = REST[:-2]
    assert engine.generate(input_ids=near_the_end, sampling_params=GREEDY)["text"] == "!"
    params = {**GREEDY, "min_new_tokens": 6, "max_new_tokens": 10, "stop_token_ids": [token_of("ump")]}
    longer = engine.generate(input_ids=near_the_end, sampling_params=params)
    assert longer["meta_info"]["finish_reason"] == {"type": "length", "length": 10}
    assert EOS not in longer["output_ids"]
    stopped = engine.generate("The", {**GREEDY, "min_new_tokens": 50, "stop": "brown"})
    assert stopped["text"] == " quick "


def test_an_abort_in_the_middle_of_a_stream_keeps_what_was_said(engine: Engine) -> None:
    chunks = engine.generate("The", ENDLESS, stream=True, rid="cut", return_logprob=True)
    first = next(chunks)
    assert engine.abort_request("cut")["num_aborted"] == 1
    *_, last = chunks
    meta = last["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert meta["finish_reason"]["message"] == "Aborted by /abort_request"
    assert len(last["output_ids"]) == meta["completion_tokens"] == len(meta["output_token_logprobs"])
    assert last["output_ids"][: len(first["output_ids"])] == first["output_ids"]
    assert last["text"] == decode(last["output_ids"])
