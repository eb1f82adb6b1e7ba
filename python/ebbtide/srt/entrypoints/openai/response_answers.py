"""Answers and streams of `/v1/responses`.

Source: https://platform.openai.com/docs/api-reference/responses-streaming.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from msgspec import UNSET, Struct, UnsetType, to_builtins

from ebbtide.srt.entrypoints.openai.answers import Piece
from ebbtide.srt.entrypoints.openai.blocks import (
    Added,
    Block,
    BlockKind,
    BlockWriter,
    Closed,
    Opened,
    Step,
    encoded,
)
from ebbtide.srt.entrypoints.openai.protocol import Fields
from ebbtide.srt.entrypoints.openai.requests import OpenAICall
from ebbtide.srt.entrypoints.openai.responses import ResponsesRequest

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(Struct, tag="output_text", tag_field="type"):
    text: str
    annotations: tuple[()] = ()
    logprobs: tuple[()] = ()


class ReasoningText(Struct, tag="reasoning_text", tag_field="type"):
    text: str


class MessageItem(Struct, tag="message", tag_field="type", kw_only=True):
    id: str
    role: Literal["assistant"] = "assistant"
    status: Status
    content: list[OutputText]


class CallItem(Struct, tag="function_call", tag_field="type", kw_only=True):
    """A call of a function. `arguments`: a JSON object as text."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: Status


class ReasoningItem(Struct, tag="reasoning", tag_field="type", kw_only=True):
    id: str
    summary: tuple[()] = ()
    content: list[ReasoningText]
    encrypted_content: None = None
    status: Status


