"""The control endpoints: one for each control request whose row has a path. Source: wire_api section 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, get_args, get_origin

import msgspec
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from ebbtide.srt.entrypoints.http_answers import Endpoint, Json
from ebbtide.srt.entrypoints.request_body import MAX_BODY_BYTES, BodyReader
from ebbtide.srt.entrypoints.service import ControlAnswer, EngineService
from ebbtide.srt.errors import error_body
from ebbtide.srt.managers.io_struct import CONTROL_REQUESTS, ControlRequest
from ebbtide.srt.memory_saver.tags import MemoryTag

CONTROL_ROUTES: Final[dict[str, type[ControlRequest]]] = {
    kind.row.path: kind for kind in CONTROL_REQUESTS if kind.row.path is not None
}

# Says what a body that is a bare list cannot.
REMARK_HEADER: Final = "Ebbtide-Message"

# SGLang has these paths, or vLLM and the servers made of it, and this version does not.
NOT_IMPLEMENTED = (
    "/encode",
    "/classify",
    "/load_lora_adapter_from_distributed",
    "/post_process_weights",
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
    "/send_weights_to_remote_instance",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/completions/render",
    "/v1/chat/completions/render",
    *(f"/nemo-rl/refit/{step}" for step in ("prepare", "s3-manifest", "flush", "zmq-flush")),
)


def control_endpoint(service: EngineService, kind: type[ControlRequest], bodies: BodyReader) -> Endpoint:
    """The endpoint of a control request. A client that disconnects does not end it."""
    binary = binary_fields(kind)

    async def endpoint(request: Request) -> Response:
        max_bytes = _max_weight_bytes(service) if binary else MAX_BODY_BYTES
        body = await bodies.read(request.stream(), binary, max_bytes)
        fields = query_fields(kind, request.query_params) | body
        return _answer(kind, fields, await service.answer(kind, fields))

    return endpoint


def binary_fields(kind: type[ControlRequest]) -> frozenset[str]:
    """Fields that are lists of base64 in JSON."""
    fields = msgspec.structs.fields(kind)
    return frozenset(known.name for known in fields if known.type == list[bytes])


def query_fields(kind: type[ControlRequest], query: QueryParams) -> dict[str, Any]:
    """The fields in a query, with the types that the request gives them; a list is a field that is repeated.

    What does not fit its type stays text: building the request then says what was expected.
    """
    types = {known.name: known.type for known in msgspec.structs.fields(kind)}
    fields: dict[str, Any] = {}
    for key in query:
        name = kind.row.query_aliases.get(key, key)
        wanted = types.get(name, str)
        given: Any = query.getlist(key) if _takes_list(wanted) else query[key]
        try:
            fields[name] = msgspec.convert(given, wanted, strict=False)
        except msgspec.ValidationError:
            fields[name] = given
    return fields


def _takes_list(annotation: Any) -> bool:
    members = (annotation, *get_args(annotation))
    return str not in members and any(get_origin(member) in (list, tuple) for member in members)


def _answer(kind: type[ControlRequest], fields: Mapping[str, Any], answer: ControlAnswer) -> Response:
    reply, remark = answer.body, answer.remark
    if kind.row.body_if is not None and not fields.get(kind.row.body_if):
        return Response()
    if isinstance(reply, dict) and not reply["success"]:
        # It was carried out, and not in full: an error for clients that poll, and the reply's fields stay.
        return Json({**error_body(reply["message"], 400), **reply}, 400)
    return Json(reply, headers={REMARK_HEADER: remark} if remark else None)


def _max_weight_bytes(service: EngineService) -> int:
    """What a body with weights may hold: all of them, for each rank, as float32 and in base64."""
    ranks = service.state.ranks
    weight_bytes = sum(rank.tags[MemoryTag.WEIGHTS].virtual_bytes for rank in ranks)
    return MAX_BODY_BYTES + 3 * weight_bytes * len(ranks)
