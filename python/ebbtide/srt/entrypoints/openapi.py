"""The OpenAPI document, made from the types of requests and answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, get_type_hints

import msgspec

from ebbtide.srt.entrypoints.anthropic import AnthropicApi
from ebbtide.srt.entrypoints.middleware import Access, access_of
from ebbtide.srt.entrypoints.openai.routes import OpenAIApi
from ebbtide.srt.entrypoints.routes import CONTROL_ROUTES, NativeApi
from ebbtide.srt.entrypoints.routing import Route, declared
from ebbtide.srt.entrypoints.transition import STEPS
from ebbtide.srt.entrypoints.vllm.generate import TokensApi
from ebbtide.srt.entrypoints.vllm.parameters import FetchInfo, InitInfo, LendingInfo
from ebbtide.srt.entrypoints.vllm.routes import PARTS_OF_VLLM
from ebbtide.srt.managers.api.generate_fields import GenerateReqInput
from ebbtide.srt.managers.io_struct import ControlRequest, Reply
from ebbtide.srt.sampling_params import FIELDS as SAMPLING_FIELDS, SamplingParams
from ebbtide.version import __version__

# Types within bodies whose fields have loose types, so msgspec does not find them.
PARTS = (SamplingParams, InitInfo, LendingInfo, FetchInfo)
REF_TEMPLATE = "#/components/schemas/{name}"

Schema = dict[str, Any]


# The classes whose methods answer the routes, in the order of the document.
OWNERS: Final = (NativeApi, OpenAIApi, AnthropicApi, TokensApi, *PARTS_OF_VLLM)


def openapi_document() -> Schema:
    """Make the whole document."""
    routes = [route for owner in OWNERS for route in declared(owner).values()]
    routes += [_control_route(path, kind) for path, kind in CONTROL_ROUTES.items()]
    schemas = _Schemas(routes)
    paths: dict[str, Schema] = {}
    for route in routes:
        # Starlette's mark for a parameter that may contain slashes, such as a model's name.
        for path in (path.replace(":path", "") for path in route.paths):
            paths[path] = {
                method.lower(): _describe(route, path, method, schemas) for method in route.methods
            }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Ebbtide", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _control_route(path: str, kind: type[ControlRequest]) -> Route:
    row = kind.row
    summary = (kind.__doc__ or "").partition("\n")[0]
    reply: Any = row.reply
    if row.body_field is not None:
        reply = get_type_hints(row.reply)[row.body_field]
    if row.body_if is not None:
        own = [name for name in row.reply.__struct_fields__ if name not in Reply.__struct_fields__]
        names = ", ".join(f"`{name}`" for name in own)
        reply, summary = None, f"{summary} Only with `{row.body_if}` there is a body: {names}."
    return Route(row.methods, (path,), summary, "control", kind, reply)


class _Schemas:
    """The schemas of all types. `of` returns a reference to one."""

    def __init__(self, routes: Iterable[Route]) -> None:
        requests = [route.takes for route in routes if route.takes is not None]
        replies = [
            kind
            for one in routes
            for kind in (one.reply, one.event, one.error)
            if kind is not None and not isinstance(kind, str)
        ]
        requests += PARTS
        known, incoming = _components(requests)
        answered, outgoing = _components(replies)
        self._known = known | answered
        # Only for whole requests: types within them say themselves whether null is allowed.
        for kind in dict.fromkeys(requests):
            _accept_null(incoming[kind.__name__])
        for name, schema in (*incoming.items(), *outgoing.items()):
            _drop_tag(name, schema)
        self.components = outgoing | incoming
        self._refine()

    def of(self, kind: Any) -> Schema:
        return self._known[repr(kind)]

    def _refine(self) -> None:
        """Add constraints that the types do not contain."""
        params = self.components[SamplingParams.__name__]
        params["additionalProperties"] = False
        one = self.of(SamplingParams)
        generate = self.components[GenerateReqInput.__name__]["properties"]
        generate["sampling_params"] = {"anyOf": [one, {"type": "array", "items": one}, {"type": "null"}]}
        refine(self.components)


def _components(kinds: Iterable[Any]) -> tuple[dict[str, Schema], dict[str, Schema]]:
    kinds = list({repr(kind): kind for kind in kinds}.values())
    schemas, components = msgspec.json.schema_components(kinds, ref_template=REF_TEMPLATE)
    return {repr(kind): schema for kind, schema in zip(kinds, schemas, strict=True)}, dict(components)


def _accept_null(schema: Schema) -> None:
    """Allow null for all optional fields of a request, where it means "not given"."""
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        takes_null = "anyOf" in field and {"type": "null"} in field["anyOf"]
        # An empty schema allows anything already.
        if name not in required and field.keys() - {"default"} and not takes_null:
            default = {"default": field.pop("default")} if "default" in field else {}
            schema["properties"][name] = {"anyOf": [field, {"type": "null"}], **default}


def _drop_tag(name: str, schema: Schema) -> None:
    """Remove the tag with the type's name. Messages between processes have it, bodies do not."""
    if schema.get("properties", {}).get("type") == {"enum": [name]}:
        del schema["properties"]["type"]
        schema["required"] = [field for field in schema["required"] if field != "type"]


