"""Turns bodies of OpenAI's endpoints into bodies of `/generate`, where the other checks are."""

from __future__ import annotations

import functools
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias, TypeVar

from msgspec import structs

from ebbtide.srt.entrypoints.openai.protocol import (
    NO_STREAM_OPTIONS,
    ChatBatchRequest,
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    Fields,
    OpenAIRequest,
    StreamOptions,
    parse,
)
from ebbtide.srt.entrypoints.openai.shared_fields import grammar_params, refuse_unsupported, unknown_fields
from ebbtide.srt.entrypoints.openai.tokenization import ChatTemplate, text_of
from ebbtide.srt.entrypoints.openai.tool_use import AnswerForm, answer_form
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.lossless import as_bool
from ebbtide.srt.managers.api.array_forms import FlatForm, flat_form
from ebbtide.srt.managers.api.generate_fields import UNSUPPORTED_FIELDS, PromptFields
from ebbtide.srt.managers.api.generate_request import Render
from ebbtide.srt.sampling_params import GRAMMAR_KINDS, OPENAI_FIELDS, params_of

# Gives the text of a prompt, from its index and its token ids.
Echo: TypeAlias = Callable[[int, list[int]], str]

COMPLETION_MAX_TOKENS = 16
# Fields that do not apply to a batch of conversations.
_OF_ONE_CHAT: Final = ("stream", "input_ids", "required_prefix_token_ids", "prompt_logprobs")


@dataclass(frozen=True, kw_only=True)
class OpenAICall:
    """A request as `/generate` takes it, and what writing its answer needs.

    Attributes:
        id: of the answer.
        model: the name of the model in the answer.
        created: seconds since 1970.
        generate: the fields for `/generate`.
        num_samples: per prompt.
        num_logprobs, num_prompt_logprobs: how many of the most likely tokens are listed; None: no logprobs.
        stop_token_ids: the request's own, without those that end every sequence.
        render: makes the prompt, or the prompts of a batch; None: `generate` has it.
        echo: gives the text to put in front of a prompt's samples; None: nothing is put there.
        forms: what to find in the text of a chat's answers; one for each conversation of a batch.
        flat_top: how the `meta_info` of a chat lists the most likely tokens; None: not flat.
        ignored_fields: names of the request's fields that have no effect.
    """

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))
    generate: Fields
    num_samples: int
    stream_options: StreamOptions
    return_token_ids: bool
    return_prompt_token_ids: bool
    return_weight_versions: bool
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    stop_token_ids: frozenset[int | None] = frozenset()
    render: Render | Sequence[Render] | None = None
    echo: Echo | None = None
    forms: Sequence[AnswerForm] = (AnswerForm(),)
    flat_top: FlatForm | None = None
    ignored_fields: Sequence[str] = ()


def completion_call(
    fields: Mapping[str, Any], default_model: str, template: ChatTemplate | None
) -> OpenAICall:
    """Read a request of `/v1/completions`.

    `template`: has the engine's tokenizer; None if there is none. Raises RequestRejected: 400.
    """
    request = parse(CompletionRequest, fields)
    refuse_unsupported(fields, is_chat=False)
    _check_stream_options(request)
    if request.suffix:
        raise RequestRejected("suffix: not supported in this version")
    params = _sampling_params(request)
    num_samples = params.get("n", 1)
    if request.best_of not in (None, num_samples):
        raise RequestRejected(f"best_of: expected null or n ({num_samples}), got {request.best_of}")
    params["max_new_tokens"] = request.max_tokens if request.max_tokens is not None else COMPLETION_MAX_TOKENS
    generate = _generate_fields(request, fields) | _prompt_fields(request.prompt)
    generate |= _logprob_fields(request, request.logprobs, with_prompt=bool(request.echo))
    generate["return_text_in_logprobs"] = generate["return_text_in_logprobs"] and template is not None
    generate["sampling_params"] = params
    echo = _echo(generate, template) if request.echo else None
    ignored_fields = unknown_fields(CompletionRequest, fields, is_chat=False)
    about = {"echo": echo, "ignored_fields": ignored_fields}
    return _call(request, generate, default_model, "cmpl-", request.logprobs, **about)


