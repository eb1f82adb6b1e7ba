"""OpenAI's endpoints. Source: wire_api section 5."""

from __future__ import annotations

import time

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from ebbtide.srt.entrypoints.http_answers import Endpoint, Json, error_answer
from ebbtide.srt.entrypoints.openai.answers import ChatWriter, ChunkWriter, CompletionWriter
from ebbtide.srt.entrypoints.openai.calls import Calls
from ebbtide.srt.entrypoints.openai.protocol import ModelCard, ModelList
from ebbtide.srt.entrypoints.openai.requests import OpenAICall
from ebbtide.srt.entrypoints.openai.response_answers import ResponseWriter
from ebbtide.srt.entrypoints.openai.responses import as_chat, ignored_fields
from ebbtide.srt.entrypoints.openai.tokenization import Tokenization
from ebbtide.srt.entrypoints.request_body import BodyReader
from ebbtide.srt.entrypoints.service import EngineService
from ebbtide.srt.errors import RequestRejected


class OpenAIApi:
    """What is behind `/v1/models`, completions, chats, responses, `/tokenize` and `/detokenize`."""

    def __init__(self, service: EngineService, bodies: BodyReader, calls: Calls) -> None:
        self._service = service
        self._calls = calls
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
            ("POST", "/v1/responses", self._responses),
            *(("POST", path, self._tokenize) for path in ("/tokenize", "/v1/tokenize")),
            *(("POST", path, self._detokenize) for path in ("/detokenize", "/v1/detokenize")),
        ]

    async def _models(self, request: Request) -> Response:
        return Json(ModelList(data=self._cards()))

    async def _model(self, request: Request) -> Response:
        wanted = request.path_params["model"]
        card = next((one for one in self._cards() if one.id == wanted), None)
        return error_answer(f"there is no model {wanted!r}", 404) if card is None else Json(card)

    async def _completions(self, request: Request) -> Response:
        call = await self._calls.completion(await self._calls.fields_of(request))
        return await self._calls.answer(request, call, ChunkWriter(CompletionWriter(call), call))

    async def _chat_completions(self, request: Request) -> Response:
        fields = await self._calls.fields_of(request)
        return await self._chat(request, await self._calls.chat(fields), fields.get("return_meta_info"))

    async def _chat_batch(self, request: Request) -> Response:
        fields = await self._calls.fields_of(request)
        call = await self._calls.chat(fields, is_batch=True)
        return await self._chat(request, call, fields.get("return_meta_info"))

    async def _chat(self, request: Request, call: OpenAICall, return_meta_info: bool | None) -> Response:
        wants_meta = bool(return_meta_info)
        writer = ChunkWriter(ChatWriter(call, return_meta_info=wants_meta), call)
        return await self._calls.answer(request, call, writer, wants_meta=wants_meta)

    async def _responses(self, request: Request) -> Response:
        fields = await self._calls.fields_of(request)
        asked, chat = await self._service.manager.worked_on(fields, lambda: as_chat(fields))
        call = await self._calls.chat(chat)
        return await self._calls.answer(request, call, ResponseWriter(call, asked, ignored_fields(fields)))

    async def _tokenize(self, request: Request) -> Response:
        fields, tokenization = await self._bodies.read(request.stream()), self._tokenization
        self._service.require_model(fields.get("model"))
        return Json(await self._service.manager.in_thread(lambda: tokenization.tokenize(fields)))

    async def _detokenize(self, request: Request) -> Response:
        fields, tokenization = await self._bodies.read(request.stream()), self._tokenization
        self._service.require_model(fields.get("model"))
        return Json(await self._service.manager.in_thread(lambda: tokenization.detokenize(fields)))

    def _cards(self) -> list[ModelCard]:
        """The base model, and its adapters."""
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
