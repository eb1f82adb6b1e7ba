"""What clients of servers built on pydantic send is taken by every reader of requests."""

from typing import Annotated, Any, Literal

import pytest
from msgspec import Meta, Struct

from ebbtide.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest, parse
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.lossless import read, read_losslessly
from ebbtide.srt.managers.api import generate_fields
from ebbtide.srt.managers.api.control_client import build_request
from ebbtide.srt.managers.io_struct import EndWeightUpdateReqInput


class Loose(Struct):
    count: Annotated[int, Meta(ge=0)] | None = None
    share: float | None = None
    flag: bool | list[bool | None] | None = None
    either: str | int | None = None
    word: Literal["a", "b"] | None = None
    ids: list[int] | None = None
    anything: Any = None


@pytest.mark.parametrize(
    ("name", "given", "read"),
    [
        *(("count", given, 2) for given in (2, 2.0, "2", "2.0")),
        *(
            ("count", given, given)
            for given in (2.5, "two", "", " 2", "2" * 30, 1e300, float("nan"), None, [2])
        ),
        ("count", True, 1),
        *(("share", given, 0.5) for given in (0.5, "0.5", "5e-1")),
        *(("share", given, given) for given in ("nan", "inf", "1e999", "half")),
        *(("flag", given, True) for given in (True, 1, 1.0, "1", "true", "True", "yes")),
        *(("flag", given, given) for given in (2, "maybe", [1])),
        *(("either", given, given) for given in ("2", 2, True, 2.0)),
        *(("word", given, given) for given in ("a", 1)),
        ("ids", [1.0], [1.0]),
        ("anything", "1", "1"),
        ("unknown", "1", "1"),
    ],
)
def test_only_what_loses_nothing_changes(name: str, given: Any, read: Any) -> None:
    [found] = read_losslessly({name: given}, Loose).values()
    assert (found, type(found)) == (read, type(read)) or (found is given and given != given)


class Within(Struct):
    word: Literal["a"]


class Choosing(Struct):
    digit: Literal[0, 1] | None = None
    words: list[Literal["a", "b"]] | None = None
    objects: list[Within] | None = None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"digit": 2}, "Invalid enum value 2 - at `$.digit`; expected one of 0, 1"),
        ({"words": ["c"]}, "Invalid enum value 'c' - at `$.words[0]`; expected one of a, b"),
        ({"objects": [{"word": "c"}]}, "Invalid enum value 'c' - at `$.objects[0].word`"),
    ],
)
def test_a_refusal_names_the_values_that_a_field_can_have(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestRejected) as refused:
        read(Choosing, fields)
    assert refused.value.message == message


def test_every_reader_of_requests_does_so() -> None:
    completion = parse(
        CompletionRequest, {"prompt": "a", "logprobs": True, "max_tokens": "2", "echo": 1, "seed": 3.0}
    )
    assert (completion.logprobs, completion.max_tokens, completion.echo, completion.seed) == (1, 2, True, 3)
    assert parse(ChatCompletionRequest, {"messages": [], "logprobs": 1, "n": 2.0}).n == 2
    assert generate_fields.parse({"text": "a", "stream": 1, "priority": "7"}).priority == 7
    assert generate_fields.parse({"text": "a", "timeout_s": 1e300}).timeout_s == 1e300
    ended, _ = build_request(EndWeightUpdateReqInput, {"allow_incomplete": "true", "timeout_s": "1.5"})
    assert (ended.allow_incomplete, ended.timeout_s) == (True, 1.5)
