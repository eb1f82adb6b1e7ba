"""One reply out of many: totals, the worst, and who failed."""

from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from fixtures import scripted_engine

from ebbtide.srt.managers.io_struct import (
    AbortReqOutput,
    AnyReply,
    FlushCacheReqOutput,
    GivenUp,
    PauseMode,
    PingReqOutput,
    RankReport,
    Refusal,
    ReleaseMemoryOccupationReqOutput,
    Reply,
    ResumeMemoryOccupationReqOutput,
    StateReport,
    UpdateWeightsReqOutput,
    UpdateWeightVersionReqOutput,
    WeightsContent,
)
from ebbtide.srt.managers.wire.control_request import ControlRow
from ebbtide.srt.managers.wire.merging import (
    merge_ranks,
    merge_refusals,
    merge_replicas,
    merge_reports,
)
from ebbtide.srt.memory_saver import MemoryTag


def released(weights: int, **fields: Any) -> ReleaseMemoryOccupationReqOutput:
    given: dict[str, Any] = {
        "changed": True,
        "tags": [MemoryTag.WEIGHTS, MemoryTag.KV_CACHE],
        "freed_bytes": {MemoryTag.WEIGHTS: weights, MemoryTag.KV_CACHE: 10},
        "num_retracted": 2,
        "device_free_bytes_before": 100,
        "device_free_bytes_after": 110 + weights,
        "duration_ms": float(weights),
        "message": "Released weights, kv_cache.",
    }
    return ReleaseMemoryOccupationReqOutput(**given | fields)


def updated(**fields: Any) -> UpdateWeightsReqOutput:
    return msgspec.structs.replace(scripted_engine.updated("8"), message="Updated 3 tensors.", **fields)


def refused(*replies: AnyReply) -> Refusal:
    merged = merge_replicas(replies)
    assert isinstance(merged, Refusal)
    return merged


@dataclass
class Merged:
    ranks: Any
    replicas: Any


def both(*replies: AnyReply) -> Merged:
    return Merged(merge_ranks(replies), merge_replicas(replies))


def test_a_field_without_a_rule_is_refused_where_its_row_is_written() -> None:
    class Unruled(Reply, frozen=True, kw_only=True):
        num_found: int

    with pytest.raises(TypeError, match="Unruled: no rule says how to merge num_found"):
        ControlRow(Unruled)


def test_bytes_are_summed_per_tag_and_the_slowest_rank_gives_the_time() -> None:
    reply = released(7)
    assert merge_replicas([reply]) == reply
    assert "ranks" not in msgspec.to_builtins(reply), "one reply is itself"
    summed = both(released(3), released(5))
    assert (summed.ranks.num_retracted, summed.replicas.num_retracted) == (2, 4), "ranks share requests"
    for merged in (summed.ranks, summed.replicas):
        assert merged.freed_bytes == {MemoryTag.WEIGHTS: 8, MemoryTag.KV_CACHE: 20}
        assert (merged.device_free_bytes_before, merged.device_free_bytes_after) == (200, 228)
        assert merged.duration_ms == 5.0
        assert merged.message == "Released weights, kv_cache."
        assert [share["freed_bytes"]["weights"] for share in merged.ranks] == [3, 5]


def test_the_shares_of_all_ranks_of_all_replicas_are_listed() -> None:
    replicas = [merge_ranks([released(1), released(2)]), merge_ranks([released(3), released(4)])]
    # As they come from their processes.
    replicas = [msgspec.msgpack.decode(msgspec.msgpack.encode(each), type=AnyReply) for each in replicas]
    body = msgspec.to_builtins(merge_replicas(replicas))
    assert [
        (share["dp_rank"], share["tp_rank"], share["freed_bytes"]["weights"]) for share in body["ranks"]
    ] == [
        (0, 0, 1),
        (0, 1, 2),
        (1, 0, 3),
        (1, 1, 4),
    ]
    assert body["freed_bytes"]["weights"] == 10


def test_one_stale_rank_makes_all_stale() -> None:
    def resumed(content: WeightsContent) -> ResumeMemoryOccupationReqOutput:
        return ResumeMemoryOccupationReqOutput(
            changed=False,
            tags=[],
            mapped_bytes={},
            weights=content,
            device_free_bytes_before=0,
            device_free_bytes_after=0,
            duration_ms=0.0,
        )

    stale = WeightsContent(content="stale", num_missing=1, missing=["norm"])
    assert both(resumed(WeightsContent(content="valid")), resumed(stale)).ranks.weights == stale


def aborted(number: int) -> AbortReqOutput:
    return AbortReqOutput(changed=number > 0, num_aborted=number, message=f"Aborted {number} requests.")


def left(number: int) -> Refusal:
    return Refusal(status=409, message=f"{number} left", fields={"num_running": number})


FULL = FlushCacheReqOutput(fully_flushed=True, freed_tokens=4)
PARTIAL = FlushCacheReqOutput(success=False, fully_flushed=False, freed_tokens=1)
RELEASED = Refusal(status=409, message="kv_cache is released", fields={"needed_bytes": 5})
BOTH_ABORTED = "replica 0: Aborted 0 requests.; replica 1: Aborted 3 requests."


