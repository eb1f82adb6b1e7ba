"""The control endpoints: path → methods, request and what the reply becomes. Source: wire_api section 3."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin

import msgspec
from starlette.datastructures import QueryParams

from ebbtide.srt.errors import error_body
from ebbtide.srt.managers.io_struct import (
    AbortReq,
    AbortReqOutput,
    AbortWeightUpdateReqInput,
    BeginWeightUpdateReqInput,
    CheckWeightsReqInput,
    CheckWeightsReqOutput,
    ContinueGenerationReqInput,
    ContinueGenerationReqOutput,
    ControlRequest,
    DestroyWeightsUpdateGroupReqInput,
    EndWeightUpdateReqInput,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    GetWeightsByNameReqInput,
    GetWeightsByNameReqOutput,
    InitWeightsUpdateGroupReqInput,
    PauseGenerationReqInput,
    PauseGenerationReqOutput,
    ReleaseMemoryOccupationReqInput,
    ReleaseMemoryOccupationReqOutput,
    Reply,
    ResumeMemoryOccupationReqInput,
    ResumeMemoryOccupationReqOutput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
    UpdateWeightsReqOutput,
    UpdateWeightVersionReqInput,
    UpdateWeightVersionReqOutput,
    WeightSessionReqOutput,
    WeightsUpdateGroupReqOutput,
)

POST = ("POST",)
POST_OR_GET = ("POST", "GET")

# A status and a body; None for an empty one.
Answer = tuple[int, Any]


@dataclass(frozen=True)
class ControlRoute:
    """One control endpoint.

    Attributes:
        reply: what it is answered with.
        query_aliases: further names of fields in the query.
        answer: makes the answer of the fields that were sent and the body of the reply.
    """

    request: type[ControlRequest]
    reply: type[Reply]
    methods: tuple[str, ...] = POST
    query_aliases: Mapping[str, str] = field(default_factory=dict)
    answer: Callable[[Mapping[str, Any], Any], Answer] = lambda fields, reply: (200, reply)

    @property
    def binary_fields(self) -> frozenset[str]:
        """Fields that are lists of base64 in JSON."""
        fields = msgspec.structs.fields(self.request)
        return frozenset(known.name for known in fields if known.type == list[bytes])


def _abort_answer(fields: Mapping[str, Any], reply: Any) -> Answer:
    return 200, reply if fields.get("report") else None


def _flush_answer(fields: Mapping[str, Any], reply: Any) -> Answer:
    """Not full is an error for clients that poll, and the reply's own fields stay."""
    if reply["fully_flushed"]:
        return 200, reply
    return 400, {**error_body(reply["message"], 400), **reply}


CONTROL_ROUTES: dict[str, ControlRoute] = {
    "/release_memory_occupation": ControlRoute(
        ReleaseMemoryOccupationReqInput, ReleaseMemoryOccupationReqOutput, POST_OR_GET
    ),
    "/resume_memory_occupation": ControlRoute(
        ResumeMemoryOccupationReqInput, ResumeMemoryOccupationReqOutput, POST_OR_GET
    ),
    "/pause_generation": ControlRoute(PauseGenerationReqInput, PauseGenerationReqOutput),
    "/continue_generation": ControlRoute(ContinueGenerationReqInput, ContinueGenerationReqOutput),
    "/abort_request": ControlRoute(AbortReq, AbortReqOutput, answer=_abort_answer),
    "/flush_cache": ControlRoute(
        FlushCacheReqInput,
        FlushCacheReqOutput,
        POST_OR_GET,
        query_aliases={"timeout": "timeout_s"},
        answer=_flush_answer,
    ),
    "/update_weights_from_disk": ControlRoute(UpdateWeightFromDiskReqInput, UpdateWeightsReqOutput),
    "/update_weights_from_tensor": ControlRoute(UpdateWeightsFromTensorReqInput, UpdateWeightsReqOutput),
    "/update_weights_from_distributed": ControlRoute(
        UpdateWeightsFromDistributedReqInput, UpdateWeightsReqOutput
    ),
    "/update_weights_from_ipc": ControlRoute(UpdateWeightsFromIPCReqInput, UpdateWeightsReqOutput),
    "/init_weights_update_group": ControlRoute(InitWeightsUpdateGroupReqInput, WeightsUpdateGroupReqOutput),
    "/destroy_weights_update_group": ControlRoute(
        DestroyWeightsUpdateGroupReqInput, WeightsUpdateGroupReqOutput
    ),
    "/begin_weight_update": ControlRoute(BeginWeightUpdateReqInput, WeightSessionReqOutput),
    "/end_weight_update": ControlRoute(EndWeightUpdateReqInput, UpdateWeightsReqOutput),
    "/abort_weight_update": ControlRoute(AbortWeightUpdateReqInput, WeightSessionReqOutput),
    "/update_weight_version": ControlRoute(UpdateWeightVersionReqInput, UpdateWeightVersionReqOutput),
    "/get_weights_by_name": ControlRoute(GetWeightsByNameReqInput, GetWeightsByNameReqOutput, POST_OR_GET),
    "/weights_checker": ControlRoute(CheckWeightsReqInput, CheckWeightsReqOutput, POST_OR_GET),
}

# Paths that SGLang has and this version does not.
NOT_IMPLEMENTED = (
    "/encode",
    "/classify",
    "/load_lora_adapter",
    "/load_lora_adapter_from_tensors",
    "/load_lora_adapter_from_distributed",
    "/unload_lora_adapter",
    "/post_process_weights",
    "/pull_weights",
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
    "/v1/responses",
)


def query_fields(route: ControlRoute, query: QueryParams) -> dict[str, Any]:
    """The fields in a query, with the types that the request gives them; a list is a field that is repeated.

    What does not fit its type stays text: building the request then says what was expected.
    """
    types = {known.name: known.type for known in msgspec.structs.fields(route.request)}
    fields: dict[str, Any] = {}
    for key in query:
        name = route.query_aliases.get(key, key)
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
