"""OpenAI's endpoints. Source: wire_api section 5."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response

from ebbtide.srt.entrypoints.http_answers import (
    Endpoint,
    Json,
    answer_events,
    answer_whole,
    client_of,
    error_answer,
)
from ebbtide.srt.entrypoints.metrics.prometheus import OUTPUTS_AT_ONCE
from ebbtide.srt.entrypoints.openai.answers import (
    ChatWriter,
    ChunkWriter,
    CompletionWriter,
    Writer,
    write_answer,
)
from ebbtide.srt.entrypoints.openai.chat_template import (
    ChatTemplate,
    read_chat_template,
    recommended_sampling,
)
from ebbtide.srt.entrypoints.openai.protocol import ModelCard, ModelList
from ebbtide.srt.entrypoints.openai.requests import (
    OpenAICall,
    chat_call,
    completion_call,
    force_usage,
    within_limits,
)
from ebbtide.srt.entrypoints.openai.tokenization import Tokenization
from ebbtide.srt.entrypoints.openai.tool_use import Parsers
from ebbtide.srt.entrypoints.request_body import BodyReader, with_headers
from ebbtide.srt.entrypoints.service import EngineService
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.api.routed_experts import RoutedForm


class OpenAIApi:
    """What is behind `/v1/models`, the completions of both kinds, `/tokenize` and `/detokenize`."""

    def __init__(self, service: EngineService, bodies: BodyReader) -> None:
        self._service = service
        self._bodies = bodies
        self._created = int(time.time())

    def routes(self) -> list[tuple[str, str, Endpoint]]:
        """Method, path and endpoint of each."""
        return [
            ("GET", "/v1/models", self._models),
            # The name of a model may be a path.
            ("GET", "/v1/models/{model:path}", self._model),
            ("POST", "/v1/completions", self._completions),
            ("POST", "/v1/chat/completions", self._chat_completions),
            ("POST", "/v1/chat/completions/batch", self._chat_batch),
            *(("POST", path, self._tokenize) for path in ("/tokenize", "/v1/tokenize")),
            *(("POST", path, self._detokenize) for path in ("/detokenize", "/v1/detokenize")),
        ]

    async def _models(self, request: Request) -> Response:
        return Json(ModelList(data=[self._card()]))

    async def _model(self, request: Request) -> Response:
        card, wanted = self._card(), request.path_params["model"]
        return Json(card) if wanted == card.id else error_answer(f"there is no model {wanted!r}", 404)

    async def _completions(self, request: Request) -> Response:
        fields = await self._fields_of(request)
        manager = self._service.manager
        manager.limits.check_given("prompt", fields.get("prompt"), fields.get("truncate_prompt_tokens"))
        call = await manager.worked_on(
            fields, lambda: completion_call(fields, self._model_name, self._template)
        )
        call = self._within_limits(call)
        return await self._answer(request, call, CompletionWriter(call))

    async def _chat_completions(self, request: Request) -> Response:
        fields = await self._fields_of(request)
        call = chat_call(fields, self._model_name, self._template, self._recommended, self._parsers)
        call = self._within_limits(call)
        wants_meta = fields.get("return_meta_info") is True
        return await self._answer(
            request, call, ChatWriter(call, return_meta_info=wants_meta), wants_meta=wants_meta
        )

    async def _chat_batch(self, request: Request) -> Response:
        fields = await self._fields_of(request)
        call = await self._service.manager.worked_on(
            fields,
            lambda: chat_call(
                fields, self._model_name, self._template, self._recommended, self._parsers, is_batch=True
            ),
        )
        call = self._within_limits(call)
        return await self._answer(request, call, ChatWriter(call, return_meta_info=False))

    async def _tokenize(self, request: Request) -> Response:
        fields, tokenization = await self._bodies.read(request.stream()), self._tokenization
        self._service.require_model(fields.get("model"))
        return Json(await self._service.manager.in_thread(lambda: tokenization.tokenize(fields)))

    async def _detokenize(self, request: Request) -> Response:
        fields, tokenization = await self._bodies.read(request.stream()), self._tokenization
        self._service.require_model(fields.get("model"))
        return Json(await self._service.manager.in_thread(lambda: tokenization.detokenize(fields)))

    async def _answer(
        self, request: Request, call: OpenAICall, writer: Writer, *, wants_meta: bool = False
    ) -> Response:
        # An answer with SGLang's `meta_info` has routed experts in SGLang's form.
        form = "int32" if wants_meta else self._service.config.server_args.routed_experts_format
        return await answer_call(self._service, request, call, writer, form)

    async def _fields_of(self, request: Request) -> dict[str, Any]:
        """The body, and what headers say; where it says nothing, the server's flags do."""
        fields = await self._bodies.read(request.stream())
        service = self._service
        by_default = {
            "return_tokens_as_token_ids": service.config.server_args.return_tokens_as_token_ids,
            "return_routed_experts": service.manager.limits.records_routes,
        }
        for name, is_default in by_default.items():
            if is_default and fields.get(name) is None:
                fields[name] = True
        if service.config.server_args.enable_force_include_usage:
            force_usage(fields)
        self._service.require_model(fields.get("model"))
        return with_headers(fields, request.headers)

    def _within_limits(self, call: OpenAICall) -> OpenAICall:
        max_logprobs = self._service.config.server_args.max_logprobs
        return within_limits(call, max_logprobs, self._service.manager.limits.vocab_size)

    def _card(self) -> ModelCard:
        model = self._service.config.model
        return ModelCard(
            id=model.served_model_name,
            created=self._created,
            root=model.served_model_name,
            max_model_len=model.context_len,
        )

    @property
    def _parsers(self) -> Parsers:
        args = self._service.config.server_args
        return Parsers(args.tool_call_parser, args.reasoning_parser)

    @property
    def _model_name(self) -> str:
        return self._service.config.model.served_model_name

    @functools.cached_property
    def _template(self) -> ChatTemplate | None:
        tokenizer = self._service.manager.tokenizer
        if tokenizer is None:
            return None
        config = self._service.config
        template = read_chat_template(config.server_args.chat_template)
        return ChatTemplate(tokenizer, template, config.model.eos_token_ids)

    @property
    def _tokenization(self) -> Tokenization:
        if self._template is None:
            raise RequestRejected("there is no tokenizer: the engine runs with skip_tokenizer_init")
        return Tokenization(self._template, self._service.manager.limits)

    @functools.cached_property
    def _recommended(self) -> Mapping[str, Any]:
        return recommended_sampling(self._service.config.model.path)


async def answer_call(
    service: EngineService, request: Request, call: OpenAICall, writer: Writer, routed_form: str
) -> Response:
    """Carry a request out; its answer, or its chunks as events, are as the writer puts them.

    Args:
        routed_form: how routed experts are encoded.

    Raises:
        RequestRejected, EngineError, ClientDisconnect: as `answer_whole` and `answer_events`.
    """
    starting = service.manager.prepare(
        call.generate,
        call.render,
        is_incremental=True,
        routed_form=cast("RoutedForm", routed_form),
        client=client_of(request),
    )
    if call.generate["stream"]:
        return await answer_events(
            request.receive, starting, service.metrics.note_chunk, ChunkWriter(writer, call)
        )
    result = await answer_whole(request.receive, starting)
    await service.metrics.note_all(result)
    if isinstance(result, list) and len(result) > OUTPUTS_AT_ONCE:
        # The event loop has its turns between those of the thread.
        return await service.manager.in_thread(lambda: Json(write_answer(writer, call, result)))
    return Json(write_answer(writer, call, result))
