"""Tools and reasoning in chats: what a request asks for, and its answers taken apart.

Source: wire_api sections 5 and 8; OpenAI's `tools` and `tool_choice`.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ebbtide.srt.entrypoints.openai.protocol import ChatCompletionRequest, ToolCallBody, ToolCallFunction
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.text.reasoning import ReasoningSplitter
from ebbtide.srt.managers.text.tool_calls import (
    ToolCall,
    ToolCallParser,
    ToolSpec,
    calls_schema,
    json_calls,
    tool_specs,
)


@dataclass(frozen=True)
class Parsers:
    """The server's parsers by name; None: there is none."""

    tool_calls: str | None = None
    reasoning: str | None = None


@dataclass(frozen=True)
class AnswerForm:
    """What the text of an answer is taken apart into.

    Attributes:
        parser: finds the calls of tools; None: there are none to find.
        calls_schema: of calls that a grammar makes: the answer is nothing else. Empty: there is no grammar.
        reasoning: finds the reasoning; None: it stays where it is.
    """

    tools: tuple[ToolSpec, ...] = ()
    parser: str | None = None
    calls_schema: Mapping[str, Any] | None = None
    reasoning: str | None = None

    @property
    def reads_marks(self) -> bool:
        """Whether it looks for what may be special tokens."""
        return self.parser is not None or self.reasoning is not None


NO_PARSERS: Final = Parsers()
PLAIN: Final = AnswerForm()


def answer_form(request: ChatCompletionRequest, parsers: Parsers) -> AnswerForm:
    """How the answers to a request are to be read.

    Raises:
        RequestRejected: 400, `tools` or `tool_choice` are not what was expected.
    """
    reasoning = None if request.separate_reasoning is False else parsers.reasoning
    try:
        tools = tuple(tool_specs(request.tools or ()))
    except ValueError as error:
        raise RequestRejected(str(error)) from None
    choice = request.tool_choice
    if choice is None or choice in ("auto", "none"):
        parser = parsers.tool_calls if tools and choice != "none" else None
        return AnswerForm(tools, parser, reasoning=reasoning)
    match choice:
        case "required":
            chosen = tools
        case {"type": "function", "function": {"name": str() as name}}:
            chosen = tuple(tool for tool in tools if tool.name == name)
            if not chosen:
                known = ", ".join(tool.name for tool in tools) or "none"
                raise RequestRejected(f"tool_choice: expected one of the tools ({known}), got {name[:200]!r}")
        case _:
            raise RequestRejected(
                "tool_choice: expected null, 'none', 'auto', 'required' or a function by its name, got "
                f"{str(choice)[:200]!r}"
            )
    if not chosen:
        raise RequestRejected("tool_choice: expected tools to choose from")
    is_single = choice != "required" or request.parallel_tool_calls is False
    # Nothing but the calls: there is no room for reasoning.
    return AnswerForm(chosen, calls_schema=calls_schema(chosen, most=1 if is_single else None))


@dataclass(frozen=True)
class AnswerParts:
    """What is new of an answer."""

    content: str
    reasoning: str
    calls: list[ToolCallBody]


class AnswerReader:
    """Takes one answer apart, piece by piece."""

    def __init__(self, form: AnswerForm) -> None:
        self.num_calls = 0
        self._form = form
        self._made = ""
        self._splitter = None if form.reasoning is None else ReasoningSplitter(form.reasoning)
        self._parser = None if form.parser is None else ToolCallParser(form.tools, form.parser)

    def push(self, text: str, *, is_last: bool) -> AnswerParts:
        """What a piece of the text adds."""
        if self._form.calls_schema is not None:
            return self._push_made(text, is_last=is_last)
        reasoning = ""
        if self._splitter is not None:
            reasoning, text = self._splitter.push(text)
            if is_last:
                rest = self._splitter.finish()
                reasoning, text = reasoning + rest[0], text + rest[1]
        calls: list[ToolCall] = []
        if self._parser is not None:
            text, calls = self._parser.push(text)
            if is_last:
                last, more = self._parser.finish()
                text, calls = text + last, calls + more
        return AnswerParts(text, reasoning, self._bodies(calls))

    def _push_made(self, text: str, *, is_last: bool) -> AnswerParts:
        """Add text that a grammar has made, which is calls as a whole. Cut short, it stays text."""
        self._made += text
        if not is_last:
            return AnswerParts("", "", [])
        calls = json_calls(self._made, self._form.tools)
        return AnswerParts("" if calls else self._made, "", self._bodies(calls))

    def _bodies(self, calls: list[ToolCall]) -> list[ToolCallBody]:
        bodies = []
        for call in calls:
            # Templates of this family read the place of a call from its id.
            of_kimi = f"functions.{call.name}:{self.num_calls}"
            call_id = of_kimi if self._form.parser == "kimi_k2" else f"call_{uuid.uuid4().hex[:24]}"
            function = ToolCallFunction(name=call.name, arguments=call.arguments)
            bodies.append(ToolCallBody(index=self.num_calls, id=call_id, function=function))
            self.num_calls += 1
        return bodies
