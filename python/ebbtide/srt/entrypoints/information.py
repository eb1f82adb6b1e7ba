"""What an engine says of itself: its model, its arguments, its state. Source: wire_api section 3.4."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from ebbtide.srt.config import EngineConfig
from ebbtide.srt.entrypoints.bodies import Reply
from ebbtide.srt.entrypoints.occupation import EngineState, num_gpus, total_tags
from ebbtide.srt.managers.io_struct import Load, StateReport, TagReport
from ebbtide.version import __version__

# /server_info says that there are keys, and not which.
KEY_FIELDS: Final = ("api_key", "admin_api_key")


class WeightVersion(Reply, kw_only=True):
    weight_version: str


class ModelInfo(Reply, kw_only=True):
    """`weight_versions`: of several replicas, what each serves."""

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
    """One replica. `memory_usage` is in GiB, under the names that clients of SGLang read."""

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
    """Seconds from the start of the engine until its ranks were ready, and until it could be asked."""

    scheduler_e2e: float
    tokenizer_e2e: float


class ServerInfo(Reply, kw_only=True):
    """Holds every argument of the server besides, as given, or as it was chosen; keys as `***`."""

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
    """The body of `GET /model_info`.

    Args:
        reports: the replicas' own, by dp_rank.
    """
    model = config.model
    return ModelInfo(
        model_path=state.model_path,
        served_model_name=model.served_model_name,
        tokenizer_path=model.tokenizer_path,
        weight_version=state.weight_version,
        weight_versions=[report.weight_version for report in reports] if len(reports) > 1 else UNSET,
        load_format=state.load_format,
        reasoning_parser=config.server_args.reasoning_parser,
        tool_call_parser=config.server_args.tool_call_parser,
        model_type=model.model_type,
        architectures=model.architectures,
        context_len=model.context_len,
        dtype=model.dtype,
        precision=config.precision,
        vocab_size=model.vocab_size,
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
    """The body of `GET /server_info`.

    Args:
        facts: what the ranks said when they were ready.
        reports, loads: of each replica, by dp_rank.
    """
    num_tokens = facts["max_total_num_tokens"]
    info = ServerInfo(
        version=__version__,
        startup_time=startup_time,
        max_total_num_tokens=num_tokens,
        max_req_input_len=facts["max_req_input_len"],
        num_gpus=num_gpus(state.ranks),
        internal_states=[
            ReplicaState(
                dp_rank=report.dp_rank,
                last_gen_throughput=load.last_gen_throughput,
                memory_usage=_memory_usage(total_tags(report.ranks), num_tokens),
                effective_max_running_requests_per_dp=config.schedule.max_running_requests,
                weight_version=report.weight_version,
                can_run=report.can_run,
                reason=report.reason,
            )
            for report, load in zip(reports, loads, strict=True)
        ],
        state=occupation,
        weight_update=_weight_update(state),
    )
    return {**arguments(config, facts), **msgspec.to_builtins(info)}


def arguments(config: EngineConfig, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Every argument of the server as given; those left open, or that mean another, as they were chosen."""
    given = dataclasses.asdict(config.server_args)
    schedule, cache, runtime = config.schedule, config.cache, config.runtime
    chunk = schedule.chunked_prefill_size
    chosen = {
        "tokenizer_path": config.model.tokenizer_path,
        "served_model_name": config.model.served_model_name,
        "context_length": config.model.context_len,
        "dtype": config.model.dtype,
        "kv_cache_dtype": cache.dtype,
        "quantization": config.model.quantization,
        "page_size": cache.page_size,
        "mem_fraction_static": cache.mem_fraction_static,
        "max_running_requests": schedule.max_running_requests,
        "chunked_prefill_size": -1 if chunk is None else chunk,
        "device": runtime.device.partition(":")[0],
        "random_seed": runtime.random_seed,
        "attention_backend": facts.get("attention_backend"),
        "cuda_graph_bs": list(runtime.cuda_graph_bs) or None,
        "log_level_http": config.http.log_level,
        "dist_timeout": config.parallel.dist_timeout_s,
    }
    left_open = {name: value for name, value in chosen.items() if given[name] in (None, "auto")}
    resolved = {
        # A checkpoint may keep more modules as they are than it was asked to.
        "quantization_exclude": list(config.model.quantization_exclude) or None,
        # Some names of other engines mean another order here.
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
