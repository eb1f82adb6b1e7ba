"""Anthropic's Messages as chats: the bodies of `/v1/messages`. Source: https://docs.claude.com/en/api/messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from msgspec import Struct

from ebbtide.srt.entrypoints.openai.chat_dialects import (
    ChatBuilder,
    not_known,
    passed_on,
    shown,
    template_options,
    text_field,
    text_in,
    unsupported,
)
from ebbtide.srt.entrypoints.openai.protocol import Fields, parse
from ebbtide.srt.entrypoints.openai.shared_fields import refuse_fields
from ebbtide.srt.errors import RequestRejected

_UNSUPPORTED: Final[Mapping[str, str]] = {
    "container": "tools are called by the client",
    "context_management": "messages hold the whole conversation",
    "mcp_servers": "tools are called by the client",
    "output_format": "output_config.format takes its place",
    "stop": "stop_sequences takes its place",
}
# What a server of one model has nothing to do with.
_WITHOUT_EFFECT: Final = frozenset(("cache_control", "service_tier", "thinking.budget_tokens"))
_BLOCKS: Final = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
    "system": ("text",),
}


class InputMessage(Struct, kw_only=True):
    """`content`: a text, or blocks: `text`, `tool_use`, `tool_result` and `thinking`."""

    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class CountTokensRequest(Struct, kw_only=True):
    """What becomes a prompt. An answer to messages that end with an assistant's goes on with its text."""

    model: str | None = None
    messages: list[InputMessage]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Sampling parameters and fields of `/generate` that chats take mean here what they mean there.

    `thinking.budget_tokens` is no limit: `max_tokens` counts all tokens.
    """

    max_tokens: int
    stop_sequences: list[str] | None = None
    metadata: dict[str, Any] | None = None
    stream: bool | None = None


def as_chat(fields: Mapping[str, Any], *, has_reasoning: bool) -> Fields:
    """The fields of the chat that a request of `/v1/messages` is.

    `has_reasoning`: whether the server separates reasoning from the answer. Raises RequestRejected: 400.
    """
    request = parse(MessagesRequest, fields)
    own = {
        "max_completion_tokens": request.max_tokens,
        "stop": request.stop_sequences or None,
        **passed_on(fields),
    }
    return own | prompt_fields(request, fields, has_reasoning=has_reasoning)


def prompt_fields(request: CountTokensRequest, fields: Mapping[str, Any], *, has_reasoning: bool) -> Fields:
    """Those fields of the chat that make the prompt. Raises RequestRejected: 400."""
    refuse_fields(fields, _UNSUPPORTED)
    messages = _messages(request)
    wanted = request.output_config or {}
    thinks = _thinks(request.thinking, has_reasoning=has_reasoning)
    options = template_options(fields, thinks=thinks, effort=wanted.get("effort"))
    tool_choice, one_at_most = _tool_choice(request.tool_choice or {"type": "auto"})
    return {
        "messages": messages,
        "continue_final_message": bool(messages) and messages[-1]["role"] == "assistant",
        "tools": [_tool(tool, f"tools[{index}]") for index, tool in enumerate(request.tools or ())],
        "tool_choice": tool_choice,
        "parallel_tool_calls": not one_at_most,
        "response_format": _response_format(wanted.get("format")),
        "chat_template_kwargs": options,
    }


def ignored_fields(fields: Mapping[str, Any]) -> list[str]:
    """The names of those that have no effect."""
    ignored = not_known(fields, {*MessagesRequest.__struct_fields__, *_UNSUPPORTED, *_WITHOUT_EFFECT})
    thinking = fields.get("thinking") or {}
    return [*ignored, *(["thinking.budget_tokens"] if "budget_tokens" in thinking else [])]


def _messages(request: CountTokensRequest) -> list[Fields]:
    conversation = ChatBuilder()
    if request.system:
        conversation.system(text_in(request.system, "system", ("text",)))
    for index, message in enumerate(request.messages):
        where = f"messages[{index}].content"
        if isinstance(message.content, str):
            _add_text(conversation, message.role, message.content)
        for number, block in enumerate(() if isinstance(message.content, str) else message.content):
            _add_block(conversation, message.role, block, f"{where}[{number}]")
    last = conversation.messages[-1] if conversation.messages else {}
    if "tool_calls" in last:
        raise RequestRejected("messages: expected the last tool_use to be followed by its tool_result")
    return conversation.messages


def _add_text(conversation: ChatBuilder, role: str, text: str) -> None:
    if role == "assistant":
        conversation.say(text)
    elif role == "system":
        conversation.system(text)
    else:
        conversation.add("user", text)


def _add_block(conversation: ChatBuilder, role: str, block: Fields, where: str) -> None:
    kind = block.get("type")
    if kind not in _BLOCKS[role]:
        raise unsupported(where, block, _BLOCKS[role])
    match kind:
        case "text":
            _add_text(conversation, role, text_field(block, "text", where))
        case "thinking":
            conversation.think(text_field(block, "thinking", where))
        case "tool_use":
            given = block.get("input")
            if not isinstance(given, dict):
                raise RequestRejected(f"{where}.input: expected an object, got {shown(given)}")
            conversation.call(text_field(block, "id", where), text_field(block, "name", where), given)
        case "tool_result":
            text = text_in(block.get("content"), f"{where}.content", ("text",))
            conversation.add("tool", text, tool_call_id=text_field(block, "tool_use_id", where))


def _thinks(thinking: Mapping[str, Any] | None, *, has_reasoning: bool) -> bool | None:
    """Whether the answer begins with reasoning; None: as the model has it."""
    match thinking:
        case None:
            return None
        case {"type": "disabled"}:
            return False
        case {"type": "enabled" | "adaptive"} if has_reasoning:
            return True
        case {"type": "enabled" | "adaptive"}:
            raise RequestRejected("thinking: needs a server with --reasoning-parser")
    raise RequestRejected("thinking.type: expected enabled, adaptive or disabled")


def _tool(tool: Fields, where: str) -> Fields:
    if tool.get("type") not in (None, "custom"):
        raise unsupported(where, tool, ("custom",))
    function = {"name": text_field(tool, "name", where), "parameters": tool.get("input_schema") or {}}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _tool_choice(choice: Mapping[str, Any]) -> tuple[Any, bool]:
    """The choice as a chat has it, and whether there is one call at most."""
    one_at_most = choice.get("disable_parallel_tool_use") is True
    match choice:
        case {"type": "auto" | "none" as kind}:
            return kind, one_at_most
        case {"type": "any"}:
            return "required", one_at_most
        case {"type": "tool", "name": str() as name}:
            return {"type": "function", "function": {"name": name}}, one_at_most
    raise RequestRejected(
        f"tool_choice: expected a type of auto, any, none or tool (with name), got {str(choice)[:200]}"
    )


def _response_format(wanted: Any) -> Any:
    match wanted:
        case None:
            return None
        case {"type": "json_schema", "schema": Mapping() as schema}:
            return {"type": "json_schema", "json_schema": {"schema": schema}}
    raise RequestRejected(
        f"output_config.format: expected a type of json_schema, and schema, got {str(wanted)[:200]}"
    )
