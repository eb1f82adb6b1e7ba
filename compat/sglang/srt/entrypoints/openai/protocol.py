"""OpenAI request types that frameworks build or validate before sending."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Function(BaseModel):
    """A function that the model may call."""

    description: str | None = None
    name: str | None = None
    parameters: Any = None
    strict: bool = False


class Tool(BaseModel):
    """A tool. Functions are the only type."""

    type: Literal["function"] = "function"
    function: Function


class ChatCompletionMessageParam(BaseModel):
    """A message of a conversation. Other keys are kept, for the chat template."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: Any = None


class ChatCompletionRequest(BaseModel):
    """The body of `/v1/chat/completions`. Other keys are kept; the server validates them."""

    model_config = ConfigDict(extra="allow")

    messages: list[ChatCompletionMessageParam]
    model: str = "default"
    tools: list[Tool] | None = None
    tool_choice: Any = None
    stream: bool = False
