"""One answer out of many: the replies of a replica's ranks, then those of the replicas, and their reports.

A rank's failure fails the request and is named. Source: control_semantics section 0; wire_api section 3:
totals are sums over ranks and replicas, `ranks` lists the shares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from msgspec import UNSET

from ebbtide.srt.managers.io_struct import (
    AnyReply,
    GivenUp,
    Refusal,
    StateReport,
    TotalsReply,
    UpdateWeightsReqOutput,
    UpdateWeightVersionReqOutput,
    WeightsContent,
)

T = TypeVar("T")

MAX_ERRORS = 20


def _first(values: list[T]) -> T:
    return values[0]


def _worst(values: list[WeightsContent]) -> WeightsContent:
    return max(values, key=lambda value: value.num_missing)


def _agreed(values: list[str]) -> str:
    """The one value, or plainly none that a client could take for one."""
    distinct = list(dict.fromkeys(values))
    return distinct[0] if len(distinct) == 1 else f"mixed: {', '.join(distinct)}"


def _joined(values: list[list[Any]]) -> list[Any]:
    return [entry for value in values for entry in value]


def _sum_per_tag(values: list[dict[Any, int]]) -> dict[Any, int]:
    return {tag: sum(value[tag] for value in values) for tag in values[0]}


def _joined_if_given(values: list[Any]) -> Any:
    return UNSET if values[0] is UNSET else _joined(values)


Rule = Callable[[list[Any]], Any]

# Of what each rank has a share of its own, and a reply the total.
SHARED: dict[str, Rule] = {
    "freed_bytes": _sum_per_tag,
    "mapped_bytes": _sum_per_tag,
    "device_free_bytes_before": sum,
    "device_free_bytes_after": sum,
    "num_bytes": sum,
}
# By the name of a field: what becomes of its values. Ranks of one replica have the same requests.
OVER_RANKS: dict[str, Rule] = {
    **SHARED,
    "success": all,
    "changed": any,
    "committed": all,
    "staged": all,
    "fully_flushed": all,
    "replaced": any,
    "duration_ms": max,
    "stall_ms": max,
    "weights": _worst,
    "content": min,  # "stale" comes before "valid"
    "num_missing": max,
    "weight_version": _agreed,
    "new_version": _agreed,
    "per_engine_checksum": _agreed,
    **dict.fromkeys(
        (
            "status",
            "tags",
            "mode",
            "num_running",
            "num_retracted",
            "num_aborted",
            "num_queued",
            "num_paused_requests",
            "freed_tokens",
            "num_tensors",
            "num_ignored",
            "values",
            "loads",
            "by_rank",
        ),
        _first,
    ),
}
# Replicas have requests of their own.
OVER_REPLICAS: dict[str, Rule] = {
    **OVER_RANKS,
    **dict.fromkeys(
        ("num_running", "num_retracted", "num_aborted", "num_queued", "num_paused_requests", "freed_tokens"),
        sum,
    ),
    "loads": _joined,
    "by_rank": _joined_if_given,
}
# Of the further fields of refusals. What is not here is the first one's.
REFUSED_OVER_RANKS: dict[str, Rule] = {"needed_bytes": sum, "free_bytes": sum, "num_errors": sum}
REFUSED_OVER_REPLICAS: dict[str, Rule] = REFUSED_OVER_RANKS | {"num_running": sum}


def merge_ranks(replies: Sequence[AnyReply]) -> AnyReply:
    """The reply of a replica out of those of its ranks, by tp_rank: one type, or refusals among them."""
    if len(replies) == 1:
        return replies[0]
    refusals = {rank: reply for rank, reply in enumerate(replies) if isinstance(reply, Refusal)}
    if refusals:
        return merge_refusals(refusals, len(replies))
    return _merged(replies, "rank", OVER_RANKS, [_share(reply, rank) for rank, reply in enumerate(replies)])


def merge_refusals(
    refusals: Mapping[int, Refusal], num_asked: int, noun: Literal["rank", "replica"] = "rank"
) -> Refusal:
    """The refusal of what some or all of those who were asked refused; `refusals` is by their number.

    It is their common one if all refuse alike. Otherwise the message names them, and so does every entry of
    `errors`, as `rank` or `dp_rank`.
    """
    first, *others = refusals.values()
    if len(refusals) == num_asked and all(other == first for other in others):
        return first
    rules = REFUSED_OVER_RANKS if noun == "rank" else REFUSED_OVER_REPLICAS
    names = dict.fromkeys(name for refusal in refusals.values() for name in refusal.fields)
    fields = {
        name: rules.get(name, _first)([one.fields[name] for one in refusals.values() if name in one.fields])
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
        message=_common_or_told(_messages(refusals), num_asked, noun),
        fields=fields,
    )


def merge_replicas(replies: Sequence[AnyReply]) -> AnyReply:
    """The reply of the engine out of those of its replicas, by dp_rank.

    Where some did what others refused, it is a refusal with `replicas`, an entry for each: `dp_rank`,
    `success`, `message`, and the `weight_version` that it serves, where its reply tells. If weights have
    changed on some replicas only, the status is 500, and sending the update again is what helps.
    """
    if len(replies) == 1:
        return replies[0]
    refused = {rank: reply for rank, reply in enumerate(replies) if isinstance(reply, Refusal)}
    if not refused:
        shares = [share for rank, reply in enumerate(replies) for share in _shares(reply, rank)]
        return _merged(replies, "replica", OVER_REPLICAS, shares)
    refusal = merge_replica_refusals(refused, len(replies))
    if len(refused) == len(replies):
        return refusal
    done = {rank: reply for rank, reply in enumerate(replies) if rank not in refused}
    differ = any(_has_changed_weights(reply) for reply in done.values())
    advice = " The replicas serve different weights now: send the update again" if differ else ""
    return Refusal(
        status=500 if differ else refusal.status,
        message=f"{refusal.message}; but {_told(_messages(done), 'replica')}{advice}",
        fields={**refusal.fields, "replicas": [_outcome(rank, reply) for rank, reply in enumerate(replies)]},
    )


def merge_replica_refusals(refused: Mapping[int, Refusal], num_asked: int) -> Refusal:
    """The refusal of what some or all replicas refused; `refused` is by dp_rank.

    Those that gave up for the sake of others add nothing but what they have left behind.
    """
    own = {rank: reply for rank, reply in refused.items() if not isinstance(reply, GivenUp)}
    refusal = merge_refusals(own or refused, num_asked, "replica")
    left = {rank: reply.left for rank, reply in refused.items() if isinstance(reply, GivenUp) and reply.left}
    if not left:
        return refusal
    return Refusal(
        status=max(reply.status for reply in refused.values()),
        message=f"{refusal.message}; {_told(left, 'replica')}",
        fields=refusal.fields,
    )


def merge_reports(reports: Sequence[StateReport]) -> StateReport:
    """The state of the engine out of its replicas', by dp_rank.

    It can run if every replica can, and is paused if any is. Versions that differ read "mixed: 7, 8": no
    client takes that for one of them.
    """
    if len(reports) == 1:
        return reports[0]
    paused = [report.paused for report in reports if report.paused is not None]
    sessions = [report.session for report in reports if report.session is not None]
    reasons = {rank: report.reason for rank, report in enumerate(reports) if not report.can_run}
    return StateReport(
        paused=paused[0] if paused else None,
        can_run=not reasons,
        reason=_common_or_told(reasons, len(reports), "replica") if reasons else "",
        ranks=[rank for report in reports for rank in report.ranks],
        weight_version=_agreed([report.weight_version for report in reports]),
        model_path=_agreed([report.model_path for report in reports]),
        load_format=_agreed([report.load_format for report in reports]),
        session=sessions[0] if sessions else None,
        weight_groups=list(dict.fromkeys(name for report in reports for name in report.weight_groups)),
    )


def _merged(
    replies: Sequence[AnyReply], noun: str, rules: Mapping[str, Rule], shares: list[dict[str, Any]]
) -> AnyReply:
    kind = type(replies[0])
    assert all(type(reply) is kind for reply in replies), "replies to one request are of one type"
    names = [name for name in kind.__struct_fields__ if name not in ("message", "ranks")]
    fields = {name: rules[name]([getattr(reply, name) for reply in replies]) for name in names}
    if issubclass(kind, TotalsReply):
        fields["ranks"] = shares
    return kind(message=_common_or_told(_messages(dict(enumerate(replies))), len(replies), noun), **fields)


def _share(reply: AnyReply, tp_rank: int) -> dict[str, Any]:
    """What one rank adds to the totals."""
    own = {name: getattr(reply, name) for name in SHARED if hasattr(reply, name)}
    return {"dp_rank": 0, "tp_rank": tp_rank, **own}


def _shares(reply: AnyReply, dp_rank: int) -> list[dict[str, Any]]:
    """What each rank of a replica adds to the totals. A replica of one rank lists none: it is the share."""
    listed = (
        reply.ranks if isinstance(reply, TotalsReply) and reply.ranks is not UNSET else [_share(reply, 0)]
    )
    return [{**share, "dp_rank": dp_rank} for share in listed]


def _has_changed_weights(reply: AnyReply) -> bool:
    match reply:
        case UpdateWeightsReqOutput():
            return reply.committed
        case UpdateWeightVersionReqOutput():
            return True
        case _:
            return False


def _outcome(dp_rank: int, reply: AnyReply) -> dict[str, Any]:
    outcome = {"dp_rank": dp_rank, "success": reply.success, "message": reply.message}
    match reply:
        case UpdateWeightsReqOutput():
            outcome["weight_version"] = reply.weight_version
        case UpdateWeightVersionReqOutput():
            outcome["weight_version"] = reply.new_version
    return outcome


def _messages(replies: Mapping[int, AnyReply]) -> dict[int, str]:
    return {index: reply.message for index, reply in replies.items()}


def _common_or_told(messages: Mapping[int, str], num_asked: int, noun: str) -> str:
    """The message, if all who were asked say the same; otherwise who says what."""
    if len(messages) == num_asked and len(set(messages.values())) == 1:
        return next(iter(messages.values()))
    return _told(messages, noun)


def _told(messages: Mapping[int, str], noun: str) -> str:
    """Who says what, each message once: "rank 1: ...; ranks 0, 2-7: ..."."""
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
