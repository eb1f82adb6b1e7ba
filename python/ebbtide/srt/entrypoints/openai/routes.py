"""OpenAI's endpoints, and the reading and serving of requests that other APIs' endpoints share with them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any, cast

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from ebbtide.srt.entrypoints.http_answers import (
    AnswerWriter,
    Json,
    answer_generation,
    client_of,
    error_answer,
)
from ebbtide.srt.entrypoints.openai.answers import ChatWriter, CompletionWriter
from ebbtide.srt.entrypoints.openai.protocol import (
    ChatBatchRequest,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    Completion,
    CompletionRequest,
    ModelCard,
    ModelList,
)
from ebbtide.srt.entrypoints.openai.requests import (
    C,
    OpenAICall,
    chat_call,
    completion_call,
    force_usage,
    within_limits,
)
from ebbtide.srt.entrypoints.openai.responses import (
    ResponseBody,
    ResponsesRequest,
    ResponseWriter,
    as_chat,
    ignored_fields,
)
from ebbtide.srt.entrypoints.openai.tokenization import (
    ChatTemplate,
    DetokenizeRequest,
    Texts,
    Tokenization,
    TokenizeRequest,
    Tokens,
    read_chat_template,
    recommended_sampling,
)
from ebbtide.srt.entrypoints.request_body import BodyReader, with_headers
from ebbtide.srt.entrypoints.routing import route
from ebbtide.srt.entrypoints.service import EngineService
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.api.array_forms import RoutedForm
from ebbtide.srt.managers.api.live_generation import LiveGeneration


class Calls:
    """Turns bodies of requests into calls, with the defaults of the server, and serves them."""

    def __init__(self, service: EngineService, bodies: BodyReader) -> None:
        self._service = service
        self._bodies = bodies

    async def fields_of(self, request: Request) -> dict[str, Any]:
        """Read the body and the headers of a request. The server's flags set fields that are not given.

        Raises RequestRejected: 400; the body cannot be read.
        """
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
        return with_headers(fields, request.headers)

    async def completion(self, fields: Mapping[str, Any]) -> OpenAICall:
        """Read a completion. Raises RequestRejected: 400."""
        limits = self._service.manager.limits
        limits.check_given("prompt", fields.get("prompt"), fields.get("truncate_prompt_tokens"))
        return await self._made(fields, partial(completion_call, fields, self.model_name, self.template))

    async def chat(self, fields: Mapping[str, Any], *, is_batch: bool = False) -> OpenAICall:
        """Read a chat, or a batch of chats. Raises RequestRejected: 400."""
        args = self._service.config.server_args
        parsers = args.tool_call_parser, args.reasoning_parser
        about = self.model_name, self.template, self._recommended, *parsers
        return await self._made(fields, partial(chat_call, fields, *about, is_batch=is_batch))

    async def _made(self, fields: Mapping[str, Any], make: Callable[[], OpenAICall]) -> OpenAICall:
        return self.within_limits(await self._service.manager.worked_on(fields, make))

    def prompt_ids(self, call: OpenAICall) -> list[int]:
        """The token ids of a chat's prompt. Call it in a thread. Raises RequestRejected: 400."""
        assert callable(call.render), "a chat is rendered"
        assert self.template is not None, "and that needs a tokenizer"
        made = call.render()
        adds_special_tokens = call.generate["add_special_tokens"]
        if isinstance(made, list):
            return made
        return self.template.tokenizer.encode(made, add_special_tokens=adds_special_tokens)

    async def answer(
        self, request: Request, call: OpenAICall, writer: AnswerWriter, routed_form: str | None = None
    ) -> Response:
        """Serve a call. The writer makes the answer's body, or the events of its stream.

        `routed_form`: how routed experts are encoded; None: as the server's flag says. Raises
        RequestRejected, EngineError, ClientDisconnect: as `answer_generation`.
        """
        service = self._service
        form = routed_form or service.config.server_args.routed_experts_format

        async def start() -> LiveGeneration:
            async with service.models.held(call.model) as adapter:
                if adapter is not None:
                    if call.generate.get("lora_path") not in (None, "", adapter):
                        raise RequestRejected(f"lora_path: model names another adapter, {adapter!r}")
                    call.generate["lora_path"] = adapter
                return await service.manager.prepare(
                    *(call.generate, call.render),
                    is_incremental=True,
                    routed_form=cast("RoutedForm", form),
                    client=client_of(request),
                )

        is_stream = bool(call.generate["stream"])
        return await answer_generation(request.receive, start(), service, writer, is_stream=is_stream)

    @property
    def model_name(self) -> str:
        return self._service.config.model.served_model_name

    @cached_property
    def template(self) -> ChatTemplate | None:
        """None: the engine has no tokenizer."""
        tokenizer = self._service.manager.tokenizer
        if tokenizer is None:
            return None
        config = self._service.config
        template = read_chat_template(config.server_args.chat_template)
        return ChatTemplate(tokenizer, template, config.model.eos_token_ids)

    def within_limits(self, call: C) -> C:
        """Check a call against the server's limits, see `requests.within_limits`."""
        max_logprobs = self._service.config.server_args.max_logprobs
        return within_limits(call, max_logprobs, self._service.manager.limits.vocab_size)

    @cached_property
    def _recommended(self) -> Mapping[str, Any]:
        return recommended_sampling(self._service.config.model.path)


