"""The type of tool calls."""

from __future__ import annotations

from pydantic import BaseModel


class ToolCallItem(BaseModel):
    """A tool call. `tool_index`: its number in the text; `parameters`: a JSON object, as text."""

    tool_index: int
    name: str | None = None
    parameters: str
