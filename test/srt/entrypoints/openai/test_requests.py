"""OpenAI's requests and answers without a server: chat templates, streams, engines without a tokenizer."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fixtures.checkpoints import make_tokenizer

from ebbtide.srt.entrypoints.openai.answers import CompletionWriter, Piece, new_pieces, write_answer
from ebbtide.srt.entrypoints.openai.chat_template import (
    ChatTemplate,
    read_chat_template,
    recommended_sampling,
)
from ebbtide.srt.entrypoints.openai.requests import chat_call, completion_call
from ebbtide.srt.errors import ConfigurationError, RequestRejected
from ebbtide.srt.managers.text.tokenizer import Tokenizer

TOOL_TEMPLATE = (
    "{% if mood is defined %}[{{ mood }}]{% endif %}"
    "{% for tool in tools or [] %}<{{ tool.function.name }}>{% endfor %}"
    "{% for m in messages %}{{ m.role }}={{ m.content }}"
    "{% for call in m.tool_calls or [] %}({{ call.function.arguments | tojson }}){% endfor %};{% endfor %}"
)


def template(text: str | None = TOOL_TEMPLATE) -> ChatTemplate:
    return ChatTemplate(Tokenizer(make_tokenizer()), text)


def render(fields: dict[str, Any], text: str | None = TOOL_TEMPLATE) -> str:
    call = chat_call(fields, "tide", template(text), {})
    return bytes(call.generate["input_ids"]).decode()


USER = {"role": "user", "content": "a"}


def test_the_template_sees_tools_calls_and_options() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    fields = {
        "messages": [USER, {"role": "assistant", "tool_calls": [call]}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "chat_template_kwargs": {"mood": "calm"},
    }
    assert render(fields) == '[calm]<f>user=a;assistant=({"x": 1});'


def test_arguments_that_are_no_json_reach_the_template_as_they_are() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "{x"}}
    assert render({"messages": [{"role": "assistant", "tool_calls": [call]}]}) == 'assistant=("{x");'


def test_text_parts_become_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render({"messages": [{"role": "user", "content": parts}]}) == "user=a b;"


@pytest.mark.parametrize(
    "text", ["{{ raise_exception('no') }}", "{{ messages[7].role }}", "{% for %}", "{{ 1 / 0 }}"]
)
def test_what_a_template_does_not_take_is_refused(text: str) -> None:
    with pytest.raises(RequestRejected, match="chat template") as raised:
        render({"messages": [USER]}, text)
    assert raised.value.status == 400


def test_a_tokenizer_without_a_template_needs_one() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(RequestRejected, match="--chat-template"):
        chat_call({"messages": [USER]}, "tide", ChatTemplate(Tokenizer(tokenizer), None), {})


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "add_generation_prompt", "tools", "self"])
def test_a_client_cannot_choose_what_is_rendered(name: str) -> None:
    with pytest.raises(RequestRejected, match=f"{name} cannot be set"):
        render({"messages": [USER], "chat_template_kwargs": {name: "x"}})


def test_a_chat_template_is_a_text_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages }}")
    assert read_chat_template(None) is None
    assert read_chat_template("{% if x %}") == "{% if x %}"
    assert read_chat_template(str(file)) == "{{ messages }}"
    with pytest.raises(ConfigurationError, match="chat_template: expected a file or a Jinja template"):
        read_chat_template("chatml")


def test_recommended_parameters_are_those_that_make_sense(tmp_path: Path) -> None:
    assert recommended_sampling(str(tmp_path)) == {}
    given = {"temperature": 0.6, "top_k": 0, "top_p": 7, "repetition_penalty": None, "max_length": 20}
    (tmp_path / "generation_config.json").write_bytes(msgspec.json.encode(given))
    assert recommended_sampling(str(tmp_path)) == {"temperature": 0.6}
    fields = {"messages": [USER], "top_p": 0.5}
    call = chat_call(fields, "tide", template(), {"temperature": 0.6, "top_p": 0.9})
    params = call.generate["sampling_params"]
    assert params == {"temperature": 0.6, "top_p": 0.5, "max_new_tokens": None}


def test_without_a_tokenizer_there_is_no_chat_but_completions_of_ids() -> None:
    with pytest.raises(RequestRejected, match="needs a tokenizer"):
        chat_call({"messages": [USER], "input_ids": [1]}, "tide", None, {})
    call = completion_call({"prompt": [1, 2], "logprobs": 1, "echo": True}, "tide", None)
    assert call.generate["return_text_in_logprobs"] is False
    output = {"output_ids": [3], "meta_info": meta([3], finish={"type": "stop", "matched": 3})}
    output["meta_info"] |= {"input_token_logprobs": [[None, 1, None], [-1.0, 2, None]]}
    output["meta_info"] |= {"input_top_logprobs": [None, [[-0.5, 9, None]]]}
    output["meta_info"] |= {"output_top_logprobs": [[[-0.25, 3, None]]]}
    answer = write_answer(CompletionWriter(call), call, output)
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason, choice.matched_stop) == ("", "stop", 3)
    assert choice.logprobs.tokens == ["token_id:1", "token_id:2", "token_id:3"]
    assert choice.logprobs.top_logprobs == [None, {"token_id:9": -0.5}, {"token_id:3": -0.25}]


def meta(ids: list[int], finish: Any = None) -> dict[str, Any]:
    return {
        "finish_reason": finish,
        "prompt_tokens": 2,
        "completion_tokens": len(ids),
        "cached_tokens": 1,
        "weight_version": "7",
        "weight_versions": [],
        "kv_weight_versions": ["7"],
        "output_token_logprobs": [(-float(token), token, None) for token in ids],
    }


def chunks_of(texts: list[str], ids: list[list[int]], *, is_incremental: bool) -> list[dict[str, Any]]:
    """The chunks of one output, as a server in either mode sends them."""
    chunks = []
    for end in range(1, len(texts) + 1):
        start = end - 1 if is_incremental else 0
        new_ids = [token for step in ids[start:end] for token in step]
        chunks.append({"text": "".join(texts[start:end]), "output_ids": new_ids, "meta_info": meta(new_ids)})
    return chunks


@pytest.mark.parametrize("is_incremental", [False, True])
def test_pieces_are_what_is_new_in_either_kind_of_stream(is_incremental: bool) -> None:
    texts = [["a", "", "é"], ["x", "yz", ""]]
    ids = [[[1], [2], [3, 4]], [[5], [6, 7], [8]]]
    first, second = (
        chunks_of(text, token_ids, is_incremental=is_incremental)
        for text, token_ids in zip(texts, ids, strict=True)
    )

    async def chunks() -> AsyncIterator[dict[str, Any]]:
        for one, other in zip(first, second, strict=True):
            yield {**one, "index": 0}
            yield {**other, "index": 1}

    async def collect() -> list[Piece]:
        return [piece async for piece in new_pieces(chunks(), is_incremental=is_incremental)]

    pieces = asyncio.run(collect())
    for index in (0, 1):
        own = [piece for piece in pieces if piece.index == index]
        assert [piece.text for piece in own] == texts[index]
        assert [piece.token_ids for piece in own] == ids[index]
        assert [[triple[1] for triple in piece.logprobs] for piece in own] == ids[index]
        assert [piece.is_first for piece in own] == [True, False, False]
