"""Anthropic's Messages API: `/v1/messages` as chats; its requests, answers, streams, errors and routes.

Source: https://docs.claude.com/en/api/messages and messages-streaming.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType, to_builtins
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Scope, Send

from ebbtide.srt.entrypoints.http_answers import Json
from ebbtide.srt.entrypoints.openai.answers import Piece
from ebbtide.srt.entrypoints.openai.chat_dialects import (
    AnswerBlock,
    BlockKind,
    BlockWriter,
    ChatBuilder,
    encoded,
    not_known,
    passed_on,
    shown,
    template_options,
    text_field,
    text_in,
    unsupported,
)
from ebbtide.srt.entrypoints.openai.protocol import Fields, parse
from ebbtide.srt.entrypoints.openai.routes import Calls
from ebbtide.srt.entrypoints.openai.shared_fields import refuse_fields
from ebbtide.srt.entrypoints.routing import route
from ebbtide.srt.entrypoints.service import EngineService
from ebbtide.srt.errors import RequestRejected

_UNSUPPORTED: Final[Mapping[str, str]] = {
    "container": "tools are called by the client",
    "context_management": "messages hold the whole conversation",
    "mcp_servers": "tools are called by the client",
    "output_format": "use output_config.format instead",
    "stop": "use stop_sequences instead",
}
# Known fields that have no effect, and are not listed as ignored (the budget is, see `ignored_fields`).
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
    """The fields that make the prompt. If the last message is an assistant's, the answer continues it."""

    model: str | None = None
    messages: list[InputMessage]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Sampling parameters and fields of `/generate` mean the same as in chats.

    `thinking.budget_tokens` has no effect: `max_tokens` limits reasoning and answer together.
    """

    max_tokens: int
    stop_sequences: list[str] | None = None
    metadata: dict[str, Any] | None = None
    stream: bool | None = None


def as_chat(fields: Mapping[str, Any], *, has_reasoning: bool) -> Fields:
    """Turn a request of `/v1/messages` into the fields of a chat.

    `has_reasoning`: whether the server has a reasoning parser. Raises RequestRejected: 400.
    """
    request = parse(MessagesRequest, fields)
    own = {
        "max_completion_tokens": request.max_tokens,
        "stop": request.stop_sequences or None,
        **passed_on(fields),
    }
    return own | prompt_fields(request, fields, has_reasoning=has_reasoning)


def prompt_fields(request: CountTokensRequest, fields: Mapping[str, Any], *, has_reasoning: bool) -> Fields:
    """The fields of the chat that make the prompt. Raises RequestRejected: 400."""
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
    """The names of fields that have no effect."""
    ignored = not_known(fields, {*MessagesRequest.__struct_fields__, *_UNSUPPORTED, *_WITHOUT_EFFECT})
    thinking = fields.get("thinking") or {}
    return [*ignored, *(["thinking.budget_tokens"] if "budget_tokens" in thinking else [])]


def _messages(request: CountTokensRequest) -> list[Fields]:
    conversation = ChatBuilder()
    if request.system:
        conversation.write("system", text_in(request.system, "system", ("text",)))
    for index, message in enumerate(request.messages):
        where = f"messages[{index}].content"
        if isinstance(message.content, str):
            conversation.write(message.role, message.content)
        for number, block in enumerate(() if isinstance(message.content, str) else message.content):
            _add_block(conversation, message.role, block, f"{where}[{number}]")
    last = conversation.messages[-1] if conversation.messages else {}
    if "tool_calls" in last:
        raise RequestRejected("messages: expected the last tool_use to be followed by its tool_result")
    return conversation.messages


def _add_block(conversation: ChatBuilder, role: str, block: Fields, where: str) -> None:
    kind = block.get("type")
    if kind not in _BLOCKS[role]:
        raise unsupported(where, block, _BLOCKS[role])
    match kind:
        case "text":
            conversation.write(role, text_field(block, "text", where))
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
    """Whether the answer begins with reasoning; None: the chat template's default."""
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
    """The choice in a chat's form, and whether there may be at most one call."""
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


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextBlock(Struct, tag="text", tag_field="type"):
    text: str
    citations: None = None


