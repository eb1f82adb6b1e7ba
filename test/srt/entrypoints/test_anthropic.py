"""Anthropic's Messages, through Anthropic's own client: what becomes of a request, an answer and a stream."""

import asyncio
import json
from typing import Any

import httpx2
import pytest
from fixtures.dialects import CALL, LENGTH, STOP, Scripted, call_of
from pydantic import TypeAdapter

from ebbtide.srt.entrypoints.anthropic import MessageWriter, as_chat, ignored_fields, with_own_errors
from ebbtide.srt.entrypoints.http_answers import AnswerWriter, error_answer
from ebbtide.srt.entrypoints.openai.requests import OpenAICall
from ebbtide.srt.errors import RequestRejected

TOOL: Any = {"name": "f", "description": "F", "input_schema": {"type": "object"}}
USER: Any = {"role": "user", "content": "hi"}


def make(fields: dict[str, Any], *, has_reasoning: bool = True) -> tuple[OpenAICall, AnswerWriter]:
    call = call_of(as_chat(fields, has_reasoning=has_reasoning))
    return call, MessageWriter(call, ignored_fields(fields))


@pytest.fixture
def server() -> Scripted:
    return Scripted(make, httpx2)


class Asked:
    """Anthropic's client, and the fields that each of its requests needs."""

    def __init__(self, server: Scripted, client_class: Any) -> None:
        self.client = client_class(
            base_url="http://tide", api_key="key", http_client=server.client, max_retries=0
        )

    def create(self, **fields: Any) -> Any:
        return self.client.messages.create(**{"model": "tide", "max_tokens": 9, "messages": [USER], **fields})


@pytest.fixture
def client(server: Scripted, anthropic: Any) -> Asked:
    return Asked(server, anthropic.Anthropic)


def test_a_message_is_answered(server: Scripted, client: Asked, anthropic: Any) -> None:
    answer = client.create(system=[{"type": "text", "text": "be kind"}], extra_body={"top_k": 3})
    assert server.prompt == "system=be kind;user=hi;"
    assert server.params | {"top_k": 3, "max_new_tokens": 9} == server.params
    anthropic.types.Message.model_validate(json.loads(server.bodies[-1]))
    assert [(block.type, block.text) for block in answer.content] == [("text", "a")]
    assert (answer.stop_reason, answer.stop_sequence, answer.role) == ("end_turn", None, "assistant")
    # What the prefix cache had is counted for itself.
    assert (answer.usage.input_tokens, answer.usage.cache_read_input_tokens) == (3, 2)
    assert answer.metadata["weight_version"] == "7"


@pytest.mark.parametrize(
    ("finish", "reason", "sequence"),
    [(LENGTH, "max_tokens", None), ({"type": "stop", "matched": "x"}, "stop_sequence", "x")],
)
def test_an_answer_says_why_it_ends(
    server: Scripted, client: Asked, finish: Any, reason: str, sequence: str | None
) -> None:
    server.finish = finish
    answer = client.create(stop_sequences=["x"])
    assert server.params["stop"] == ["x"]
    assert (answer.stop_reason, answer.stop_sequence) == (reason, sequence)


def test_blocks_are_messages_and_an_answer_can_be_sent_again(server: Scripted, client: Asked) -> None:
    server.pieces = ["<think>hm</think>So ", CALL]
    answer = client.create(tools=[TOOL], thinking={"type": "enabled", "budget_tokens": 1024})
    assert server.prompt == '[thinks True]<f {"type": "object"}>user=hi;'
    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
    assert (answer.content[2].name, answer.content[2].input) == ("f", {"x": 1})
    assert (answer.stop_reason, answer.ignored_fields) == ("tool_use", ["thinking.budget_tokens"])
    result = {"type": "tool_result", "tool_use_id": answer.content[2].id}
    parts = [{**result, "content": [{"type": "text", "text": "2"}]}, {"type": "text", "text": "and?"}]
    client.create(
        messages=[USER, {"role": "assistant", "content": answer.content}, {"role": "user", "content": parts}]
    )
    tool = f"tool=2@{answer.content[2].id}"
    assert server.prompt == f'user=hi;assistant=(hm)So !f{{"x": 1}};{tool};user=and?;'


def test_an_assistants_last_message_goes_on(server: Scripted, client: Asked) -> None:
    client.create(messages=[USER, {"role": "assistant", "content": "So"}])
    assert server.prompt == "user=hi;assistant=So"


@pytest.mark.parametrize("finish", [STOP, LENGTH])
def test_a_stream_adds_up_to_the_whole(server: Scripted, client: Asked, anthropic: Any, finish: Any) -> None:
    server.pieces, server.finish = [*"<think>hm</think>So ", *CALL, "And"], finish
    body: Any = {"model": "tide", "max_tokens": 9, "messages": [USER], "tools": [TOOL]}
    with client.client.messages.stream(**body) as stream:
        told = stream.get_final_message()
    events: TypeAdapter[Any] = TypeAdapter(anthropic.types.RawMessageStreamEvent)
    for event in server.events:
        events.validate_python(event)
    assert [block.type for block in told.content] == ["thinking", "text", "tool_use", "text"]
    assert told.content[2].input == {"x": 1}
    assert "".join(block.text for block in told.content if block.type == "text") == "So And"
    whole = client.create(tools=[TOOL])
    assert (told.stop_reason, told.usage.input_tokens) == (whole.stop_reason, whole.usage.input_tokens)
    assert told.usage.output_tokens == len(server.pieces)


