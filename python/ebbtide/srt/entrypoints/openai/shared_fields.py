"""Fields that several endpoints share: unsupported and ignored ones, and constraints of the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.api.generate_fields import UNSUPPORTED_FIELDS, asks_for_nothing

_OLDER: Final = "use structured_outputs instead"
_ONLY_TEXT: Final = "prompts are texts or token ids"
_ONLY_BIAS: Final = "logit_bias changes the odds of tokens, and allowed_token_ids restricts them"

MAX_SALT_LENGTH: Final = 1024
# Accepted if their values do not change anything.
_CHECKED: Final = frozenset(("function_call", "tool_choice"))

# Field → what to use instead, or why not.
_UNSUPPORTED: Final[Mapping[str, str]] = {
    "audio": "answers are text",
    "documents": "use chat_template_kwargs, the variables of the template",
    "ec_transfer_params": "prompts are computed here",
    "functions": "use tools instead",
    "guided_choice": _OLDER,
    "guided_grammar": _OLDER,
    "guided_json": _OLDER,
    "guided_regex": _OLDER,
    "kv_transfer_params": "prompts are computed here",
    "logits_processors": _ONLY_BIAS,
    "media_io_kwargs": _ONLY_TEXT,
    "mm_processor_kwargs": _ONLY_TEXT,
    "prompt_embeds": _ONLY_TEXT,
    "repetition_detection": "use stop, stop_token_ids or penalties",
    "stop_regex": "use stop, which takes strings",
    "thinking_token_budget": "max_tokens limits reasoning and answer together",
    "use_beam_search": "use n for several samples",
    "vllm_xargs": "unknown arguments have no effect",
}
_OF_CHATS: Final[Mapping[str, str]] = {
    "chat_template": "the server's is used (--chat-template); chat_template_kwargs are its variables",
    "echo": "only completions have it",
}
_OF_COMPLETIONS: Final[Mapping[str, str]] = {
    "required_prefix_token_ids": "use token ids as prompt",
    "tools": "only chats have tools",
}


def refuse_unsupported(fields: Mapping[str, Any], *, is_chat: bool) -> None:
    """Reject unsupported fields. Raises RequestRejected: 400, with the field and what to use instead."""
    refuse_fields(fields, {**_UNSUPPORTED, **(_OF_CHATS if is_chat else _OF_COMPLETIONS)})
    if not is_chat:
        _expect(fields, "tool_choice", ("none", "auto"), "only chats have tools")
    _expect(fields, "function_call", ("none", "auto"), "use tool_choice instead")
    check_salt(fields.get("cache_salt"))


def refuse_fields(fields: Mapping[str, Any], unsupported: Mapping[str, str]) -> None:
    """Reject unsupported fields whose values ask for something.

    `unsupported`: field → what to use instead. Raises RequestRejected: 400.
    """
    for name in sorted(unsupported.keys() & fields.keys()):
        if not asks_for_nothing(fields[name]):
            raise RequestRejected(f"{name}: not supported in this version: {unsupported[name]}")


def unknown_fields(kind: type[Struct], fields: Mapping[str, Any], *, is_chat: bool) -> list[str]:
    """The names of unknown fields, which have no effect."""
    empty = _UNSUPPORTED.keys() | (_OF_CHATS if is_chat else _OF_COMPLETIONS).keys() | UNSUPPORTED_FIELDS
    return sorted(fields.keys() - set(kind.__struct_fields__) - empty - _CHECKED)


def check_salt(salt: Any) -> None:
    """Check the length of a prefix cache salt. Raises RequestRejected: 400; it is empty or too long."""
    if isinstance(salt, str) and not 1 <= len(salt) <= MAX_SALT_LENGTH:
        raise RequestRejected(
            f"cache_salt: expected 1 to {MAX_SALT_LENGTH} characters, got {len(salt)}",
            param="body.cache_salt",
        )


def _expect(fields: Mapping[str, Any], name: str, supported: tuple[str, ...], why: str) -> None:
    value = fields.get(name)
    if value is not None and value not in supported:
        listed = ", ".join(map(repr, supported))
        raise RequestRejected(f"{name}: expected null or {listed}: {why}; got {value!r}")


ANY_OBJECT: Final = '{"type": "object"}'
# vLLM's name → sampling parameter.
_STRUCTURED_OUTPUTS: Final = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "ebnf",
    "structural_tag": "structural_tag",
}


def grammar_params(response_format: Any, structured_outputs: Any) -> dict[str, Any]:
    """The sampling parameters of the answer's constraint; empty if there is none.

    Raises RequestRejected: 400; the form is unknown, or both arguments have a constraint.
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
    """Convert structural tags from their older form, with structures and triggers, to the current one."""
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
        # An empty schema allows any JSON. Other constraints cannot be empty.
        if value in ("", [], {}) and (name, value) != ("json", {}):
            raise RequestRejected(
                f"structured_outputs.{name}: expected a constraint of the output, got {value!r}"
            )
    params = {
        _STRUCTURED_OUTPUTS[name]: value if value != {} else "{}"
        for name, value in given.items()
        if name != "json_object"
    }
    return {"json_schema": ANY_OBJECT, **params} if "json_object" in given else params
