"""Text in, text out, on real processes: a model that says one text by heart, so every answer is known."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fixtures.gpu_device import DEVICE
from fixtures.scripts import EOS, make_script_checkpoint, script_ids

from ebbtide import Engine

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 100}
PROMPT, *REST = script_ids()
# What the model says after "The", special tokens left out.
SAID = " quick brown fox jumps over the lazy dog🎉é好ж!"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    checkpoint = make_script_checkpoint(tmp_path_factory.mktemp("script"))
    with Engine(model_path=str(checkpoint), max_total_tokens=8192, **DEVICE.server_args) as engine:
        yield engine


def test_text_and_its_tokens_are_the_same_prompt(engine: Engine) -> None:
    by_text = engine.generate("The", GREEDY)
    assert (by_text["text"], by_text["output_ids"]) == (SAID, REST)
    assert by_text["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}
    assert by_text["meta_info"]["completion_tokens"] == len(REST)
    assert by_text["meta_info"]["prompt_tokens"] == 1
    by_ids = engine.generate(input_ids=[PROMPT], sampling_params=GREEDY, return_prompt_token_ids=True)
    assert (by_ids["text"], by_ids["output_ids"], by_ids["prompt_token_ids"]) == (SAID, REST, [PROMPT])


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
