"""Conversations of dialects other than OpenAI's chats, as such chats."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from ebbtide.srt.entrypoints.openai.protocol import Fields
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.api.generate_fields import CommonFields
from ebbtide.srt.sampling_params import OPENAI_FIELDS

# What bodies of these dialects may hold too, under the name and with the meaning that it has in a chat.
PASSED_ON: Final = frozenset(
    {*OPENAI_FIELDS, *CommonFields.__struct_fields__, "add_special_tokens", "truncate_prompt_tokens"}
    | {"truncation_side", "stream", "cache_salt", "extra_key", "timeout_s", "rid", "request_id", "model"}
    | {"chat_template_kwargs", "separate_reasoning", "data_parallel_rank"}
) - {"n", "return_sampling_mask"}
# What the server's flags add to a body, for other answers than these.
_ADDED: Final = frozenset(("return_tokens_as_token_ids", "return_routed_experts", "stream_options"))


class ChatBuilder:
    """Puts the messages of a chat together. What an assistant says in several pieces is one message.

    `messages`: so far.
    """

    def __init__(self) -> None:
        self.messages: list[Fields] = []

    def system(self, text: str) -> None:
        """Instructions. Templates take one such message, at the beginning."""
        if len(self.messages) == 1 and self.messages[0]["role"] == "system":
            self.messages[0]["content"] += f"\n\n{text}"
        else:
            self.add("system", text)

    def add(self, role: str, text: str, **fields: Any) -> None:
        """A message."""
        self.messages.append({"role": role, "content": text, **fields})

    def say(self, text: str) -> None:
        """A piece of an assistant's text."""
        self._answer()["content"] += text

    def think(self, text: str) -> None:
        """A piece of an assistant's reasoning."""
        answer = self._answer()
        answer["reasoning_content"] = answer.get("reasoning_content", "") + text

    def call(self, call_id: str, name: str, arguments: Any) -> None:
        """A call of a tool. `arguments`: an object, or JSON."""
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._answer().setdefault("tool_calls", []).append(call)

    def _answer(self) -> Fields:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.add("assistant", "")
        return self.messages[-1]


def text_in(content: Any, where: str, kinds: Collection[str]) -> str:
    """The text of a message's content, whose parts are joined by spaces, as those of a chat are.

    Args:
        where: its name in a refusal.
        kinds: the types that parts with text have.

    Raises RequestRejected: 400; a part is no text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RequestRejected(f"{where}: expected a text or a list of parts, got {shown(content)}")
    texts = []
    for index, part in enumerate(content):
        match part:
            case {"type": str() as kind, "text": str() as text} if kind in kinds:
                texts.append(text)
            case _:
                raise unsupported(f"{where}[{index}]", part, kinds)
    return " ".join(texts)


def text_field(item: Mapping[str, Any], name: str, where: str) -> str:
    """A field that has to be a text. Raises RequestRejected: 400, it is none."""
    value = item.get(name)
    if not isinstance(value, str):
        raise RequestRejected(f"{where}.{name}: expected a text, got {shown(value)}")
    return value


def unsupported(where: str, item: Any, kinds: Collection[str]) -> RequestRejected:
    """The refusal of an item of an unknown type."""
    expected = ", ".join(sorted(kinds))
    if isinstance(item, Mapping) and item.get("type") in kinds:
        return RequestRejected(f"{where}: a field of this {item['type']} is missing, or of another type")
    given = item.get("type") if isinstance(item, Mapping) else item
    return RequestRejected(f"{where}: not supported in this version: expected {expected}, got {shown(given)}")


def shown(value: Any) -> str:
    """What a refusal quotes of a value."""
    return repr(value)[:100] if isinstance(value, str | int | float | bool | None) else type(value).__name__


def passed_on(fields: Mapping[str, Any]) -> Fields:
    """What means the same in a chat. Raises RequestRejected: 400, several answers are asked for."""
    if fields.get("n") not in (None, 1):
        raise RequestRejected(f"n: expected null or 1, got {shown(fields['n'])}: chats have several answers")
    return {name: fields[name] for name in PASSED_ON & fields.keys()}


def not_known(fields: Mapping[str, Any], known: Collection[str]) -> list[str]:
    """The names of fields that have no effect."""
    given = {name for name, value in fields.items() if value is not None}
    return sorted(given - PASSED_ON - _ADDED - {"n"} - set(known))


def template_options(fields: Mapping[str, Any], *, thinks: bool | None, effort: Any) -> Fields:
    """The variables of the chat template: those given, and those by which templates switch reasoning.

    Args:
        thinks: None: as the template has it.
        effort: None: as the template has it.
    """
    given = fields.get("chat_template_kwargs")
    if given is not None and not isinstance(given, Mapping):
        raise RequestRejected(f"chat_template_kwargs: expected an object, got {shown(given)}")
    options = {} if thinks is None else {"enable_thinking": thinks, "thinking": thinks}
    if effort is not None:
        options["reasoning_effort"] = effort
    return {**options, **(given or {})}
