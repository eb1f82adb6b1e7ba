"""Merges the replies of ranks, and then those of replicas, into one: a rule per field, and the messages.

If a rank fails, the request fails, and the message names the rank. Source: control_semantics section 0;
wire_api section 3: totals are sums over ranks and replicas, and `ranks` lists the shares.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar, get_type_hints

from msgspec import UNSET

from ebbtide.srt.managers.wire.message import (
    GivenUp,
    Refusal,
    Reply,
    StateReport,
    TotalsReply,
    WeightsContent,
)

T = TypeVar("T")

Rule = Callable[[list[Any]], Any]

# These two fields are written by the merging itself.
UNRULED = frozenset({"message", "ranks"})


@dataclass(frozen=True)
class Merge:
    """The rules of one field, as `Annotated[int, SUM]`.

    Attributes:
        is_share: whether `TotalsReply.ranks` lists each rank's own value.
        on_device: for a measure of devices: picks one value among ranks that share a device.
    """

    over_ranks: Rule
    over_replicas: Rule
    is_share: bool = False
    on_device: Rule | None = None


def first(values: list[T]) -> T:
    return values[0]


def agreed(values: list[str]) -> str:
    """The common value; else a text that no client takes for one."""
    distinct = list(dict.fromkeys(values))
    return distinct[0] if len(distinct) == 1 else f"mixed: {', '.join(distinct)}"


def _joined(values: list[Any]) -> Any:
    """The lists, concatenated; UNSET if they are unset."""
    return UNSET if values[0] is UNSET else [entry for value in values for entry in value]


def _worse(values: list[WeightsContent]) -> WeightsContent:
    return max(values, key=lambda value: value.num_missing)


def _sum_per_tag(values: list[dict[Any, int]]) -> dict[Any, int]:
    return {tag: sum(value[tag] for value in values) for tag in values[0]}


SAME = Merge(first, first)
ANY = Merge(any, any)
ALL = Merge(all, all)
MAX = Merge(max, max)
# "stale" comes before "valid" in the alphabet.
STALER = Merge(min, min)
WORSE = Merge(_worse, _worse)
AGREED = Merge(agreed, agreed)
# Ranks of one replica have the same requests; replicas have requests of their own.
PER_REPLICA = Merge(first, sum)
LISTED_OF_FIRST_REPLICA = Merge(_joined, first)
LISTED_PER_REPLICA = Merge(first, _joined)
SUM = Merge(sum, sum, is_share=True)
# Ranks that share a device act one after the other: the smallest, or largest, value has all of the change.
DEVICE_LEAST = Merge(sum, sum, is_share=True, on_device=min)
DEVICE_MOST = Merge(sum, sum, is_share=True, on_device=max)
SUM_PER_TAG = Merge(_sum_per_tag, _sum_per_tag, is_share=True)


@functools.cache
def merge_rules(kind: type[Reply]) -> Mapping[str, Merge]:
    """The rule of every field. Raises TypeError: a field has none."""
    rules: dict[str, Merge] = {"success": ALL}
    for name, annotation in get_type_hints(kind, include_extras=True).items():
        rule = next((one for one in getattr(annotation, "__metadata__", ()) if isinstance(one, Merge)), None)
        if rule is not None:
            rules[name] = rule
    missing = set(kind.__struct_fields__) - rules.keys() - UNRULED
    if missing:
        raise TypeError(f"{kind.__name__}: no rule says how to merge {', '.join(sorted(missing))}")
    return rules


R = TypeVar("R", bound=Reply)

MAX_ERRORS: Final = 20

# How further fields of refusals are merged; for any other field, the first value counts.
REFUSED_OVER_RANKS: Final[dict[str, Rule]] = {"needed_bytes": sum, "free_bytes": sum, "num_errors": sum}
REFUSED_OVER_REPLICAS: Final[dict[str, Rule]] = REFUSED_OVER_RANKS | {"num_running": sum}


def merge_ranks(replies: Sequence[R]) -> R | Refusal:
    """Merge the replies of a replica's ranks, by tp_rank: all of one type, or some of them refusals."""
    refusals = {rank: reply for rank, reply in enumerate(replies) if isinstance(reply, Refusal)}
    if refusals:
        return merge_refusals(refusals, len(replies))
    return _merged(replies, "rank", [_share(reply, rank) for rank, reply in enumerate(replies)])


def merge_refusals(
    refusals: Mapping[int, Refusal], num_asked: int, noun: Literal["rank", "replica"] = "rank"
) -> Refusal:
    """Merge the refusals of some or all that were asked.

    If all refuse alike, it is the common refusal. Otherwise the message names them, and so does every entry
    of `errors`, by `rank` or `dp_rank`.

    Args:
        refusals: by number of the rank or replica.
        num_asked: how many were asked.
    """
    common, *others = refusals.values()
    if len(refusals) == num_asked and all(other == common for other in others):
        return common
    rules = REFUSED_OVER_RANKS if noun == "rank" else REFUSED_OVER_REPLICAS
    names = dict.fromkeys(name for refusal in refusals.values() for name in refusal.fields)
    fields = {
        name: rules.get(name, first)([one.fields[name] for one in refusals.values() if name in one.fields])
        for name in names
    }
    if "errors" in fields:
        place = "rank" if noun == "rank" else "dp_rank"
        listed = ((index, refusal.fields.get("errors", ())) for index, refusal in refusals.items())
        fields["errors"] = [{**error, place: index} for index, errors in listed for error in errors][
            :MAX_ERRORS
        ]
    return Refusal(
        status=max(refusal.status for refusal in refusals.values()),
        message=_common_or_each(_messages(refusals), num_asked, noun),
        fields=fields,
    )


