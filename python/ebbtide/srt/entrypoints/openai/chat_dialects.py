"""Shared by the APIs that are served as chats: building the messages, and writing answers as blocks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final

from msgspec import UNSET

from ebbtide.srt.entrypoints.http_answers import AnswerWriter, server_event
from ebbtide.srt.entrypoints.openai.answers import Piece, piece_of, whole_pieces
from ebbtide.srt.entrypoints.openai.protocol import Fields, ToolCallBody
from ebbtide.srt.entrypoints.openai.requests import OpenAICall
from ebbtide.srt.entrypoints.openai.tool_use import AnswerReader
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.api.generate_fields import CommonFields
from ebbtide.srt.sampling_params import OPENAI_FIELDS

# Fields of chats that bodies of these APIs may have too, with the same name and meaning.
PASSED_ON: Final = frozenset(
    {*OPENAI_FIELDS, *CommonFields.__struct_fields__, "add_special_tokens", "truncate_prompt_tokens"}
    | {"truncation_side", "stream", "cache_salt", "extra_key", "timeout_s", "rid", "request_id", "model"}
    | {"chat_template_kwargs", "separate_reasoning", "data_parallel_rank"}
) - {"n", "return_sampling_mask"}
# Fields that the server's flags add to every body. They have no effect on these answers.
_ADDED: Final = frozenset(("return_tokens_as_token_ids", "return_routed_experts", "stream_options"))


class ChatBuilder:
    """Builds the messages of a chat. Consecutive pieces of an assistant become one message.

    `messages`: those built so far.
    """

    def __init__(self) -> None:
        self.messages: list[Fields] = []

    def write(self, role: str, text: str) -> None:
        """Add a text: for an assistant a piece of its message, else a message.

        A system text after a system message at the start joins it, since templates take only one there.
        """
        if role == "assistant":
            self._answer()["content"] += text
        elif role != "user" and len(self.messages) == 1 and self.messages[0]["role"] == "system":
            self.messages[0]["content"] += f"\n\n{text}"
        else:
            self.add("user" if role == "user" else "system", text)

    def add(self, role: str, text: str, **fields: Any) -> None:
        """Add a message."""
        self.messages.append({"role": role, "content": text, **fields})

    def think(self, text: str) -> None:
        """Add a piece of the assistant's reasoning."""
        answer = self._answer()
        answer["reasoning_content"] = answer.get("reasoning_content", "") + text

    def call(self, call_id: str, name: str, arguments: Any) -> None:
        """Add a tool call of the assistant. `arguments`: an object, or its JSON."""
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._answer().setdefault("tool_calls", []).append(call)

    def _answer(self) -> Fields:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.add("assistant", "")
        return self.messages[-1]


def text_in(content: Any, where: str, kinds: Collection[str]) -> str:
    """The text of a message's content. Parts are joined by spaces, as in chats.

    `where`: its name in errors. `kinds`: the allowed types of parts.
    Raises RequestRejected: 400; a part is not a text of these kinds.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RequestRejected(f"{where}: expected a text or a list of parts, got {shown(content)}")
    texts = []
    for index, part in enumerate(content):
        match part:
            case {"type": str() as kind, "text": str() as text} if kind in kinds:
                texts.append(text)
            case _:
                raise unsupported(f"{where}[{index}]", part, kinds)
    return " ".join(texts)


def text_field(item: Mapping[str, Any], name: str, where: str) -> str:
    """A required string field. Raises RequestRejected: 400; it is missing, or not a string."""
    value = item.get(name)
    if not isinstance(value, str):
        raise RequestRejected(f"{where}.{name}: expected a text, got {shown(value)}")
    return value


def unsupported(where: str, item: Any, kinds: Collection[str]) -> RequestRejected:
    """The error for an item whose type is not among `kinds`, or that lacks a field of its type."""
    expected = ", ".join(sorted(kinds))
    if isinstance(item, Mapping) and item.get("type") in kinds:
        return RequestRejected(f"{where}: a field of this {item['type']} is missing, or of another type")
    given = item.get("type") if isinstance(item, Mapping) else item
    return RequestRejected(f"{where}: not supported in this version: expected {expected}, got {shown(given)}")


def shown(value: Any) -> str:
    """A value as errors quote it: its first 100 characters, or the type's name of a container."""
    return repr(value)[:100] if isinstance(value, str | int | float | bool | None) else type(value).__name__


def passed_on(fields: Mapping[str, Any]) -> Fields:
    """The fields that mean the same in a chat. Raises RequestRejected: 400; `n` is more than 1."""
    if fields.get("n") not in (None, 1):
        raise RequestRejected(f"n: expected null or 1, got {shown(fields['n'])}: only chats have several")
    return {name: fields[name] for name in PASSED_ON & fields.keys()}


