"""An answer as blocks: of reasoning, of text, and calls of tools, one behind the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, TypeAlias

from ebbtide.srt.entrypoints.http_answers import AnswerWriter, server_event
from ebbtide.srt.entrypoints.openai.answers import Piece, piece_of, whole_pieces
from ebbtide.srt.entrypoints.openai.protocol import Fields, ToolCallBody
from ebbtide.srt.entrypoints.openai.requests import OpenAICall
from ebbtide.srt.entrypoints.openai.tool_use import AnswerReader


class BlockKind(Enum):
    REASONING = auto()
    TEXT = auto()
    CALL = auto()


@dataclass
class AnswerBlock:
    """A part of an answer.

    Attributes:
        index: among those of its answer.
        pieces: of its text so far; of a call, of its arguments.
        call: of a tool; None: it is none.
        is_open: whether more of it may come.
    """

    index: int
    kind: BlockKind
    pieces: list[str] = field(default_factory=list)
    call: ToolCallBody | None = None
    is_open: bool = True

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True)
class BlockOpened:
    """A block begins; it is empty still."""

    block: AnswerBlock


@dataclass(frozen=True)
class BlockGrown:
    """A block has grown by a text."""

    block: AnswerBlock
    text: str


@dataclass(frozen=True)
class BlockClosed:
    """A block is whole."""

    block: AnswerBlock


BlockStep: TypeAlias = BlockOpened | BlockGrown | BlockClosed


class BlockWriter(AnswerWriter):
    """Writes the one answer to a request as blocks. A dialect says how each step is written.

    Attributes:
        blocks: of the answer so far.
        finish_reason: that of its end, where that is known; of a stream that has failed, `abort`.
    """

    def __init__(self, call: OpenAICall) -> None:
        self.blocks: list[AnswerBlock] = []
        self.finish_reason: str | None = None
        self._reader = AnswerReader(call.forms[0])
        self._open: AnswerBlock | None = None
        self._is_first = True

    def whole(self, result: Any) -> Any:
        [piece] = whole_pieces(result)
        for _ in self._steps(piece):
            pass
        return self.answer(piece)

    def chunk(self, chunk: Mapping[str, Any]) -> bytes:
        piece = piece_of(chunk, 0, is_first=self._is_first)
        events = self.begin(piece) if self._is_first else []
        self._is_first = False
        for step in self._steps(piece):
            events += self.events(step)
        if piece.finish is not None:
            events += self.finish(piece)
        return encoded(events)

    def end(self) -> bytes:
        return b""

    def answer(self, piece: Piece) -> Any:
        """The body of an answer whose blocks are all there."""
        raise NotImplementedError

    def begin(self, piece: Piece) -> list[Fields]:
        """What a stream begins with. The `type` of an event is its name."""
        raise NotImplementedError

    def events(self, step: BlockStep) -> list[Fields]:
        """What a step becomes."""
        raise NotImplementedError

    def finish(self, piece: Piece) -> list[Fields]:
        """What a stream ends with."""
        raise NotImplementedError

    def _steps(self, piece: Piece) -> Iterator[BlockStep]:
        self.finish_reason = piece.finish_reason
        is_last = piece.finish is not None
        reasoning, text, calls = self._reader.push(piece.text, is_last=is_last)
        for kind, added in ((BlockKind.REASONING, reasoning), (BlockKind.TEXT, text)):
            if added:
                if self._open is None or self._open.kind is not kind:
                    yield from self._next(kind)
                yield from self._add(added)
        for call in calls:
            yield from self._next(BlockKind.CALL, call)
            yield from self._add(call.function.arguments)
        if is_last:
            yield from self._close()

    def _next(self, kind: BlockKind, call: ToolCallBody | None = None) -> Iterator[BlockStep]:
        yield from self._close()
        self._open = AnswerBlock(len(self.blocks), kind, call=call)
        self.blocks.append(self._open)
        yield BlockOpened(self._open)

    def _add(self, text: str) -> Iterator[BlockStep]:
        assert self._open is not None, "it has been opened"
        self._open.pieces.append(text)
        yield BlockGrown(self._open, text)

    def _close(self) -> Iterator[BlockStep]:
        if self._open is not None:
            self._open.is_open = False
            yield BlockClosed(self._open)
        self._open = None


def encoded(events: list[Fields]) -> bytes:
    """Events as they are sent."""
    return b"".join(server_event(event, event["type"]) for event in events)
