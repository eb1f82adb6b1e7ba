"""Bodies of answers that are put together from parts, as types for the OpenAPI document.

A field that is not always there is one with a default.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType, field

from ebbtide.srt.entrypoints.openai.protocol import VersionSpan
from ebbtide.srt.managers.io_struct import RankReport, TagReport

# Logprob, token id, text.
Triple = tuple[float | None, int, str | None]
Positions = list[list[Triple] | None]


class Reply(Struct, kw_only=True):
    success: bool
    message: str


class ErrorDetail(Struct, kw_only=True):
    message: str
    type: str
    code: int


class Error(Reply, kw_only=True):
    """Any refusal or failure. Some have further fields."""

    error: ErrorDetail


# ---------------------------------------------------------------------------------------------- generation


class FinishReason(Struct, kw_only=True):
    """Of `stop` there is `matched`, of `length` its `length`, of `abort` the `message`."""

    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    length: int = 0
    message: str = ""
    status_code: int | None = None
    err_type: str | None = None


class MetaInfo(Struct, kw_only=True):
    """Times are in seconds, and there once the output has ended."""

    id: str
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int
    num_retractions: int
    dp_rank: int
    weight_version: str
    weight_versions: list[VersionSpan]
    kv_weight_versions: list[str]
    output_token_logprobs: list[Triple] | UnsetType = UNSET
    output_token_logprobs_length: int | UnsetType = UNSET
    output_top_logprobs: Positions | UnsetType = UNSET
    output_token_ids_logprobs: Positions | UnsetType = UNSET
    input_token_logprobs: list[Triple] | UnsetType = UNSET
    input_top_logprobs: Positions | UnsetType = UNSET
    input_token_ids_logprobs: Positions | UnsetType = UNSET
    e2e_latency: float | UnsetType = UNSET
    queue_time: float | UnsetType = UNSET
    first_token_latency: float | UnsetType = UNSET


class GenerateOutput(Struct, kw_only=True):
    """One output. Of a stream of several, each chunk has the `index` of its output."""

    text: str | UnsetType = UNSET
    output_ids: list[int]
    prompt_token_ids: list[int] | UnsetType = UNSET
    meta_info: MetaInfo
    index: int | UnsetType = UNSET


# --------------------------------------------------------------------------------------------- information


class GenerationState(Struct, kw_only=True):
    state: Literal["running", "paused"]
    mode: str | None


class DeviceMemory(Struct, kw_only=True):
    """Null is what cannot be measured from the server."""

    total_bytes: int | None
    free_bytes: int | None
    unmanaged_bytes: int | None


class RankOccupation(RankReport, frozen=True, kw_only=True):
    device_bytes: DeviceMemory | None


class EngineState(Reply, kw_only=True):
    generation: GenerationState
    can_run: bool
    reason: str
    tags: dict[str, TagReport]
    device: DeviceMemory


class MemoryOccupation(EngineState, kw_only=True):
    ranks: list[RankOccupation]


class WeightVersion(Reply, kw_only=True):
    weight_version: str


class ModelInfo(Reply, kw_only=True):
    """`weight_versions`: of several replicas, what each serves."""

    model_path: str
    served_model_name: str
    tokenizer_path: str
    is_generation: bool
    preferred_sampling_params: None
    weight_version: str
    weight_versions: list[str] | UnsetType = UNSET
    load_format: str
    reasoning_parser: None
    tool_call_parser: None
    disaggregation_mode: Literal["null"]
    has_image_understanding: bool
    has_audio_understanding: bool
    model_type: str
    architectures: list[str]
    context_len: int
    dtype: str
    vocab_size: int


class ReplicaState(Struct, kw_only=True):
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


class ServerInfo(Reply, kw_only=True):
    """Beside these, every argument that the server was started with; keys as `***`."""

    version: str
    status: Literal["ready"]
    max_total_num_tokens: int
    max_req_input_len: int
    num_gpus: int
    internal_states: list[ReplicaState]
    state: EngineState
    weight_update: WeightUpdateState


class StepOutcome(Struct, kw_only=True):
    op: str
    status: int
    duration_ms: float
    reply: dict[str, Any]


class TransitionReply(Reply, kw_only=True):
    op_id: str
    replayed: bool
    num_done: int
    steps: list[StepOutcome] = field(default_factory=list)
