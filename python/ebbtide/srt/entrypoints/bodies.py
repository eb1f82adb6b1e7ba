"""Bodies of answers: the common ones, and those of generation, which whole answers and streams share.

Fields with a default may be missing.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from ebbtide.srt.managers.api.output_state import Triple
from ebbtide.srt.managers.wire.message import Seconds

Body = dict[str, Any]
Positions = list[list[Triple] | None]


class AnswerBody(Struct, kw_only=True):
    """The fields of every body."""

    success: bool = True
    message: str = ""


class ErrorDetail(Struct, kw_only=True):
    message: str
    type: str
    code: int


class Error(AnswerBody, kw_only=True):
    """An error. Some have further fields."""

    error: ErrorDetail


class DrainRequest(Struct, kw_only=True):
    """`timeout_s`: requests that have not ended by then are answered with 503; null: no limit."""

    timeout_s: Seconds | None = None


class DrainReply(AnswerBody, kw_only=True):
    """`num_live`: number of requests that are still served."""

    num_live: int


# ---------------------------------------------------------------------------------------------- generation


class FinishReasonBody(Struct, kw_only=True):
    """`stop` comes with `matched`, `length` with `length`, `abort` and `stale` with `message`."""

    type: Literal["stop", "length", "abort", "stale"]
    matched: int | str | None = None
    length: int = 0
    message: str = ""
    status_code: int | None = None
    err_type: str | None = None


class VersionSpan(Struct, kw_only=True):
    """Output tokens `start` to `end` (exclusive) were sampled with weights of this version."""

    version: str
    start: int
    end: int


class MetaInfo(Struct, kw_only=True):
    """Facts about one output. Times are in seconds; only a finished output has them.

    Only a finished output has these too:
    `precision`: of `weights` (a dtype, `fp8` or `w8a8_fp8`) and of `kv_cache` (a dtype, or `fp8_e4m3`).
    `num_nonfinite`: how many rows of logits held NaN or +Inf, over the output, and over the prompt if its
    logprobs were requested.
    `ignored_fields`: the request's unknown fields, which have no effect.
    """

    id: str
    finish_reason: FinishReasonBody | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int
    num_retractions: int
    dp_rank: int
    weight_version: str
    weight_versions: list[VersionSpan]
    kv_weight_versions: list[str]
    prefill_weight_versions: list[VersionSpan]
    lora_name: str | UnsetType = UNSET
    lora_version: str | UnsetType = UNSET
    lora_versions: list[VersionSpan] | UnsetType = UNSET
    output_token_logprobs: list[Triple] | UnsetType = UNSET
    output_token_logprobs_length: int | UnsetType = UNSET
    output_top_logprobs: Positions | UnsetType = UNSET
    output_top_logprobs_shape: list[int] | UnsetType = UNSET
    output_top_logprobs_null_prefix: int | UnsetType = UNSET
    output_top_logprobs_val_flat: list[float] | UnsetType = UNSET
    output_top_logprobs_idx_flat: list[int] | UnsetType = UNSET
    output_top_logprobs_val_flat_b64: str | UnsetType = UNSET
    output_top_logprobs_val_flat_b64_dtype: str | UnsetType = UNSET
    output_top_logprobs_idx_flat_b64: str | UnsetType = UNSET
    output_top_logprobs_idx_flat_b64_dtype: str | UnsetType = UNSET
    output_token_ids_logprobs: Positions | UnsetType = UNSET
    input_token_logprobs: list[Triple] | UnsetType = UNSET
    input_top_logprobs: Positions | UnsetType = UNSET
    input_token_ids_logprobs: Positions | UnsetType = UNSET
    output_token_sampling_mask: list[list[int]] | UnsetType = UNSET
    output_token_sampling_logprobs: list[float] | UnsetType = UNSET
    output_token_sampling_mask_length: int | UnsetType = UNSET
    top_p_token_ids: str | UnsetType = UNSET
    top_p_token_offsets: str | UnsetType = UNSET
    routed_experts: str | UnsetType = UNSET
    routed_experts_start_len: int | UnsetType = UNSET
    e2e_latency: float | UnsetType = UNSET
    queue_time: float | UnsetType = UNSET
    first_token_latency: float | UnsetType = UNSET
    precision: dict[str, str] | UnsetType = UNSET
    num_nonfinite: int | UnsetType = UNSET
    ignored_fields: list[str] | UnsetType = UNSET


class GenerateOutput(Struct, kw_only=True):
    """One output. In a stream of several outputs, each chunk has the `index` of its output."""

    text: str | UnsetType = UNSET
    output_ids: list[int]
    prompt_token_ids: list[int] | UnsetType = UNSET
    meta_info: MetaInfo
    index: int | UnsetType = UNSET
