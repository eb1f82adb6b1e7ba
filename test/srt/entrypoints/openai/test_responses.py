"""OpenAI's Responses, through OpenAI's own client: what becomes of a request, an answer and a stream."""

import json
from typing import Any

import httpx
import openai
import pytest
from fixtures.dialects import CALL, LENGTH, STOP, Scripted, call_of
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from ebbtide.srt.entrypoints.http_answers import AnswerWriter
from ebbtide.srt.entrypoints.openai.requests import OpenAICall
from ebbtide.srt.entrypoints.openai.responses import ResponseWriter, as_chat, ignored_fields

TOOL: Any = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
USER: Any = {"role": "user", "content": "hi"}
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def make(fields: dict[str, Any]) -> tuple[OpenAICall, AnswerWriter]:
    asked, chat = as_chat(fields)
    call = call_of(chat)
    return call, ResponseWriter(call, asked, ignored_fields(fields))


@pytest.fixture
def server() -> Scripted:
    return Scripted(make, httpx)


@pytest.fixture
def client(server: Scripted) -> openai.OpenAI:
    return openai.OpenAI(base_url="http://tide/v1", api_key="key", http_client=server.client, max_retries=0)


def test_a_text_is_what_the_user_says(server: Scripted, client: openai.OpenAI) -> None:
    answer = client.responses.create(input="hi", temperature=0.5, max_output_tokens=9, metadata={"k": "v"})
    assert server.prompt == "user=hi;"
    assert server.params | {"temperature": 0.5, "max_new_tokens": 9} == server.params
    Response.model_validate(json.loads(server.bodies[-1]))
    assert (answer.output_text, answer.status, answer.temperature) == ("a", "completed", 0.5)
    assert answer.metadata is not None
    assert (answer.metadata["k"], answer.metadata["weight_version"]) == ("v", "7")
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.input_tokens_details.cached_tokens) == (5, 2)
    assert answer.usage.total_tokens == 6


def test_items_are_messages_and_those_of_one_turn_are_one_message(
    server: Scripted, client: openai.OpenAI
) -> None:
    turn: Any = [
        {"role": "developer", "content": "short"},
        USER,
        {
            "type": "reasoning",
            "id": "x",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
        },
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"x": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "2"}]},
    ]
    client.responses.create(input=turn, instructions="be kind", tools=[TOOL])
    assert server.prompt == (
        '<f {"type": "object"}>system=be kind\n\nshort;user=hi;assistant=(hm)So!f{"x": 1};tool=2@c;'
    )


def test_what_an_answer_says_can_be_sent_again(server: Scripted, client: openai.OpenAI) -> None:
    server.pieces = ["<think>hm</think>So ", CALL]
    answer = client.responses.create(input=[USER], tools=[TOOL])
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
    call = answer.output[2]
    assert call.type == "function_call"
    assert (call.name, call.arguments, call.status) == ("f", '{"x": 1}', "completed")
    said: Any = [item.to_dict() for item in answer.output]
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
    client.responses.create(input=[USER, *said, output])
    assert server.prompt == f'user=hi;assistant=(hm)So !f{{"x": 1}};tool=2@{call.call_id};'


@pytest.mark.parametrize("finish", [STOP, LENGTH, {"type": "abort", "message": "gone"}])
def test_a_stream_adds_up_to_the_whole(server: Scripted, client: openai.OpenAI, finish: Any) -> None:
    server.pieces, server.finish = [*"<think>hm</think>So ", *CALL, "And"], finish
    body: Any = {"input": [USER], "tools": [TOOL], "store": False}
    final = list(client.responses.create(stream=True, **body))[-1]
    assert final.type == f"response.{final.response.status}"  # type: ignore[union-attr]
    told: Any = final.response  # type: ignore[union-attr]
    assert [item.type for item in told.output] == ["reasoning", "message", "function_call", "message"]
    assert told.output_text == "So And"
    whole: Any = client.responses.create(**body)
    assert (told.status, told.error, told.incomplete_details) == (
        whole.status,
        whole.error,
        whole.incomplete_details,
    )
    assert told.status == {"stop": "completed", "length": "incomplete", "abort": "failed"}[finish["type"]]