def chat_call(
    fields: Mapping[str, Any],
    default_model: str,
    template: ChatTemplate | None,
    defaults: Mapping[str, Any],
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    *,
    is_batch: bool = False,
) -> OpenAICall:
    """Read a request of `/v1/chat/completions`, or of a batch of conversations.

    Args:
        template: renders the messages; None: there is no tokenizer, and the request is rejected.
        defaults: sampling parameters that the model's authors recommend.
        tool_parser, reasoning_parser: the server's; None: answers are not searched for these.

    Raises RequestRejected: 400.
    """
    kind = ChatBatchRequest if is_batch else ChatCompletionRequest
    request = parse(kind, fields)
    refuse_unsupported(fields, is_chat=True)
    for name in _OF_ONE_CHAT if is_batch else ():
        if getattr(request, name) is not None and getattr(request, name) is not False:
            raise RequestRejected(f"{name}: not supported in a batch")
    _check_stream_options(request)
    if template is None:
        raise RequestRejected("chat needs a tokenizer: the engine runs with skip_tokenizer_init")
    if request.top_logprobs and not request.logprobs:
        raise RequestRejected("top_logprobs: needs logprobs to be true")
    limit = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    form = answer_form(request, tool_parser, reasoning_parser)
    params = {**defaults, **_sampling_params(request), "max_new_tokens": limit}
    if form.calls_schema is not None:
        _refuse_other_grammar(params)
        params["json_schema"] = form.calls_schema
    if form.reads_marks:
        params.setdefault("skip_special_tokens", False)
    generate = _generate_fields(request, fields)
    num_logprobs = (request.top_logprobs or 0) if request.logprobs else None
    generate |= _logprob_fields(request, num_logprobs)
    generate["sampling_params"] = params
    ignored_fields = unknown_fields(kind, fields, is_chat=True)
    is_flat, is_base64 = request.return_flat_raw_output_top_logprobs, request.return_flat_raw_top_logprobs_b64
    about = {"flat_top": flat_form(is_flat, is_base64), "ignored_fields": ignored_fields}
    make = functools.partial(_call, request, generate, default_model, "chatcmpl-", num_logprobs, **about)
    if request.input_ids is not None:
        generate["input_ids"] = request.input_ids
        form.read_prompt(template.end_of(request.input_ids))
        return make(forms=[form])
    # By default none are added, since the template writes the special tokens.
    generate["add_special_tokens"] = bool(request.add_special_tokens)
    # A client that requests token ids and "none" (TRL) parses tool calls itself: the prompt needs the tools.
    has_tools = request.tool_choice != "none" or request.return_token_ids
    render = functools.partial(_render, template, request, tools=request.tools if has_tools else None)
    given = fields.get("messages") or []
    if isinstance(request, ChatBatchRequest):
        forms = [replace(form) for _ in given]
        return make(render=list(map(render, request.messages, given, forms)), forms=forms)
    return make(render=render(request.messages or [], given, form), forms=[form])


def _render(
    template: ChatTemplate,
    request: ChatCompletionRequest,
    messages: Sequence[ChatMessage],
    given: Sequence[Mapping[str, Any]],
    form: AnswerForm,
    *,
    tools: list[dict[str, Any]] | None,
) -> Render:
    """Return a function that makes the prompt of a conversation, and tells `form` how the answer begins.

    `messages`, `given`, `tools`: as for `ChatTemplate.prompt`.
    """
    adds_special_tokens = bool(request.add_special_tokens)

    def render() -> str | list[int]:
        prompt = template.prompt(
            request, messages, given, tools=tools, add_special_tokens=adds_special_tokens
        )
        continued = text_of(given[-1]) if request.continue_final_message else ""
        form.read_prompt(template.end_of(prompt), continued)
        return prompt

    return render