def not_known(fields: Mapping[str, Any], known: Collection[str]) -> list[str]:
    """The names of fields that have no effect. `known`: the API's own fields."""
    given = {name for name, value in fields.items() if value is not None}
    return sorted(given - PASSED_ON - _ADDED - {"n"} - set(known))


def template_options(fields: Mapping[str, Any], *, thinks: bool | None, effort: Any) -> Fields:
    """The variables of the chat template: the given ones, and those that control reasoning.

    `thinks`, `effort`: None leaves them to the template. Raises RequestRejected: 400.
    """
    given = fields.get("chat_template_kwargs")
    if given is not None and not isinstance(given, Mapping):
        raise RequestRejected(f"chat_template_kwargs: expected an object, got {shown(given)}")
    options = {} if thinks is None else {"enable_thinking": thinks, "thinking": thinks}
    if effort is not None:
        options["reasoning_effort"] = effort
    return {**options, **(given or {})}


class BlockKind(Enum):
    REASONING = auto()
    TEXT = auto()
    CALL = auto()


@dataclass
class AnswerBlock:
    """A part of an answer.

    `pieces`: its text so far, in pieces; for a call, its arguments. `is_open`: whether it may still grow.
    """

    index: int
    kind: BlockKind
    pieces: list[str] = field(default_factory=list)
    call: ToolCallBody | None = None
    is_open: bool = True

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class BlockWriter(AnswerWriter):
    """Writes the one answer to a request as blocks. Subclasses define how each is written.

    Args:
        ignored: the names of the request's fields that have no effect.

    Attributes:
        blocks: those of the answer so far.
        finish_reason: None until it is known; `abort` if the stream has failed.
    """

    def __init__(self, call: OpenAICall, ignored: list[str]) -> None:
        self.blocks: list[AnswerBlock] = []
        self.finish_reason: str | None = None
        self._call, self._ignored = call, ignored or UNSET
        self._reader = AnswerReader(call.forms[0])
        self._open: AnswerBlock | None = None
        self._is_first = True

    def whole(self, result: Any) -> Any:
        [piece] = whole_pieces(result)
        self._read(piece)
        return self.answer(piece)

    def chunk(self, chunk: Mapping[str, Any]) -> bytes:
        piece = piece_of(chunk, 0, is_first=self._is_first)
        events = self.begin(piece) if self._is_first else []
        self._is_first = False
        events += self._read(piece)
        if piece.finish is not None:
            events += self.finish(piece)
        return encoded(events)

    def end(self) -> bytes:
        return b""

    def answer(self, piece: Piece) -> Any:
        """Build the body of an answer, whose blocks are complete."""
        raise NotImplementedError

    def begin(self, piece: Piece) -> list[Fields]:
        """The first events of a stream. The `type` of an event is its name."""
        raise NotImplementedError

    def opened(self, block: AnswerBlock) -> list[Fields]:
        """The events at the start of a block, which is still empty."""
        raise NotImplementedError

    def grown(self, block: AnswerBlock, text: str) -> list[Fields]:
        """The events of text that was added to a block."""
        raise NotImplementedError

    def closed(self, block: AnswerBlock) -> list[Fields]:
        """The events at the end of a block."""
        raise NotImplementedError

    def finish(self, piece: Piece) -> list[Fields]:
        """The last events of a stream."""
        raise NotImplementedError

    def _read(self, piece: Piece) -> list[Fields]:
        """Split a piece into blocks, and return the events of these for a stream."""
        self.finish_reason = piece.finish_reason
        is_last = piece.finish is not None
        reasoning, text, calls = self._reader.push(piece.text, is_last=is_last)
        events: list[Fields] = []
        for kind, added in ((BlockKind.REASONING, reasoning), (BlockKind.TEXT, text)):
            if added:
                if self._open is None or self._open.kind is not kind:
                    events += self._next(kind)
                events += self._add(added)
        for call in calls:
            events += self._next(BlockKind.CALL, call) + self._add(call.function.arguments)
        return events + self._close() if is_last else events

    def _next(self, kind: BlockKind, call: ToolCallBody | None = None) -> list[Fields]:
        events = self._close()
        self._open = AnswerBlock(len(self.blocks), kind, call=call)
        self.blocks.append(self._open)
        return events + self.opened(self._open)

    def _add(self, text: str) -> list[Fields]:
        assert self._open is not None, "it has been opened"
        self._open.pieces.append(text)
        return self.grown(self._open, text)

    def _close(self) -> list[Fields]:
        block, self._open = self._open, None
        if block is None:
            return []
        block.is_open = False
        return self.closed(block)


def encoded(events: list[Fields]) -> bytes:
    """Encode events as server-sent events."""
    return b"".join(server_event(event, event["type"]) for event in events)
