"""From the bodies of OpenAI's endpoints to those of `/generate`, which checks the rest."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from ebbtide.srt.entrypoints.openai.chat_template import ChatTemplate
from ebbtide.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest, OpenAIRequest
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.api.generate_request import UNSUPPORTED_FIELDS

R = TypeVar("R", bound=OpenAIRequest)

Fields = dict[str, Any]

COMPLETION_MAX_TOKENS = 16

# OpenAI's name → that of the sampling parameter.
_SAMPLING = {
    **{name: name for name in ("n", "temperature", "top_p", "top_k", "min_p", "logit_bias", "stop")},
    **{name: name for name in ("frequency_penalty", "presence_penalty", "repetition_penalty")},
    **{name: name for name in ("stop_token_ids", "ignore_eos", "no_stop_trim", "skip_special_tokens")},
    **{name: name for name in ("regex", "ebnf", "json_schema")},
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
}
_PASSED_ON = ("cache_salt", "extra_key", "routed_dp_rank", "timeout_s", "stream")


@dataclass(frozen=True)
class OpenAICall:
    """A request as `/generate` takes it, and what its answer has to know of it.

    Attributes:
        generate: the fields for `/generate`.
        num_samples: per prompt.
        echoes: the text of each prompt, to be put in front of its samples; None if that is not wanted.
    """

    id: str
    model: str
    created: int
    generate: Fields
    num_samples: int
    include_usage: bool
    return_token_ids: bool
    return_prompt_token_ids: bool
    echoes: list[str] | None = None


def parse(kind: type[R], fields: Mapping[str, Any]) -> R:
    """Check the types of a request's fields.

    Raises:
        RequestRejected: 400, with the field's path and what was expected.
    """
    try:
        request = msgspec.convert({k: v for k, v in fields.items() if v is not None}, kind)
    except msgspec.ValidationError as error:
        is_of_part = ".content[" in str(error)
        hint = "; in a message, only parts with text are supported" if is_of_part else ""
        raise RequestRejected(f"{error}{hint}") from None
    wanted = request.response_format
    if wanted is not None and wanted.get("type") != "text":
        raise RequestRejected(f"response_format: not supported in this version, but for text, got {wanted}")
    return request


def completion_call(
    fields: Mapping[str, Any], default_model: str, template: ChatTemplate | None
) -> OpenAICall:
    """A request of `/v1/completions`.

    Args:
        template: with the tokenizer of the engine; None if it has none.

    Raises:
        RequestRejected: 400.
    """
    request = parse(CompletionRequest, fields)
    if request.suffix:
        raise RequestRejected("suffix: not supported in this version")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise RequestRejected(f"best_of: expected null or n ({request.n or 1}), got {request.best_of}")
    params = _sampling_params(request)
    params["max_new_tokens"] = request.max_tokens if request.max_tokens is not None else COMPLETION_MAX_TOKENS
    generate = _generate_fields(request, fields) | _prompt_fields(request.prompt)
    if request.logprobs is not None:
        generate |= {"return_logprob": True, "top_logprobs_num": request.logprobs}
        generate["return_text_in_logprobs"] = template is not None
        generate["logprob_start_len"] = 0 if request.echo else -1
    generate["sampling_params"] = params
    return _call(request, generate, default_model, _echoes(generate, template) if request.echo else None)


def chat_call(
    fields: Mapping[str, Any],
    default_model: str,
    template: ChatTemplate | None,
    defaults: Mapping[str, Any],
) -> OpenAICall:
    """A request of `/v1/chat/completions`.

    Args:
        defaults: sampling parameters that the model's authors recommend.

    Raises:
        RequestRejected: 400.
    """
    request = parse(ChatCompletionRequest, fields)
    if template is None:
        raise RequestRejected("chat needs a tokenizer: the engine runs with skip_tokenizer_init")
    if request.top_logprobs and not request.logprobs:
        raise RequestRejected("top_logprobs: needs logprobs to be true")
    limit = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    params = {**defaults, **_sampling_params(request), "max_new_tokens": limit}
    generate = _generate_fields(request, fields)
    if request.input_ids is not None:
        generate["input_ids"] = request.input_ids
    else:
        generate["input_ids"] = template.encode(
            fields.get("messages") or [],
            tools=request.tools,
            options=request.chat_template_kwargs or {},
            continue_final_message=bool(request.continue_final_message),
        )
    if request.logprobs:
        generate |= {"return_logprob": True, "top_logprobs_num": request.top_logprobs or 0}
        generate["return_text_in_logprobs"] = True
    generate["sampling_params"] = params
    return _call(request, generate, default_model)


def _call(
    request: OpenAIRequest, generate: Fields, default_model: str, echoes: list[str] | None = None
) -> OpenAICall:
    rid = request.rid if request.rid is not None else uuid.uuid4().hex
    options = request.stream_options
    wants_prompt = bool(request.return_token_ids or request.return_prompt_token_ids)
    return OpenAICall(
        id=rid if isinstance(rid, str) else next(iter(rid), ""),
        model=request.model if request.model is not None else default_model,
        created=int(time.time()),
        generate={**generate, "rid": rid, "return_prompt_token_ids": wants_prompt},
        num_samples=request.n or 1,
        include_usage=options is not None and bool(options.include_usage),
        return_token_ids=bool(request.return_token_ids),
        return_prompt_token_ids=wants_prompt,
        echoes=echoes,
    )


def _sampling_params(request: OpenAIRequest) -> Fields:
    given = {known: getattr(request, name) for name, known in _SAMPLING.items()}
    return {known: value for known, value in given.items() if value is not None}


def _generate_fields(request: OpenAIRequest, fields: Mapping[str, Any]) -> Fields:
    passed_on = {name: getattr(request, name) for name in _PASSED_ON}
    # Refused there, by what they ask for.
    return passed_on | {name: fields[name] for name in UNSUPPORTED_FIELDS & fields.keys()}


def _prompt_fields(prompt: str | list[str | int | list[int]]) -> Fields:
    if isinstance(prompt, str) or (prompt and all(isinstance(entry, str) for entry in prompt)):
        return {"text": prompt}
    if any(isinstance(entry, str) for entry in prompt):
        raise RequestRejected("prompt: expected texts or token ids, got a mixture")
    return {"input_ids": prompt}


def _echoes(generate: Fields, template: ChatTemplate | None) -> list[str]:
    if "text" in generate:
        text = generate["text"]
        return [text] if isinstance(text, str) else list(text)
    ids = generate["input_ids"]
    prompts = ids if ids and isinstance(ids[0], list) else [ids]
    # Of ids that the model does not know there will be no answer to put it in.
    return ["" if template is None else template.tokenizer.decode(_known(prompt)) for prompt in prompts]


def _known(ids: Any) -> list[int]:
    return [token_id for token_id in ids if isinstance(token_id, int) and 0 <= token_id < 2**31]