_openai = partial(route, tag="OpenAI")


class OpenAIApi:
    """Serves `/v1/models`, completions, chats, responses, `/tokenize` and `/detokenize`."""

    def __init__(self, service: EngineService, bodies: BodyReader, calls: Calls) -> None:
        self._service = service
        self._calls = calls
        self._bodies = bodies
        self._created = int(time.time())

    @_openai("GET", "/v1/models", reply=ModelList)
    async def models(self, request: Request) -> Response:
        """List the served model and its adapters."""
        return Json(ModelList(data=self._cards()))

    @_openai("GET", "/v1/models/{model:path}", reply=ModelCard)
    async def model(self, request: Request) -> Response:
        """Describe the model or adapter of this name."""
        wanted = request.path_params["model"]
        card = next((one for one in self._cards() if one.id == wanted), None)
        return error_answer(f"there is no model {wanted!r}", 404) if card is None else Json(card)

    @_openai("POST", "/v1/completions", takes=CompletionRequest, reply=Completion, event=Completion)
    async def completions(self, request: Request) -> Response:
        """Complete a prompt."""
        call = await self._calls.completion(await self._calls.fields_of(request))
        return await self._calls.answer(request, call, CompletionWriter(call))

    @_openai(
        "POST",
        "/v1/chat/completions",
        takes=ChatCompletionRequest,
        reply=ChatCompletion,
        event=ChatCompletionChunk,
    )
    async def chat_completions(self, request: Request) -> Response:
        """Answer a conversation."""
        fields = await self._calls.fields_of(request)
        return await self._chat(request, await self._calls.chat(fields), fields.get("return_meta_info"))

    @_openai("POST", "/v1/chat/completions/batch", takes=ChatBatchRequest, reply=ChatCompletion)
    async def chat_batch(self, request: Request) -> Response:
        """Answer several conversations."""
        fields = await self._calls.fields_of(request)
        call = await self._calls.chat(fields, is_batch=True)
        return await self._chat(request, call, fields.get("return_meta_info"))

    async def _chat(self, request: Request, call: OpenAICall, return_meta_info: bool | None) -> Response:
        wants_meta = bool(return_meta_info)
        writer = ChatWriter(call, return_meta_info=wants_meta)
        # In SGLang's `meta_info`, routed experts are encoded as int32.
        return await self._calls.answer(request, call, writer, "int32" if wants_meta else None)

    @_openai(
        "POST",
        "/v1/responses",
        takes=ResponsesRequest,
        reply=ResponseBody,
        event="Events of OpenAI's Responses.",
    )
    async def responses(self, request: Request) -> Response:
        """Answer a conversation, by OpenAI's Responses API."""
        fields = await self._calls.fields_of(request)
        asked, chat = await self._service.manager.worked_on(fields, lambda: as_chat(fields))
        call = await self._calls.chat(chat)
        return await self._calls.answer(request, call, ResponseWriter(call, asked, ignored_fields(fields)))

    @_openai("POST", "/tokenize", "/v1/tokenize", takes=TokenizeRequest, reply=Tokens)
    async def tokenize(self, request: Request) -> Response:
        """Return the token ids of texts, or of a conversation."""
        return await self._in_thread(request, self._tokenization.tokenize)

    @_openai("POST", "/detokenize", "/v1/detokenize", takes=DetokenizeRequest, reply=Texts)
    async def detokenize(self, request: Request) -> Response:
        """Return the texts of token ids."""
        return await self._in_thread(request, self._tokenization.detokenize)

    async def _in_thread(self, request: Request, work: Callable[[Mapping[str, Any]], Any]) -> Response:
        fields = await self._bodies.read(request.stream())
        self._service.models.require(fields.get("model"))
        return Json(await self._service.manager.in_thread(lambda: work(fields)))

    def _cards(self) -> list[ModelCard]:
        """The entries of the base model and its adapters."""
        model = self._service.config.model
        base = ModelCard(
            id=model.served_model_name,
            created=self._created,
            root=model.served_model_name,
            max_model_len=model.context_len,
        )
        return [
            base,
            *(
                replace(base, id=one.name, root=one.path or one.name, parent=base.id)
                for one in self._service.state.adapter_versions.values()
            ),
        ]

    @property
    def _tokenization(self) -> Tokenization:
        if self._calls.template is None:
            raise RequestRejected("there is no tokenizer: the engine runs with skip_tokenizer_init")
        return Tokenization(self._calls.template, self._service.manager.limits)
