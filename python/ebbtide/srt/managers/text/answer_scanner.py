"""Splits the text of an answer, as it grows, into reasoning, tool calls and the remaining text.

The result does not depend on the pieces in which the text comes: an end that may be the start of a marker is
held back until the next piece, and a block of calls until its end, up to a limit. Each character is scanned
about once.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, NamedTuple, TypeVar

from ebbtide.srt.managers.text.tool_calls import (
    NO_CALLS,
    TOOL_CALL_FORMATS,
    Atoms,
    ToolCall,
    ToolCallFormat,
    ToolSpec,
    atoms,
)

Format = TypeVar("Format")

# A longer block of calls is left as text, since parsing it would block the API's event loop.
MAX_BLOCK_CHARACTERS: Final = 1 << 17
# Limit of a marker's length, with the spaces and names that it may contain.
_MAX_MARKER_CHARACTERS: Final = 256
_CLOSERS: Final = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True)
class ReasoningFormat:
    """How a family of models marks its reasoning.

    `is_open`: whether answers begin in the middle of reasoning, unless the prompt shows otherwise.
    """

    begin: str
    end: str
    is_open: bool = False


_THINK: Final = ReasoningFormat("<think>", "</think>")
_OPEN_THINK: Final = ReasoningFormat("<think>", "</think>", is_open=True)
_NO_REASONING: Final = ReasoningFormat("", "")

# SGLang's name → format.
REASONING_FORMATS: Final[Mapping[str, ReasoningFormat]] = {
    "deepseek-r1": _OPEN_THINK,
    "deepseek-v3": _THINK,
    "glm45": _THINK,
    "kimi": ReasoningFormat("◁think▷", "◁/think▷"),
    "kimi_k2": _THINK,
    "qwen3": _THINK,
    "qwen3-thinking": _OPEN_THINK,
}


class _Place(Enum):
    START = auto()
    REASONING = auto()
    ANSWER = auto()


def _any(patterns: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(filter(None, patterns)) or "(?!)")


def _start_of(marker: Atoms) -> str:
    """A pattern of all proper prefixes of a marker."""
    return functools.reduce(lambda rest, atom: f"{atom}(?:{rest})?" if rest else atom, marker[-2::-1], "")


class _Markers:
    """The patterns to search for in answers with these formats of calls and reasoning.

    Attributes:
        start: the begin of reasoning, at the start of an answer.
        outside: outside of blocks, by place: the end of reasoning, or the start of a block, at the match's
            group.
        inside: within a block, by place and current quote: what may end the block or its string.
        behind_reasoning, behind_calls: what is dropped after these.
    """

    def __init__(self, calls: ToolCallFormat, reasoning: ReasoningFormat) -> None:
        begin, end, think_end = map(re.escape, (calls.begin, calls.end, reasoning.end))
        openings = [((*atoms(calls.begin), *lead), value) for lead, value in calls.values if begin]
        wholes = [f"{''.join(lead)}({''.join(value)})" for lead, value in openings]
        start = (r"\s{0,64}", *atoms(reasoning.begin)) if think_end else ()
        self.start, self._start_prefix = _any(["".join(start)]), _any([_start_of(start)])
        self.outside = {
            _Place.ANSWER: _any([*wholes, *(f"({''.join(value)})" for value in calls.bare)]),
            _Place.REASONING: _any([think_end, *wholes]),
        }
        self.inside: dict[tuple[_Place, str], re.Pattern[str]] = {}
        for quote in ("", *calls.quotes):
            of_value = rf"[{quote}\\]" if quote else rf"[{calls.quotes}\[\](){{}}]"
            ends = [end] if end else [begin, of_value]
            self.inside[_Place.ANSWER, quote] = _any(ends)
            self.inside[_Place.REASONING, quote] = _any([*ends, think_end])
        self.behind_reasoning = re.compile(r"\n+")
        # A call has ended the reasoning, so an end marker of reasoning that follows is dropped.
        self.behind_calls = _any([r"\s+" if end else r"[\s;,]+", think_end, re.escape(calls.behind)])
        markers = [*((*lead, *value) for lead, value in openings), *calls.bare]
        markers += map(atoms, (calls.begin, calls.end, calls.behind, reasoning.end))
        self._prefix = re.compile(f"(?:{_any(map(_start_of, markers)).pattern})\\Z")

    def num_certain(self, text: str, place: _Place) -> int:
        """The number of characters before the end of the text that may be the start of a marker."""
        if place is _Place.START and (not text or self._start_prefix.fullmatch(text)):
            return 0
        match = self._prefix.search(text, max(0, len(text) - _MAX_MARKER_CHARACTERS))
        return len(text) if match is None else match.start()


_markers = functools.cache(_Markers)


@dataclass
class _Block:
    """A block of text so far, which may be calls.

    Attributes:
        pieces, size: its text, and the number of its characters.
        closers: the closing brackets that the value still needs, innermost last.
        quote: the quote of the string that the text ends in; empty: it ends in none.
        is_escaped: whether the next character of the string is escaped.
    """

    pieces: list[str] = field(default_factory=list)
    size: int = 0
    closers: list[str] = field(default_factory=list)
    quote: str = ""
    is_escaped: bool = False

    def add(self, text: str) -> None:
        self.pieces.append(text)
        self.size += len(text)
        self.is_escaped = self.is_escaped and not text

    def ends_with(self, token: str) -> bool:
        """Take a quote, backslash or bracket. Returns whether it ends the value; a wrong bracket does too."""
        if self.quote:
            self.is_escaped = token == "\\"
            self.quote = "" if token == self.quote else self.quote
        elif token in _CLOSERS:
            self.closers.append(_CLOSERS[token])
        elif token in "\"'":
            self.quote = token
        else:
            return not self.closers or self.closers.pop() != token or not self.closers
        return False


class AnswerParts(NamedTuple):
    """The reasoning, the text and the calls that a piece of an answer adds."""

    reasoning: str
    text: str
    calls: list[ToolCall]


class AnswerScanner:
    """Splits one answer, piece by piece.

    A block that is not a call of one of the tools stays in the text. A call within reasoning ends the
    reasoning.

    Args:
        tools: those that may be called.
        tool_calls, reasoning: names of the formats; None: calls or reasoning are not searched for.
        is_open: whether the answer begins in the middle of reasoning; None: as is usual for its format.

    Raises ValueError: a format is unknown.
    """

    def __init__(
        self,
        tools: Sequence[ToolSpec] = (),
        tool_calls: str | None = None,
        reasoning: str | None = None,
        *,
        is_open: bool | None = None,
    ) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._format = _known("tool_call_parser", TOOL_CALL_FORMATS, tool_calls, NO_CALLS)
        thought = _known("reasoning_parser", REASONING_FORMATS, reasoning, _NO_REASONING)
        self._markers = _markers(self._format, thought)
        self._is_open = thought.is_open if is_open is None else is_open
        self._place = _Place.START
        self._dropped: re.Pattern[str] | None = None
        self._block: _Block | None = None
        self._rest = ""
        self._reasoning: list[str] = []
        self._text: list[str] = []
        self._found: list[ToolCall] = []

    def push(self, text: str, *, is_last: bool = False) -> AnswerParts:
        """Add a piece of the answer. Returns the parts that are now certain; if it is the last, the rest."""
        text, place = self._rest + text, 0
        end = len(text) if is_last else self._markers.num_certain(text, self._place)
        self._reasoning, self._text, self._found = [], [], []
        if self._place is _Place.START and (end or is_last):
            place = self._start(text)
        while place < end:
            if self._block is None:
                place = self._step(text, place, end)
            else:
                place = self._step_inside(self._block, text, place, end)
        if is_last and self._block is not None:
            self._close(self._block)
        self._rest = text[max(place, end) :]
        return AnswerParts("".join(self._reasoning), "".join(self._text), self._found)

    def _start(self, text: str) -> int:
        match = self._markers.start.match(text)
        self._place = _Place.REASONING if match is not None or self._is_open else _Place.ANSWER
        self._dropped = None if match is None else self._markers.behind_reasoning
        return 0 if match is None else match.end()

    def _step(self, text: str, place: int, end: int) -> int:
        """Scan on from a place outside of blocks. Returns the next place."""
        dropped = None if self._dropped is None else self._dropped.match(text, place)
        if dropped is not None:
            return dropped.end()
        self._dropped = None
        match = self._markers.outside[self._place].search(text, place)
        if match is None or match.start() >= end:
            self._emit(text[place:end])
            return end
        self._emit(text[place : match.start()])
        if not match.lastindex:
            self._place, self._dropped = _Place.ANSWER, self._markers.behind_reasoning
            return match.end()
        begin = match.start(match.lastindex)
        self._block = _Block()
        self._block.add(text[match.start() : begin])
        return begin

    def _step_inside(self, block: _Block, text: str, place: int, end: int) -> int:
        """Scan on from a place in a block. Returns the next place."""
        full = place + MAX_BLOCK_CHARACTERS - block.size
        tokens = self._markers.inside[self._place, block.quote]
        match = tokens.search(text, place + block.is_escaped, full)
        if match is None or match.start() >= end:
            stop = min(end, full)
            block.add(text[place:stop])
            has_ended = stop == full
        else:
            is_part = match[0] == self._format.end if self._format.end else len(match[0]) == 1
            stop = match.end() if is_part else match.start()
            block.add(text[place:stop])
            has_ended = not is_part or bool(self._format.end) or block.ends_with(match[0])
        if has_ended:
            self._close(block)
        return stop

    def _close(self, block: _Block) -> None:
        self._block = None
        text = "".join(block.pieces)
        calls, first = self._format.calls(text, self._tools), 0
        if not calls:
            # Perhaps only the text after a later begin marker is a call.
            first = max(0, text.rfind(self._format.begin))
            calls = self._format.calls(text[first:], self._tools) if first else []
        self._emit(text[:first] if calls else text)
        if calls:
            self._found += calls
            self._place, self._dropped = _Place.ANSWER, self._markers.behind_calls

    def _emit(self, text: str) -> None:
        (self._reasoning if self._place is _Place.REASONING else self._text).append(text)


def may_have_calls(text: str, tool_calls: str) -> bool:
    """Whether a text seems to contain calls. `tool_calls`: name of their format."""
    outside = _markers(TOOL_CALL_FORMATS[tool_calls], _NO_REASONING).outside
    return outside[_Place.ANSWER].search(text) is not None


def _known(argument: str, formats: Mapping[str, Format], name: str | None, absent: Format) -> Format:
    if name is not None and name not in formats:
        raise ValueError(f"{argument}: expected one of {', '.join(formats)}, got {name!r}")
    return absent if name is None else formats[name]
