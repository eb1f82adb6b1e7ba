"""Calls of tools in the words of a model: found in its text as that grows, or in all of it at once.

Each family of models writes calls in a form of its own: `TOOL_CALL_FORMATS`, by the names that SGLang has for
them. A call is told whole, when its end has come; text that could yet become one is held back till then.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias


@dataclass(frozen=True)
class ToolSpec:
    """A tool that a request offers: its name, and the JSON schema of its parameters."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ToolCall:
    """A call: `arguments` is the JSON text of an object."""

    name: str
    arguments: str


Tools: TypeAlias = Sequence[ToolSpec]
# The calls in a block, as (name, arguments). ValueError, KeyError, TypeError, SyntaxError: it is none.
ReadBlock: TypeAlias = Callable[[str, Mapping[str, ToolSpec]], list[tuple[str, Any]]]


@dataclass(frozen=True)
class ToolCallFormat:
    """How a family of models writes calls.

    Attributes:
        begin: what a block of calls begins with.
        end: what it ends with; empty: it goes on to the end of the text.
        starts: a text that begins with this is a block as a whole; empty: there is no such thing.
    """

    begin: str
    end: str
    read: ReadBlock
    starts: str = ""


def tool_specs(tools: Sequence[Any]) -> list[ToolSpec]:
    """The functions among tools as OpenAI writes them: objects, or JSON.

    Raises:
        ValueError: one has no name.
    """
    specs = []
    for tool in tools:
        function = _member(tool, "function") or tool
        name = _member(function, "name")
        if not isinstance(name, str) or not name:
            raise ValueError("tools: expected objects with a function that has a name")
        parameters = _member(function, "parameters")
        specs.append(ToolSpec(name, parameters if isinstance(parameters, Mapping) else {}))
    return specs


def _member(holder: Any, name: str) -> Any:
    return holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)


class ToolCallParser:
    """Takes calls out of one text, piece by piece.

    A block that is no call, or that calls what is not among the tools, stays in the text as it is.

    Raises ValueError for a format that is not known.
    """

    def __init__(self, tools: Tools, name: str) -> None:
        if name not in TOOL_CALL_FORMATS:
            raise ValueError(
                f"tool_call_parser: expected one of {', '.join(TOOL_CALL_FORMATS)}, got {name!r}"
            )
        self.format = TOOL_CALL_FORMATS[name]
        self._tools = {tool.name: tool for tool in tools}
        self._held = ""
        self._is_inside = False
        self._is_start = True

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """The text that is certain to be no call, and the calls whose end has come."""
        self._held += text
        plain, calls = [], []
        while True:
            if self._is_start:
                if not self._held.strip():
                    break
                self._is_start = False
                starts = self.format.starts
                if starts and self._held.lstrip().startswith(starts):
                    self._is_inside = True
            if self._is_inside:
                found = self._take_block()
                if found is None:
                    break
                plain.append(found[0])
                calls += found[1]
            else:
                before, begin, rest = self._held.partition(self.format.begin)
                if not begin:
                    num_held = num_open(before, self.format.begin)
                    plain.append(before[: len(before) - num_held])
                    self._held = before[len(before) - num_held :]
                    break
                plain.append(before)
                self._held, self._is_inside = begin + rest, True
        return "".join(plain), calls

    def finish(self) -> tuple[str, list[ToolCall]]:
        """The text has ended: what was held back."""
        held, self._held = self._held, ""
        if not self._is_inside:
            return held, []
        self._is_inside = False
        calls = self._calls(held)
        return ("", calls) if calls else (held, [])

    def _take_block(self) -> tuple[str, list[ToolCall]] | None:
        end = self.format.end
        place = self._held.find(end) if end else -1
        if place < 0:
            return None
        block, self._held = self._held[: place + len(end)], self._held[place + len(end) :]
        self._is_inside = False
        calls = self._calls(block)
        return ("", calls) if calls else (block, [])

    def _calls(self, block: str) -> list[ToolCall]:
        body = block.strip().removeprefix(self.format.begin).removesuffix(self.format.end or "\0")
        try:
            found = self.format.read(body.strip(), self._tools)
        except (ValueError, KeyError, TypeError, SyntaxError, AttributeError, RecursionError):
            return []
        if any(name not in self._tools or not isinstance(given, dict) for name, given in found):
            return []
        return [ToolCall(name, json.dumps(given, ensure_ascii=False)) for name, given in found]


def json_calls(text: str, tools: Tools) -> list[ToolCall]:
    """The calls of a text that a grammar of `calls_schema` has made; none where it was cut short."""
    try:
        return [
            ToolCall(call["name"], json.dumps(call["parameters"], ensure_ascii=False))
            for call in json.loads(text)
        ]
    except (ValueError, KeyError, TypeError):
        return []


