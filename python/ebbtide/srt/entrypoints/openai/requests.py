"""From the bodies of OpenAI's endpoints to those of `/generate`, which checks the rest."""

from __future__ import annotations

import functools
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from ebbtide.srt.entrypoints.openai.chat_template import ChatTemplate
from ebbtide.srt.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    OpenAIRequest,
    parse,
)
from ebbtide.srt.entrypoints.openai.unsupported_fields import refuse_unsupported
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.api.generate_request import UNSUPPORTED_FIELDS, Render

Fields = dict[str, Any]
# The text of a prompt, from its number and its ids.
Echo: TypeAlias = Callable[[int, list[int]], str]

COMPLETION_MAX_TOKENS = 16

# OpenAI's name → that of the sampling parameter.
_SAMPLING = {
    **{name: name for name in ("n", "temperature", "top_p", "top_k", "min_p", "logit_bias", "stop")},
    **{name: name for name in ("frequency_penalty", "presence_penalty", "repetition_penalty")},
    **{name: name for name in ("stop_token_ids", "ignore_eos", "no_stop_trim", "skip_special_tokens")},
    **{name: name for name in ("spaces_between_special_tokens", "regex", "ebnf", "json_schema")},
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
}
_PASSED_ON = (
    *("add_special_tokens", "truncate_prompt_tokens", "cache_salt", "extra_key"),
    *("routed_dp_rank", "data_parallel_rank", "timeout_s", "stream"),
)


@dataclass(frozen=True)
class OpenAICall:
    """A request as `/generate` takes it, and what its answer has to know of it.

    Attributes:
        generate: the fields for `/generate`.
        render: makes the text of the prompt, where those do not hold one.
        num_samples: per prompt.
        echo: tells what is to be put in front of a prompt's samples; None if nothing is.
    """

    id: str
    model: str
    created: int
    generate: Fields
    num_samples: int
    include_usage: bool
    return_token_ids: bool
    return_prompt_token_ids: bool
    return_weight_versions: bool
    render: Render | None = None
    echo: Echo | None = None


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
    refuse_unsupported(fields, is_chat=False)
    if request.suffix:
        raise RequestRejected("suffix: not supported in this version")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise RequestRejected(f"best_of: expected null or n ({request.n or 1}), got {request.best_of}")
    params = _sampling_params(request)
    params["max_new_tokens"] = request.max_tokens if request.max_tokens is not None else COMPLETION_MAX_TOKENS
    generate = _generate_fields(request, fields) | _prompt_fields(request.prompt)
    if request.logprobs is not None:
        generate |= {"return_logprob": True, "top_logprobs_num": request.logprobs}
        generate["return_text_in_logprobs"] = _wants_texts(request) and template is not None
        generate["logprob_start_len"] = 0 if request.echo else -1
    generate["sampling_params"] = params
    return _call(request, generate, default_model, echo=_echo(generate, template) if request.echo else None)


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
    refuse_unsupported(fields, is_chat=True)
    if template is None:
        raise RequestRejected("chat needs a tokenizer: the engine runs with skip_tokenizer_init")
    if request.top_logprobs and not request.logprobs:
        raise RequestRejected("top_logprobs: needs logprobs to be true")
    limit = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    params = {**defaults, **_sampling_params(request), "max_new_tokens": limit}
    generate = _generate_fields(request, fields)
    if request.logprobs:
        generate |= {"return_logprob": True, "top_logprobs_num": request.top_logprobs or 0}
        generate["return_text_in_logprobs"] = _wants_texts(request)
    generate["sampling_params"] = params
    if request.input_ids is not None:
        return _call(request, {**generate, "input_ids": request.input_ids}, default_model)
    # The template writes the special tokens.
    generate["add_special_tokens"] = bool(request.add_special_tokens)
    render = functools.partial(
        template.render,
        fields.get("messages") or [],
        tools=request.tools,
        options=request.chat_template_kwargs or {},
        continue_final_message=bool(request.continue_final_message),
        add_generation_prompt=request.add_generation_prompt,
    )
    return _call(request, generate, default_model, render=render)


def _call(
    request: OpenAIRequest,
    generate: Fields,
    default_model: str,
    render: Render | None = None,
    echo: Echo | None = None,
) -> OpenAICall:
    rid = request.rid if request.rid is not None else uuid.uuid4().hex
    options = request.stream_options
    wants_prompt = bool(request.return_token_ids or request.return_prompt_token_ids)
    return OpenAICall(
        id=rid if isinstance(rid, str) else next(iter(rid), ""),
        model=request.model if request.model is not None else default_model,
        created=int(time.time()),
        generate={**generate, "rid": rid, "return_prompt_token_ids": wants_prompt or echo is not None},
        num_samples=request.n or 1,
        include_usage=options is not None and bool(options.include_usage),
        return_token_ids=bool(request.return_token_ids),
        return_prompt_token_ids=wants_prompt,
        return_weight_versions=bool(request.return_weight_versions),
        render=render,
        echo=echo,
    )


def _sampling_params(request: OpenAIRequest) -> Fields:
    given = {known: getattr(request, name) for name, known in _SAMPLING.items()}
    if request.include_stop_str_in_output:
        given["no_stop_trim"] = True
    if request.top_k == 0:
        given["top_k"] = -1  # other servers' word for "off"
    return {known: value for known, value in given.items() if value is not None}


def _wants_texts(request: OpenAIRequest) -> bool:
    """Whether tokens are told by their texts rather than by their ids."""
    return not request.return_tokens_as_token_ids


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


def _echo(generate: Fields, template: ChatTemplate | None) -> Echo:
    if "text" not in generate or generate["truncate_prompt_tokens"]:
        return lambda index, ids: "" if template is None else template.tokenizer.decode(ids)
    given = generate["text"]
    texts = [given] if isinstance(given, str) else given
    return lambda index, ids: str(texts[index])
