"""Fields of other servers' OpenAI dialects that would change an answer and are not in this version.

Ignored, they would change it in silence: they are refused by name, unless they ask for nothing.
Source: wire_vllm section 1.6.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.api.generate_fields import UNSUPPORTED_FIELDS, asks_for_nothing

_OLDER: Final = "structured_outputs takes its place"
_ONLY_TEXT: Final = "prompts are texts or token ids"
_ONLY_BIAS: Final = "of single tokens, logit_bias changes the odds and allowed_token_ids says which may come"

MAX_SALT_LENGTH: Final = 1024
# Taken where they say what is so anyway.
_CHECKED: Final = frozenset(("function_call", "tool_choice"))

# Field → what there is instead.
_UNSUPPORTED: Final[Mapping[str, str]] = {
    "audio": "answers are text",
    "documents": "chat_template_kwargs are variables of the template",
    "ec_transfer_params": "prompts are computed here",
    "functions": "tools takes its place",
    "guided_choice": _OLDER,
    "guided_grammar": _OLDER,
    "guided_json": _OLDER,
    "guided_regex": _OLDER,
    "kv_transfer_params": "prompts are computed here",
    "logits_processors": _ONLY_BIAS,
    "media_io_kwargs": _ONLY_TEXT,
    "mm_processor_kwargs": _ONLY_TEXT,
    "prompt_embeds": _ONLY_TEXT,
    "repetition_detection": "there are stop strings, stop_token_ids and penalties",
    "stop_regex": "stop takes strings",
    "thinking_token_budget": "max_tokens counts all tokens",
    "use_beam_search": "n samples are drawn",
    "vllm_xargs": "unknown arguments have no effect",
}
_OF_CHATS: Final[Mapping[str, str]] = {
    "chat_template": "the server's is used (--chat-template); chat_template_kwargs are its variables",
    "echo": "completions have it",
}
_OF_COMPLETIONS: Final[Mapping[str, str]] = {
    "required_prefix_token_ids": "prompt takes token ids",
    "tools": "chats show them to the chat template",
}


def refuse_unsupported(fields: Mapping[str, Any], *, is_chat: bool) -> None:
    """Refuse what cannot be kept. Raises RequestRejected: 400; names the field and what there is instead."""
    refuse_fields(fields, {**_UNSUPPORTED, **(_OF_CHATS if is_chat else _OF_COMPLETIONS)})
    if not is_chat:
        _expect(fields, "tool_choice", ("none", "auto"), "chats have tools")
    _expect(fields, "function_call", ("none", "auto"), "tool_choice takes its place")
    check_salt(fields.get("cache_salt"))


def refuse_fields(fields: Mapping[str, Any], unsupported: Mapping[str, str]) -> None:
    """Refuse those that ask for something.

    Args:
        unsupported: their names, and what there is instead.

    Raises:
        RequestRejected: 400.
    """
    for name in sorted(unsupported.keys() & fields.keys()):
        if not asks_for_nothing(fields[name]):
            raise RequestRejected(f"{name}: not supported in this version: {unsupported[name]}")


def unknown_fields(kind: type[Struct], fields: Mapping[str, Any], *, is_chat: bool) -> list[str]:
    """The names of those that have no effect because nothing is known of them."""
    empty = _UNSUPPORTED.keys() | (_OF_CHATS if is_chat else _OF_COMPLETIONS).keys() | UNSUPPORTED_FIELDS
    return sorted(fields.keys() - set(kind.__struct_fields__) - empty - _CHECKED)


def check_salt(salt: Any) -> None:
    """Refuse one that separates nothing, and one that is no text of a few words.

    Raises RequestRejected: 400.
    """
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
