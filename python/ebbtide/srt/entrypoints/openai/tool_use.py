"""Tools and reasoning in chats: reads them from requests, and finds them in answers.

Source: wire_api sections 5 and 8; OpenAI's `tools` and `tool_choice`.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ebbtide.srt.entrypoints.openai.protocol import ChatCompletionRequest, ToolCallBody
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.text.answer_scanner import REASONING_FORMATS, AnswerScanner
from ebbtide.srt.managers.text.tool_calls import ToolCall, ToolSpec, calls_schema, json_calls, tool_specs


@dataclass
class AnswerForm:
    """What to find in the text of an answer: tool calls and reasoning.

    Attributes:
        tools: those that may be called.
        parser: name of the format of tool calls; None: calls are not searched for.
        calls_schema: JSON schema of calls, if a grammar makes the whole answer calls; None: it does not.
        reasoning: name of the format of reasoning; None: it stays in the text.
        is_open: whether the answer begins in the middle of reasoning; None: as is usual for its format.
    """

    tools: tuple[ToolSpec, ...] = ()
    parser: str | None = None
    calls_schema: Mapping[str, Any] | None = None
    reasoning: str | None = None
    is_open: bool | None = None

    @property
    def reads_marks(self) -> bool:
        """Whether markers, which may be special tokens, are searched for."""
        return self.parser is not None or self.reasoning is not None

    def read_prompt(self, end: str, continued: str = "") -> None:
        """Set `is_open` by the end of the prompt. Call it before the answer is read.

        `continued`: the beginning of the answer, if the prompt contains it.
        """
        if self.reasoning is None:
            return
        marks = REASONING_FORMATS[self.reasoning]
        if continued:
            self.is_open = continued.rfind(marks.begin) > continued.rfind(marks.end)
        elif end.rstrip().endswith((marks.begin, marks.end)):
            self.is_open = end.rstrip().endswith(marks.begin)


def answer_form(
    request: ChatCompletionRequest, tool_parser: str | None, reasoning_parser: str | None
) -> AnswerForm:
    """Read tools and reasoning of a request. The parsers are the server's; None: it has none.

    Raises RequestRejected: 400; `tools` or `tool_choice` are wrong.
    """
    reasoning = None if request.separate_reasoning is False else reasoning_parser
    try:
        tools = tuple(tool_specs(request.tools or ()))
    except ValueError as error:
        raise RequestRejected(str(error)) from None
    choice = request.tool_choice
    if choice is None or choice in ("auto", "none"):
        parser = tool_parser if tools and choice != "none" else None
        options = request.chat_template_kwargs or {}
        is_off = any(options.get(name) is False for name in ("thinking", "enable_thinking"))
        return AnswerForm(tools, parser, reasoning=reasoning, is_open=False if is_off else None)
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
    try:
        # The grammar allows nothing but the calls, so there is no reasoning to find.
        return AnswerForm(chosen, calls_schema=calls_schema(chosen, most=1 if is_single else None))
    except ValueError as error:
        raise RequestRejected(str(error)) from None


class AnswerReader:
    """Splits one answer into reasoning, text and tool calls, as it grows.

    `num_calls`: of tools so far.
    """

    def __init__(self, form: AnswerForm) -> None:
        self.num_calls = 0
        self._form = form
        self._made: list[str] = []
        self._scanner = AnswerScanner(form.tools, form.parser, form.reasoning, is_open=form.is_open)

    def push(self, text: str, *, is_last: bool) -> tuple[str, str, list[ToolCallBody]]:
        """Add a piece of the answer. Returns the new reasoning, the new text, and the calls now complete."""
        if self._form.calls_schema is not None:
            return self._push_made(text, is_last=is_last)
        if not self._form.reads_marks:
            return "", text, []
        parts = self._scanner.push(text, is_last=is_last)
        return parts.reasoning, parts.text, self._bodies(parts.calls)

    def _push_made(self, text: str, *, is_last: bool) -> tuple[str, str, list[ToolCallBody]]:
        """Add a piece of an answer that a grammar makes calls as a whole. If cut short, it is text."""
        self._made.append(text)
        if not is_last:
            return "", "", []
        made = "".join(self._made)
        calls = json_calls(made, self._form.tools)
        return "", "" if calls else made, self._bodies(calls)

    def _bodies(self, calls: list[ToolCall]) -> list[ToolCallBody]:
        bodies = []
        for call in calls:
            # Kimi's chat templates read the index of a call from its id.
            of_kimi = f"functions.{call.name}:{self.num_calls}"
            call_id = of_kimi if self._form.parser == "kimi_k2" else f"call_{uuid.uuid4().hex[:24]}"
            bodies.append(ToolCallBody(index=self.num_calls, id=call_id, function=call))
            self.num_calls += 1
        return bodies