class ThinkingBlock(Struct, tag="thinking", tag_field="type"):
    thinking: str
    signature: str = ""


class ToolUseBlock(Struct, tag="tool_use", tag_field="type"):
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(Struct, kw_only=True):
    """`input_tokens`: tokens of the prompt that were not in the prefix cache."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int


class MessageBody(Struct, kw_only=True):
    """An answer of `/v1/messages`. `metadata`: the weight versions, as in a chat."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    metadata: dict[str, str] | UnsetType = UNSET
    ignored_fields: list[str] | UnsetType = UNSET


class TokenCount(Struct, kw_only=True):
    """An answer of `/v1/messages/count_tokens`."""

    input_tokens: int


class MessageWriter(BlockWriter):
    """Writes answers of `/v1/messages`, and the events of its streams."""

    def answer(self, piece: Piece) -> MessageBody:
        """Build the body. Raises RequestRejected: 503, or the abort's status; the request was aborted."""
        message = self._message(piece)
        message.content = [_content(block, block.text) for block in self.blocks]
        message.stop_reason = self._stop_reason(piece)
        message.stop_sequence = _stop_sequence(piece)
        message.metadata = piece.metadata
        return message

    def begin(self, piece: Piece) -> list[Fields]:
        return [{"type": "message_start", "message": self._message(piece)}]

    def opened(self, block: AnswerBlock) -> list[Fields]:
        content = _content(block, "")
        return [{"type": "content_block_start", "index": block.index, "content_block": content}]

    def grown(self, block: AnswerBlock, text: str) -> list[Fields]:
        kind, name = _DELTAS[block.kind]
        delta = {"type": kind, name: text}
        return [{"type": "content_block_delta", "index": block.index, "delta": delta}]

    def closed(self, block: AnswerBlock) -> list[Fields]:
        return [{"type": "content_block_stop", "index": block.index}]

    def finish(self, piece: Piece) -> list[Fields]:
        """The last events. Raises RequestRejected: 503, or the abort's status; the request was aborted."""
        delta = {"stop_reason": self._stop_reason(piece), "stop_sequence": _stop_sequence(piece)}
        event = {"type": "message_delta", "delta": delta, "usage": _usage(piece), "metadata": piece.metadata}
        return [event, {"type": "message_stop"}]

    def failure(self, error: Mapping[str, Any]) -> bytes:
        return encoded([error_body(error["message"], error["code"])])

    def _message(self, piece: Piece) -> MessageBody:
        call, usage = self._call, _usage(piece)
        return MessageBody(
            id=call.id, model=call.model, content=[], usage=usage, ignored_fields=self._ignored
        )

    def _stop_reason(self, piece: Piece) -> StopReason:
        assert piece.finish is not None, "it has ended"
        if piece.finish_reason in ("abort", "stale"):
            # Anthropic has no stop reason for this; clients must not take a partial answer for a whole one.
            message = piece.finish.get("message") or "the request was aborted"
            raise RequestRejected(message, piece.finish.get("status_code") or 503)
        if piece.finish_reason == "length":
            return "max_tokens"
        if any(block.kind is BlockKind.CALL for block in self.blocks):
            return "tool_use"
        return "end_turn" if _stop_sequence(piece) is None else "stop_sequence"


# Kind of block → type of its deltas, and the name of the field with the added text.
_DELTAS: Final = {
    BlockKind.TEXT: ("text_delta", "text"),
    BlockKind.REASONING: ("thinking_delta", "thinking"),
    BlockKind.CALL: ("input_json_delta", "partial_json"),
}


