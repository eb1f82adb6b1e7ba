"""Calls of tools, as frameworks find them in what the model has said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from ebbtide.srt.managers.text.tool_calls import TOOL_CALL_FORMATS, ToolCall, ToolCallParser, tool_specs
from sglang.srt.function_call.core_types import ToolCallItem


class FunctionCallParser:
    """Finds calls in one text: whole, or as it grows.

    Args:
        tools: `Tool`s, or as JSON.
        tool_call_parser: a name of `ToolCallParserEnum`.

    Raises ValueError for another name, with those that there are.
    """

    ToolCallParserEnum: ClassVar[dict[str, Any]] = dict(TOOL_CALL_FORMATS)

    def __init__(self, tools: Sequence[Any], tool_call_parser: str) -> None:
        self._tools = tool_specs(tools)
        self._name = tool_call_parser
        self._stream = ToolCallParser(self._tools, tool_call_parser)
        self._num_calls = 0

    def has_tool_call(self, text: str) -> bool:
        """Whether it looks as if there were one."""
        form = self._stream.format
        return form.begin in text or (form.starts != "" and text.lstrip().startswith(form.starts))

    def parse_non_stream(self, full_text: str) -> tuple[str, list[ToolCallItem]]:
        """The text without its calls, and these."""
        parser = ToolCallParser(self._tools, self._name)
        plain, calls = parser.push(full_text)
        rest, last = parser.finish()
        return plain + rest, _items(calls + last, 0)

    def parse_stream_chunk(self, chunk_text: str) -> tuple[str, list[ToolCallItem]]:
        """What a chunk adds. A call is told whole, when its end has come."""
        plain, calls = self._stream.push(chunk_text)
        items = _items(calls, self._num_calls)
        self._num_calls += len(items)
        return plain, items


def _items(calls: list[ToolCall], first: int) -> list[ToolCallItem]:
    return [
        ToolCallItem(tool_index=index, name=call.name, parameters=call.arguments)
        for index, call in enumerate(calls, first)
    ]
