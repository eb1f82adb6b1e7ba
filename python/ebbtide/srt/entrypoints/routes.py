"""Ebbtide's own endpoints, and one for each control request that has a path. Source: wire_api."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from functools import partial
from typing import Any, Final

import msgspec
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from ebbtide.srt.entrypoints import bodies
from ebbtide.srt.entrypoints.http_answers import (
    AnswerWriter,
    Endpoint,
    Json,
    answer_generation,
    client_of,
    error_answer,
)
from ebbtide.srt.entrypoints.information import (
    Loads,
    LoadsQuery,
    LoadSummary,
    ModelInfo,
    ServerInfo,
    WeightVersion,
    load_summaries,
)
from ebbtide.srt.entrypoints.metrics.prometheus import Metrics
from ebbtide.srt.entrypoints.occupation import MemoryOccupationBody
from ebbtide.srt.entrypoints.openai.protocol import parse
from ebbtide.srt.entrypoints.request_body import MAX_BODY_BYTES, BodyReader, of_query
from ebbtide.srt.entrypoints.routing import route
from ebbtide.srt.entrypoints.service import ControlAnswer, EngineService
from ebbtide.srt.entrypoints.transition import TransitionReply, TransitionRequest
from ebbtide.srt.entrypoints.vllm.routes import ServerInfoQuery, vllm_sections
from ebbtide.srt.errors import EngineError, RequestRejected, error_body
from ebbtide.srt.lossless import as_bool, read
from ebbtide.srt.managers.api.generate_fields import GenerateReqInput
from ebbtide.srt.managers.io_struct import CONTROL_REQUESTS, ControlRequest
from ebbtide.srt.memory_saver import MemoryTag

CONTROL_ROUTES: Final[dict[str, type[ControlRequest]]] = {
    kind.row.path: kind for kind in CONTROL_REQUESTS if kind.row.path is not None
}

# Carries the reply's message if the body is a bare list, which has no room for it.
REMARK_HEADER: Final = "Ebbtide-Message"

# Paths of SGLang, vLLM and servers based on it that this version does not have.
NOT_IMPLEMENTED = (
    "/encode",
    "/classify",
    "/load_lora_adapter_from_distributed",
    "/register_lora_adapter",
    "/start_profile",
    "/stop_profile",
    "/set_internal_state",
    "/open_session",
    "/close_session",
    "/slow_down",
    "/freeze_gc",
    "/configure_logging",
    "/parallelism_config",
    "/get_remote_instance_transfer_engine_info",
    "/remote_instance_transfer_engine_info",
    "/send_weights_to_remote_instance",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/completions/render",
    "/v1/chat/completions/render",
    *(f"/nemo-rl/refit/{step}" for step in ("prepare", "s3-manifest", "flush", "zmq-flush")),
)


_information = partial(route, "GET", tag="information")


class NativeApi:
    """Serves `/generate`, `/drain`, `/transition`, and the paths that report information."""

    def __init__(self, service: EngineService, reader: BodyReader) -> None:
        self._service = service
        self._bodies = reader

    @route(
        *("POST PUT", "/generate"),
        tag="generation",
        takes=GenerateReqInput,
        reply=bodies.GenerateOutput | list[bodies.GenerateOutput],
        event=bodies.GenerateOutput,
    )
    async def generate(self, request: Request) -> Response:
        """Generate from text or token ids."""
        fields = await self._bodies.read(request.stream())
        starting = self._service.manager.prepare(fields, client=client_of(request))
        is_stream = as_bool(fields.get("stream")) is True
        return await answer_generation(
            request.receive, starting, self._service, AnswerWriter(), is_stream=is_stream
        )

    @_information("/health")
    async def health(self, request: Request) -> Response:
        """Check that every process lives and responds, even while paused or asleep."""
        return await _healthy(self._service.check_health())

    @_information("/health_generate")
    async def health_generate(self, request: Request) -> Response:
        """Like /health; an idle engine also generates a token."""
        return await _healthy(self._service.check_generation())

    @_information("/ready", reply=bodies.AnswerBody)
    async def ready(self, request: Request) -> Response:
        """Check whether a request would run now; 503 with the reason if not."""
        reason = self._service.not_ready
        return error_answer(reason, 503) if reason else Json(bodies.AnswerBody())

    @_information("/metrics", reply=str, media_type="text/plain")
    async def metrics(self, request: Request) -> Response:
        """Return Prometheus metrics; needs --enable-metrics."""
        if not self._service.config.server_args.enable_metrics:
            return error_answer("there are no metrics: start the server with --enable-metrics", 404)
        return Response(await self._service.metrics_text(), media_type=Metrics.content_type)

    @_information("/model_info", "/get_model_info", reply=ModelInfo)
    async def model_info(self, request: Request) -> Response:
        """Describe the model."""
        return Json(await self._service.model_info())

    @_information("/server_info", "/get_server_info", takes=ServerInfoQuery, reply=ServerInfo)
    async def server_info(self, request: Request) -> Response:
        """Return the arguments and the state of the server."""
        asked = read(ServerInfoQuery, request.query_params, param="query.config_format")
        info = await self._service.server_info()
        return Json({**info, **vllm_sections(self._service.config, asked)})

    @_information("/memory_occupation", reply=MemoryOccupationBody)
    async def memory_occupation(self, request: Request) -> Response:
        """Return the memory of each tag, and of the devices."""
        return Json(await self._service.memory_occupation())

    @_information("/v1/loads", takes=LoadsQuery, reply=Loads)
    async def loads(self, request: Request) -> Response:
        """Return the load of every replica."""
        query = request.query_params
        return Json(await self._service.loads_body(query.getlist("include"), query.get("dp_rank")))

    @_information("/get_load", reply=list[LoadSummary])
    async def load_summaries(self, request: Request) -> Response:
        """Return the load of every replica, in short."""
        return Json(load_summaries(await self._service.loads()))

    @_information("/get_weight_version", reply=WeightVersion)
    async def weight_version(self, request: Request) -> Response:
        """Return the version of the weights."""
        return Json(WeightVersion(weight_version=self._service.state.weight_version))

    @route("POST", "/post_process_weights", tag="control", reply=bodies.AnswerBody)
    async def post_process_weights(self, request: Request) -> Response:
        """Do nothing: after every update the weights are ready for use."""
        return Json(bodies.AnswerBody(message="Nothing to do: updates leave the weights ready."))

    @route("POST", "/drain", tag="control", takes=bodies.DrainRequest, reply=bodies.DrainReply)
    async def drain(self, request: Request) -> Response:
        """Finish the requests that are there, refuse new ones with 503, then end the server."""
        wanted = parse(bodies.DrainRequest, await self._bodies.read(request.stream()))
        return Json(self._service.drain(wanted.timeout_s))

    @route("POST", "/transition", tag="control", takes=TransitionRequest, reply=TransitionReply)
    async def transition(self, request: Request) -> Response:
        """Carry out several control requests in order. Sending it again with its op_id repeats nothing."""
        return Json(await self._service.transition(await self._bodies.read(request.stream())))


async def _healthy(check: Awaitable[None]) -> Response:
    try:
        await check
    except (EngineError, RequestRejected) as error:
        return error_answer(str(error), 503)
    return Response()


def control_endpoint(service: EngineService, kind: type[ControlRequest], reader: BodyReader) -> Endpoint:
    """Make the endpoint of a control request. The request is carried out even if its client disconnects."""
    binary = binary_fields(kind)

    async def endpoint(request: Request) -> Response:
        max_bytes = _max_weight_bytes(service) if binary else MAX_BODY_BYTES
        body = await reader.read(request.stream(), binary, max_bytes)
        fields = query_fields(kind, request.query_params) | body
        return _answer(kind, fields, await service.answer(kind, fields))

    return endpoint


def binary_fields(kind: type[ControlRequest]) -> frozenset[str]:
    """The fields that are lists of base64 strings in JSON."""
    fields = msgspec.structs.fields(kind)
    return frozenset(known.name for known in fields if known.type == list[bytes])


def query_fields(kind: type[ControlRequest], query: QueryParams) -> dict[str, Any]:
    """The fields in a query, converted to the request's types. A repeated parameter is a list.

    A value that cannot be converted stays text; building the request then raises the error.
    """
    types = {known.name: known.type for known in msgspec.structs.fields(kind)}
    fields: dict[str, Any] = {}
    for key in query:
        name = kind.row.query_aliases.get(key, key)
        wanted = types.get(name, str)
        given = of_query(query, key, wanted)
        try:
            fields[name] = msgspec.convert(given, wanted, strict=False)
        except msgspec.ValidationError:
            fields[name] = given
    return fields


def _answer(kind: type[ControlRequest], fields: Mapping[str, Any], answer: ControlAnswer) -> Response:
    reply, remark = answer.body, answer.remark
    if kind.row.body_if is not None and not fields.get(kind.row.body_if):
        return Response()
    if isinstance(reply, dict) and not reply["success"]:
        # It was only carried out in part: clients that poll need an error, and others the reply's fields.
        return Json({**error_body(reply["message"], 400), **reply}, 400)
    return Json(reply, headers={REMARK_HEADER: remark} if remark else None)


def _max_weight_bytes(service: EngineService) -> int:
    """The limit of a body with weights: room for all weights for every rank, as float32 in base64."""
    ranks = service.state.ranks
    weight_bytes = sum(rank.tags[MemoryTag.WEIGHTS].virtual_bytes for rank in ranks)
    return MAX_BODY_BYTES + 3 * weight_bytes * len(ranks)
