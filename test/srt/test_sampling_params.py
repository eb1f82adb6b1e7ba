"""SamplingParams: what is accepted, what it becomes, what is refused."""

import math
from dataclasses import fields
from typing import Any

import pytest

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.sampling_params import SamplingParams

KEYS = {
    *("max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "frequency_penalty"),
    *("presence_penalty", "repetition_penalty", "stop", "stop_token_ids", "ignore_eos", "n"),
    *("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "stream_interval"),
    *("logit_bias", "sampling_seed", "custom_params", "json_schema", "regex", "ebnf", "structural_tag"),
    *("stop_regex", "choice", "beam_width", "watermark", "allowed_token_ids", "bad_words"),
}
UNSUPPORTED = ("stop_regex", "watermark")
GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag", "choice")


def test_the_keys_are_those_of_the_wire() -> None:
    assert {entry.name for entry in fields(SamplingParams)} == KEYS


@pytest.mark.parametrize("name", sorted(KEYS - {"max_new_tokens"}))
def test_null_is_the_default(name: str) -> None:
    assert SamplingParams.from_dict({name: None}) == SamplingParams()


def test_null_max_new_tokens_lifts_the_ceiling() -> None:
    assert SamplingParams().max_new_tokens == 128
    assert SamplingParams.from_dict({"max_new_tokens": None}).max_new_tokens is None


AT_THE_BOUNDS: dict[str, list[Any]] = {
    "max_new_tokens": [0],
    "temperature": [0, 1e6],
    "top_p": [1e-9, 1],
    "top_k": [-1, 1, 10**9],
    "min_p": [0, 1.0],
    "frequency_penalty": [-2],
    "presence_penalty": [2.0],
    "repetition_penalty": [1e-3, 2],
    "n": [1],
    "stream_interval": [1],
    "sampling_seed": [-(2**63), 2**63 - 1],
    "skip_special_tokens": [False],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [*((name, value) for name, values in AT_THE_BOUNDS.items() for value in values)],
)
def test_values_at_the_bounds_are_taken(name: str, value: Any) -> None:
    assert getattr(SamplingParams.from_dict({name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("max_new_tokens", 2.0, 2),
        ("max_new_tokens", "2", 2),
        ("sampling_seed", 3.0, 3),
        ("n", True, 1),
        ("temperature", "0.5", 0.5),
        ("ignore_eos", 1, True),
        ("ignore_eos", "false", False),
        ("beam_width", 1, None),
        ("logit_bias", {"12": -1}, {12: -1.0}),
        ("custom_params", {"callback": object()}, None),
    ],
)
def test_what_can_mean_one_thing_only_is_taken(name: str, given: Any, value: Any) -> None:
    taken = getattr(SamplingParams.from_dict({name: given}), name)
    assert (taken, type(taken)) == (value, type(value))


BAD_VALUES: dict[str, list[Any]] = {
    "max_new_tokens": [-1, 1.5, "8.5", "eight", "", 2**63, "9" * 19, 1e300],
    "min_new_tokens": [-1],
    "temperature": [-0.1, math.nan, math.inf, "hot", False, "nan", "1e999", 10**400],
    "top_p": [0, 1.01],
    "top_k": [0, -2, 1.5],
    "min_p": [-0.01, 1.01],
    "frequency_penalty": [2.1],
    "presence_penalty": [-2.1],
    "repetition_penalty": [0, 2.1],
    "stop": ["", ["a", ""], ["a", 1], 7, ["x"] * 33],
    "stop_token_ids": [7, ["7"], [True], [-1], [1] * 4097],
    "allowed_token_ids": [7, [], ["7"], [1] * ((1 << 18) + 1)],
    "bad_words": ["a", [""], ["a"] * 1025, ["a" * (1 << 16), "b"]],
    "ignore_eos": [2, "maybe"],
    "n": [0, False, 4097, 2**40],
    "stream_interval": [0],
    "logit_bias": [
        *([1], {"x": 1}, {"-1": 1}, {"1": "2"}, {"1": math.inf}, {"1": 10**400}, {"9" * 30: 1}),
        dict.fromkeys(map(str, range((1 << 18) + 1)), 0.0),
    ],
    "sampling_seed": [2**63, 1.5],
    "custom_params": [[]],
    "beam_width": [2, True],
    "structural_tag": [5, ["a"], {1: {2}}],
    "json_schema": [5, {"a": {1}}],
    "regex": [{}, ["a"]],
    "choice": ["a", [""], [1]],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name, values in BAD_VALUES.items() for value in values),
        *((name, "x") for name in UNSUPPORTED),
    ],
)
def test_a_bad_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestRejected, match=f"^sampling_params.{name}: ") as refusal:
        SamplingParams.from_dict({name: value})
    assert refusal.value.status == 400
    assert len(refusal.value.message) < 300
    with pytest.raises(RequestRejected):
        SamplingParams(**{name: value})


def test_an_unknown_key_is_refused_with_the_valid_ones() -> None:
    with pytest.raises(RequestRejected, match="'temprature'") as refusal:
        SamplingParams.from_dict({"temprature": 0.5, "top_p": 0.9})
    assert all(key in refusal.value.message for key in KEYS)


@pytest.mark.parametrize("given", [None, [], "greedy", 1])
def test_what_is_not_an_object_is_refused(given: Any) -> None:
    with pytest.raises(RequestRejected, match="expected an object"):
        SamplingParams.from_dict(given)


def test_min_new_tokens_may_not_exceed_max_new_tokens() -> None:
    assert SamplingParams(min_new_tokens=4, max_new_tokens=4).min_new_tokens == 4
    assert SamplingParams(min_new_tokens=400, max_new_tokens=None).min_new_tokens == 400
    with pytest.raises(RequestRejected, match="min_new_tokens"):
        SamplingParams(min_new_tokens=5, max_new_tokens=4)


def test_what_the_output_is_to_match_excludes_other_ends_and_matches() -> None:
    with pytest.raises(RequestRejected, match="expected one of regex, ebnf, not all of them"):
        SamplingParams(regex="a", ebnf='root ::= "a"')
    with pytest.raises(RequestRejected, match=r"sampling_params.ignore_eos: cannot be combined with regex"):
        SamplingParams(regex="a", ignore_eos=True)


@pytest.mark.parametrize("name", [*UNSUPPORTED, *GRAMMARS])
@pytest.mark.parametrize("value", ["", []])
def test_empty_values_of_missing_features_are_not_given(name: str, value: Any) -> None:
    assert SamplingParams.from_dict({name: value}) == SamplingParams()


def test_stops_are_normalised() -> None:
    assert SamplingParams(stop="END").stop_strings == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams(stop=[]).stop_strings == SamplingParams().stop_strings == ()
    assert SamplingParams(stop_token_ids=[3, None, 5]).stop_token_id_set == {3, 5}
    assert (
        SamplingParams(stop_token_ids=[None]).stop_token_id_set == SamplingParams().stop_token_id_set == set()
    )


def test_greedy_is_a_temperature_below_one_millionth() -> None:
    assert SamplingParams(temperature=0).is_greedy
    assert SamplingParams(temperature=9e-7).is_greedy
    assert not SamplingParams(temperature=1e-6).is_greedy