def calls_schema(tools: Tools, *, most: int | None) -> dict[str, Any]:
    """The JSON schema of one call or more of these tools, as `json_calls` reads them."""
    kinds = [
        {
            "type": "object",
            "properties": {
                "name": {"enum": [tool.name]},
                "parameters": dict(tool.parameters) or {"type": "object"},
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    limit = {} if most is None else {"maxItems": most}
    return {
        "type": "array",
        "minItems": 1,
        **limit,
        "items": kinds[0] if len(kinds) == 1 else {"anyOf": kinds},
    }


def num_open(text: str, marker: str) -> int:
    """How many of the last characters may be the beginning of the marker."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


# ---------------------------------------------------------------------------------------------------- forms


def _json_values(text: str) -> Iterator[Any]:
    """The JSON values in a text, one behind the other, with `;`, `,` or space between them."""
    decoder = json.JSONDecoder()
    place = 0
    while place < len(text):
        if text[place] in " \n\t\r;,":
            place += 1
        else:
            value, place = decoder.raw_decode(text, place)
            yield value


def _named(call: Mapping[str, Any]) -> tuple[str, Any]:
    given = call["arguments"] if "arguments" in call else call.get("parameters", {})
    return call["name"], json.loads(given) if isinstance(given, str) else given


def _read_json(text: str, tools: Mapping[str, ToolSpec]) -> list[tuple[str, Any]]:
    values = list(_json_values(text))
    return [_named(call) for value in values for call in (value if isinstance(value, list) else [value])]


def _read_mistral(text: str, tools: Mapping[str, ToolSpec]) -> list[tuple[str, Any]]:
    if "[ARGS]" not in text:
        return _read_json(text, tools)
    calls = [part.partition("[ARGS]") for part in text.split("[TOOL_CALLS]")]
    return [(name.strip(), json.loads(given)) for name, _, given in calls]


def _all_of(
    pattern: str, read: Callable[[re.Match[str], Mapping[str, ToolSpec]], tuple[str, Any]]
) -> ReadBlock:
    compiled = re.compile(pattern, re.DOTALL)

    def read_block(text: str, tools: Mapping[str, ToolSpec]) -> list[tuple[str, Any]]:
        return [read(match, tools) for match in compiled.finditer(text)]

    return read_block


def _read_pair(match: re.Match[str], tools: Mapping[str, ToolSpec]) -> tuple[str, Any]:
    return match["name"].strip(), json.loads(match["given"])


def _typed(values: Mapping[str, str], tool: ToolSpec | None) -> dict[str, Any]:
    """Values that come as text, in the types of their schema. What is no JSON is text."""
    properties = tool.parameters.get("properties", {}) if tool is not None else {}
    return {name: _value(text, properties.get(name, {})) for name, text in values.items()}


def _value(text: str, schema: Any) -> Any:
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text, text)


def _read_xml_function(match: re.Match[str], tools: Mapping[str, ToolSpec]) -> tuple[str, Any]:
    pairs = re.findall(r"<parameter=(.*?)>\n?(.*?)\n?</parameter>", match["given"], re.DOTALL)
    name = match["name"].strip()
    return name, _typed(dict(pairs), tools.get(name))


def _read_glm(text: str, tools: Mapping[str, ToolSpec]) -> list[tuple[str, Any]]:
    name = text.partition("<arg_key>")[0].strip()
    pairs = re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", text, re.DOTALL)
    return [(name, _typed(dict(pairs), tools.get(name)))]


def _read_pythonic(text: str, tools: Mapping[str, ToolSpec]) -> list[tuple[str, Any]]:
    tree = ast.parse(text.strip(), mode="eval").body
    calls = tree.elts if isinstance(tree, ast.List) else [tree]
    found = []
    for call in calls:
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name | ast.Attribute):
            raise ValueError("expected calls with named arguments")
        given = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
        found.append((ast.unparse(call.func), given))
    return found


def _mark(words: str) -> str:
    """A token of DeepSeek's, in whose names stand a wide bar and a low block."""
    return f"<\uff5c{words.replace(' ', chr(0x2581))}\uff5c>"


_HERMES: Final = ToolCallFormat("<tool_call>", "</tool_call>", _read_json)
_DEEPSEEK: Final = (_mark("tool calls begin"), _mark("tool calls end"))
_LLAMA3: Final = ToolCallFormat("<|python_tag|>", "", _read_json, starts="{")

TOOL_CALL_FORMATS: Final[Mapping[str, ToolCallFormat]] = {
    "qwen": _HERMES,
    "qwen25": _HERMES,
    "hermes": _HERMES,
    "qwen3_coder": ToolCallFormat(
        "<tool_call>",
        "</tool_call>",
        _all_of(r"<function=(?P<name>.*?)>(?P<given>.*?)(?:</function>|$)", _read_xml_function),
    ),
    "llama3": _LLAMA3,
    "mistral": ToolCallFormat("[TOOL_CALLS]", "", _read_mistral),
    "deepseekv3": ToolCallFormat(
        *_DEEPSEEK,
        _all_of(
            _mark("tool call begin")
            + "function"
            + _mark("tool sep")
            + r"(?P<name>.*?)\n```json\n(?P<given>.*?)\n```"
            + _mark("tool call end"),
            _read_pair,
        ),
    ),
    "deepseekv31": ToolCallFormat(
        *_DEEPSEEK,
        _all_of(
            _mark("tool call begin")
            + "(?P<name>.*?)"
            + _mark("tool sep")
            + "(?P<given>.*?)"
            + _mark("tool call end"),
            _read_pair,
        ),
    ),
    "glm45": ToolCallFormat("<tool_call>", "</tool_call>", _read_glm),
    "kimi_k2": ToolCallFormat(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        _all_of(
            r"<\|tool_call_begin\|>\s*(?:functions\.)?(?P<name>.*?)(?::\d+)?\s*<\|tool_call_argument_begin\|>"
            r"(?P<given>.*?)<\|tool_call_end\|>",
            _read_pair,
        ),
    ),
    "pythonic": ToolCallFormat("<|python_start|>", "<|python_end|>", _read_pythonic, starts="["),
}
