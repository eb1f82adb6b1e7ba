"""Control requests from loose fields: a JSON body, a query, or keyword arguments."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.lossless import read
from ebbtide.srt.managers.io_struct import ControlRequest

R = TypeVar("R", bound=ControlRequest)

INT64_MIN: Final = -(2**63)
INT64_MAX: Final = 2**63 - 1
# Every entry of a list costs each rank some time. This is several times the tensors of the largest models.
MAX_ENTRIES: Final = 1 << 18
# An answer quotes no more characters of a request, and names no more of its ignored fields, than this.
MAX_CHARACTERS: Final = 200
MAX_IGNORED: Final = 100
# Fields without which a request is about everything, or gives memory back.
NONE_IS_ALL: Final = ("tags", "request_ids", "level")


def build_request(kind: type[R], fields: Mapping[str, Any]) -> tuple[R, list[str]]:
    """Build a control request from loose fields: a JSON body, or keyword arguments.

    Null means "not given". Unknown fields are ignored; up to a hundred are returned, sorted, for
    `ignored_fields`. In Python, a torch.dtype may stand for its name. Raises RequestRejected: 400, with the
    field's path and what was expected.
    """
    known = {name: value for name, value in fields.items() if name in kind.__struct_fields__}
    try:
        for name, value in known.items():
            _check_sizes(kind, f"$.{name}", value)
    except RecursionError:
        raise RequestRejected(f"{kind.__name__}: a field is nested too deeply") from None
    given = {name: _plain(value) for name, value in known.items() if value is not None}
    ignored = [name[:MAX_CHARACTERS] for name in sorted(set(fields) - set(known))[:MAX_IGNORED]]
    refuse_misspelt(kind, given, ignored)
    try:
        return read(kind, {"type": kind.__name__, **given}), ignored
    except RequestRejected as error:
        raise RequestRejected(f"{kind.__name__}: {error.message}") from None


def refuse_misspelt(kind: type[Struct], given: Collection[str], unknown: Iterable[str]) -> None:
    """Refuse a request that does not say what it is about, and has a field that may be meant to say it.

    Raises RequestRejected: 400; an unknown field is within two letters of a known one.
    """
    fields = msgspec.structs.fields(kind)
    if all(known.name in given for known in fields if known.required or known.name in NONE_IS_ALL):
        return
    for name in unknown:
        meant = next((known.name for known in fields if _is_near(name, known.name, 2)), None)
        if meant is not None and meant not in given:
            raise RequestRejected(f"{name}: unknown; did you mean {meant}?", param=f"body.{name}")


def _is_near(one: str, other: str, num_letters: int) -> bool:
    """Whether `num_letters` letters inserted, left out or replaced make one of the other."""
    if abs(len(one) - len(other)) > num_letters:
        return False
    while one and other and one[0] == other[0]:
        one, other = one[1:], other[1:]
    if not one or not other:
        return True
    return num_letters > 0 and (
        _is_near(one[1:], other[1:], num_letters - 1)
        or _is_near(one[1:], other, num_letters - 1)
        or _is_near(one, other[1:], num_letters - 1)
    )


def _plain(value: Any) -> Any:
    """The value, with a torch.dtype, or a list of them, by name."""
    if isinstance(value, list | tuple):
        return [str(member) if _is_dtype(member) else member for member in value]
    return str(value) if _is_dtype(value) else value


def _is_dtype(value: Any) -> bool:
    # It is known by name: torch takes seconds to import, and nothing else here needs it.
    kind = type(value)
    return (kind.__module__, kind.__name__) == ("torch", "dtype")


def _check_sizes(kind: type[Struct], path: str, value: Any) -> None:
    """Refuse numbers that the messages between processes, or JSON, have no room for, and endless lists.

    Neither the types of the fields nor JSON and Python bound an integer.
    """
    match value:
        case bool():
            return
        case int() if not INT64_MIN <= value <= INT64_MAX:
            raise RequestRejected(f"{kind.__name__}: Expected an integer of at most 64 bits - at `{path}`")
        case float() if not math.isfinite(value):
            raise RequestRejected(f"{kind.__name__}: Expected a finite number, got {value} - at `{path}`")
        case Mapping():
            for name, member in value.items():
                _check_sizes(kind, f"{path}.{name}", member)
        case list() | tuple() if len(value) > MAX_ENTRIES:
            raise RequestRejected(
                f"{kind.__name__}: Expected at most {MAX_ENTRIES} entries, got {len(value)} - at `{path}`"
            )
        case list() | tuple():
            for index, member in enumerate(value):
                _check_sizes(kind, f"{path}[{index}]", member)
