"""Reasoning and calls in the words of every family of models, however their text is cut up."""

import contextlib
import itertools
import json
import re
from collections.abc import Iterable
from typing import Any
from unittest import mock

import jsonschema_rs
import pytest
from hypothesis import given, strategies as st

from ebbtide.srt.managers.text import answer_scanner
from ebbtide.srt.managers.text.answer_scanner import REASONING_FORMATS, AnswerScanner
from ebbtide.srt.managers.text.tool_calls import (
    TOOL_CALL_FORMATS,
    ToolCallFormat,
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
WEATHER, NOW = ("weather", {"city": "Bréhat", "days": 2}), ("now", {})
GIVEN = '{"city": "Bréhat", "days": 2}'
HERMES = f'<tool_call>\n{{"name": "weather", "arguments": {GIVEN}}}\n</tool_call>'
PYTHONIC = '[weather(city="Bréhat", days=2), now()]'


def deepseek(begin: str, call: str) -> str:
    """In its own tokens, written here without what stands between their words."""
    marked = f"[tool calls begin]{begin}{call}[tool calls end]"
    return re.sub(
        r"\[(tool [a-z ]+)\]", lambda match: f"<\uff5c{match[1].replace(' ', chr(0x2581))}\uff5c>", marked
    )


# Format → a text with the two calls.
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
    "pythonic": f"<|python_start|>{PYTHONIC}<|python_end|>",
}
TEXTS |= dict.fromkeys(("qwen", "hermes"), TEXTS["qwen25"])
# What texts that are meant to mislead are made of.
FRAGMENTS = [
    *re.findall(r"<[^<>]*>|\[TOOL_CALLS\]|weather|.\"days\": 2", "".join(TEXTS.values())),
    *('{"name": "now"}', '{"name": "', "now[ARGS]{", "[now(", "[now()]", '{"a": "\\', "<think>", "</think>"),
    *('"', "'", "\\", "{", "}", "[", "]", "(", ")", ",", ";", "=", "\n", " ", "<", "ß", "1", "\ud83d"),
]
NAMES = st.sampled_from(list(TOOL_CALL_FORMATS))
HOSTILE = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=30).map("".join)


def scanned(scanner: AnswerScanner, pieces: Iterable[str]) -> tuple[str, str, list[Any]]:
    parts = [*map(scanner.push, pieces), scanner.push("", is_last=True)]
    calls = [(call.name, json.loads(call.arguments)) for part in parts for call in part.calls]
    return "".join(part.reasoning for part in parts), "".join(part.text for part in parts), calls


