"""Outputs keep to their grammars, whatever happens to their requests meanwhile."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from ebbtide import Engine
from ebbtide.srt.errors import RequestRejected

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "ok": {"enum": [True, "perhaps"]}},
    "required": ["n", "ok"],
    "additionalProperties": False,
}
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<a>",
        "content": {"type": "regex", "pattern": "[xy]{20}"},
        "end": "</a>",
    },
}
LONG = "[a-f]{60}"


def sampled(engine: Engine, **params: Any) -> Any:
    return engine.generate(input_ids=[3, 1, 4], sampling_params={"max_new_tokens": 128, "n": 3, **params})


@pytest.mark.parametrize(
    ("params", "pattern"),
    [
        ({"json_schema": SCHEMA, "temperature": 3.0}, None),
        ({"regex": "[a-f]{3}-[0-9]{4}"}, "[a-f]{3}-[0-9]{4}"),
        ({"structural_tag": TAG}, "<a>[xy]{20}</a>"),
    ],
)
def test_outputs_keep_to_their_grammar(
    sampling_engine: Engine, params: dict[str, Any], pattern: str | None
) -> None:
    for output in sampled(sampling_engine, **params):
        if pattern is None:
            assert output["meta_info"]["finish_reason"]["type"] == "stop"
            assert set(json.loads(output["text"])) == {"n", "ok"}
        else:
            assert re.fullmatch(pattern, output["text"]), output["text"]


def test_parameters_that_leave_no_token_are_refused_and_disturb_nobody(sampling_engine: Engine) -> None:
    with pytest.raises(RequestRejected, match="leave no token that may come here") as refused:
        sampled(sampling_engine, regex="a+", allowed_token_ids=[3], n=1)
    assert refused.value.status == 400
    assert sampled(sampling_engine, regex="[a-f]{3}", n=1)["text"]


def test_a_grammar_follows_the_tokens_through_updates_retraction_and_parking(
    sampling_engine: Engine, checkpoint_a: Path
) -> None:
    engine = sampling_engine

    async def run() -> None:
        async def generate(index: int) -> Any:
            params = {"regex": LONG, "max_new_tokens": 128, "sampling_seed": index}
            return await engine.async_generate(input_ids=[index, 1, 4], sampling_params=params)

        plain = asyncio.create_task(
            engine.async_generate(
                input_ids=[9], sampling_params={"max_new_tokens": 200, "ignore_eos": True, "sampling_seed": 1}
            )
        )
        before = [await generate(index) for index in range(2)]
        again = [asyncio.create_task(generate(index)) for index in range(2)]
        await asyncio.sleep(0)
        await engine.async_pause_generation("retract")
        await engine.async_continue_generation()
        await engine.async_release_memory_occupation(["kv_cache"], preserve="live")
        await engine.async_resume_memory_occupation(["kv_cache"])
        await engine.async_update_weights_from_disk(
            str(checkpoint_a), pause_mode="in_place", flush_cache=False
        )
        for first, task in zip(before, again, strict=True):
            second = await task
            assert re.fullmatch(LONG, second["text"])
            assert second["text"] == first["text"]
        assert len((await plain)["output_ids"]) == 200

    asyncio.run(run())
