"""What answers have to keep to, in the words of OpenAI and of vLLM, as sampling parameters.

Source: OpenAI's `response_format`; wire_vllm section 1.6 (`structured_outputs`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ebbtide.srt.errors import RequestRejected

ANY_OBJECT: Final = '{"type": "object"}'
# vLLM's name → that of the sampling parameter.
_STRUCTURED_OUTPUTS: Final = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "ebnf",
    "structural_tag": "structural_tag",
}


def grammar_params(response_format: Any, structured_outputs: Any) -> dict[str, Any]:
    """The sampling parameters for what was asked; empty if nothing was.

    Raises RequestRejected: 400, a form that is not known.
    """
    params = _of_format(response_format) if response_format is not None else {}
    outputs = _of_outputs(structured_outputs) if structured_outputs else {}
    if params and outputs:
        raise RequestRejected("structured_outputs and response_format: expected one of them")
    return params | outputs


def _of_format(wanted: Any) -> dict[str, Any]:
    match wanted:
        case {"type": "text"}:
            return {}
        case {"type": "json_object"}:
            return {"json_schema": ANY_OBJECT}
        case {"type": "json_schema", "json_schema": {"schema": Mapping() as schema}}:
            return {"json_schema": schema or ANY_OBJECT}
        case {"type": "structural_tag", "format": Mapping()}:
            return {"structural_tag": wanted}
        case {"type": "structural_tag", "structures": list() as structures, "triggers": list() as triggers}:
            return {"structural_tag": triggered_tags(structures, triggers)}
    raise RequestRejected(
        "response_format: expected a type of text, json_object, json_schema (with json_schema.schema) or "
        f"structural_tag (with format, or with structures and triggers), got {str(wanted)[:200]}"
    )


def triggered_tags(structures: list[Any], triggers: list[Any]) -> dict[str, Any]:
    """The older form of structural tags in today's."""
    tags = []
    for structure in structures:
        if not isinstance(structure, Mapping) or not {"begin", "end"} <= structure.keys():
            raise RequestRejected("response_format.structures: expected objects with begin, schema and end")
        content = {"type": "json_schema", "json_schema": structure.get("schema") or {}}
        tags.append({"begin": structure["begin"], "content": content, "end": structure["end"]})
    return {
        "type": "structural_tag",
        "format": {"type": "triggered_tags", "triggers": triggers, "tags": tags},
    }


def _of_outputs(wanted: Any) -> dict[str, Any]:
    if not isinstance(wanted, Mapping):
        raise RequestRejected(f"structured_outputs: expected an object, got {str(wanted)[:200]}")
    given = {name: value for name, value in wanted.items() if value is not None and value is not False}
    unknown = sorted(given.keys() - _STRUCTURED_OUTPUTS.keys() - {"json_object"})
    if unknown:
        listed = ", ".join([*_STRUCTURED_OUTPUTS, "json_object"])
        raise RequestRejected(f"structured_outputs.{unknown[0]}: not supported; there are {listed}")
    for name, value in given.items():
        # An empty schema allows any JSON; of nothing else is there an empty one.
        if value in ("", [], {}) and (name, value) != ("json", {}):
            raise RequestRejected(
                f"structured_outputs.{name}: expected what the output keeps to, got {value!r}"
            )
    params = {
        _STRUCTURED_OUTPUTS[name]: value if value != {} else "{}"
        for name, value in given.items()
        if name != "json_object"
    }
    return {"json_schema": ANY_OBJECT, **params} if "json_object" in given else params
