"""SGLang's parser of tool calls in a model's output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from ebbtide.srt.managers.text.answer_scanner import AnswerScanner, may_have_calls
from ebbtide.srt.managers.text.tool_calls import TOOL_CALL_FORMATS, ToolCall, calls_schema, tool_specs
from sglang.srt.function_call.core_types import ToolCallItem


class FunctionCallParser:
    """Finds tool calls, in a whole text or in a stream.

    Args:
        tools: `Tool`s, or the same as dictionaries.
        tool_call_parser: a key of `ToolCallParserEnum`.

    Raises:
        ValueError: `tool_call_parser` is unknown. The message lists the known ones.
    """

    ToolCallParserEnum: ClassVar[dict[str, Any]] = dict(TOOL_CALL_FORMATS)

    def __init__(self, tools: Sequence[Any], tool_call_parser: str) -> None:
        self._tools = tool_specs(tools)
        self._name = tool_call_parser
        self._stream = AnswerScanner(self._tools, tool_call_parser)
        self._num_calls = 0

    def has_tool_call(self, text: str) -> bool:
        """Whether a text may have a tool call."""
        return may_have_calls(text, self._name)

    def parse_non_stream(self, full_text: str) -> tuple[str, list[ToolCallItem]]:
        """The text without its tool calls, and the calls."""
        parts = AnswerScanner(self._tools, self._name).push(full_text, is_last=True)
        return parts.text, _items(parts.calls, 0)

    def parse_stream_chunk(self, chunk_text: str) -> tuple[str, list[ToolCallItem]]:
        """What a chunk of the stream adds to text and calls. A call is returned when it is complete."""
        return self._push(chunk_text, is_last=False)

    def finish(self) -> tuple[str, list[ToolCallItem]]:
        """What the end of the stream adds: text that could have become a call, and an unfinished call."""
        return self._push("", is_last=True)

    def get_structure_constraint(self, tool_choice: Any) -> tuple[str, dict[str, Any]] | None:
        """Name and value of the sampling parameter that enforces calls; None for "auto" and "none".

        Args:
            tool_choice: "auto", "none", "required", or an object or dictionary that names a function.
        """
        if isinstance(tool_choice, str):
            chosen, most = (self._tools if tool_choice == "required" else []), None
        else:
            [wanted] = tool_specs([tool_choice])
            chosen, most = [tool for tool in self._tools if tool.name == wanted.name], 1
        return ("json_schema", calls_schema(chosen, most=most)) if chosen else None

    def _push(self, text: str, *, is_last: bool) -> tuple[str, list[ToolCallItem]]:
        parts = self._stream.push(text, is_last=is_last)
        items = _items(parts.calls, self._num_calls)
        self._num_calls += len(items)
        return parts.text, items


def _items(calls: list[ToolCall], first: int) -> list[ToolCallItem]:
    return [
        ToolCallItem(tool_index=index, name=call.name, parameters=call.arguments)
        for index, call in enumerate(calls, first)
    ]
