"""vLLM's sampling parameters as those of `/generate`. Source: wire_vllm section 1.6."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ebbtide.srt.entrypoints.openai.structured_output import grammar_params
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.lossless import as_int
from ebbtide.srt.sampling_params import VLLM_FIELDS, params_of

Fields = dict[str, Any]

# These would change the tokens, or are read back: empty values are taken, others refused.
UNSUPPORTED = (
    "extra_args",
    *("prompt_logprob_token_ids", "prompt_logprob_start", "trace_decode_token_ids"),
    *("skip_reading_prefix_cache", "thinking_token_budget"),
)
# Read elsewhere, or without a meaning here.
_OTHERS = (
    *("detokenize", "output_kind", "logprobs", "prompt_logprobs", "max_tokens", "cache_salt"),
    *("truncate_prompt_tokens", "structured_outputs", "logprob_token_ids"),
    "routed_experts_prompt_start",
)


def refuse_unsupported(fields: Mapping[str, Any], names: tuple[str, ...], where: str) -> None:
    """Refuse what asks for a feature that is not there.

    Raises:
        RequestRejected: 400, with its name.
    """
    for name in names:
        # An empty value does not ask for it; 0 is what some of them are without.
        if fields.get(name):
            raise RequestRejected(
                f"{name}: not supported in this version, got {fields[name]!r}", param=f"{where}.{name}"
            )


def sampling_params(given: Mapping[str, Any]) -> tuple[Fields, list[str]]:
    """The parameters for `/generate`, and the names of those that are ignored.

    Raises:
        RequestRejected: 400, one of them asks for what is not supported.
    """
    refuse_unsupported(given, UNSUPPORTED, "body.sampling_params")
    params = params_of(given, VLLM_FIELDS) | grammar_params(None, given.get("structured_outputs"))
    params["max_new_tokens"] = given.get("max_tokens")
    known = {*VLLM_FIELDS, *UNSUPPORTED, *_OTHERS}
    return params, sorted(set(given) - known)


def count_of(given: Mapping[str, Any], name: str) -> int | None:
    """How many logprobs are asked for; None: none at all.

    Raises:
        RequestRejected: 400.
    """
    value = as_int(given.get(name))
    if value is None:
        return None
    if not isinstance(value, int) or value < -1:
        raise RequestRejected(
            f"{name}: expected null or a number of tokens from 0, or -1 for all, got {value!r}",
            param=f"body.sampling_params.{name}",
        )
    return value
