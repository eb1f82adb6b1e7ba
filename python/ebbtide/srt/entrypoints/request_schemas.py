"""What the schemas of requests say beyond the types of their fields: bounds, choices, and what is needed.

The checks are where requests are carried out; a test holds each entry here against a server. What hangs on
the state, on the model or on files is not said.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from ebbtide.srt.entrypoints.information import SECTIONS
from ebbtide.srt.entrypoints.transition import STEPS
from ebbtide.srt.managers.io_struct import CONTROL_REQUESTS
from ebbtide.srt.sampling_params import FIELDS as SAMPLING_FIELDS

Schema = dict[str, Any]

# Keywords that go with a field's type: each is about values of one type, and says nothing of null.
FROM_0: Final[Schema] = {"minimum": 0}
FROM_1: Final[Schema] = {"minimum": 1}
ABOVE_0: Final[Schema] = {"exclusiveMinimum": 0}
NOT_EMPTY: Final[Schema] = {"minLength": 1}
PORT: Final[Schema] = {"minimum": 1, "maximum": 65535, "pattern": "^[0-9]+$"}
ONLY_TRUE: Final[Schema] = {"enum": [True, None]}
ONE_MODEL: Final[Schema] = {"enum": ["target", "all", None]}

_GROUP: Final[dict[str, Schema]] = {
    "rank_offset": FROM_1,
    "world_size": {"minimum": 2},
}
_SECTION: Final = rf"\s*({'|'.join(SECTIONS)})\s*"
_IDS: Final[Schema] = {"type": "array", "items": {"type": "integer"} | FROM_0}
_LISTS_OF_IDS: Final[Schema] = {"type": "array", "items": _IDS}

# By type of the request, and field.
FIELDS: Final[dict[str, dict[str, Schema]]] = {
    "SamplingParams": {field.name: dict(field.check.schema) for field in SAMPLING_FIELDS},
    "CompletionRequest": {
        "prompt": {
            "anyOf": [
                NOT_EMPTY | {"type": "string"},
                {"type": "array", "minItems": 1, "items": NOT_EMPTY | {"type": "string"}},
                _IDS | {"minItems": 1},
                _LISTS_OF_IDS | {"minItems": 1},
            ]
        },
    },
    "DetokenizeRequest": {"tokens": {"anyOf": [_IDS, _LISTS_OF_IDS]}},
    "LoadsQuery": {
        "dp_rank": FROM_0,
        "include": {"pattern": f"^{_SECTION}(,{_SECTION})*$"},
    },
    "PauseGenerationReqInput": {"timeout_s": FROM_0},
    "FlushCacheReqInput": {"timeout_s": FROM_0},
    "BeginWeightUpdateReqInput": {"timeout_s": FROM_0, "selector": ONE_MODEL},
    "EndWeightUpdateReqInput": {"timeout_s": FROM_0},
    **{
        kind.__name__: {"timeout_s": FROM_0, "selector": ONE_MODEL}
        for kind in CONTROL_REQUESTS
        if kind.__name__.startswith("UpdateWeight") and "selector" in kind.__struct_fields__
    },
    "InitWeightsUpdateGroupReqInput": {**_GROUP, "group_name": NOT_EMPTY, "timeout_s": ABOVE_0},
    "InitInfo": _GROUP,
    "GetWeightsByNameReqInput": {"name": NOT_EMPTY, "truncate_size": FROM_0},
    "Canary": {"input_ids": {"minItems": 2, "items": FROM_0}, "atol": FROM_0},
    "StartParameters": {"is_checkpoint_format": ONLY_TRUE},
    "BroadcasterParameters": {
        "host": NOT_EMPTY,
        "port": PORT,
        "rank_offset": FROM_0,
        "inference_world_size": FROM_1,
        "timeout": ABOVE_0,
        "quantize_in_weight_transfer": {"enum": [False, None]},
        "session_id": {"type": "null"},
    },
    "PullParameters": {"pre_read_hook": {"enum": ["", None]}},
}


def given(name: str, **schema: Any) -> Schema:
    """A body in which a field is there, is not null, and fits."""
    return {"required": [name], "properties": {name: {"not": {"type": "null"}, **schema}}}


def _one_of(*names: str) -> Schema:
    return {"oneOf": [given(name) for name in names]}


# By type of the request: what one field has to do with another.
BODIES: Final[dict[str, Schema]] = {
    "GenerateReqInput": {"anyOf": [given("text"), given("input_ids", minItems=1), given("continue_from")]},
    "ChatCompletionRequest": {"anyOf": [given("messages", minItems=1), given("input_ids", minItems=1)]},
    "TokensRequest": {"anyOf": [given("token_ids", minItems=1), given("continue_from")]},
    "TokenizeRequest": _one_of("prompt", "text", "messages"),
    "ResizeMemoryOccupationReqInput": _one_of("num_tokens", "num_bytes"),
    "InitWeightsUpdateGroupReqInput": {
        "anyOf": [
            given("nccl_unique_id"),
            {"properties": {"master_address": NOT_EMPTY, "master_port": PORT}},
        ]
    },
    "CheckerParameters": {
        "anyOf": [given("baseline"), {"properties": {"action": {"enum": ["checksum", "reset"]}}}]
    },
}


def refine(components: Mapping[str, Schema]) -> None:
    """Say in the schemas of requests what their types do not."""
    for kind, fields in FIELDS.items():
        properties = components[kind]["properties"]
        for name, keywords in fields.items():
            overlaps = properties[name].keys() & keywords.keys()
            properties[name] |= {"allOf": [keywords]} if overlaps else keywords
    for kind, whole in BODIES.items():
        components[kind].update(whole)
    forms = ("InitInfo", "LendingInfo", "FetchInfo")
    for kind in forms:
        components[kind]["additionalProperties"] = False
    components["InitParameters"]["properties"]["init_info"] = {"anyOf": [components[kind] for kind in forms]}
    steps = components["TransitionRequest"]["properties"]["steps"]
    steps["items"] = {"oneOf": list(_steps(components))}


def _steps(components: Mapping[str, Schema]) -> Iterable[Schema]:
    """The schema of each kind of step: the fields of its request, and its name."""
    for op, kind in STEPS.items():
        request = components[kind.__name__]
        named = {"op": {"const": op}, **request["properties"]}
        yield {**request, "properties": named, "required": ["op", *request.get("required", ())]}
