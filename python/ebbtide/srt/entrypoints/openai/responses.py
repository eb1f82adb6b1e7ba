"""OpenAI's Responses API: its requests are turned into chats, and the chats' answers into its own.

Source: https://platform.openai.com/docs/api-reference/responses and responses-streaming.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from msgspec import UNSET, Struct, UnsetType, to_builtins

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
from ebbtide.srt.entrypoints.openai.requests import OpenAICall
from ebbtide.srt.entrypoints.openai.shared_fields import refuse_fields
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.api.generate_fields import said

_NOT_STORED: Final = "nothing is stored: send the whole conversation as input"
_UNSUPPORTED: Final[Mapping[str, str]] = {
    "background": "answers are returned at once, or streamed",
    "conversation": _NOT_STORED,
    "previous_response_id": _NOT_STORED,
    "prompt": "use instructions and input instead",
    "store": _NOT_STORED,
}
_TEXTS: Final = ("input_text", "output_text", "text")
_ITEMS: Final = ("message", "function_call", "function_call_output", "reasoning")
_ROLES: Final = ("user", "assistant", "system", "developer")


class ResponsesRequest(Struct, kw_only=True):
    """`input`: a text, or items: messages with text, function calls, their outputs, and reasoning.

    Sampling parameters and fields of `/generate` mean the same as in chats.
    `include` may hold `reasoning.encrypted_content`: reasoning is returned as text, and can be sent again.
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
    """Read a request of `/v1/responses`. Returns it, and the fields of the same request as a chat.

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
            raise RequestRejected(f"reasoning.{name}: expected null or 'auto': reasoning is not summarised")
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
    """The names of fields that have no effect."""
    return not_known(fields, {*ResponsesRequest.__struct_fields__, *_UNSUPPORTED})


def _messages(request: ResponsesRequest) -> list[Fields]:
    conversation = ChatBuilder()
    if request.instructions:
        conversation.write("system", request.instructions)
    if isinstance(request.input, str):
        conversation.write("user", request.input)
    for index, item in enumerate(() if isinstance(request.input, str) else request.input):
        _add_item(conversation, item, f"input[{index}]")
    return conversation.messages


def _add_item(conversation: ChatBuilder, item: Fields, where: str) -> None:
    match item.get("type", "message"):
        case "message":
            text, role = text_in(item.get("content"), f"{where}.content", _TEXTS), item.get("role")
            if role not in _ROLES:
                raise RequestRejected(f"{where}.role: expected {', '.join(_ROLES)}, got {shown(role)}")
            conversation.write(role, text)
        case "function_call":
            conversation.call(*(text_field(item, name, where) for name in ("call_id", "name", "arguments")))
        case "function_call_output":
            output = text_in(item.get("output"), f"{where}.output", _TEXTS)
            conversation.add("tool", output, tool_call_id=text_field(item, "call_id", where))
        case "reasoning":
            # The reasoning of OpenAI's own models has no text, and adds nothing here.
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
    """Convert the choice of a tool to that of a chat, which rejects wrong ones."""
    match choice:
        case {"type": "function", "name": str() as name}:
            return {"type": "function", "function": {"name": name}}
    return choice


def _response_format(text: Mapping[str, Any]) -> Any:
    if text.get("verbosity") not in (None, "medium"):
        raise RequestRejected(
            "text.verbosity: expected null or 'medium': ask for the length of answers in instructions"
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


Status = Literal["in_progress", "completed", "incomplete"]


class OutputTextPart(Struct, tag="output_text", tag_field="type"):
    text: str
    annotations: tuple[()] = ()
    logprobs: tuple[()] = ()


class ReasoningText(Struct, tag="reasoning_text", tag_field="type"):
    text: str


class MessageItem(Struct, tag="message", tag_field="type", kw_only=True):
    id: str
    role: Literal["assistant"] = "assistant"
    status: Status
    content: list[OutputTextPart]


class CallItem(Struct, tag="function_call", tag_field="type", kw_only=True):
    """A function call. `arguments`: a JSON object as text."""

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
    """An answer of `/v1/responses`. `metadata`: the request's, and the weight versions."""

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
        super().__init__(call, ignored)
        self._request = request
        self._num_events = 0

    def answer(self, piece: Piece) -> ResponseBody:
        body = self._body(_STATUS[self.finish_reason or ""])
        if body.status == "failed":
            assert piece.finish is not None, "it has ended"
            body.error = ResponseError(message=piece.finish.get("message") or "the request was aborted")
        elif body.status == "incomplete":
            body.incomplete_details = IncompleteDetails(reason="max_output_tokens")
        body.usage = _usage(piece.meta)
        body.metadata |= piece.metadata
        return body

    def begin(self, piece: Piece | None) -> list[Fields]:
        body = self._body("in_progress")
        return [self._event("created", response=body), self._event("in_progress", response=body)]

    def opened(self, block: AnswerBlock) -> list[Fields]:
        item, at = self._item(block), {"output_index": block.index}
        if isinstance(item, CallItem):
            return [self._event("output_item.added", **at, item=item)]
        bare = {**to_builtins(item), "content": []}
        added = self._event("output_item.added", **at, item=bare)
        return [added, self._event("content_part.added", **_place(block, item), part=item.content[0])]

    def grown(self, block: AnswerBlock, text: str) -> list[Fields]:
        kind, logprobs = _EVENTS[block.kind]
        return [self._event(f"{kind}.delta", **_place(block, self._item(block)), delta=text, **logprobs)]

    def closed(self, block: AnswerBlock) -> list[Fields]:
        item, (kind, logprobs) = self._item(block), _EVENTS[block.kind]
        place = _place(block, item)
        if isinstance(item, CallItem):
            events = [self._event(f"{kind}.done", **place, name=item.name, arguments=item.arguments)]
        else:
            [content] = item.content
            events = [self._event(f"{kind}.done", **place, text=content.text, **logprobs)]
            events.append(self._event("content_part.done", **place, part=content))
        return [*events, self._event("output_item.done", output_index=block.index, item=item)]

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

    def _item(self, block: AnswerBlock) -> MessageItem | CallItem | ReasoningItem:
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
        text = [OutputTextPart(block.text)]
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
            ignored_fields=self._ignored,
        )


def _place(block: AnswerBlock, item: MessageItem | CallItem | ReasoningItem) -> Fields:
    """The fields that say what an event is about: an item, or the item's only part."""
    place: Fields = {"output_index": block.index, "item_id": item.id}
    return place if isinstance(item, CallItem) else place | {"content_index": 0}


# Finish reason → status.
_STATUS: Final[Mapping[str, Any]] = {
    "stop": "completed",
    "length": "incomplete",
    "abort": "failed",
    "stale": "failed",
}
# Kind of block → name of its events, and their additional fields.
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
