"""OpenAI's Responses as chats: the bodies of `/v1/responses`.

Source: https://platform.openai.com/docs/api-reference/responses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from msgspec import Struct

from ebbtide.srt.entrypoints.openai.conversation import (
    Conversation,
    not_known,
    passed_on,
    shown,
    template_options,
    text_field,
    text_in,
    unsupported,
)
from ebbtide.srt.entrypoints.openai.protocol import Fields, parse
from ebbtide.srt.entrypoints.openai.unsupported_fields import refuse_fields
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.api.generate_fields import said

_NOT_STORED: Final = "nothing is stored: input holds the whole conversation"
_UNSUPPORTED: Final[Mapping[str, str]] = {
    "background": "answers are given at once, or streamed",
    "conversation": _NOT_STORED,
    "previous_response_id": _NOT_STORED,
    "prompt": "instructions and input say what is asked",
    "store": _NOT_STORED,
}
_TEXTS: Final = ("input_text", "output_text", "text")
_ITEMS: Final = ("message", "function_call", "function_call_output", "reasoning")


class ResponsesRequest(Struct, kw_only=True):
    """`input`: a text, or items: messages with text, calls of functions, their outputs, and reasoning.

    Sampling parameters and fields of `/generate` that chats take mean here what they mean there.
    `include` may hold `reasoning.encrypted_content`: reasoning comes back as it is, and can be sent again.
    """

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    include: list[str] | None = None
    truncation: Literal["disabled"] | None = None
    top_logprobs: Literal[0] | None = None
    stream: bool | None = None
    store: Annotated[bool | None, said(enum=[False, None])] = None
    background: Annotated[bool | None, said(enum=[False, None])] = None


def as_chat(fields: Mapping[str, Any]) -> tuple[ResponsesRequest, Fields]:
    """The request, and the fields of the chat that it is.

    Raises RequestRejected: 400.
    """
    refuse_fields(fields, _UNSUPPORTED)
    request = parse(ResponsesRequest, fields)
    for name in request.include or ():
        if name != "reasoning.encrypted_content":
            raise RequestRejected(f"include: not supported in this version: {shown(name)}")
    reasoning = request.reasoning or {}
    for name in ("summary", "generate_summary"):
        if reasoning.get(name) not in (None, "auto"):
            raise RequestRejected(
                f"reasoning.{name}: expected null or 'auto': reasoning is returned as it is"
            )
    effort = reasoning.get("effort")
    options = template_options(fields, thinks=False if effort == "none" else None, effort=effort)
    chat = {
        **passed_on(fields),
        "messages": _messages(request),
        "max_completion_tokens": request.max_output_tokens,
        "tools": [_tool(tool, f"tools[{index}]") for index, tool in enumerate(request.tools or ())],
        "tool_choice": _tool_choice(request.tool_choice),
        "parallel_tool_calls": request.parallel_tool_calls,
        "response_format": _response_format(request.text or {}),
        "chat_template_kwargs": options,
    }
    return request, chat


def ignored_fields(fields: Mapping[str, Any]) -> list[str]:
    """The names of those that have no effect."""
    return not_known(fields, {*ResponsesRequest.__struct_fields__, *_UNSUPPORTED})


def _messages(request: ResponsesRequest) -> list[Fields]:
    conversation = Conversation()
    if request.instructions:
        conversation.system(request.instructions)
    if isinstance(request.input, str):
        conversation.add("user", request.input)
        return conversation.messages
    for index, item in enumerate(request.input):
        _add_item(conversation, item, f"input[{index}]")
    return conversation.messages


def _add_item(conversation: Conversation, item: Fields, where: str) -> None:
    match item.get("type", "message"):
        case "message":
            text = text_in(item.get("content"), f"{where}.content", _TEXTS)
            match item.get("role"):
                case "assistant":
                    conversation.say(text)
                case "system" | "developer":
                    conversation.system(text)
                case "user":
                    conversation.add("user", text)
                case role:
                    raise RequestRejected(
                        f"{where}.role: expected user, assistant, system or developer, got {shown(role)}"
                    )
        case "function_call":
            conversation.call(*(text_field(item, name, where) for name in ("call_id", "name", "arguments")))
        case "function_call_output":
            output = text_in(item.get("output"), f"{where}.output", _TEXTS)
            conversation.add("tool", output, tool_call_id=text_field(item, "call_id", where))
        case "reasoning":
            # What OpenAI's own models have thought comes without its text.
            conversation.think(text_in(item.get("content"), f"{where}.content", ("reasoning_text",)))
        case _:
            raise unsupported(where, item, _ITEMS)


def _tool(tool: Fields, where: str) -> Fields:
    if tool.get("type") != "function":
        raise unsupported(where, tool, ("function",))
    named = {"name": text_field(tool, "name", where)}
    given = {name: tool[name] for name in ("description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": named | given}


def _tool_choice(choice: Any) -> Any:
    match choice:
        case {"type": "function", "name": str() as name}:
            return {"type": "function", "function": {"name": name}}
        case None | str():
            return choice
    raise RequestRejected(
        "tool_choice: expected null, 'none', 'auto', 'required' or a function by its name, got "
        f"{str(choice)[:200]}"
    )


def _response_format(text: Mapping[str, Any]) -> Any:
    if text.get("verbosity") not in (None, "medium"):
        raise RequestRejected(
            "text.verbosity: expected null or 'medium': instructions say how long answers are"
        )
    match text.get("format"):
        case {"type": "json_schema", "schema": Mapping() as schema}:
            return {"type": "json_schema", "json_schema": {"schema": schema}}
        case None | {"type": "text" | "json_object"} as known:
            return known
        case other:
            raise RequestRejected(
                "text.format: expected a type of text, json_object or json_schema (with schema), got "
                f"{str(other)[:200]}"
            )
