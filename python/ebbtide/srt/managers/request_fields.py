"""Control requests from loose fields: a JSON body, a query, or keyword arguments."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from typing import Any, TypeVar, get_args

import msgspec
from msgspec import Struct

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.io_struct import ControlRequest

R = TypeVar("R", bound=ControlRequest)


def build_request(kind: type[R], fields: Mapping[str, Any]) -> tuple[R, list[str]]:
    """Build a control request from loose fields: a JSON body, or keyword arguments.

    Null means "not given". Unknown fields are ignored and returned, sorted, for `ignored_fields`.

    Raises:
        RequestRejected: 400, with the field's path and what was expected.
    """
    known = {name: value for name, value in fields.items() if name in kind.__struct_fields__}
    given = {name: value for name, value in known.items() if value is not None}
    ignored = sorted(set(fields) - set(known))
    try:
        return msgspec.convert({"type": kind.__name__, **given}, kind), ignored
    except msgspec.ValidationError as error:
        raise RequestRejected(f"{kind.__name__}: {explain(error, kind)}") from None


def explain(error: msgspec.ValidationError, kind: type[Struct]) -> str:
    """The validation message, with the valid values where an enumeration was expected."""
    message = str(error)
    field = re.search(r"`\$\.(\w+)", message)
    if field is None or not message.startswith("Invalid enum value"):
        return message
    types = {known.name: known.type for known in msgspec.structs.fields(kind)}
    return f"{message}; expected one of {', '.join(_valid_values(types[field[1]]))}"


def _valid_values(annotation: Any) -> list[str]:
    if isinstance(annotation, enum.EnumType):
        return list(map(str, annotation.__members__.values()))
    if isinstance(annotation, str):
        return [annotation]
    return [value for argument in get_args(annotation) for value in _valid_values(argument)]
