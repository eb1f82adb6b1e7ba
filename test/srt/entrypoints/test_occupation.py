"""What an engine of many ranks says of its memory: totals, shares, and what cannot be measured from here."""

import os
from typing import Any

import msgspec
import pytest
from fixtures.scripted_engine import STATE
from msgspec.structs import replace

from ebbtide.srt.config import ParallelConfig
from ebbtide.srt.device import device_memory_bytes
from ebbtide.srt.entrypoints import occupation
from ebbtide.srt.entrypoints.occupation import count_devices_once, memory_occupation, num_gpus
from ebbtide.srt.errors import EngineError
from ebbtide.srt.managers.io_struct import (
    PauseMode,
    RankReport,
    ReleaseMemoryOccupationReqOutput,
    StateReport,
    TagReport,
)
from ebbtide.srt.managers.wire.merging import merge_replicas
from ebbtide.srt.memory_saver import MemoryTag

TP2 = ParallelConfig(tp_size=2)
TWO_NODES = ParallelConfig(tp_size=2, nnodes=2)


def tag(num_bytes: int, **changes: Any) -> TagReport:
    fields: dict[str, Any] = {
        "state": "resident",
        "virtual_bytes": num_bytes,
        "resident_bytes": num_bytes,
        "backup_bytes": 0,
    }
    return TagReport(**fields | changes)


def rank(tp_rank: int = 0, dp_rank: int = 0, uuid: str | None = None, **weights: Any) -> RankReport:
    return RankReport(
        dp_rank=dp_rank,
        tp_rank=tp_rank,
        pid=os.getpid(),
        device="cpu" if uuid is None else f"cuda:{tp_rank}",
        uuid=uuid,
        tags={
            MemoryTag.WEIGHTS: tag(100, **{"content": "valid", "num_missing": 0, "missing": []} | weights),
            MemoryTag.KV_CACHE: tag(10),
        },
    )


def state(*ranks: RankReport) -> StateReport:
    return replace(STATE, paused=PauseMode.RETRACT, can_run=False, ranks=list(ranks))


def body_of(state: StateReport, parallel: ParallelConfig) -> dict[str, Any]:
    body: dict[str, Any] = msgspec.to_builtins(memory_occupation(state, parallel))
    return body


def test_tags_are_added_and_listed_by_rank() -> None:
    body = body_of(state(rank(0), rank(1)), TP2)
    assert body["generation"] == {"state": "paused", "mode": "retract"}
    assert body["tags"]["weights"]["resident_bytes"] == 200
    assert body["tags"]["kv_cache"] == {**msgspec.to_builtins(tag(20)), "content": None}
    by_rank = {entry["tp_rank"]: entry["tags"]["weights"]["resident_bytes"] for entry in body["ranks"]}
    assert by_rank == {0: 100, 1: 100}


def test_what_is_stale_or_released_anywhere_is_so() -> None:
    stale = rank(1, content="stale", num_missing=1, missing=["norm"])
    weights = body_of(state(rank(0), stale), TP2)["tags"]["weights"]
    assert (weights["content"], weights["num_missing"], weights["missing"]) == ("stale", 1, ["norm"])
    released = rank(1, state="released", resident_bytes=0)
    weights = body_of(state(rank(0), released), TP2)["tags"]["weights"]
    assert (weights["state"], weights["virtual_bytes"], weights["resident_bytes"]) == ("released", 200, 100)


def test_ranks_on_one_host_share_its_memory() -> None:
    body = body_of(state(rank(0), rank(1)), TP2)
    shares = [entry["device_bytes"] for entry in body["ranks"]]
    assert body["device"]["total_bytes"] == shares[0]["total_bytes"]
    assert body["device"]["unmanaged_bytes"] == sum(share["unmanaged_bytes"] for share in shares)


def test_the_memory_of_another_node_is_not_known_here() -> None:
    body = body_of(state(rank(0), rank(1)), TWO_NODES)
    here, there = (entry["device_bytes"] for entry in body["ranks"])
    assert there is None
    assert body["device"] == here


def test_cuda_devices_are_asked_of_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    memories = {"a": (1000, 600), "b": (1000, 300)}
    monkeypatch.setattr(occupation, "device_memory_bytes", memories.get)
    monkeypatch.setattr(occupation, "process_bytes", lambda uuid: {os.getpid(): 150})

    def device() -> list[int | None]:
        body = body_of(state(rank(0, uuid="a"), rank(1, uuid="b")), TP2)["device"]
        return [body[name] for name in ("total_bytes", "free_bytes", "unmanaged_bytes")]

    assert device() == [2000, 900, 80]
    monkeypatch.setattr(occupation, "process_bytes", lambda uuid: {})
    assert device() == [2000, 900, None]
    monkeypatch.setattr(occupation, "device_memory_bytes", lambda uuid: None)
    assert device() == [None, None, None]
    assert num_gpus([rank(0, uuid="a"), rank(1, uuid="b"), rank(2, uuid="a")]) == 2


def test_a_process_that_has_ended_is_an_error() -> None:
    gone = RankReport(dp_rank=0, tp_rank=0, pid=2**22 + 1, device="cpu", uuid=None, tags=rank().tags)
    with pytest.raises(EngineError, match="has ended"):
        body_of(state(gone), ParallelConfig())


@pytest.mark.parametrize(
    ("uuids", "before", "after"),
    [((None, None), None, None), (("a", "b"), 190, 610), (("a", "a"), 90, 310)],
)
def test_free_memory_is_that_of_devices(
    uuids: tuple[str | None, ...], before: int | None, after: int | None
) -> None:
    ranks = [rank(dp_rank=dp_rank, uuid=uuid) for dp_rank, uuid in enumerate(uuids)]
    seen = [(90, 300), (100, 310)]
    replies = [
        ReleaseMemoryOccupationReqOutput(
            changed=True,
            tags=[MemoryTag.WEIGHTS],
            freed_bytes={MemoryTag.WEIGHTS: 200},
            num_retracted=0,
            device_free_bytes_before=free_before,
            device_free_bytes_after=free_after,
            duration_ms=1.0,
        )
        for free_before, free_after in seen
    ]
    reply = count_devices_once(merge_replicas(replies), ranks)
    assert (reply.device_free_bytes_before, reply.device_free_bytes_after) == (before, after)


class NVMLError(Exception):
    pass


class Nvml:
    """A driver that knows one device."""

    NVMLError = NVMLError

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-1234":
            raise NVMLError("not found")
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return type("Memory", (), {"total": 100, "free": 40})


def test_a_device_that_nvml_does_not_know_has_no_figures() -> None:
    assert device_memory_bytes("1234", Nvml()) == (100, 40)
    assert device_memory_bytes("5678", Nvml()) is None
