"""Converts values of a wrong JSON type that have only one possible meaning.

Clients send such values because servers that use pydantic accept them: `true` and `"2"` as numbers, 1 and
"true" as booleans. A value whose conversion would lose something, such as 2.5 for an integer, stays as it is;
the check of types then rejects it.
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
    """Convert a value to an integer if it means one; else return it."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 63:
        return int(value)
    if isinstance(value, str) and _INTEGER.fullmatch(value):
        return int(value.partition(".")[0])
    return value


def as_float(value: Any) -> Any:
    """Convert a text to a float if it means a number; else return it. Booleans stay: they mean no number."""
    if isinstance(value, str) and _NUMBER.fullmatch(value) and math.isfinite(number := float(value)):
        return number
    return value


def as_bool(value: Any) -> Any:
    """Convert a value to a boolean if it means one; else return it."""
    if isinstance(value, str):
        return _BOOLEANS.get(value.lower(), value)
    return bool(value) if isinstance(value, int | float) and value in (0, 1) else value


def reader_of(annotation: Any) -> Callable[[Any], Any] | None:
    """The converter for a field of this type; None: its type allows text, or has no bool, int or float."""
    kinds = set(_kinds(annotation))
    if str in kinds or Any in kinds:
        return None
    return next(
        (read for kind, read in ((bool, as_bool), (int, as_int), (float, as_float)) if kind in kinds), None
    )


K = TypeVar("K", bound=Struct)


def read(kind: type[K], fields: Mapping[str, Any], param: str | None = None) -> K:
    """Build a request from its fields.

    `param`: the error's `param`. Raises RequestRejected: 400, with the field's path and what was expected.
    """
    try:
        return msgspec.convert(read_losslessly(fields, kind), kind)
    except msgspec.ValidationError as error:
        raise RequestRejected(_explained(error, kind), param=param) from None


def read_losslessly(fields: Mapping[str, Any], kind: type[Struct]) -> dict[str, Any]:
    """Convert the fields of a request to the types of its struct, as far as that is lossless."""
    readers = _readers(kind)
    return {name: readers[name](value) if name in readers else value for name, value in fields.items()}


@cache
def _readers(kind: type[Struct]) -> dict[str, Callable[[Any], Any]]:
    found = {field.encode_name: reader_of(field.type) for field in msgspec.structs.fields(kind)}
    return {name: reader for name, reader in found.items() if reader is not None}


def _kinds(annotation: Any) -> list[Any]:
    """The members of a union, without the types of their items."""
    if get_origin(annotation) is Annotated:
        return _kinds(get_args(annotation)[0])
    origin = get_origin(annotation)
    if origin in (list, dict, tuple, Mapping, Sequence):
        return [origin]
    members = get_args(annotation)
    return [kind for member in members for kind in _kinds(member)] if members else [annotation]


def _explained(error: msgspec.ValidationError, kind: type[Struct]) -> str:
    """The validation message; if an enumeration was expected, with the valid values."""
    message = str(error)
    if message.startswith("Invalid base64"):
        return f"{message}; expected the standard alphabet, with padding"
    field = re.search(r"`\$\.(\w+)[^.]*`", message)  # of the request itself, not of an object within
    if field is None or not message.startswith("Invalid enum value"):
        return message
    types = {known.name: known.type for known in msgspec.structs.fields(kind)}
    return f"{message}; expected one of {', '.join(valid_values(types[field[1]]))}"


def valid_values(annotation: Any) -> list[str]:
    """The valid values in a field's type: members of enumerations and literals."""
    if isinstance(annotation, enum.EnumType):
        return list(map(str, annotation.__members__.values()))
    if isinstance(annotation, str | int):
        return [str(annotation)]
    return [value for argument in get_args(annotation) for value in valid_values(argument)]
