"""How a field of many replies becomes one: a rule beside each field of a reply, read by `reply_merging`.

The ranks of a replica are merged first, then the replicas.
Source: control_semantics section 0; wire_api section 3.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints

from msgspec import UNSET

from ebbtide.srt.managers.wire.message import Reply
from ebbtide.srt.managers.wire.reports import WeightsContent

T = TypeVar("T")

Rule = Callable[[list[Any]], Any]

# The merging itself writes these two.
UNRULED = frozenset({"message", "ranks"})


@dataclass(frozen=True)
class Merge:
    """The rules of one field, as `Annotated[int, SHARE]`.

    Attributes:
        is_share: every rank has a part of its own, which `TotalsReply.ranks` lists.
        on_device: it is a measure of devices: which value counts of those of ranks that share one.
    """

    over_ranks: Rule
    over_replicas: Rule
    is_share: bool = False
    on_device: Rule | None = None


def first(values: list[T]) -> T:
    return values[0]


def agreed(values: list[str]) -> str:
    """The one value, or plainly none that a client could take for one."""
    distinct = list(dict.fromkeys(values))
    return distinct[0] if len(distinct) == 1 else f"mixed: {', '.join(distinct)}"


def _joined(values: list[Any]) -> Any:
    """One list after the other, unless there are none."""
    return UNSET if values[0] is UNSET else [entry for value in values for entry in value]


def _worse(values: list[WeightsContent]) -> WeightsContent:
    return max(values, key=lambda value: value.num_missing)


def _sum_per_tag(values: list[dict[Any, int]]) -> dict[Any, int]:
    return {tag: sum(value[tag] for value in values) for tag in values[0]}


SAME = Merge(first, first)
ANY = Merge(any, any)
ALL = Merge(all, all)
LARGEST = Merge(max, max)
# "stale" comes before "valid" in the alphabet.
STALER = Merge(min, min)
WORSE = Merge(_worse, _worse)
AGREED = Merge(agreed, agreed)
# Ranks of one replica have the same requests; replicas have requests of their own.
PER_REPLICA = Merge(first, sum)
LISTED_OF_FIRST_REPLICA = Merge(_joined, first)
LISTED_PER_REPLICA = Merge(first, _joined)
SHARE = Merge(sum, sum, is_share=True)
# Ranks that share a device do not act at the same instant: the least, or the most, shows all of the change.
DEVICE_LEAST = Merge(sum, sum, is_share=True, on_device=min)
DEVICE_MOST = Merge(sum, sum, is_share=True, on_device=max)
SHARE_PER_TAG = Merge(_sum_per_tag, _sum_per_tag, is_share=True)


@functools.cache
def merge_rules(kind: type[Reply]) -> Mapping[str, Merge]:
    """The rule of every field.

    Raises:
        TypeError: a field has none.
    """
    rules: dict[str, Merge] = {"success": ALL}
    for name, annotation in get_type_hints(kind, include_extras=True).items():
        rule = next((one for one in getattr(annotation, "__metadata__", ()) if isinstance(one, Merge)), None)
        if rule is not None:
            rules[name] = rule
    missing = set(kind.__struct_fields__) - rules.keys() - UNRULED
    if missing:
        raise TypeError(f"{kind.__name__}: no rule says how to merge {', '.join(sorted(missing))}")
    return rules


@functools.cache
def share_names(kind: type[Reply]) -> tuple[str, ...]:
    """The fields of which every rank has a part of its own."""
    return tuple(name for name, merge in merge_rules(kind).items() if merge.is_share)