def _call(
    request: OpenAIRequest,
    generate: Fields,
    default_model: str,
    id_prefix: str,
    num_logprobs: int | None,
    **about: Any,
) -> OpenAICall:
    """Make the call. `about`: fields of `OpenAICall` that do not come from the request."""
    rid = request.rid if request.rid is not None else (request.request_id or uuid.uuid4().hex)
    posted_id = None if request.request_id is None else id_prefix + request.request_id
    params = generate["sampling_params"]
    wants_prompt = bool(request.return_token_ids or request.return_prompt_token_ids)
    return OpenAICall(
        id=posted_id or (rid if isinstance(rid, str) else next(iter(rid), "")),
        model=request.model if request.model is not None else default_model,
        generate={
            **generate,
            "rid": rid,
            "return_prompt_token_ids": wants_prompt or about.get("echo") is not None,
        },
        num_samples=params.get("n") or 1,
        stream_options=request.stream_options or NO_STREAM_OPTIONS,
        return_token_ids=bool(request.return_token_ids),
        return_prompt_token_ids=wants_prompt,
        return_weight_versions=bool(request.return_weight_versions),
        num_logprobs=num_logprobs,
        num_prompt_logprobs=request.prompt_logprobs,
        stop_token_ids=frozenset(params.get("stop_token_ids", ())),
        **about,
    )


C = TypeVar("C", bound=OpenAICall)


def within_limits(call: C, max_logprobs: int, vocab_size: int) -> C:
    """Check the numbers of logprobs of a call, and replace −1, which means all, by the vocabulary's size.

    Where the call names token ids, no most likely tokens are listed besides them.
    `max_logprobs`: the largest allowed number; −1: no limit. Raises RequestRejected: 400; it is exceeded.
    """
    counts = {}
    for name, number in (("logprobs", call.num_logprobs), ("prompt_logprobs", call.num_prompt_logprobs)):
        counts[name] = vocab_size if number == -1 else number
        if max_logprobs >= 0 and (counts[name] or 0) > max_logprobs:
            raise RequestRejected(
                f"{name}: expected at most {max_logprobs} (--max-logprobs), got {number}",
                param=f"body.{name}",
            )
    if call.generate["token_ids_logprob"] and counts["logprobs"] is not None:
        counts["logprobs"] = 0
    return replace(
        call,
        num_logprobs=counts["logprobs"],
        num_prompt_logprobs=counts["prompt_logprobs"],
        generate={**call.generate, "top_logprobs_num": max(count or 0 for count in counts.values())},
    )


def force_usage(fields: Fields) -> None:
    """Make a stream end with its usage. Options of a wrong type stay; they are rejected later."""
    options = fields.get("stream_options") or {}
    if as_bool(fields.get("stream")) is True and isinstance(options, dict):
        fields["stream_options"] = {**options, "include_usage": True}


def _check_stream_options(request: OpenAIRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise RequestRejected("stream_options: expected null, or stream to be true")


def _refuse_other_grammar(params: Fields) -> None:
    given = next((kind for kind in GRAMMAR_KINDS if params.get(kind)), None)
    if given is not None:
        raise RequestRejected(f"tool_choice: cannot be combined with {given}: the answer can only be calls")


def _logprob_fields(request: OpenAIRequest, num_logprobs: int | None, *, with_prompt: bool = False) -> Fields:
    """The fields for `/generate`, where one number of most likely tokens holds for prompt and output."""
    num_prompt = request.prompt_logprobs
    if request.logprob_token_ids and num_logprobs is None:
        raise RequestRejected("logprob_token_ids: needs logprobs")
    if num_prompt is not None and request.stream:
        raise RequestRejected("prompt_logprobs: not in a stream")
    is_wanted = num_logprobs is not None or num_prompt is not None
    of_prompt = num_prompt is not None or (with_prompt and is_wanted)
    return {
        "return_logprob": is_wanted,
        "top_logprobs_num": max(num_logprobs or 0, num_prompt or 0),
        "token_ids_logprob": request.logprob_token_ids or None,
        "return_text_in_logprobs": is_wanted and not request.return_tokens_as_token_ids,
        "logprob_start_len": 0 if of_prompt else -1,
    }


def _sampling_params(request: OpenAIRequest) -> Fields:
    params = params_of(structs.asdict(request), OPENAI_FIELDS)
    if request.include_stop_str_in_output:
        params["no_stop_trim"] = True
    return params | grammar_params(request.response_format, request.structured_outputs)


def _generate_fields(request: OpenAIRequest, fields: Mapping[str, Any]) -> Fields:
    passed_on = {name: getattr(request, name) for name in PromptFields.__struct_fields__}
    start = request.routed_experts_prompt_start
    passed_on["return_routed_experts"] = request.return_routed_experts or start is not None
    passed_on["routed_experts_start_len"] = request.routed_experts_start_len if start is None else start
    # `/generate` rejects them if their values ask for something.
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