def cut(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


@given(NAMES, st.sampled_from([None, *REASONING_FORMATS]), HOSTILE, st.lists(st.integers(0, 200)))
def test_pieces_give_what_the_whole_gives_and_nothing_raises(
    name: str, reasoning: str | None, text: str, places: list[int]
) -> None:
    edges = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    pieces = [text[start:stop] for start, stop in itertools.pairwise(edges)]
    with mock.patch.object(answer_scanner, "MAX_BLOCK_CHARACTERS", 60):
        whole, *others = (
            scanned(AnswerScanner(TOOLS, name, reasoning), one) for one in ([text], pieces, text)
        )
    assert others == [whole, whole]
    json.dumps(whole[2], ensure_ascii=False).encode()


@pytest.mark.parametrize("name", TOOL_CALL_FORMATS)
def test_calls_are_taken_out_of_the_text_and_of_reasoning_and_the_rest_stays(name: str) -> None:
    before = "Let me <tool look. "
    text = f"{before}{TEXTS[name]}\nSo."
    assert scanned(AnswerScanner(TOOLS, name), [text]) == ("", before + "So.", [WEATHER, NOW])
    assert scanned(AnswerScanner(TOOLS, name, "deepseek-r1"), [text]) == (before, "So.", [WEATHER, NOW])
    without = "No calls [here] {or: 1} <at all"
    assert scanned(AnswerScanner(TOOLS, name), [without]) == ("", without, [])


@pytest.mark.parametrize(
    ("name", "text", "calls", "left"),
    [
        ("llama3", f'So {{"name": "weather", "parameters": {GIVEN}}} it is.', [WEATHER], "So it is."),
        ("llama3", '{"name": bad}; <|python_tag|>{"name": "now"}', [NOW], '{"name": bad}; '),
        ("llama3", '<|python_tag|>{"<|python_tag|>{"name": "now"}', [NOW], '<|python_tag|>{"'),
        (
            "mistral",
            f"Hm [TOOL_CALLS]weather[ARGS]{GIVEN}[TOOL_CALLS]now[ARGS]{{}} so",
            [WEATHER, NOW],
            "Hm so",
        ),
        ("hermes", HERMES.removesuffix("</tool_call>"), [WEATHER], ""),
        ("hermes", f"As <tool_call> says: {HERMES}", [WEATHER], "As <tool_call> says: "),
        ("pythonic", f"Well, {PYTHONIC} then", [WEATHER, NOW], "Well, then"),
        (
            "pythonic",
            r"[now(a='\u00e9\n', b=(1, -2.5,), c=[None, {'d': True}])]",
            [("now", {"a": "é\n", "b": [1, -2.5], "c": [None, {"d": True}]})],
            "",
        ),
    ],
)
def test_calls_are_found_beside_text_and_what_is_broken(
    name: str, text: str, calls: list[Any], left: str
) -> None:
    assert scanned(AnswerScanner(TOOLS, name), [text]) == ("", left, calls)


HERMES_BODIES = ("{broken", '{"name": ["now"]}', '"now"', "1", "[]", '{"name": "now", "arguments": 1}')
JSON_VALUES = ("NaN", "1e999", r'"\ud83d"', "[" * 20_000, "1" * 5000)
PYTHON_VALUES = ("{1, 2}", "b'x'", "1j", "...", "{(1, 2): 3}", r"'\ud83d'", "-" * 9999, "now()", "1][")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("hermes", f"<tool_call>{body}</tool_call> and on") for body in HERMES_BODIES),
        *(("hermes", HERMES.replace("2", value)) for value in JSON_VALUES),
        *(("hermes", text) for text in (HERMES.replace("weather", "unknown"), HERMES[:40])),
        ("llama3", '{"some": "json"}'),
        *(("pythonic", f"[now(a={value})]") for value in PYTHON_VALUES),
        *(("pythonic", text) for text in ("[open('/x')]", "[now('x')]", "[now(**{'a': 1})]", "now()")),
    ],
)
def test_what_is_no_call_of_these_tools_stays_in_the_text(name: str, text: str) -> None:
    assert scanned(AnswerScanner(TOOLS, name), [text]) == ("", text, [])


@pytest.mark.parametrize("name", REASONING_FORMATS)
def test_reasoning_is_separated_from_the_answer(name: str) -> None:
    form = REASONING_FORMATS[name]

    def split(text: str, is_open: bool | None = None) -> tuple[str, str]:
        return scanned(AnswerScanner(reasoning=name, is_open=is_open), text)[:2]

    assert split(f" {form.begin}\nhmm < so{form.end}\n\nYes.") == ("hmm < so", "Yes.")
    assert split(f"{form.begin}cut short") == ("cut short", "")
    without = "Yes < no."
    assert split(without) == ((without, "") if form.is_open else ("", without))
    assert (split(without, True), split(without, False)) == ((without, ""), ("", without))


def test_a_marker_in_reasoning_that_begins_no_call_is_reasoning() -> None:
    scanner = AnswerScanner(TOOLS, "hermes", "qwen3")
    found = scanned(scanner, f"<think>A <tool_call> of what?</think>\n{HERMES}")
    assert found == ("A <tool_call> of what?", "", [WEATHER])


def test_the_command_line_knows_every_format_and_what_is_unknown_is_refused() -> None:
    assert tuple(TOOL_CALL_FORMATS) == TOOL_CALL_PARSERS
    assert tuple(REASONING_FORMATS) == REASONING_PARSERS
    with pytest.raises(ValueError, match=r"tool_call_parser: expected one of qwen, .*, got 'x'"):
        AnswerScanner(TOOLS, "x")
    with pytest.raises(ValueError, match="reasoning_parser: expected one of deepseek-r1, "):
        AnswerScanner(reasoning="x")
    with pytest.raises(ValueError, match="a function that has a name"):
        tool_specs([{"type": "function", "function": {}}])


