"""Bodies with information about an engine: model, arguments, state, load. Source: wire_api section 3.4."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType, convert, field

from ebbtide.srt.config import EngineConfig
from ebbtide.srt.entrypoints.bodies import AnswerBody
from ebbtide.srt.entrypoints.occupation import EngineState, num_gpus, total_tags
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.api.generate_fields import said
from ebbtide.srt.managers.io_struct import Load, StateReport, TagReport
from ebbtide.version import __version__

S = TypeVar("S", bound=Struct)

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
# `spec`, `lora` and `disagg` are accepted for clients of SGLang; they add nothing.
LOAD_SECTIONS = ("core", "memory", "queues", "spec", "lora", "disagg", "all")
_SECTION: Final = rf"\s*({'|'.join(LOAD_SECTIONS)})\s*"


class LoadsQuery(Struct, kw_only=True):
    """`include`: `core`, `memory`, `queues` or `all`, separated by commas."""

    include: Annotated[str, said(pattern=f"^{_SECTION}(,{_SECTION})*$")] = "core"
    dp_rank: Annotated[int | None, said(minimum=0)] = None


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
    """One replica in `/v1/loads`. `memory` and `queues` only if requested."""

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
    """Sums and means over the listed replicas."""

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


def _filled(kind: type[S], *sources: object, **own: Any) -> S:
    """Make a body of type `kind`, from `own`, else from attributes of the last source that has them."""
    names = kind.__struct_fields__
    found = {name: getattr(one, name) for one in sources for name in names if hasattr(one, name)}
    return kind(**{**found, **own})


def load_summaries(loads: Sequence[Load]) -> list[LoadSummary]:
    """Make the body of `/get_load`."""
    return [convert(load, LoadSummary, from_attributes=True) for load in loads]


def load_totals(loads: Sequence[Load]) -> dict[str, float]:
    """The sums of the summable fields over all replicas; empty without replicas."""
    return {name: sum(getattr(load, name) for load in loads) for name in _SUMMABLE} if loads else {}


def wanted_sections(given: Sequence[str]) -> frozenset[str]:
    """The sections that a query requests. `given`: its values, each a list separated by commas.

    Raises RequestRejected: 400; there is no such section.
    """
    names = frozenset(name.strip() for value in given for name in value.split(","))
    unknown = sorted(names.difference(LOAD_SECTIONS))
    if unknown:
        raise RequestRejected(f"include: unknown section {unknown[0]!r}; expected {', '.join(LOAD_SECTIONS)}")
    return frozenset(LOAD_SECTIONS) if "all" in names else names


def loads_of_rank(loads: Sequence[Load], dp_rank: int | str | None) -> list[Load]:
    """The load of one replica, as a list. `dp_rank`: a number, or its text in a query; None: all replicas.

    Raises RequestRejected: 400; there is no such replica.
    """
    chosen = [load for load in loads if dp_rank is None or str(load.dp_rank) == str(dp_rank)]
    if not chosen:
        raise RequestRejected(f"dp_rank: expected 0 to {len(loads) - 1}, got {dp_rank}")
    return chosen


def loads_body(loads: Sequence[Load], sections: frozenset[str], config: EngineConfig) -> Loads:
    """Make the body of `/v1/loads`, for at least one replica."""
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
    return _filled(
        *(ReplicaLoad, load),
        timestamp=time.time(),
        num_total_reqs=load.num_reqs,
        utilization=load.num_running_reqs / load.max_running_requests,
        memory=memory if "memory" in sections else UNSET,
        queues=queues if "queues" in sections else UNSET,
    )


# /server_info shows only whether these are set.
KEY_FIELDS: Final = ("api_key", "admin_api_key")


class WeightVersion(AnswerBody, kw_only=True):
    weight_version: str


class ModelInfo(AnswerBody, kw_only=True):
    """`weight_versions`: with several replicas, the version that each serves, by dp_rank."""

    model_path: str
    served_model_name: str
    tokenizer_path: str
    is_generation: bool = True
    preferred_sampling_params: None = None
    weight_version: str
    weight_versions: list[str] | UnsetType = UNSET
    load_format: str
    reasoning_parser: str | None
    tool_call_parser: str | None
    disaggregation_mode: Literal["null"] = "null"
    has_image_understanding: bool = False
    has_audio_understanding: bool = False
    model_type: str
    architectures: list[str]
    context_len: int
    dtype: str
    precision: dict[str, str]
    vocab_size: int


class ReplicaState(Struct, kw_only=True):
    """One replica. `memory_usage` is in GiB, with SGLang's names."""

    dp_rank: int
    last_gen_throughput: float
    memory_usage: dict[str, float]
    effective_max_running_requests_per_dp: int
    weight_version: str
    can_run: bool
    reason: str


