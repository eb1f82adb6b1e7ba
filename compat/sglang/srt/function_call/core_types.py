"""What calls of tools are told in."""

from __future__ import annotations

from pydantic import BaseModel


class ToolCallItem(BaseModel):
    """A call. `tool_index`: its place among those of its text; `parameters`: the JSON text of an object."""

    tool_index: int
    name: str | None = None
    parameters: str
