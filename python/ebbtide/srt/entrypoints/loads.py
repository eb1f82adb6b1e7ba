"""What each replica has to do, as `/v1/loads` and `/get_load` tell it. Source: wire_api section 3.4."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime

from msgspec import UNSET, Struct, UnsetType, convert, field

from ebbtide.srt.config import EngineConfig
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.io_struct import Load
from ebbtide.version import __version__

_SUMMABLE = (
    "num_running_reqs",
    "num_paused_reqs",
    "num_waiting_reqs",
    "num_used_tokens",
    "max_total_num_tokens",
    "gen_throughput",
    "num_parked_reqs",
    "parked_bytes",
    "lent_bytes",
)
# This version has no speculative decoding, LoRA or disaggregation: their sections are empty.
SECTIONS = ("core", "memory", "queues", "spec", "lora", "disagg", "all")


class LoadSummary(Struct, kw_only=True):
    """One replica in `/get_load`."""

    dp_rank: int
    num_reqs: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_paused_reqs: int
    num_total_tokens: int = field(name="num_tokens")


class LoadMemory(Struct, kw_only=True):
    used_tokens: int
    token_capacity: int


class LoadQueues(Struct, kw_only=True):
    waiting: int
    paused: int


class ReplicaLoad(Struct, kw_only=True):
    """One replica in `/v1/loads`; `memory` and `queues` if they were asked for."""

    dp_rank: int
    timestamp: float
    num_running_reqs: int
    num_waiting_reqs: int
    num_paused_reqs: int
    num_total_reqs: int
    num_used_tokens: int
    num_total_tokens: int
    max_total_num_tokens: int
    max_running_requests: int
    token_usage: float
    gen_throughput: float
    cache_hit_rate: float
    utilization: float
    memory: LoadMemory | UnsetType = UNSET
    queues: LoadQueues | UnsetType = UNSET


class TotalLoad(Struct, kw_only=True):
    """Sums over the replicas that are listed, and means."""

    total_running_reqs: int
    total_waiting_reqs: int
    total_paused_reqs: int
    total_reqs: int
    avg_token_usage: float
    avg_throughput: float
    avg_utilization: float


class Loads(Struct, kw_only=True):
    """The body of `/v1/loads`."""

    timestamp: str
    version: str
    accelerator: str
    num_accelerators: int
    loads: list[ReplicaLoad]
    aggregate: TotalLoad


def load_summaries(loads: Sequence[Load]) -> list[LoadSummary]:
    """The body of `/get_load`."""
    return [convert(load, LoadSummary, from_attributes=True) for load in loads]


def load_totals(loads: Sequence[Load]) -> dict[str, float]:
    """The sums over all replicas of what can be added up."""
    return {name: sum(getattr(load, name) for load in loads) for name in _SUMMABLE} if loads else {}


def wanted_sections(given: Sequence[str]) -> frozenset[str]:
    """The sections that a query asks for, repeated or separated by commas.

    Raises:
        RequestRejected: 400, there is no such section.
    """
    names = frozenset(name.strip() for value in given for name in value.split(","))
    unknown = sorted(names.difference(SECTIONS))
    if unknown:
        raise RequestRejected(f"include: unknown section {unknown[0]!r}; expected {', '.join(SECTIONS)}")
    return frozenset(SECTIONS) if "all" in names else names


def loads_of_rank(loads: Sequence[Load], dp_rank: int | str | None) -> list[Load]:
    """Those of the replica that is asked for, as a number or in a query; None for all.

    Raises:
        RequestRejected: 400, there is no such replica.
    """
    chosen = [load for load in loads if dp_rank is None or str(load.dp_rank) == str(dp_rank)]
    if not chosen:
        raise RequestRejected(f"dp_rank: expected 0 to {len(loads) - 1}, got {dp_rank}")
    return chosen


def loads_body(loads: Sequence[Load], sections: frozenset[str], config: EngineConfig) -> Loads:
    """The body of `/v1/loads`, of at least one replica."""
    replicas = [_replica(load, sections) for load in loads]
    parallel = config.parallel
    return Loads(
        timestamp=datetime.now(UTC).isoformat(),
        version=__version__,
        accelerator=config.runtime.device.partition(":")[0],
        num_accelerators=parallel.tp_size * parallel.dp_size,
        loads=replicas,
        aggregate=TotalLoad(
            total_running_reqs=sum(load.num_running_reqs for load in loads),
            total_waiting_reqs=sum(load.num_waiting_reqs for load in loads),
            total_paused_reqs=sum(load.num_paused_reqs for load in loads),
            total_reqs=sum(load.num_reqs for load in loads),
            avg_token_usage=sum(load.token_usage for load in loads) / len(loads),
            avg_throughput=sum(load.gen_throughput for load in loads) / len(loads),
            avg_utilization=sum(replica.utilization for replica in replicas) / len(loads),
        ),
    )


def _replica(load: Load, sections: frozenset[str]) -> ReplicaLoad:
    memory = LoadMemory(used_tokens=load.num_used_tokens, token_capacity=load.max_total_num_tokens)
    queues = LoadQueues(waiting=load.num_waiting_reqs, paused=load.num_paused_reqs)
    names = ReplicaLoad.__struct_fields__
    return ReplicaLoad(
        **{name: getattr(load, name) for name in names if hasattr(load, name)},
        timestamp=time.time(),
        num_total_reqs=load.num_reqs,
        utilization=load.num_running_reqs / load.max_running_requests,
        memory=memory if "memory" in sections else UNSET,
        queues=queues if "queues" in sections else UNSET,
    )