def _describe(route: Route, path: str, method: str, schemas: _Schemas) -> Schema:
    described: Schema = {
        "operationId": f"{method.lower()}_{path.strip('/').replace('/', '_') or 'root'}",
        "tags": [route.tag],
        "summary": route.summary,
        "responses": {
            "200": {"description": "Done.", **_content(route, schemas)},
            "default": {
                "description": "Refused, or failed.",
                "content": {"application/json": {"schema": schemas.of(route.error)}},
            },
        },
    }
    if access_of(path) is not Access.OPEN:
        # {} makes the key optional, since a server may have none.
        described["security"] = [{"key": []}, {}]
    parameters = (
        [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
        if "{model}" in path
        else []
    )
    if route.takes is not None and method == "GET":
        parameters += _query(schemas.components[route.takes.__name__])
    elif route.takes is not None:
        schema = schemas.of(route.takes)
        needs_fields = bool(schemas.components[route.takes.__name__].keys() & {"required", "anyOf", "oneOf"})
        described["requestBody"] = {
            "required": needs_fields,
            "content": {"application/json": {"schema": schema}},
        }
    if parameters:
        described["parameters"] = parameters
    return described


def _content(route: Route, schemas: _Schemas) -> Schema:
    if route.reply is None:
        return {}
    content: Schema = {route.media_type: {"schema": schemas.of(route.reply)}}
    if route.event is not None:
        # OpenAPI 3.1 cannot describe the schema of single events, so describe them in words.
        event = (
            route.event
            if isinstance(route.event, str)
            else f"Each event is `data: ` and a {route.event.__name__}; the last is `data: [DONE]`."
        )
        content["text/event-stream"] = {"schema": {"description": event}}
    return {"content": content}


def _query(schema: Mapping[str, Any]) -> list[Schema]:
    required = schema.get("required", ())
    return [
        {"name": name, "in": "query", "required": name in required, "schema": field}
        for name, field in schema["properties"].items()
    ]


# Constraints beyond the types: bounds, choices, required fields. They are checked where requests are carried
# out; a test compares each entry with a server. Those that depend on state, model or files are left out.

# Keywords that are added to a field's type. Each applies to one type of value, and so not to null.
FROM_0: Final[Schema] = {"minimum": 0}
NOT_EMPTY: Final[Schema] = {"minLength": 1}
PORT: Final[Schema] = {"minimum": 1, "maximum": 65535, "pattern": "^[0-9]+$"}

_IDS: Final[Schema] = {"type": "array", "items": {"type": "integer"} | FROM_0}
_LISTS_OF_IDS: Final[Schema] = {"type": "array", "items": _IDS}

# Type of the request → field → keywords.
FIELD_SCHEMAS: Final[dict[str, dict[str, Schema]]] = {
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
}


def given(name: str, **schema: Any) -> Schema:
    """Schema of a body in which this field is given, is not null, and matches `schema`."""
    return {"required": [name], "properties": {name: {"not": {"type": "null"}, **schema}}}


def _one_of(*names: str) -> Schema:
    return {"oneOf": [given(name) for name in names]}


# Type of the request → constraints between its fields.
BODY_SCHEMAS: Final[dict[str, Schema]] = {
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
    """Add to the schemas of requests the constraints that their types do not contain."""
    for kind, fields in FIELD_SCHEMAS.items():
        properties = components[kind]["properties"]
        for name, keywords in fields.items():
            overlaps = properties[name].keys() & keywords.keys()
            properties[name] |= {"allOf": [keywords]} if overlaps else keywords
    for kind, whole in BODY_SCHEMAS.items():
        components[kind].update(whole)
    forms = ("InitInfo", "LendingInfo", "FetchInfo")
    for kind in forms:
        components[kind]["additionalProperties"] = False
    components["InitParameters"]["properties"]["init_info"] = {"anyOf": [components[kind] for kind in forms]}
    steps = components["TransitionRequest"]["properties"]["steps"]
    steps["items"] = {"oneOf": list(_steps(components))}


def _steps(components: Mapping[str, Schema]) -> Iterable[Schema]:
    """The schema of each kind of step: `op`, and the fields of its request."""
    for op, kind in STEPS.items():
        request = components[kind.__name__]
        named = {"op": {"const": op}, **request["properties"]}
        yield {**request, "properties": named, "required": ["op", *request.get("required", ())]}
