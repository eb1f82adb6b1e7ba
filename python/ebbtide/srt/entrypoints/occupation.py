"""The memory that an engine occupies, over all of its ranks. Source: wire_api section 3.1.

Every rank reports its tags. The other memory of its device is measured here: on the host for ranks of this
node, and for CUDA devices by NVML. Values that cannot be measured are null.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, Struct

from ebbtide.srt.config import ParallelConfig
from ebbtide.srt.device import device_memory_bytes, host_memory_info, process_bytes
from ebbtide.srt.entrypoints.bodies import AnswerBody
from ebbtide.srt.entrypoints.launch.placement import node_of
from ebbtide.srt.errors import EngineError
from ebbtide.srt.managers.io_struct import AdapterReport, RankReport, StateReport, TagReport, TotalsReply
from ebbtide.srt.managers.wire.merging import merge_rules


class GenerationState(Struct, kw_only=True):
    state: Literal["running", "paused"]
    mode: str | None


class DeviceMemory(Struct, kw_only=True):
    """Memory of a device. Null: it cannot be measured by the server."""

    total_bytes: int | None
    free_bytes: int | None
    unmanaged_bytes: int | None


class RankOccupation(RankReport, frozen=True, kw_only=True):
    device_bytes: DeviceMemory | None


class EngineState(AnswerBody, kw_only=True):
    generation: GenerationState
    can_run: bool
    reason: str
    tags: dict[str, TagReport]
    device: DeviceMemory
    adapters: list[AdapterReport]


class MemoryOccupationBody(EngineState, kw_only=True):
    ranks: list[RankOccupation]


def memory_occupation(state: StateReport, parallel: ParallelConfig) -> MemoryOccupationBody:
    """Make the body of `GET /memory_occupation`. Reading /proc takes milliseconds for large processes.

    Raises EngineError: the process of a rank has ended.
    """
    devices = [_measured(rank, parallel) for rank in state.ranks]
    return MemoryOccupationBody(
        generation=GenerationState(
            state="running" if state.paused is None else "paused",
            mode=None if state.paused is None else state.paused.value,
        ),
        can_run=state.can_run,
        reason=state.reason,
        tags=total_tags(state.ranks),
        device=_total_device(state.ranks, devices, parallel),
        adapters=state.adapters,
        ranks=[
            RankOccupation(**msgspec.structs.asdict(rank), device_bytes=device)
            for rank, device in zip(state.ranks, devices, strict=True)
        ],
    )


def total_tags(ranks: Sequence[RankReport]) -> dict[str, TagReport]:
    """Merge the tags of these ranks: bytes are summed; a tag is released, or stale, if any rank's is."""
    return {tag.value: _total([rank.tags[tag] for rank in ranks]) for tag in ranks[0].tags}


def count_devices_once(reply: TotalsReply, ranks: Sequence[RankReport]) -> TotalsReply:
    """Sum the measures of devices in a reply so that a device shared by ranks counts once. Null on CPUs.

    A host's available memory is an estimate that other processes change, so it would not show what was freed.
    """
    measures = {name: merge.on_device for name, merge in merge_rules(type(reply)).items() if merge.on_device}
    uuids = {(rank.dp_rank, rank.tp_rank): rank.uuid for rank in ranks}
    if None in uuids.values():
        shares = reply.ranks
        if shares is not UNSET:
            shares = [share | dict.fromkeys(measures) for share in shares]
        return msgspec.structs.replace(reply, ranks=shares, **dict.fromkeys(measures))
    if reply.ranks is UNSET:
        return reply
    totals = {}
    for name, measure in measures.items():
        seen: dict[str | None, list[int]] = {}
        for share in reply.ranks:
            seen.setdefault(uuids[share["dp_rank"], share["tp_rank"]], []).append(share[name])
        totals[name] = sum(measure(values) for values in seen.values())
    return msgspec.structs.replace(reply, **totals)


def num_gpus(ranks: Sequence[RankReport]) -> int:
    """The number of CUDA devices that the ranks are on."""
    return len({rank.uuid for rank in ranks if rank.uuid is not None})


def _device_key(rank: RankReport, parallel: ParallelConfig) -> Hashable:
    """A key that is equal for ranks on the same device: the device's id, or for CPUs the node."""
    return rank.uuid if rank.uuid is not None else node_of(parallel, rank.dp_rank, rank.tp_rank)


def _total(reports: Sequence[TagReport]) -> TagReport:
    worst = max(reports, key=lambda report: 0 if report.num_missing is UNSET else report.num_missing)
    return TagReport(
        state="released" if any(report.state == "released" for report in reports) else "resident",
        virtual_bytes=sum(report.virtual_bytes for report in reports),
        resident_bytes=sum(report.resident_bytes for report in reports),
        backup_bytes=sum(report.backup_bytes for report in reports),
        content=worst.content,
        num_missing=worst.num_missing,
        missing=worst.missing,
    )


def _measured(rank: RankReport, parallel: ParallelConfig) -> DeviceMemory | None:
    """Measure the memory of a rank's device; None: it cannot be measured from here."""
    if node_of(parallel, rank.dp_rank, rank.tp_rank) != parallel.node_rank:
        return None
    if rank.uuid is None:
        try:
            memory = host_memory_info(rank.pid)
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
    return DeviceMemory(
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        # The state is older than the measurement: memory may have been freed in between.
        unmanaged_bytes=None if held_bytes is None else max(0, held_bytes - resident_bytes),
    )


def _total_device(
    ranks: Sequence[RankReport], devices: Sequence[DeviceMemory | None], parallel: ParallelConfig
) -> DeviceMemory:
    """Sum over the measured devices, each counted once; `unmanaged_bytes` over their ranks."""
    measured = {
        _device_key(rank, parallel): device
        for rank, device in zip(ranks, devices, strict=True)
        if device is not None
    }
    unmanaged = [device.unmanaged_bytes for device in devices if device is not None]
    return DeviceMemory(
        total_bytes=_sum([device.total_bytes for device in measured.values()]),
        free_bytes=_sum([device.free_bytes for device in measured.values()]),
        unmanaged_bytes=_sum(unmanaged),
    )


def _sum(values: Sequence[int | None]) -> int | None:
    """The sum; None if a value is None, or there are no values."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None