def merge_replicas(replies: Sequence[R]) -> R | Refusal:
    """Merge the replies of the engine's replicas, by dp_rank.

    If only some refused, it is a refusal with `replicas`: an entry for each with `dp_rank`, `success`,
    `message`, and the `weight_version` that it serves, if its reply has that. If weights have changed only on
    some replicas, the status is 500, and the message advises to send the update again.
    """
    if len(replies) == 1:
        return replies[0]
    refused = {rank: reply for rank, reply in enumerate(replies) if isinstance(reply, Refusal)}
    if not refused:
        shares = [share for rank, reply in enumerate(replies) for share in _shares(reply, rank)]
        return _merged(replies, "replica", shares)
    refusal = merge_replica_refusals(refused, len(replies))
    if len(refused) == len(replies):
        return refusal
    done = {rank: reply for rank, reply in enumerate(replies) if rank not in refused}
    differ = any(reply.has_changed_weights for reply in done.values())
    advice = " The replicas serve different weights now: send the update again" if differ else ""
    return Refusal(
        status=500 if differ else refusal.status,
        message=f"{refusal.message}; but {_each(_messages(done), 'replica')}{advice}",
        fields={**refusal.fields, "replicas": [_outcome(rank, reply) for rank, reply in enumerate(replies)]},
    )


def merge_replica_refusals(refused: Mapping[int, Refusal], num_asked: int) -> Refusal:
    """Merge the refusals of some or all replicas, by dp_rank.

    Replicas that gave up because others refused only add what they have left changed.
    """
    own = {rank: reply for rank, reply in refused.items() if not isinstance(reply, GivenUp)}
    refusal = merge_refusals(own or refused, num_asked, "replica")
    left = {rank: reply.left for rank, reply in refused.items() if isinstance(reply, GivenUp) and reply.left}
    if not left:
        return refusal
    return Refusal(
        status=max(reply.status for reply in refused.values()),
        message=f"{refusal.message}; {_each(left, 'replica')}",
        fields=refusal.fields,
    )


def merge_reports(reports: Sequence[StateReport]) -> StateReport:
    """Merge the states of the engine's replicas, by dp_rank.

    The engine can run if every replica can, and is paused if any is. Versions that differ read "mixed: 7, 8",
    which no client takes for a version.
    """
    if len(reports) == 1:
        return reports[0]
    paused = [report.paused for report in reports if report.paused is not None]
    sessions = [report.session for report in reports if report.session is not None]
    reasons = {rank: report.reason for rank, report in enumerate(reports) if not report.can_run}
    return StateReport(
        paused=paused[0] if paused else None,
        can_run=not reasons,
        reason=_common_or_each(reasons, len(reports), "replica") if reasons else "",
        ranks=[rank for report in reports for rank in report.ranks],
        weight_version=agreed([report.weight_version for report in reports]),
        model_path=agreed([report.model_path for report in reports]),
        load_format=agreed([report.load_format for report in reports]),
        session=sessions[0] if sessions else None,
        adapters=reports[0].adapters,
        weight_groups=list(dict.fromkeys(name for report in reports for name in report.weight_groups)),
    )


def _merged(replies: Sequence[R], noun: Literal["rank", "replica"], shares: list[dict[str, Any]]) -> R:
    kind = type(replies[0])
    assert all(type(reply) is kind for reply in replies), "replies to one request are of one type"
    fields = {}
    for name, merge in merge_rules(kind).items():
        rule = merge.over_ranks if noun == "rank" else merge.over_replicas
        fields[name] = rule([getattr(reply, name) for reply in replies])
    if issubclass(kind, TotalsReply):
        fields["ranks"] = shares
    return kind(message=_common_or_each(_messages(dict(enumerate(replies))), len(replies), noun), **fields)


def _share(reply: Reply, tp_rank: int) -> dict[str, Any]:
    """The part of the totals that one rank adds."""
    own = {name: getattr(reply, name) for name, rule in merge_rules(type(reply)).items() if rule.is_share}
    return {"dp_rank": 0, "tp_rank": tp_rank, **own}


def _shares(reply: Reply, dp_rank: int) -> list[dict[str, Any]]:
    """The parts of the totals that each rank of a replica adds. A replica of one rank is its own share."""
    listed = (
        reply.ranks if isinstance(reply, TotalsReply) and reply.ranks is not UNSET else [_share(reply, 0)]
    )
    return [{**share, "dp_rank": dp_rank} for share in listed]


def _outcome(dp_rank: int, reply: Reply) -> dict[str, Any]:
    outcome = {"dp_rank": dp_rank, "success": reply.success, "message": reply.message}
    if reply.served_version is not None:
        outcome["weight_version"] = reply.served_version
    return outcome


def _messages(replies: Mapping[int, Reply]) -> dict[int, str]:
    return {index: reply.message for index, reply in replies.items()}


def _common_or_each(messages: Mapping[int, str], num_asked: int, noun: str) -> str:
    """The common message if all that were asked say the same; else each message with its speakers."""
    if len(messages) == num_asked and len(set(messages.values())) == 1:
        return next(iter(messages.values()))
    return _each(messages, noun)


def _each(messages: Mapping[int, str], noun: str) -> str:
    """Each message once, with its speakers: "rank 1: ...; ranks 0, 2-7: ..."."""
    speakers: dict[str, list[int]] = {}
    for index, message in messages.items():
        speakers.setdefault(message, []).append(index)
    return "; ".join(
        f"{noun}{'s' if len(indices) > 1 else ''} {_ranges(indices)}: {message}"
        for message, indices in speakers.items()
    )


def _ranges(indices: list[int]) -> str:
    """Ascending numbers, with runs as "2-7"."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
