"""Anthropic's endpoints, over the same requests as OpenAI's chats."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Scope, Send

from ebbtide.srt.entrypoints.anthropic.messages import (
    CountTokensRequest,
    ErrorResponse,
    MessageBody,
    MessagesRequest,
    MessageWriter,
    TokenCount,
    as_chat,
    error_body,
    ignored_fields,
    prompt_fields,
)
from ebbtide.srt.entrypoints.http_answers import Json
from ebbtide.srt.entrypoints.openai.protocol import parse
from ebbtide.srt.entrypoints.openai.routes import Calls
from ebbtide.srt.entrypoints.routing import route
from ebbtide.srt.entrypoints.service import EngineService

PATH = "/v1/messages"


class AnthropicApi:
    """What is behind `/v1/messages` and `/v1/messages/count_tokens`."""

    def __init__(self, service: EngineService, calls: Calls) -> None:
        self._service = service
        self._calls = calls

    @route(
        *("POST", PATH),
        tag="Anthropic",
        takes=MessagesRequest,
        reply=MessageBody,
        event="Events of Anthropic's Messages.",
        error=ErrorResponse,
    )
    async def messages(self, request: Request) -> Response:
        """Answer a conversation."""
        fields = await self._calls.fields_of(request)
        call = await self._calls.chat(
            await self._service.manager.worked_on(
                fields, lambda: as_chat(fields, has_reasoning=self._has_reasoning)
            )
        )
        return await self._calls.answer(request, call, MessageWriter(call, ignored_fields(fields)))

    @route(
        *("POST", f"{PATH}/count_tokens"),
        tag="Anthropic",
        takes=CountTokensRequest,
        reply=TokenCount,
        error=ErrorResponse,
    )
    async def count_tokens(self, request: Request) -> Response:
        """How many tokens a conversation has."""
        fields = await self._calls.fields_of(request)
        asked = parse(CountTokensRequest, fields)
        call = await self._calls.chat(prompt_fields(asked, fields, has_reasoning=self._has_reasoning))
        async with self._service.models.held(call.model):
            tokens = await self._service.manager.in_thread(lambda: self._calls.prompt_ids(call))
        return Json(TokenCount(input_tokens=len(tokens)))

    @property
    def _has_reasoning(self) -> bool:
        return self._service.config.server_args.reasoning_parser is not None


def with_own_errors(scope: Scope, send: Send) -> Send:
    """What sends the answer to a request: errors to Anthropic's clients in their shape, all else as it is."""
    # A proxy may have put a prefix before the path.
    if scope["type"] != "http" or f"{PATH}/" not in f"{scope['path']}/":
        return send
    start: Message | None = None
    body = bytearray()

    async def send_own(message: Message) -> None:
        nonlocal start
        if message["type"] == "http.response.start" and message["status"] >= 400:
            start = message
            return
        if start is None:
            await send(message)
            return
        body.extend(message.get("body", b""))
        if message.get("more_body", False):
            return
        error: dict[str, Any] = msgspec.json.decode(body or b"{}")
        own = msgspec.json.encode(error_body(str(error.get("message", "")), start["status"])) + b"\n"
        headers = [(name, value) for name, value in start["headers"] if name != b"content-length"]
        headers.append((b"content-length", str(len(own)).encode()))
        await send({**start, "headers": headers})
        await send({**message, "body": own})

    return send_own