@pytest.mark.parametrize("kind", ["abort", "stale"])
def test_half_an_answer_is_not_taken_for_a_whole_one(kind: str) -> None:
    meta = {"prompt_tokens": 1, "cached_tokens": 0, "completion_tokens": 1}
    output = {"text": "a", "output_ids": [1], "meta_info": {**meta, "finish_reason": {"type": kind}}}
    for answer in ("whole", "chunk"):
        _, writer = make({"max_tokens": 9, "messages": [USER]})
        with pytest.raises(RequestRejected, match="aborted") as raised:
            getattr(writer, answer)(output)
        assert raised.value.status == 503
    assert writer.failure(raised.value.body["error"]) == (
        b"event: error\n"
        b'data: {"type":"error","error":{"type":"overloaded_error","message":"the request was aborted"}}\n\n'
    )


@pytest.mark.parametrize(
    ("choice", "prompt", "must"),
    [
        ({"type": "any"}, '<f {"type": "object"}>user=hi;', True),
        (
            {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
            '<f {"type": "object"}>user=hi;',
            True,
        ),
        ({"type": "auto"}, '<f {"type": "object"}>user=hi;', False),
        ({"type": "none"}, "user=hi;", False),
    ],
)
def test_which_tools_are_called(
    server: Scripted, client: Asked, choice: dict[str, Any], prompt: str, must: bool
) -> None:
    client.create(tools=[TOOL], tool_choice=choice)
    assert (server.prompt, "json_schema" in server.params) == (prompt, must)
    if choice.get("disable_parallel_tool_use"):
        assert server.params["json_schema"]["maxItems"] == 1


def test_efforts_and_schemas(server: Scripted, client: Asked) -> None:
    schema = {"type": "json_schema", "schema": {"type": "array"}}
    client.create(output_config={"effort": "low", "format": schema}, thinking={"type": "disabled"})
    assert server.prompt == "[thinks False][effort low]user=hi;"
    assert server.params["json_schema"] == {"type": "array"}


def said(role: str, **block: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [block]}]}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": []}, "messages: at least one is needed"),
        (said("user", type="image", source={}), "got 'image'"),
        ({"messages": [{"role": "user", "content": [3]}]}, r"\$.messages\[0\].content"),
        (said("assistant", type="tool_use", input="x"), "input: expected an object, got 'x'"),
        (said("assistant", type="tool_use", id="a", name="f", input={}), "followed by its tool_result"),
        (
            said("user", type="tool_result", tool_use_id="a", content=[{"type": "image"}]),
            r"content\[0\].content\[0\]: not supported in this version: expected text, got 'image'",
        ),
        ({"system": [{"type": "image"}]}, r"system\[0\]: not supported"),
        ({"stop": ["x"]}, "stop: not supported in this version: use stop_sequences"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "got 'web_search_20250305'"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice: expected a type of auto"),
        ({"thinking": {"type": "much"}}, "thinking.type: expected enabled"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format: expected"),
    ],
)
def test_what_is_not_kept_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestRejected, match=message) as raised:
        make({"max_tokens": 9, "messages": [USER], **fields})[0].render()  # type: ignore[operator,misc]
    assert raised.value.status == 400


def test_thinking_needs_a_parser_of_reasoning() -> None:
    body = {"max_tokens": 9, "messages": [USER]}
    with pytest.raises(RequestRejected, match="--reasoning-parser"):
        make({**body, "thinking": {"type": "adaptive"}}, has_reasoning=False)
    make({**body, "thinking": {"type": "disabled"}}, has_reasoning=False)


@pytest.mark.parametrize(
    ("path", "status", "kind"),
    [
        ("/v1/messages", 400, "invalid_request_error"),
        ("/engines/a/v1/messages/count_tokens", 404, "not_found_error"),
        ("/v1/messages/", 503, "overloaded_error"),
        ("/v1/messages/batches", 500, "api_error"),
        ("/v1/chat/completions", 401, None),
        ("/v1/messages_of_others", 401, None),
    ],
)
def test_errors_have_the_shape_of_the_path(path: str, status: int, kind: str | None) -> None:
    sent: list[Any] = []

    async def script() -> None:
        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "path": path}
        await error_answer("no", status)(scope, None, with_own_errors(scope, send))  # type: ignore[arg-type]

    asyncio.run(script())
    start, body = sent
    told = json.loads(body["body"])
    assert start["status"] == status
    assert dict(start["headers"])[b"content-length"] == str(len(body["body"])).encode()
    if kind is None:
        assert told["message"] == told["error"]["message"] == "no"
    else:
        assert told == {"type": "error", "error": {"type": kind, "message": "no"}}
