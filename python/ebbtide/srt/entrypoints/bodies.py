"""The bodies that answers have in common, and those of generation, which its streams put together.

A field that is not always there is one with a default.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from ebbtide.srt.managers.api.output_state import Triple
from ebbtide.srt.managers.wire.message import Seconds

Body = dict[str, Any]
Positions = list[list[Triple] | None]


class AnswerBody(Struct, kw_only=True):
    """What every body has."""

    success: bool = True
    message: str = ""


class ErrorDetail(Struct, kw_only=True):
    message: str
    type: str
    code: int


class Error(AnswerBody, kw_only=True):
    """Any refusal or failure. Some have further fields."""

    error: ErrorDetail


class DrainRequest(Struct, kw_only=True):
    """`timeout_s`: what has not ended by then is answered with 503; null: there is no limit."""

    timeout_s: Seconds | None = None


class DrainReply(AnswerBody, kw_only=True):
    """`num_live`: requests that are still served."""

    num_live: int


# ---------------------------------------------------------------------------------------------- generation


class FinishReasonBody(Struct, kw_only=True):
    """`stop` comes with `matched`, `length` with its `length`, `abort` and `stale` with the `message`."""

    type: Literal["stop", "length", "abort", "stale"]
    matched: int | str | None = None
    length: int = 0
    message: str = ""
    status_code: int | None = None
    err_type: str | None = None


class VersionSpan(Struct, kw_only=True):
    """Output tokens `start` to `end`, exclusive, were sampled by weights of this version."""

    version: str
    start: int
    end: int


class MetaInfo(Struct, kw_only=True):
    """Times are in seconds, and there once the output has ended.

    So is `precision`: `weights` and `kv_cache`, a dtype each, or `fp8` or `w8a8_fp8`, and `fp8_e4m3`; and
    `num_nonfinite`: rows of logits, of the prompt where its logprobs are asked for and of the output, that
    held NaN or +Inf; and `ignored_fields`: those of the request that nothing is known of, if there are any.
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
    """One output. Of a stream of several, each chunk has the `index` of its output."""

    text: str | UnsetType = UNSET
    output_ids: list[int]
    prompt_token_ids: list[int] | UnsetType = UNSET
    meta_info: MetaInfo
    index: int | UnsetType = UNSET
