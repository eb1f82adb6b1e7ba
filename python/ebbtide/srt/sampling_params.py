"""Sampling parameters of one request: the keys of `sampling_params`, checked when built. No torch here."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Self, get_type_hints

from ebbtide.srt.errors import RequestRejected, first_few
from ebbtide.srt.lossless import as_bool, as_float, as_int

GREEDY_BELOW_TEMPERATURE = 1e-6
# The key of `custom_params` that is read.
TOP_P_IDS = "return_top_p_token_ids"
MAX_STOP_STRINGS = 32
MAX_BAD_WORDS = 1024
MAX_BAD_CHARACTERS = 1 << 16
MAX_STOP_TOKEN_IDS = 4096
# At least as large as vocabularies.
MAX_TOKEN_IDS = 1 << 18
MAX_SAMPLES = 4096
_INT64_MAX = 2**63 - 1

Schema = Mapping[str, Any]
GRAMMAR_KINDS: Final = ("json_schema", "regex", "ebnf", "structural_tag", "choice")


@dataclass(frozen=True)
class GrammarSpec:
    """A grammar as a client gives it. `kind`: one of `GRAMMAR_KINDS`."""

    kind: str
    text: str

    @property
    def key(self) -> str:
        """A digest that identifies the grammar."""
        return hashlib.sha256(f"{self.kind}:{self.text}".encode()).hexdigest()


@dataclass(frozen=True)
class Check:
    """How a field's value is checked.

    `read`: normalises a value, given the field's name and the value, or raises RequestRejected. `schema`: the
    same rule as JSON schema, for OpenAPI.
    """

    read: Callable[[str, Any], Any]
    schema: Schema = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Field:
    """A sampling parameter, declared once for all APIs.

    Attributes:
        when_null: the value that null means.
        openai, vllm: its name in OpenAI's and vLLM's requests; None: they do not have it.
        zero: the value that 0 means in their requests, if 0 is not a valid value; None: 0 means 0.
        type: of its value in OpenAI's requests.
    """

    name: str
    default: Any
    when_null: Any
    check: Check
    openai: str | None
    vllm: str | None
    zero: int | None
    type: Any

    @property
    def openai_schema(self) -> Schema:
        """The JSON schema keywords of the field in OpenAI's requests, besides its type."""
        dropped = ("not",) if self.zero is not None else ()
        return {name: value for name, value in self.check.schema.items() if name not in dropped}


_SAME: Final = ""


def _field(
    default: Any,
    check: Check,
    *,
    openai: str | None = _SAME,
    vllm: str | None = _SAME,
    zero: int | None = None,
    is_nullable: bool = False,
    type_: Any = None,
) -> Any:
    """Declare a sampling parameter; see `Field`. With `is_nullable`, null is a value and not the default."""
    when_null = None if is_nullable else default
    about = {"check": check, "openai": openai, "vllm": vllm, "zero": zero, "when_null": when_null}
    return dataclasses.field(default=default, metadata={**about, "type": type_})


def _grammar(check: Callable[[str, Any], Any], openai: str | None = _SAME, **schema: Any) -> Any:
    return _field(None, Check(check, schema), openai=openai, vllm=None, type_=Any)


def _unsupported(check: Callable[[str, Any], Any], also: Sequence[Any] = ()) -> Any:
    """Declare an unsupported parameter. Values that ask for something are rejected; others become None."""
    return _field(None, Check(check, {"enum": [*also, None, "", []]}), openai=None, vllm=None)


def _shown(value: Any) -> str:
    # Shorten long values first, since formatting a million entries would take long.
    if isinstance(value, str | list | tuple):
        value = value[:80]
    elif isinstance(value, Mapping):
        value = dict(islice(value.items(), 80))
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _rejected(name: str, expected: str, value: Any) -> RequestRejected:
    return RequestRejected(f"sampling_params.{name}: expected {expected}, got {_shown(value)}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _integer(minimum: int, expected: str, *, maximum: int = _INT64_MAX, also: int | None = None) -> Check:
    def check(name: str, value: Any) -> int:
        number = as_int(value)
        if not _is_int(number) or not (minimum <= number <= maximum or number == also):
            raise _rejected(name, expected, value)
        return int(number)

    schema: dict[str, Any] = {}
    if minimum > -_INT64_MAX:
        schema = {"minimum": minimum} if also is None else {"minimum": also, "not": {"const": 0}}
    if maximum < _INT64_MAX:
        schema["maximum"] = maximum
    return Check(check, schema)


def _number(low: float, high: float, expected: str, *, above_low: bool = False) -> Check:
    def check(name: str, value: Any) -> float:
        number = as_float(value)
        is_number = _is_int(number) or isinstance(number, float)
        # NaN fails both comparisons, so it is rejected too.
        if not is_number or not (low <= number <= high) or (above_low and number == low):
            raise _rejected(name, expected, value)
        return number if type(number) is float else float(number)

    schema = {"exclusiveMinimum" if above_low else "minimum": low}
    return Check(check, schema if high == sys.float_info.max else {**schema, "maximum": high})


def _boolean(name: str, value: Any) -> bool:
    flag = as_bool(value)
    if not isinstance(flag, bool):
        raise _rejected(name, "true or false", value)
    return flag


def _stop(name: str, value: Any) -> tuple[str, ...] | None:
    expected = f"a non-empty string or a list of at most {MAX_STOP_STRINGS} of them"
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, list | tuple) or len(strings) > MAX_STOP_STRINGS:
        raise _rejected(name, expected, value)
    if not all(isinstance(string, str) and string for string in strings):
        raise _rejected(name, expected, value)
    return tuple(strings) or None