@pytest.mark.parametrize(
    ("replies", "expected"),
    [
        ([aborted(0), aborted(3)], {"changed": True, "num_aborted": 3, "message": BOTH_ABORTED}),
        ([FULL, PARTIAL], {"success": False, "fully_flushed": False, "freed_tokens": 5}),
        (
            [updated(weight_version="7"), updated(weight_version="8")],
            {"success": True, "weight_version": "mixed: 7, 8"},
        ),
        (
            [updated(), updated(content="stale", num_missing=2, staged=False)],
            {"content": "stale", "num_missing": 2, "staged": False},
        ),
        ([RELEASED, RELEASED], {"status": 409, "message": RELEASED.message, "fields": RELEASED.fields}),
        ([left(2), left(3)], {"fields": {"num_running": 5}}),
    ],
    ids=["abort", "flush", "versions", "stale", "alike", "sums"],
)
def test_replies_of_two_replicas_become_one(replies: list[Any], expected: dict[str, Any]) -> None:
    merged = merge_replicas(replies)
    assert {name: getattr(merged, name) for name in expected} == expected


def test_a_refusal_names_the_ranks() -> None:
    refusals = {rank: Refusal(status=409, message="no room", fields={"free_bytes": rank}) for rank in (1, 2)}
    assert merge_refusals(refusals, 2).message == "no room", "of all ranks, with other figures"
    assert merge_refusals(refusals, 3).message == "ranks 1-2: no room"
    merged = merge_ranks(
        [
            PingReqOutput(),
            Refusal(status=409, message="no room", fields={"needed_bytes": 5, "free_bytes": 1}),
            Refusal(status=500, message="boom"),
            Refusal(status=409, message="no room", fields={"needed_bytes": 7, "free_bytes": 2}),
            Refusal(status=409, message="no room", fields={"needed_bytes": 1, "free_bytes": 0}),
        ]
    )
    assert isinstance(merged, Refusal)
    assert merged.message == "ranks 1, 3-4: no room; rank 2: boom"
    assert merged.status == 500
    assert merged.fields == {"needed_bytes": 13, "free_bytes": 3}


def test_the_errors_of_ranks_say_whose_they_are_and_are_at_most_twenty() -> None:
    def refusal(count: int) -> Refusal:
        errors = [{"name": f"w{index}", "reason": "shape"} for index in range(count)]
        return Refusal(
            status=400, message=f"{count} do not fit", fields={"errors": errors, "num_errors": count}
        )

    merged = merge_refusals({0: refusal(2), 3: refusal(19)}, 4)
    assert merged.fields["num_errors"] == 21
    assert len(merged.fields["errors"]) == 20
    assert merged.fields["errors"][0] == {"name": "w0", "reason": "shape", "rank": 0}
    assert merged.fields["errors"][2]["rank"] == 3
    assert refused(refusal(1), refusal(2)).fields["errors"][1]["dp_rank"] == 1


def test_an_update_that_one_replica_refused_says_what_serves_where() -> None:
    merged = refused(updated(), Refusal(status=400, message="cannot open the handle"), updated())
    assert merged.status == 500
    assert "replica 1: cannot open the handle" in merged.message
    assert "replicas 0, 2: Updated 3 tensors." in merged.message
    assert "serve different weights" in merged.message
    assert [entry["success"] for entry in merged.fields["replicas"]] == [True, False, True]
    assert [entry.get("weight_version") for entry in merged.fields["replicas"]] == ["8", None, "8"]


@pytest.mark.parametrize(
    ("done", "status"),
    [(UpdateWeightVersionReqOutput(new_version="8"), 500), (updated(committed=False), 400)],
)
def test_what_leaves_the_weights_alike_keeps_the_status_of_the_refusal(done: AnyReply, status: int) -> None:
    assert refused(Refusal(status=400, message="no"), done).status == status


GAVE_UP = GivenUp(status=400, message="others have refused")
STALE = GivenUp(status=500, message="others have refused", left="4 parameters are stale")
CANNOT = Refusal(status=400, message="cannot be read")


@pytest.mark.parametrize(
    ("replies", "status", "message"),
    [
        ((GAVE_UP, CANNOT, GAVE_UP), 400, "replica 1: cannot be read"),
        ((STALE, CANNOT, GAVE_UP), 500, "replica 1: cannot be read; replica 0: 4 parameters are stale"),
        ((GAVE_UP, GAVE_UP), 400, "others have refused"),
    ],
)
def test_those_that_gave_up_for_others_tell_what_they_have_left_behind_and_no_more(
    replies: tuple[Refusal, ...], status: int, message: str
) -> None:
    merged = refused(*replies)
    assert (merged.status, merged.message) == (status, message)


def report(dp_rank: int, **fields: Any) -> StateReport:
    rank = RankReport(dp_rank=dp_rank, tp_rank=0, pid=dp_rank, device="cpu", uuid=None, tags={})
    return msgspec.structs.replace(scripted_engine.STATE, ranks=[rank], **fields)


def test_the_engine_can_run_if_every_replica_can() -> None:
    merged = merge_reports([report(0), report(1)])
    assert merged.can_run
    assert merged.reason == ""
    assert [rank.dp_rank for rank in merged.ranks] == [0, 1]
    stopped = report(2, can_run=False, reason="paused(retract)", paused=PauseMode.RETRACT)
    merged = merge_reports([report(0), report(1), stopped])
    assert (merged.can_run, merged.reason) == (False, "replica 2: paused(retract)")
    assert merged.paused is PauseMode.RETRACT
    assert merge_reports([stopped, stopped]).reason == "paused(retract)"


def test_a_report_of_replicas_with_different_weights_names_no_version() -> None:
    merged = merge_reports([report(0), report(1, weight_version="8", weight_groups=["g"])])
    assert merged.weight_version == "mixed: 1, 8"
    assert merged.weight_groups == ["g"]
