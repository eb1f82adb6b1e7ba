"""Answers, streams and errors of `/v1/messages`. Source: https://docs.claude.com/en/api/messages-streaming."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType, to_builtins

from ebbtide.srt.entrypoints.openai.answers import Piece
from ebbtide.srt.entrypoints.openai.chat_dialects import AnswerBlock, BlockKind, BlockWriter, encoded
from ebbtide.srt.entrypoints.openai.protocol import Fields
from ebbtide.srt.entrypoints.openai.requests import OpenAICall
from ebbtide.srt.errors import RequestRejected

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
    """`input_tokens`: of the prompt, without those that the prefix cache had."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int


class MessageBody(Struct, kw_only=True):
    """An answer of `/v1/messages`. `metadata`: the versions of its weights, as in a chat."""

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

    def __init__(self, call: OpenAICall, ignored: list[str]) -> None:
        super().__init__(call)
        self._call = call
        self._ignored = ignored

    def answer(self, piece: Piece) -> MessageBody:
        """Raises RequestRejected: 503, the request was aborted."""
        message = self._message(piece)
        message.content = [_content(block, block.text) for block in self.blocks]
        message.stop_reason = self._stop_reason(piece)
        message.stop_sequence = _stop_sequence(piece)
        if not isinstance(piece.metadata, UnsetType):
            message.metadata = piece.metadata.as_texts()
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
        """Raises RequestRejected: 503, the request was aborted."""
        delta = {"stop_reason": self._stop_reason(piece), "stop_sequence": _stop_sequence(piece)}
        event: Fields = {"type": "message_delta", "delta": delta, "usage": _usage(piece)}
        if not isinstance(piece.metadata, UnsetType):
            event["metadata"] = piece.metadata.as_texts()
        return [event, {"type": "message_stop"}]

    def failure(self, error: Mapping[str, Any]) -> bytes:
        return encoded([error_body(error["message"], error["code"])])

    def _message(self, piece: Piece) -> MessageBody:
        call = self._call
        ignored = self._ignored or UNSET
        return MessageBody(
            id=call.id, model=call.model, content=[], usage=_usage(piece), ignored_fields=ignored
        )

    def _stop_reason(self, piece: Piece) -> StopReason:
        assert piece.finish is not None, "it has ended"
        if piece.finish_reason in ("abort", "stale"):
            # There is no word for it: half an answer is not to be taken for a whole one.
            message = piece.finish.get("message") or "the request was aborted"
            raise RequestRejected(message, piece.finish.get("status_code") or 503)
        if piece.finish_reason == "length":
            return "max_tokens"
        if any(block.kind is BlockKind.CALL for block in self.blocks):
            return "tool_use"
        return "end_turn" if _stop_sequence(piece) is None else "stop_sequence"


# By kind of block: the type of a delta, and the name of what is added.
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
    """A refusal or failure, in Anthropic's shape."""

    type: Literal["error"] = "error"
    error: ErrorObject


def error_body(message: str, status: int) -> Fields:
    """A refusal or failure, as it is sent."""
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    body: Fields = to_builtins(ErrorResponse(error=ErrorObject(type=kind, message=message)))
    return body
