"""Values of another JSON type that can mean one thing only, as clients of other servers send them.

pydantic takes `true` and `"2"` for numbers, and 1 and "true" for booleans: what servers built on it accept is
accepted here, by every reader of requests. What would lose something, such as 2.5 for an integer, stays as it
is, and is refused by whoever checks the type.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Final, TypeVar, get_args, get_origin

import msgspec
from msgspec import Struct

from ebbtide.srt.errors import RequestRejected

_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,18}(\.0{0,18})?")
_NUMBER: Final = re.compile(r"[+-]?[0-9]{1,18}(\.[0-9]{0,18})?([eE][+-]?[0-9]{1,3})?")
_BOOLEANS: Final = {
    **dict.fromkeys(("1", "true", "t", "yes", "y", "on"), True),
    **dict.fromkeys(("0", "false", "f", "no", "n", "off"), False),
}


def as_int(value: Any) -> Any:
    """An integer where the value stands for one."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 63:
        return int(value)
    if isinstance(value, str) and _INTEGER.fullmatch(value):
        return int(value.partition(".")[0])
    return value


def as_float(value: Any) -> Any:
    """A number where the text stands for one; a time or a probability is no boolean."""
    if isinstance(value, str) and _NUMBER.fullmatch(value) and math.isfinite(number := float(value)):
        return number
    return value


def as_bool(value: Any) -> Any:
    """A boolean where the value stands for one."""
    if isinstance(value, str):
        return _BOOLEANS.get(value.lower(), value)
    return bool(value) if isinstance(value, int | float) and value in (0, 1) else value


def reader_of(annotation: Any) -> Callable[[Any], Any] | None:
    """Which of these suits a field of this type; None: it takes text, or nothing that is a single value."""
    kinds = set(_kinds(annotation))
    if str in kinds or Any in kinds:
        return None
    return next(
        (read for kind, read in ((bool, as_bool), (int, as_int), (float, as_float)) if kind in kinds), None
    )


K = TypeVar("K", bound=Struct)


def read(kind: type[K], fields: Mapping[str, Any], param: str | None = None) -> K:
    """A request of this type, of its fields.

    Raises RequestRejected: 400, with the field's path and what was expected; `param` is what that calls it.
    """
    try:
        return msgspec.convert(read_losslessly(fields, kind), kind)
    except msgspec.ValidationError as error:
        raise RequestRejected(_explained(error, kind), param=param) from None


def read_losslessly(fields: Mapping[str, Any], kind: type[Struct]) -> dict[str, Any]:
    """The fields of a request, with single values in the types that its struct has for them."""
    readers = _readers(kind)
    return {name: readers[name](value) if name in readers else value for name, value in fields.items()}


@cache
def _readers(kind: type[Struct]) -> dict[str, Callable[[Any], Any]]:
    found = {field.encode_name: reader_of(field.type) for field in msgspec.structs.fields(kind)}
    return {name: reader for name, reader in found.items() if reader is not None}


def _kinds(annotation: Any) -> list[Any]:
    """The members of a union, without what they contain."""
    if get_origin(annotation) is Annotated:
        return _kinds(get_args(annotation)[0])
    origin = get_origin(annotation)
    if origin in (list, dict, tuple, Mapping, Sequence):
        return [origin]
    members = get_args(annotation)
    return [kind for member in members for kind in _kinds(member)] if members else [annotation]


def _explained(error: msgspec.ValidationError, kind: type[Struct]) -> str:
    """The validation message, with the valid values where an enumeration was expected."""
    message = str(error)
    if message.startswith("Invalid base64"):
        return f"{message}; expected the standard alphabet, with padding"
    field = re.search(r"`\$\.(\w+)[^.]*`", message)  # of the request itself, not of an object within
    if field is None or not message.startswith("Invalid enum value"):
        return message
    types = {known.name: known.type for known in msgspec.structs.fields(kind)}
    return f"{message}; expected one of {', '.join(valid_values(types[field[1]]))}"


def valid_values(annotation: Any) -> list[str]:
    """What a type of a field has a list of: members of an enumeration, words, numbers."""
    if isinstance(annotation, enum.EnumType):
        return list(map(str, annotation.__members__.values()))
    if isinstance(annotation, str | int):
        return [str(annotation)]
    return [value for argument in get_args(annotation) for value in valid_values(argument)]