class WeightUpdateState(Struct, kw_only=True):
    session_open: bool
    age_s: float | None
    num_tensors_staged: int
    groups: list[str]


class StartupTime(Struct, kw_only=True):
    """Seconds from the engine's start until its ranks were ready, and until it took requests."""

    scheduler_e2e: float
    tokenizer_e2e: float


class ServerInfo(AnswerBody, kw_only=True):
    """Also has every argument of the server, as given or as chosen; keys as `***`."""

    version: str
    status: Literal["ready"] = "ready"
    startup_time: StartupTime
    max_total_num_tokens: int
    max_req_input_len: int
    num_gpus: int
    internal_states: list[ReplicaState]
    state: EngineState
    weight_update: WeightUpdateState


def model_info(config: EngineConfig, state: StateReport, reports: Sequence[StateReport]) -> ModelInfo:
    """Make the body of `GET /model_info`. `reports`: of each replica, by dp_rank."""
    return _filled(
        *(ModelInfo, config.model, state),
        weight_versions=[report.weight_version for report in reports] if len(reports) > 1 else UNSET,
        reasoning_parser=config.server_args.reasoning_parser,
        tool_call_parser=config.server_args.tool_call_parser,
        precision=config.precision,
    )


def server_info(
    config: EngineConfig,
    facts: Mapping[str, Any],
    startup_time: StartupTime,
    reports: Sequence[StateReport],
    loads: Sequence[Load],
    state: StateReport,
    occupation: EngineState,
) -> dict[str, Any]:
    """Make the body of `GET /server_info`. `facts`: as `NodeProcesses.wait_ready` returns them."""
    num_tokens = facts["max_total_num_tokens"]
    info = ServerInfo(
        version=__version__,
        startup_time=startup_time,
        max_total_num_tokens=num_tokens,
        max_req_input_len=facts["max_req_input_len"],
        num_gpus=num_gpus(state.ranks),
        internal_states=[
            _filled(
                *(ReplicaState, load, report),
                memory_usage=_memory_usage(total_tags(report.ranks), num_tokens),
                effective_max_running_requests_per_dp=load.max_running_requests,
            )
            for report, load in zip(reports, loads, strict=True)
        ],
        state=occupation,
        weight_update=_weight_update(state),
    )
    return {**arguments(config, facts), **msgspec.to_builtins(info)}


def arguments(config: EngineConfig, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Every argument of the server: as given, or the chosen value if it was left open. Keys as `***`."""
    given = dataclasses.asdict(config.server_args)
    schedule, cache, runtime = config.schedule, config.cache, config.runtime
    chunk = schedule.chunked_prefill_size
    num_running = facts.get("max_running_requests", schedule.max_running_requests)
    chosen = {
        "tokenizer_path": config.model.tokenizer_path,
        "served_model_name": config.model.served_model_name,
        "context_length": config.model.context_len,
        "dtype": config.model.dtype,
        "kv_cache_dtype": cache.dtype,
        "quantization": config.model.quantization,
        "page_size": cache.page_size,
        "mem_fraction_static": cache.mem_fraction_static,
        "max_running_requests": num_running,
        "chunked_prefill_size": -1 if chunk is None else chunk,
        "device": runtime.device.partition(":")[0],
        "random_seed": runtime.random_seed,
        "attention_backend": facts.get("attention_backend"),
        "cuda_graph_bs": sorted({min(size, num_running) for size in runtime.cuda_graph_bs}) or None,
        "dist_timeout": config.parallel.dist_timeout_s,
    }
    left_open = {name: value for name, value in chosen.items() if given[name] in (None, "auto")}
    resolved = {
        # The checkpoint may exclude more modules from quantization than the argument.
        "quantization_exclude": list(config.model.quantization_exclude) or None,
        # Some other engines' names are accepted for another policy.
        "schedule_policy": schedule.policy,
    }
    hidden = {name: "***" for name in KEY_FIELDS if given[name] is not None}
    return given | left_open | resolved | hidden


def _weight_update(state: StateReport) -> WeightUpdateState:
    session = state.session
    return WeightUpdateState(
        session_open=session is not None,
        age_s=None if session is None else max(0.0, time.time() - session.opened_at),
        num_tensors_staged=0 if session is None else session.num_tensors_staged,
        groups=state.weight_groups,
    )


def _memory_usage(tags: Mapping[str, TagReport], num_tokens: int) -> dict[str, float]:
    names = {"weight": "weights", "kvcache": "kv_cache", "graph": "cuda_graph"}
    gib = {name: tags[tag].resident_bytes / 2**30 for name, tag in names.items()}
    return {**gib, "token_capacity": num_tokens}
