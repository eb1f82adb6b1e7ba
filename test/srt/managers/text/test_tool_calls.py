"""Calls and reasoning in the words of every family of models, however their text is cut up."""

import json
import re
from typing import Any

import pytest

from ebbtide.srt.managers.text.reasoning import REASONING_FORMATS, ReasoningSplitter
from ebbtide.srt.managers.text.tool_calls import (
    TOOL_CALL_FORMATS,
    ToolCallParser,
    ToolSpec,
    calls_schema,
    json_calls,
    tool_specs,
)
from ebbtide.srt.server_args import REASONING_PARSERS, TOOL_CALL_PARSERS

PARAMETERS = {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = tool_specs(
    [
        {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
        {"type": "function", "function": {"name": "now"}},
    ]
)
WEATHER = ("weather", {"city": "Bréhat", "days": 2})
GIVEN = '{"city": "Bréhat", "days": 2}'
HERMES = f'<tool_call>\n{{"name": "weather", "arguments": {GIVEN}}}\n</tool_call>'


def deepseek(begin: str, call: str) -> str:
    """In its own tokens, written here without what stands between their words."""
    marked = f"[tool calls begin]{begin}{call}[tool calls end]"
    return re.sub(
        r"\[(tool [a-z ]+)\]", lambda match: f"<\uff5c{match[1].replace(' ', chr(0x2581))}\uff5c>", marked
    )


# Format → a text with the two calls, behind "Let me look. " where the format allows text.
TEXTS = {
    "qwen25": HERMES + '\n<tool_call>{"name": "now", "arguments": {}}</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nBréhat\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call><tool_call><function=now></function></tool_call>",
    "llama3": f'<|python_tag|>{{"name": "weather", "parameters": {GIVEN}}}; {{"name": "now"}}',
    "mistral": f'[TOOL_CALLS] [{{"name": "weather", "arguments": {GIVEN}}}, {{"name": "now"}}]',
    "deepseekv3": deepseek(
        f"[tool call begin]function[tool sep]weather\n```json\n{GIVEN}\n```[tool call end]",
        "[tool call begin]function[tool sep]now\n```json\n{}\n```[tool call end]",
    ),
    "deepseekv31": deepseek(
        f"[tool call begin]weather[tool sep]{GIVEN}[tool call end]",
        "[tool call begin]now[tool sep]{}[tool call end]",
    ),
    "glm45": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bréhat</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call><tool_call>now\n</tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
    f"<|tool_call_argument_begin|>{GIVEN}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}"
    "<|tool_call_end|><|tool_calls_section_end|>",
    "pythonic": '<|python_start|>[weather(city="Bréhat", days=2), now()]<|python_end|>',
}
TEXTS |= dict.fromkeys(("qwen", "hermes"), TEXTS["qwen25"])


def parsed(name: str, text: str, size: int) -> tuple[str, list[tuple[str, Any]]]:
    """In pieces of so many characters."""
    parser = ToolCallParser(TOOLS, name)
    pieces = [parser.push(text[start : start + size]) for start in range(0, len(text), size)]
    pieces.append(parser.finish())
    calls = [(call.name, json.loads(call.arguments)) for _, found in pieces for call in found]
    return "".join(plain for plain, _ in pieces), calls


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
def test_calls_are_taken_out_of_the_text_and_the_rest_stays(name: str, size: int) -> None:
    plain, calls = parsed(name, "Let me <tool look. " + TEXTS[name], size)
    assert (plain.strip(), calls) == ("Let me <tool look.", [WEATHER, ("now", {})])
    assert parsed(name, "No calls [here] <at all", size) == ("No calls [here] <at all", [])


@pytest.mark.parametrize("size", [1, 10_000])
@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("llama3", f' {{"name": "weather", "parameters": {GIVEN}}}', [WEATHER]),
        ("pythonic", '[weather(city="Bréhat", days=2)]', [WEATHER]),
        ("mistral", f"[TOOL_CALLS]weather[ARGS]{GIVEN}", [WEATHER]),
        ("hermes", HERMES.removesuffix("</tool_call>"), [WEATHER]),
        ("hermes", HERMES.replace("weather", "unknown"), []),
        ("hermes", "<tool_call>{broken</tool_call> and on", []),
        ("hermes", HERMES[:40], []),
        ("pythonic", "[open('/etc/passwd')]", []),
        ("llama3", '{"some": "json"}', []),
    ],
)
def test_what_is_no_call_of_these_tools_stays_in_the_text(
    name: str, text: str, calls: list[Any], size: int
) -> None:
    assert parsed(name, text, size) == (("", calls) if calls else (text, []))


def test_the_command_line_knows_every_format() -> None:
    assert tuple(TOOL_CALL_FORMATS) == TOOL_CALL_PARSERS
    assert tuple(REASONING_FORMATS) == REASONING_PARSERS


def test_unknown_formats_and_tools_without_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"tool_call_parser: expected one of qwen, .*, got 'x'"):
        ToolCallParser(TOOLS, "x")
    with pytest.raises(ValueError, match="reasoning_parser: expected one of deepseek-r1, "):
        ReasoningSplitter("x")
    with pytest.raises(ValueError, match="a function that has a name"):
        tool_specs([{"type": "function", "function": {}}])


def test_what_a_grammar_of_calls_has_made_is_read_and_nothing_of_what_was_cut_short() -> None:
    schema = calls_schema([ToolSpec("now")], most=1)
    assert (schema["minItems"], schema["maxItems"]) == (1, 1)
    made = '[{"name": "now", "parameters": {}}]'
    assert [call.name for call in json_calls(made, TOOLS)] == ["now"]
    assert json_calls(made[:20], TOOLS) == []


@pytest.mark.parametrize("size", [1, 5, 10_000])
@pytest.mark.parametrize("name", REASONING_FORMATS)
def test_reasoning_is_told_apart_from_the_answer(name: str, size: int) -> None:
    form = REASONING_FORMATS[name]

    def split(text: str) -> tuple[str, str]:
        splitter = ReasoningSplitter(name)
        pieces = [splitter.push(text[start : start + size]) for start in range(0, len(text), size)]
        pieces.append(splitter.finish())
        return "".join(first for first, _ in pieces), "".join(second for _, second in pieces)

    assert split(f"{form.begin}hmm < so{form.end}\n\nYes.") == ("hmm < so", "Yes.")
    assert split(f"{form.begin}cut short") == ("cut short", "")
    without = "Yes < no."
    assert split(without) == ((without, "") if form.is_open else ("", without))
