"""Which memory an engine occupies, over all of its ranks. Source: wire_api section 3.1.

Every rank reports its tags. What its device holds otherwise is measured from here: of ranks on this node, and
of CUDA devices where NVML answers. What cannot be measured is null.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from ebbtide.srt.config import ParallelConfig
from ebbtide.srt.device.cpu import CpuDevice
from ebbtide.srt.device.nvml import process_bytes
from ebbtide.srt.device.nvml_memory import device_memory_bytes
from ebbtide.srt.entrypoints.placement import node_of
from ebbtide.srt.errors import EngineError
from ebbtide.srt.managers.io_struct import RankReport, StateReport, TagReport

Body: TypeAlias = dict[str, Any]


def occupation_body(state: StateReport, parallel: ParallelConfig) -> Body:
    """The body of `GET /memory_occupation`. Reads /proc, which takes milliseconds where much is mapped.

    Raises:
        EngineError: the process of a rank has ended.
    """
    devices = [_measured(rank, parallel) for rank in state.ranks]
    return {
        "success": True,
        "message": "",
        "generation": {"state": "paused", "mode": state.paused.value}
        if state.paused is not None
        else {"state": "running", "mode": None},
        "can_run": state.can_run,
        "reason": state.reason,
        "tags": total_tags(state.ranks),
        "device": _total_device(state.ranks, devices, parallel),
        "ranks": [
            {
                **msgspec.to_builtins(rank),
                "tags": {tag.value: _tag_body(report) for tag, report in rank.tags.items()},
                "device_bytes": device,
            }
            for rank, device in zip(state.ranks, devices, strict=True)
        ],
    }


def total_tags(ranks: Sequence[RankReport]) -> dict[str, Body]:
    """Every tag over all of these ranks: bytes are added; released, or stale, if it is so anywhere."""
    return {tag.value: _tag_body(_total([rank.tags[tag] for rank in ranks])) for tag in ranks[0].tags}


def count_devices_once(body: Body, ranks: Sequence[RankReport], parallel: ParallelConfig) -> None:
    """In the reply to a release or a resume, add the free memory of devices, not of ranks that share one.

    Of what such ranks saw, that counts which shows all of the change: they do not act at the same instant.
    """
    keys = {(rank.dp_rank, rank.tp_rank): _device_key(rank, parallel) for rank in ranks}
    first, last = (min, max) if "freed_bytes" in body else (max, min)
    for name, choose in (("device_free_bytes_before", first), ("device_free_bytes_after", last)):
        seen: dict[Hashable, list[int]] = {}
        for share in body["ranks"]:
            seen.setdefault(keys[share["dp_rank"], share["tp_rank"]], []).append(share[name])
        body[name] = sum(choose(values) for values in seen.values())


def num_gpus(ranks: Sequence[RankReport]) -> int:
    """How many CUDA devices the ranks are on."""
    return len({rank.uuid for rank in ranks if rank.uuid is not None})


def _device_key(rank: RankReport, parallel: ParallelConfig) -> Hashable:
    """What ranks on the same device have in common: its id, or the host whose memory it is."""
    return rank.uuid if rank.uuid is not None else node_of(parallel, rank.dp_rank, rank.tp_rank)


def _total(reports: Sequence[TagReport]) -> TagReport:
    worst = max(reports, key=lambda report: report.num_missing or 0)
    return TagReport(
        state="released" if any(report.state == "released" for report in reports) else "resident",
        virtual_bytes=sum(report.virtual_bytes for report in reports),
        resident_bytes=sum(report.resident_bytes for report in reports),
        backup_bytes=sum(report.backup_bytes for report in reports),
        content=worst.content,
        num_missing=worst.num_missing,
        missing=worst.missing,
    )


def _tag_body(report: TagReport) -> Body:
    """Without what only the weights have, where it is another tag's."""
    body = msgspec.to_builtins(report)
    return {name: value for name, value in body.items() if value is not None or name == "content"}


def _measured(rank: RankReport, parallel: ParallelConfig) -> Body | None:
    """The memory of a rank's device now; None where it cannot be seen from here."""
    if node_of(parallel, rank.dp_rank, rank.tp_rank) != parallel.node_rank:
        return None
    if rank.uuid is None:
        try:
            memory = CpuDevice().memory_info(rank.pid)
        except ProcessLookupError:
            raise EngineError(f"the process {rank.pid} has ended") from None
        total_bytes, free_bytes = memory.total_bytes, memory.free_bytes
        held_bytes: int | None = memory.process_bytes
    else:
        device = device_memory_bytes(rank.uuid)
        if device is None:
            return None
        total_bytes, free_bytes = device
        held_bytes = process_bytes(rank.uuid).get(rank.pid)
    resident_bytes = sum(tag.resident_bytes for tag in rank.tags.values())
    return {
        "total_bytes": total_bytes,
        "free_bytes": free_bytes,
        # State and measurement are of different moments: memory may have gone in between.
        "unmanaged_bytes": None if held_bytes is None else max(0, held_bytes - resident_bytes),
    }


def _total_device(
    ranks: Sequence[RankReport], devices: Sequence[Mapping[str, Any] | None], parallel: ParallelConfig
) -> Body:
    """Over the devices that were measured, each counted once; `unmanaged_bytes` over their ranks."""
    measured = {
        _device_key(rank, parallel): device
        for rank, device in zip(ranks, devices, strict=True)
        if device is not None
    }
    if not measured:
        return dict.fromkeys(("total_bytes", "free_bytes", "unmanaged_bytes"))
    unmanaged = [device["unmanaged_bytes"] for device in devices if device is not None]
    return {
        "total_bytes": sum(device["total_bytes"] for device in measured.values()),
        "free_bytes": sum(device["free_bytes"] for device in measured.values()),
        "unmanaged_bytes": None if None in unmanaged else sum(unmanaged),
    }