def test_the_events_of_a_stream_are_openais(server: Scripted, client: openai.OpenAI) -> None:
    server.pieces = [*"<think>hm</think>So", CALL]
    with client.responses.stream(model="tide", input=[USER], tools=[TOOL]) as stream:
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    events = server.events
    for number, event in enumerate(events):
        EVENTS.validate_python(event)
        assert event["sequence_number"] == number
    deltas: dict[int, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            deltas[event["output_index"]] = deltas.get(event["output_index"], "") + event["delta"]
    assert deltas == {0: "hm", 1: "So", 2: '{"x": 1}'}
    dones = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert dones == events[-1]["response"]["output"]


def test_a_stream_that_fails_says_so_and_keeps_what_it_has() -> None:
    _, writer = make({"input": "hi"})
    sent = writer.failure({"message": "gone", "code": 503})
    kinds = [json.loads(line[6:])["type"] for line in sent.decode().split("\n") if line.startswith("data: ")]
    assert kinds == ["response.created", "response.in_progress", "response.failed"]


@pytest.mark.parametrize(
    ("fields", "params"),
    [
        ({"text": {"format": {"type": "json_object"}}}, {"json_schema": '{"type": "object"}'}),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "array"}}}},
            {"json_schema": {"type": "array"}},
        ),
        ({"top_k": 3, "seed": 5, "stop": ["x"]}, {"top_k": 3, "sampling_seed": 5, "stop": ["x"]}),
    ],
)
def test_what_an_answer_keeps_to(fields: dict[str, Any], params: dict[str, Any]) -> None:
    call, _ = make({"input": "hi", **fields})
    given = call.generate["sampling_params"]
    assert {name: given[name] for name in params} == params


def test_tools_that_must_be_called_and_efforts(server: Scripted, client: openai.OpenAI) -> None:
    client.responses.create(input="hi", tools=[TOOL], tool_choice={"type": "function", "name": "f"})
    assert "json_schema" in server.params
    client.responses.create(input="hi", reasoning={"effort": "low", "summary": "auto"})
    assert server.prompt == "[effort low]user=hi;"
    client.responses.create(input="hi", reasoning={"effort": "none"})
    assert server.prompt == "[thinks False][effort none]user=hi;"


def test_what_has_no_effect_is_named(server: Scripted, client: openai.OpenAI) -> None:
    answer: Any = client.responses.create(
        input="hi", prompt_cache_key="k", include=["reasoning.encrypted_content"]
    )
    assert answer.ignored_fields == ["prompt_cache_key"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"store": True}, "store: not supported"),
        ({"include": ["file_search_call.results"]}, "include: not supported"),
        ({"truncation": "auto"}, r"\$.truncation"),
        ({"n": 2}, "n: expected null or 1"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary: expected"),
        ({"text": {"verbosity": "low"}}, "text.verbosity: expected"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format: expected"),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\]: not supported in this version.*'web_search'"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\].name: expected a text, got None"),
        ({"tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice: expected"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            r"input\[0\].content\[0\]: not supported in this version.*'input_image'",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": 3}]}]}, "of another type"),
        (
            {"input": [{"role": "user", "content": {"a": 1}}]},
            r"input\[0\].content: expected a text or a list",
        ),
        ({"input": [{"role": "king", "content": "x"}]}, r"input\[0\].role: expected user.*'king'"),
        ({"input": [{"type": ["message"]}]}, r"input\[0\]: not supported"),
        ({"input": [{"type": "function_call", "call_id": 3}]}, r"input\[0\].call_id: expected a text, got 3"),
        ({"input": []}, "messages: at least one is needed"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs: expected an object"),
    ],
)
def test_what_is_not_kept_is_refused_by_name(
    client: openai.OpenAI, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        client.responses.create(input="hi", extra_body=fields)
