"""The OpenAI messages that frameworks build or check before they send them."""

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
    """A tool of the one kind there is."""

    type: Literal["function"] = "function"
    function: Function


class ChatCompletionMessageParam(BaseModel):
    """One message of a conversation; further keys are kept, for the chat template."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: Any = None


class ChatCompletionRequest(BaseModel):
    """The body of `/v1/chat/completions`; further keys are kept. The server checks it, this does not."""

    model_config = ConfigDict(extra="allow")

    messages: list[ChatCompletionMessageParam]
    model: str = "default"
    tools: list[Tool] | None = None
    tool_choice: Any = None
    stream: bool = False