def _content(block: AnswerBlock, text: str) -> TextBlock | ThinkingBlock | ToolUseBlock:
    if block.call is not None:
        return ToolUseBlock(block.call.id, block.call.function.name, msgspec.json.decode(text or "{}"))
    return ThinkingBlock(text) if block.kind is BlockKind.REASONING else TextBlock(text)


def _stop_sequence(piece: Piece) -> str | None:
    matched = piece.matched_stop
    return matched if isinstance(matched, str) else None


def _usage(piece: Piece) -> MessageUsage:
    meta = piece.meta
    return MessageUsage(
        input_tokens=meta["prompt_tokens"] - meta["cached_tokens"],
        cache_read_input_tokens=meta["cached_tokens"],
        output_tokens=meta["completion_tokens"],
    )


# --------------------------------------------------------------------------------------------------- errors

_ERROR_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}


class ErrorObject(Struct, kw_only=True):
    type: str
    message: str


class ErrorResponse(Struct, kw_only=True):
    """An error, in Anthropic's shape."""

    type: Literal["error"] = "error"
    error: ErrorObject


def error_body(message: str, status: int) -> Fields:
    """The body of an error, in Anthropic's shape."""
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    body: Fields = to_builtins(ErrorResponse(error=ErrorObject(type=kind, message=message)))
    return body


# --------------------------------------------------------------------------------------------------- routes

PATH: Final = "/v1/messages"


class AnthropicApi:
    """Serves `/v1/messages` and `/v1/messages/count_tokens`."""

    def __init__(self, service: EngineService, calls: Calls) -> None:
        self._service = service
        self._calls = calls

    @route(
        *("POST", PATH),
        tag="Anthropic",
        takes=MessagesRequest,
        reply=MessageBody,
        event="Events of Anthropic's Messages.",
        error=ErrorResponse,
    )
    async def messages(self, request: Request) -> Response:
        """Answer a conversation."""
        fields = await self._calls.fields_of(request)
        call = await self._calls.chat(
            await self._service.manager.worked_on(
                fields, lambda: as_chat(fields, has_reasoning=self._has_reasoning)
            )
        )
        return await self._calls.answer(request, call, MessageWriter(call, ignored_fields(fields)))

    @route(
        *("POST", f"{PATH}/count_tokens"),
        tag="Anthropic",
        takes=CountTokensRequest,
        reply=TokenCount,
        error=ErrorResponse,
    )
    async def count_tokens(self, request: Request) -> Response:
        """Count the tokens of a conversation."""
        fields = await self._calls.fields_of(request)
        asked = parse(CountTokensRequest, fields)
        call = await self._calls.chat(prompt_fields(asked, fields, has_reasoning=self._has_reasoning))
        async with self._service.models.held(call.model):
            tokens = await self._service.manager.in_thread(lambda: self._calls.prompt_ids(call))
        return Json(TokenCount(input_tokens=len(tokens)))

    @property
    def _has_reasoning(self) -> bool:
        return self._service.config.server_args.reasoning_parser is not None


def with_own_errors(scope: Scope, send: Send) -> Send:
    """Wrap `send` so that errors of Anthropic's endpoints have Anthropic's shape."""
    # A proxy may have put a prefix before the path.
    if scope["type"] != "http" or f"{PATH}/" not in f"{scope['path']}/":
        return send
    start: Message | None = None
    body = bytearray()

    async def send_own(message: Message) -> None:
        nonlocal start
        if message["type"] == "http.response.start" and message["status"] >= 400:
            start = message
            return
        if start is None:
            await send(message)
            return
        body.extend(message.get("body", b""))
        if message.get("more_body", False):
            return
        error: dict[str, Any] = msgspec.json.decode(body or b"{}")
        own = msgspec.json.encode(error_body(str(error.get("message", "")), start["status"])) + b"\n"
        headers = [(name, value) for name, value in start["headers"] if name != b"content-length"]
        headers.append((b"content-length", str(len(own)).encode()))
        await send({**start, "headers": headers})
        await send({**message, "body": own})

    return send_own