def test_what_a_grammar_of_calls_has_made_is_read_and_nothing_of_what_was_cut_short() -> None:
    schema = calls_schema([ToolSpec("now")], most=1)
    assert (schema["minItems"], schema["maxItems"]) == (1, 1)
    made = '[{"name": "now", "parameters": {}}]'
    assert [call.name for call in json_calls(made, TOOLS)] == ["now"]
    assert json_calls(made[:20], TOOLS) == []


def test_references_of_parameters_to_themselves_hold_among_those_of_other_tools() -> None:
    def tool(name: str, kind: str) -> ToolSpec:
        properties = {"x": {"$ref": "#/$defs/X"}, "more": {"$ref": "#"}, "$ref": {"const": {"$ref": "#"}}}
        return ToolSpec(name, {"properties": properties, "$defs": {"X": {"type": kind}}})

    validator = jsonschema_rs.Draft202012Validator(
        calls_schema([tool("f", "integer"), tool("g", "string")], most=None)
    )
    for name, value, is_valid in (("f", 1, True), ("f", "1", False), ("g", "1", True), ("g", 1, False)):
        given = {"more": {"x": value, "$ref": {"$ref": "#"}}}
        assert validator.is_valid([{"name": name, "parameters": given}]) is is_valid
    deep: dict[str, Any] = {}
    for _ in range(2000):
        deep = {"not": deep}
    with pytest.raises(ValueError, match="tools: expected parameters at most 100 levels deep"):
        calls_schema([ToolSpec("f", deep)], most=1)


class WatchedPattern:
    """Counts the characters that it goes through."""

    num_seen = 0

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern

    def search(self, text: str, start: int, stop: int = 1 << 60) -> re.Match[str] | None:
        match = self._pattern.search(text, start, stop)
        WatchedPattern.num_seen += (min(stop, len(text)) if match is None else match.end()) - start
        return match


@pytest.mark.parametrize("size", [3, 1 << 20])
@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral", "pythonic"])
def test_the_work_over_hostile_text_grows_as_the_text_does(
    name: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = TOOL_CALL_FORMATS[name]
    markers = AnswerScanner(TOOLS, name)._markers
    for patterns in (markers.outside, markers.inside):
        for key, pattern in patterns.items():
            monkeypatch.setitem(patterns, key, WatchedPattern(pattern))
    monkeypatch.setattr(answer_scanner, "MAX_BLOCK_CHARACTERS", 1000)
    read = mock.Mock(return_value=[])
    monkeypatch.setattr(ToolCallFormat, "calls", read)
    for fragment in (form.begin, form.begin + form.end, form.begin + "{[", '{"name"', "[now(", '"\\'):
        text = fragment * 2000
        WatchedPattern.num_seen = 0
        read.reset_mock()
        assert scanned(AnswerScanner(TOOLS, name), cut(text, size)) == ("", text, [])
        # What may become a marker is looked at again with each piece of it; a block is read twice at most.
        assert WatchedPattern.num_seen <= len(text) * (3 if size > len(text) else 40)
        assert sum(len(call.args[0]) for call in read.call_args_list) <= 2 * len(text)


class WatchedText(str):
    """Counts the characters that are gone through to find something."""

    num_seen = 0

    def find(self, wanted: str, start: int = 0) -> int:  # type: ignore[override]
        place = super().find(wanted, start)
        WatchedText.num_seen += (len(self) if place < 0 else place) - start
        return place

    def __add__(self, other: str) -> "WatchedText":
        return WatchedText(super().__add__(other))


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "deepseekv3", "deepseekv31", "kimi_k2"])
def test_the_work_of_reading_a_hostile_block_grows_as_the_block_does(name: str) -> None:
    marks = [*re.findall(r"<[^<>]*>", TEXTS[name]), "<function=x><parameter=", "<arg_key>x</arg_key>"]
    for mark in marks:
        block = WatchedText(mark * 1000)
        WatchedText.num_seen = 0
        with contextlib.suppress(ValueError, KeyError):
            list(TOOL_CALL_FORMATS[name].read(block, {}))
        assert WatchedText.num_seen <= 3 * len(block)