def _stop_token_ids(name: str, value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, list | tuple | set | frozenset) or len(value) > MAX_STOP_TOKEN_IDS:
        raise _rejected(name, f"a list of token ids, at most {MAX_STOP_TOKEN_IDS}", value)
    token_ids = tuple(token_id for token_id in value if token_id is not None)
    if not all(_is_int(token_id) and 0 <= token_id <= _INT64_MAX for token_id in token_ids):
        raise _rejected(name, "a list of token ids, each an integer ≥ 0", value)
    return token_ids or None


def _allowed_token_ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not 1 <= len(value) <= MAX_TOKEN_IDS:
        raise _rejected(name, f"a list of at least one token id and at most {MAX_TOKEN_IDS}", value)
    if not all(_is_int(token_id) and 0 <= token_id <= _INT64_MAX for token_id in value):
        raise _rejected(name, "a list of token ids, each an integer ≥ 0", value)
    return tuple(value)


def _bad_words(name: str, value: Any) -> tuple[str, ...] | None:
    is_list = isinstance(value, list | tuple) and len(value) <= MAX_BAD_WORDS
    if not is_list or not all(isinstance(word, str) and word.strip() for word in value):
        raise _rejected(name, f"a list of at most {MAX_BAD_WORDS} words", value)
    if sum(map(len, value)) > MAX_BAD_CHARACTERS:
        raise _rejected(name, f"words of at most {MAX_BAD_CHARACTERS} characters together", value)
    return tuple(value) or None


def _logit_bias(name: str, value: Any) -> dict[int, float] | None:
    expected = "an object from token id to a finite number"
    if not isinstance(value, Mapping) or len(value) > MAX_TOKEN_IDS:
        raise _rejected(name, f"{expected}, of at most {MAX_TOKEN_IDS} ids", value)
    biases: dict[int, float] = {}
    for key, bias in value.items():
        # Keys of a JSON object are strings; Python callers pass ints.
        is_id = key.isascii() and key.isdecimal() if isinstance(key, str) else _is_int(key) and key >= 0
        is_finite = (
            abs(bias) <= _INT64_MAX if _is_int(bias) else isinstance(bias, float) and math.isfinite(bias)
        )
        if not is_id or len(str(key)) > 18 or not is_finite:
            raise _rejected(name, expected, {key: bias})
        biases[int(key)] = float(bias)
    return biases or None


def _custom_params(name: str, value: Any) -> dict[str, bool] | None:
    """Keep only the key that is read, if it is true. Source: wire_vllm section 6.2."""
    if not isinstance(value, Mapping):
        raise _rejected(name, "an object", value)
    return {TOP_P_IDS: True} if value.get(TOP_P_IDS) else None


def _text(name: str, value: Any) -> str | None:
    if value in ("", []):
        return None
    if not isinstance(value, str):
        raise _rejected(name, "a string", value)
    return value


def _json_text(name: str, value: Any) -> str | None:
    """Read JSON, given as text or as an object, as text. Empty means "not given"."""
    if isinstance(value, Mapping):
        try:
            return json.dumps(value) if value else None
        except (TypeError, ValueError) as error:
            raise _rejected(name, f"JSON ({error})", value) from None
        except RecursionError:
            raise RequestRejected(f"sampling_params.{name}: it is nested too deep") from None
    return _text(name, value)


def _choice(name: str, value: Any) -> tuple[str, ...] | None:
    if value in ("", []):
        return None
    if not isinstance(value, list | tuple) or not all(isinstance(text, str) and text for text in value):
        raise _rejected(name, "a list of non-empty strings", value)
    return tuple(value)


def _not_supported(name: str, value: Any) -> None:
    if value == "" or value == []:
        return
    raise RequestRejected(f"sampling_params.{name}: not supported in this version, got {_shown(value)}")


def _beam_width(name: str, value: Any) -> None:
    if not _is_int(value) or value != 1:
        _not_supported(name, value)


