"""Tool calls: the format of each family of models, and the JSON schema for calls that a grammar makes."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from msgspec import Struct

# Deeper schemas of parameters are rejected. No use of them is known, and each level costs a Python frame.
MAX_SCHEMA_DEPTH: Final = 100


@dataclass(frozen=True)
class ToolSpec:
    """A tool that a request offers: its name, and the JSON schema of its parameters."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)


class ToolCall(Struct, frozen=True):
    """A tool call. `arguments`: a JSON object as text."""

    name: str
    arguments: str


Tools: TypeAlias = Mapping[str, ToolSpec]
# Errors for a text that is not a call. Python's parser raises MemoryError if its stack is too small.
_NO_CALL: Final = (ValueError, KeyError, TypeError, SyntaxError, RecursionError, MemoryError)
# Yields the calls in a block, as (name, arguments). It raises one of `_NO_CALL` if a part is not a call.
ReadBlock: TypeAlias = Callable[[str, Tools], Iterable[tuple[Any, Any]]]
# A marker as a sequence of regular expressions of bounded length. A piece of text may end after any of them.
Atoms: TypeAlias = tuple[str, ...]


@dataclass(frozen=True)
class ToolCallFormat:
    """How a family of models writes calls.

    Attributes:
        begin: the marker at the start of a block of calls.
        end: the marker at its end; empty: the block ends when the brackets of its value are closed.
        read: reads the calls in a block, without its markers.
        values: without an `end`: what may follow `begin`, as pairs of what precedes the value and the value's
            start.
        bare: starts of values that need no `begin`.
        quotes: the quotes of strings in a value.
        behind: a marker that may follow a call.
    """

    begin: str
    end: str
    read: ReadBlock
    values: tuple[tuple[Atoms, Atoms], ...] = (((), ()),)
    bare: tuple[Atoms, ...] = ()
    quotes: str = '"'
    behind: str = ""

    def calls(self, block: str, tools: Tools) -> list[ToolCall]:
        """The calls in a block; none if any part of it is not a call of one of the tools."""
        body = block.strip().removeprefix(self.begin).removesuffix(self.end).strip()
        try:
            return [_call(name, given, tools) for name, given in self.read(body, tools)]
        except _NO_CALL:
            return []


def _call(name: Any, given: Any, tools: Tools) -> ToolCall:
    if name not in tools or not isinstance(given, dict):
        raise ValueError("expected a call of one of the tools")
    arguments = json.dumps(given, ensure_ascii=False, allow_nan=False)
    arguments.encode()  # raises for half of a surrogate pair, which is not valid text
    return ToolCall(name, arguments)


def tool_specs(tools: Sequence[Any]) -> list[ToolSpec]:
    """Read the functions among tools in OpenAI's form, as objects or mappings.

    Raises ValueError: a function has no name.
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


def json_calls(text: str, tools: Sequence[ToolSpec]) -> list[ToolCall]:
    """The calls in a text that a grammar of `calls_schema` has made; none if it was cut short."""
    return NO_CALLS.calls(text, {tool.name: tool for tool in tools})


def calls_schema(tools: Sequence[ToolSpec], *, most: int | None) -> dict[str, Any]:
    """The JSON schema of a list of at least one call of these tools, in the form that `json_calls` reads.

    `most`: the largest number of calls; None: no limit. Raises ValueError: parameters are nested too deeply.
    """
    kinds = [
        {
            "type": "object",
            "properties": {"name": {"enum": [tool.name]}, "parameters": {"$ref": f"#/$defs/{number}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for number, tool in enumerate(tools)
    ]
    limit = {} if most is None else {"maxItems": most}
    return {
        "$defs": {
            str(number): _moved(dict(tool.parameters) or {"type": "object"}, f"#/$defs/{number}")
            for number, tool in enumerate(tools)
        },
        "type": "array",
        "minItems": 1,
        **limit,
        "items": kinds[0] if len(kinds) == 1 else {"anyOf": kinds},
    }


def _moved(schema: Any, place: str, depth: int = 0) -> Any:
    """Move a schema's root to another place in the document, by changing its references to itself."""
    if depth > MAX_SCHEMA_DEPTH:
        raise ValueError(f"tools: expected parameters at most {MAX_SCHEMA_DEPTH} levels deep")
    if isinstance(schema, list):
        return [_moved(entry, place, depth + 1) for entry in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        name: place + value[1:]
        if name == "$ref" and isinstance(value, str) and value.startswith("#")
        else value
        if name in ("const", "enum")
        else _moved(value, place, depth + 1)
        for name, value in schema.items()
    }


# -------------------------------------------------------------------------------------------------- readers


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


def _loads(text: str) -> Any:
    return json.loads(text, parse_constant=_no_number)


def _read_json(text: str, tools: Tools) -> Iterator[tuple[Any, Any]]:
    value = _loads(text)
    for call in value if isinstance(value, list) else [value]:
        if not isinstance(call, dict):
            raise ValueError("expected objects")
        given = call["arguments"] if "arguments" in call else call.get("parameters", {})
        yield call["name"], _loads(given) if isinstance(given, str) else given


def _read_mistral(text: str, tools: Tools) -> Iterable[tuple[Any, Any]]:
    if text.startswith(("[", "{")):
        return _read_json(text, tools)
    name, _, given = text.partition("[ARGS]")
    return [(name, _loads(given))]