class CachedTokens(Struct, kw_only=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class ReasoningTokens(Struct, kw_only=True):
    reasoning_tokens: int


class ResponseUsage(Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class IncompleteDetails(Struct, kw_only=True):
    reason: Literal["max_output_tokens"]


class ResponseError(Struct, kw_only=True):
    code: Literal["server_error"] = "server_error"
    message: str


class ResponseBody(Struct, kw_only=True):
    """An answer of `/v1/responses`. `metadata`: that of the request, and the versions of the weights."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status | Literal["failed"]
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[MessageItem | CallItem | ReasoningItem]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: dict[str, Any]
    store: bool = False
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    ignored_fields: list[str] | UnsetType = UNSET


class ResponseWriter(BlockWriter):
    """Writes answers of `/v1/responses`, and the events of its streams."""

    def __init__(self, call: OpenAICall, request: ResponsesRequest, ignored: list[str]) -> None:
        super().__init__(call)
        self._call = call
        self._request = request
        self._ignored = ignored
        self._num_events = 0

    def answer(self, piece: Piece) -> ResponseBody:
        body = self._body(_STATUS[self.finish_reason or ""])
        if body.status == "failed":
            assert piece.finish is not None, "it has ended"
            body.error = ResponseError(message=piece.finish.get("message") or "the request was aborted")
        elif body.status == "incomplete":
            body.incomplete_details = IncompleteDetails(reason="max_output_tokens")
        body.usage = _usage(piece.meta)
        if not isinstance(piece.metadata, UnsetType):
            body.metadata |= piece.metadata.as_texts()
        return body

    def begin(self, piece: Piece | None) -> list[Fields]:
        body = self._body("in_progress")
        return [self._event("created", response=body), self._event("in_progress", response=body)]

    def events(self, step: Step) -> list[Fields]:
        block, item = step.block, self._item(step.block)
        at = {"output_index": block.index}
        of_item = at | {"item_id": item.id}
        of_part = of_item if isinstance(item, CallItem) else of_item | {"content_index": 0}
        kind, logprobs = _EVENTS[block.kind]
        match step:
            case Opened():
                if isinstance(item, CallItem):
                    return [self._event("output_item.added", **at, item=item)]
                bare = {**to_builtins(item), "content": []}
                return [
                    self._event("output_item.added", **at, item=bare),
                    self._event("content_part.added", **of_part, part=item.content[0]),
                ]
            case Added(text=text):
                return [self._event(f"{kind}.delta", **of_part, delta=text, **logprobs)]
            case Closed():
                if isinstance(item, CallItem):
                    return [
                        self._event(f"{kind}.done", **of_part, name=item.name, arguments=item.arguments),
                        self._event("output_item.done", **at, item=item),
                    ]
                [content] = item.content
                return [
                    self._event(f"{kind}.done", **of_part, text=content.text, **logprobs),
                    self._event("content_part.done", **of_part, part=content),
                    self._event("output_item.done", **at, item=item),
                ]

    def finish(self, piece: Piece) -> list[Fields]:
        body = self.answer(piece)
        return [self._event(body.status, response=body)]

    def failure(self, error: Mapping[str, Any]) -> bytes:
        self.finish_reason = "abort"
        events = [] if self._num_events else self.begin(None)
        body = self._body("failed")
        body.error = ResponseError(message=error["message"])
        return encoded([*events, self._event("failed", response=body)])

    def _event(self, kind: str, **fields: Any) -> Fields:
        number, self._num_events = self._num_events, self._num_events + 1
        return {"type": f"response.{kind}", "sequence_number": number, **fields}

    def _item(self, block: Block) -> MessageItem | CallItem | ReasoningItem:
        is_cut = block is self.blocks[-1] and self.finish_reason in ("length", "abort", "stale")
        status: Status = "in_progress" if block.is_open else "incomplete" if is_cut else "completed"
        if block.call is not None:
            function = block.call.function
            return CallItem(
                id=f"fc_{self._call.id}_{block.index}",
                call_id=block.call.id,
                name=function.name,
                arguments=block.text,
                status=status,
            )
        if block.kind is BlockKind.REASONING:
            thought = [ReasoningText(block.text)]
            return ReasoningItem(id=f"rs_{self._call.id}_{block.index}", content=thought, status=status)
        text = [OutputText(block.text)]
        return MessageItem(id=f"msg_{self._call.id}_{block.index}", content=text, status=status)

    def _body(self, status: Literal["in_progress", "completed", "incomplete", "failed"]) -> ResponseBody:
        request, call = self._request, self._call
        params = call.generate["sampling_params"]
        return ResponseBody(
            id=call.id,
            created_at=call.created,
            status=status,
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            metadata=dict(request.metadata or {}),
            model=call.model,
            output=[self._item(block) for block in self.blocks],
            parallel_tool_calls=request.parallel_tool_calls is not False,
            reasoning={"effort": None, "summary": None, **(request.reasoning or {})},
            temperature=params.get("temperature", 1.0),
            text={"format": {"type": "text"}, **(request.text or {})},
            tool_choice=request.tool_choice or "auto",
            tools=[{"strict": None, "parameters": None, **tool} for tool in request.tools or ()],
            top_p=params.get("top_p", 1.0),
            ignored_fields=self._ignored or UNSET,
        )


# By what ended an answer.
_STATUS: Final[Mapping[str, Any]] = {
    "stop": "completed",
    "length": "incomplete",
    "abort": "failed",
    "stale": "failed",
}
# The name of a block's events, and what those have in addition.
_EVENTS: Final[Mapping[BlockKind, tuple[str, Fields]]] = {
    BlockKind.CALL: ("function_call_arguments", {}),
    BlockKind.REASONING: ("reasoning_text", {}),
    BlockKind.TEXT: ("output_text", {"logprobs": []}),
}


def _usage(meta: Mapping[str, Any]) -> ResponseUsage:
    prompt, output = meta["prompt_tokens"], meta["completion_tokens"]
    return ResponseUsage(
        input_tokens=prompt,
        input_tokens_details=CachedTokens(cached_tokens=meta["cached_tokens"]),
        output_tokens=output,
        output_tokens_details=ReasoningTokens(reasoning_tokens=meta["reasoning_tokens"]),
        total_tokens=prompt + output,
    )