_FROM_0: Final[Schema] = {"minimum": 0}
_NOT_EMPTY: Final[Schema] = {"minLength": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are sampled, and when it ends. The keys are those of `sampling_params`.

    `None` means a key's default. Values are normalised: numbers are plain `int` and `float`, `stop` and
    `stop_token_ids` are tuples, `logit_bias` has int keys. Checks that need the model (vocabulary, context,
    tokenizer) are made when a request is sent.

    Attributes:
        max_new_tokens: most output tokens; None: to the end of the context.
        min_new_tokens: tokens before which the output cannot stop.
        temperature: 0 is greedy.
        top_p, top_k, min_p: filters; 1.0, -1 and 0.0 turn them off.
        frequency_penalty, presence_penalty, repetition_penalty: 0.0, 0.0 and 1.0 turn them off.
        stop: a string or several that end the output.
        stop_token_ids: token ids that end the output, besides the model's own.
        ignore_eos: do not stop at end-of-sequence tokens, nor at `stop_token_ids`.
        n: outputs per prompt.
        skip_special_tokens, spaces_between_special_tokens: how the text is decoded.
        no_stop_trim: keep the stop string or token in the output.
        stream_interval: tokens per chunk of a stream; None: the server's.
        logit_bias: token id → number added to its logit.
        allowed_token_ids: only these tokens are sampled.
        bad_words: texts whose tokens never appear in a row.
        sampling_seed: sampling noise depends only on the seed and the position; None: drawn per request.
        custom_params: only `return_top_p_token_ids` is read.
        json_schema, regex, ebnf, structural_tag, choice: what the output must match; at most one of them.
        stop_regex, beam_width, watermark: not supported; values that ask for something are rejected.

    Raises:
        RequestRejected: status 400; names the key, what was expected and what was given.

    Source: wire_api section 2.2.
    """

    max_new_tokens: int | None = _field(
        128, _integer(0, "an integer ≥ 0"), openai=None, vllm=None, is_nullable=True
    )
    min_new_tokens: int = _field(0, _integer(0, "an integer ≥ 0"), openai="min_tokens", vllm="min_tokens")
    temperature: float = _field(1.0, _number(0.0, sys.float_info.max, "a finite number ≥ 0"))
    top_p: float = _field(1.0, _number(0.0, 1.0, "a number in (0, 1]", above_low=True))
    top_k: int = _field(-1, _integer(1, "-1 (off) or an integer ≥ 1", also=-1), zero=-1)
    min_p: float = _field(0.0, _number(0.0, 1.0, "a number in [0, 1]"))
    frequency_penalty: float = _field(0.0, _number(-2.0, 2.0, "a number in [-2, 2]"))
    presence_penalty: float = _field(0.0, _number(-2.0, 2.0, "a number in [-2, 2]"))
    repetition_penalty: float = _field(1.0, _number(0.0, 2.0, "a number in (0, 2]", above_low=True))
    stop: str | Sequence[str] | None = _field(
        None, Check(_stop, {**_NOT_EMPTY, "maxItems": MAX_STOP_STRINGS, "items": _NOT_EMPTY})
    )
    stop_token_ids: Sequence[int | None] | None = _field(None, Check(_stop_token_ids, {"items": _FROM_0}))
    ignore_eos: bool = _field(False, Check(_boolean))
    n: int = _field(1, _integer(1, f"an integer from 1 to {MAX_SAMPLES}", maximum=MAX_SAMPLES))
    skip_special_tokens: bool = _field(True, Check(_boolean))
    spaces_between_special_tokens: bool = _field(True, Check(_boolean))
    no_stop_trim: bool = _field(False, Check(_boolean), vllm="include_stop_str_in_output")
    stream_interval: int | None = _field(None, _integer(1, "an integer ≥ 1"), openai=None, vllm=None)
    logit_bias: Mapping[int, float] | None = _field(None, Check(_logit_bias), type_=dict[str, float] | None)
    allowed_token_ids: Sequence[int] | None = _field(
        None, Check(_allowed_token_ids, {"minItems": 1, "items": _FROM_0})
    )
    bad_words: Sequence[str] | None = _field(
        None, Check(_bad_words, {"maxItems": MAX_BAD_WORDS, "items": {"pattern": r"\S"}})
    )
    sampling_seed: int | None = _field(
        None, _integer(-(2**63), "a signed 64-bit integer"), openai="seed", vllm="seed"
    )
    # Keys that are not read are dropped, since they may not be serializable.
    custom_params: Mapping[str, Any] | None = _field(
        None, Check(_custom_params, {"type": ["object", "null"]}), openai=None, vllm=None
    )
    # Constraints of the output, at most one. A schema or a structural tag may be given as an object.
    json_schema: str | Mapping[str, Any] | None = _grammar(_json_text)
    regex: str | None = _grammar(_text)
    ebnf: str | None = _grammar(_text)
    structural_tag: str | Mapping[str, Any] | None = _grammar(_json_text)
    choice: Sequence[str] | None = _grammar(_choice, openai=None, items=_NOT_EMPTY)
    stop_regex: Any = _unsupported(_not_supported)
    beam_width: Any = _unsupported(_beam_width, also=[1])
    watermark: Any = _unsupported(_not_supported)

    def __post_init__(self) -> None:
        for name, default, when_null, read in _READERS:
            value = getattr(self, name)
            if value is default:
                continue
            checked = when_null if value is None else read(name, value)
            if checked is not value:
                object.__setattr__(self, name, checked)
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise _rejected(
                "min_new_tokens", f"at most max_new_tokens ({self.max_new_tokens})", self.min_new_tokens
            )
        given = [kind for kind in GRAMMAR_KINDS if getattr(self, kind) is not None]
        if given and self.bad_words:
            raise RequestRejected(f"sampling_params.bad_words: cannot be combined with {given[0]}")
        if len(given) > 1:
            raise RequestRejected(f"sampling_params: expected one of {', '.join(given)}, not all of them")
        if given and (self.min_new_tokens or self.ignore_eos):
            name = "ignore_eos" if self.ignore_eos else "min_new_tokens"
            raise RequestRejected(
                f"sampling_params.{name}: cannot be combined with {given[0]}, which decides where outputs end"
            )

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Self:
        """Build from a JSON object. Unknown keys are errors: a misspelt one would change a rollout silently.

        Raises RequestRejected: status 400; an unknown key (the message lists the valid ones) or a bad value.
        """
        if not isinstance(given, Mapping):
            raise RequestRejected(f"sampling_params: expected an object, got {_shown(given)}")
        unknown = [name for name in given if name not in _KEYS]
        if unknown:
            listed = first_few([repr(name) for name in unknown])
            raise RequestRejected(
                f"sampling_params: unknown key {listed}. Valid keys: {', '.join(sorted(_KEYS))}"
            )
        return cls(**given)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken instead of a sample."""
        return self.temperature < GREEDY_BELOW_TEMPERATURE

    @property
    def returns_top_p_ids(self) -> bool:
        """Whether the answer lists the tokens that could have been sampled, in slime's form."""
        return self.custom_params is not None and TOP_P_IDS in self.custom_params

    @property
    def grammar(self) -> GrammarSpec | None:
        """The grammar that constrains the output; None: there is none."""
        for kind in GRAMMAR_KINDS:
            value = getattr(self, kind)
            if value is not None:
                if kind == "choice":
                    value = "root ::= " + " | ".join(map(json.dumps, value))
                return GrammarSpec(kind, value)
        return None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings; empty: there are none."""
        return tuple(self.stop or ())

    @property
    def num_entries(self) -> int:
        """Number of ids and characters that are sent with each output. Of a grammar only its key is sent."""
        ids = self.allowed_token_ids, self.logit_bias, self.stop_token_ids
        texts = *self.stop_strings, *(self.bad_words or ())
        return sum(len(one or ()) for one in ids) + sum(map(len, texts))

    @property
    def stop_token_id_set(self) -> frozenset[int]:
        """The request's own stop token ids, without EOS."""
        return frozenset(token_id for token_id in self.stop_token_ids or () if token_id is not None)


def _field_of(declared: dataclasses.Field[Any], types: Mapping[str, Any]) -> Field:
    about = dict(declared.metadata)
    for dialect in ("openai", "vllm"):
        about[dialect] = declared.name if about[dialect] == _SAME else about[dialect]
    about["type"] = about["type"] or types[declared.name] | None
    return Field(name=declared.name, default=declared.default, **about)


_TYPES: Final = get_type_hints(SamplingParams)
FIELDS: Final = tuple(_field_of(declared, _TYPES) for declared in dataclasses.fields(SamplingParams))
OPENAI_FIELDS: Final = {field.openai: field for field in FIELDS if field.openai is not None}
VLLM_FIELDS: Final = {field.vllm: field for field in FIELDS if field.vllm is not None}
_KEYS: Final = frozenset(field.name for field in FIELDS)
_READERS: Final = tuple((field.name, field.default, field.when_null, field.check.read) for field in FIELDS)


def params_of(given: Mapping[str, Any], dialect: Mapping[str, Field]) -> dict[str, Any]:
    """The sampling parameters among the fields of another API's request. Null means "not given".

    `dialect`: `OPENAI_FIELDS` or `VLLM_FIELDS`.
    """
    params: dict[str, Any] = {}
    for name, field in dialect.items():
        value = given.get(name)
        if value is not None:
            params[field.name] = field.zero if field.zero is not None and value == 0 else value
    return params