def _between(text: str, begin: str, end: str) -> Iterator[str]:
    """Yield the texts between a begin and an end marker."""
    place = text.find(begin)
    while place >= 0:
        stop = text.find(end, place + len(begin))
        if stop < 0:
            return
        yield text[place + len(begin) : stop]
        place = text.find(begin, stop + len(end))


def _pairs(begin: str, middle: str, end: str) -> ReadBlock:
    """Make a reader of calls whose name and JSON arguments are separated by `middle`."""

    def read(text: str, tools: Tools) -> Iterator[tuple[Any, Any]]:
        for name, _, given in (call.partition(middle) for call in _between(text, begin, end)):
            yield name.strip(), _loads(given)

    return read


def _read_kimi(text: str, tools: Tools) -> Iterator[tuple[Any, Any]]:
    read = _pairs("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
    for call_id, given in read(text, tools):
        full = call_id.removeprefix("functions.")
        name, _, number = full.rpartition(":")
        yield name if name and number.isdecimal() else full, given


def _read_qwen3_coder(text: str, tools: Tools) -> Iterator[tuple[Any, Any]]:
    # An answer that was cut off lacks the last end marker.
    for function in _between(text + "</function>", "<function=", "</function>"):
        name, _, given = function.partition(">")
        pairs = [pair.partition(">") for pair in _between(given, "<parameter=", "</parameter>")]
        values = {key: value.removeprefix("\n").removesuffix("\n") for key, _, value in pairs}
        yield name.strip(), _typed(values, tools[name.strip()])


def _read_glm(text: str, tools: Tools) -> Iterator[tuple[Any, Any]]:
    name = text.partition("<arg_key>")[0].strip()
    pairs = [pair.partition("</arg_key>") for pair in _between(text, "<arg_key>", "</arg_value>")]
    values = {key: value.partition("<arg_value>")[2] for key, _, value in pairs}
    yield name, _typed(values, tools[name])


def _typed(values: Mapping[str, str], tool: ToolSpec) -> dict[str, Any]:
    """Convert arguments from text: strings by the schema stay, others are read as JSON if they are JSON."""
    properties = tool.parameters.get("properties")
    schemas = properties if isinstance(properties, Mapping) else {}
    return {name: _value(text, schemas.get(name)) for name, text in values.items()}


def _value(text: str, schema: Any) -> Any:
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return text
    try:
        return _loads(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text, text)


def _read_pythonic(text: str, tools: Tools) -> Iterator[tuple[Any, Any]]:
    tree = ast.parse(text, mode="eval").body
    for call in tree.elts if isinstance(tree, ast.List) else [tree]:
        if not isinstance(call, ast.Call) or call.args or any(word.arg is None for word in call.keywords):
            raise ValueError("expected calls with named arguments")
        yield ast.unparse(call.func), {word.arg: ast.literal_eval(word.value) for word in call.keywords}


# -------------------------------------------------------------------------------------------------- formats


def atoms(marker: str) -> Atoms:
    """Split a marker into its characters."""
    return tuple(map(re.escape, marker))


def _mark(words: str) -> str:
    """A special token of DeepSeek's. They contain a full-width bar, and "▁" for spaces."""
    return f"<\uff5c{words.replace(' ', chr(0x2581))}\uff5c>"


_SPACE: Final = r"\s{0,8}"
_CALL: Final = (r"[^\W\d]", r"[\w.]{0,127}", r"\(")
_HERMES: Final = ToolCallFormat("<tool_call>", "</tool_call>", _read_json)
_CALL_BEGIN, _SEP, _CALL_END = map(_mark, ("tool call begin", "tool sep", "tool call end"))
_DEEPSEEK: Final = (_mark("tool calls begin"), _mark("tool calls end"))

# The format of answers that are not searched for calls.
NO_CALLS: Final = ToolCallFormat("", "", _read_json)
# SGLang's name → format.
TOOL_CALL_FORMATS: Final[Mapping[str, ToolCallFormat]] = {
    "qwen": _HERMES,
    "qwen25": _HERMES,
    "hermes": _HERMES,
    "qwen3_coder": ToolCallFormat("<tool_call>", "</tool_call>", _read_qwen3_coder),
    "llama3": ToolCallFormat(
        "<|python_tag|>",
        "",
        _read_json,
        values=(((_SPACE,), (r"[\[{]",)),),
        bare=tuple(
            (r"\{", _SPACE, *atoms(f'"{key}"')) for key in ("name", "parameters", "arguments", "type")
        ),
    ),
    "mistral": ToolCallFormat(
        "[TOOL_CALLS]",
        "",
        _read_mistral,
        values=(
            ((_SPACE,), (r"[\[{]",)),
            ((_SPACE, r"[\w.-]{1,128}", *atoms("[ARGS]"), _SPACE), (r"\{",)),
        ),
    ),
    "deepseekv3": ToolCallFormat(
        *_DEEPSEEK, _pairs(f"{_CALL_BEGIN}function{_SEP}", "\n```json\n", f"\n```{_CALL_END}")
    ),
    "deepseekv31": ToolCallFormat(*_DEEPSEEK, _pairs(_CALL_BEGIN, _SEP, _CALL_END)),
    "glm45": ToolCallFormat("<tool_call>", "</tool_call>", _read_glm),
    "kimi_k2": ToolCallFormat("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", _read_kimi),
    "pythonic": ToolCallFormat(
        "<|python_start|>",
        "",
        _read_pythonic,
        values=(((_SPACE,), (r"\[",)), ((_SPACE,), _CALL)),
        bare=((r"\[", _SPACE, *_CALL),),
        quotes="\"'",
        behind="<|python_end|>",
    ),
}
