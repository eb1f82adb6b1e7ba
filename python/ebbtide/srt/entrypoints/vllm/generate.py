"""`/inference/v1/generate`: one prompt, tokens in and tokens out. Source: wire_vllm section 1.6."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec import Struct, UnsetType, field
from starlette.requests import Request
from starlette.responses import Response

from ebbtide.srt.entrypoints.bodies import VersionSpan
from ebbtide.srt.entrypoints.http_answers import client_of
from ebbtide.srt.entrypoints.openai.answers import CallWriter, Piece, known, prompt_logprobs, stop_reason
from ebbtide.srt.entrypoints.openai.protocol import (
    NO_STREAM_OPTIONS,
    Fields,
    FinishReasonName,
    PromptLogprobList,
    StreamOptions,
    Usage,
)
from ebbtide.srt.entrypoints.openai.requests import OpenAICall
from ebbtide.srt.entrypoints.openai.routes import Calls
from ebbtide.srt.entrypoints.openai.shared_fields import check_salt, grammar_params
from ebbtide.srt.entrypoints.request_body import BodyReader, with_headers
from ebbtide.srt.entrypoints.routing import route
from ebbtide.srt.entrypoints.service import EngineService
from ebbtide.srt.entrypoints.vllm.occupation import meant_by
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.lossless import as_int, read
from ebbtide.srt.managers.api.generate_fields import CommonFields
from ebbtide.srt.managers.api.output_state import Triple
from ebbtide.srt.sampling_params import VLLM_FIELDS, SamplingParams, params_of


class TokensRequest(CommonFields, kw_only=True):
    """`cache_salt` may also be among the sampling parameters.

    `continue_from` is given instead of `token_ids`; `sampling_params` are then those of the continued output,
    unless given. `return_sampling_mask`: null means the server's flag. `return_sample_support` requests the
    same in SkyRL's form.
    """

    token_ids: list[int] = field(default_factory=list)
    sampling_params: dict[str, Any] | None = None
    continue_from: str | None = None
    model: str | None = None
    request_id: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    return_sample_support: bool = False
    return_token_ids: bool = False
    output_mode: Literal["tokens", "text"] = "tokens"


class TokenChoice(Struct, kw_only=True):
    """A token with its logprob. It has the fields of both old and new versions of vLLM.

    `rank`: 1 is the most likely; null: unknown.
    """

    token: str
    token_id: int
    logprob: float
    rank: int | None
    bytes: list[int] | None = None


class ChosenToken(TokenChoice, kw_only=True):
    """A token of the output. `top_logprobs`: the token itself comes first."""

    top_logprobs: list[TokenChoice]


class TokensLogprobs(Struct, kw_only=True):
    content: list[ChosenToken]


class PackedSupport(Struct, kw_only=True):
    """base64 of int32 token ids: a row of `top_k` ids for each token, filled up with -1.

    `data` must come first, since clients extract it by its position.
    """

    data: str
    shape: tuple[int, int]
    dtype: Literal["int32"] = "int32"


class TokensOutput(Struct, kw_only=True):
    """A sample; in a stream, its new part."""

    index: int
    token_ids: list[int]
    text: str | None = None
    finish_reason: FinishReasonName | None = None
    stop_reason: int | str | None = None
    logprobs: TokensLogprobs | None = None
    routed_experts: Any = None
    sampling_mask: list[list[int]] | None = None
    rollout_sample_support: PackedSupport | None = None
    weight_versions: list[VersionSpan] | None = None


class TokensAnswer(Struct, kw_only=True):
    request_id: str
    model: str
    created: int
    output_mode: str
    choices: list[TokensOutput]
    usage: Usage | None = None
    prompt_logprobs: PromptLogprobList | None = None
    prompt_token_ids: list[int] | None = None


_UNSUPPORTED = (
    *("features", "content_parts", "token_offsets"),
    *("kv_transfer_params", "ec_transfer_params"),
    "return_sample_support_logprobs",
)

# They would change the tokens or the answer: values that ask for something are rejected.
_UNSUPPORTED_PARAMS = (
    "extra_args",
    *("prompt_logprob_token_ids", "prompt_logprob_start", "trace_decode_token_ids"),
    *("skip_reading_prefix_cache", "thinking_token_budget"),
)
# Known parameters that are read elsewhere, or have no effect.
_OTHER_PARAMS = (
    *("detokenize", "output_kind", "logprobs", "prompt_logprobs", "max_tokens", "cache_salt"),
    *("truncate_prompt_tokens", "truncation_side", "structured_outputs", "logprob_token_ids"),
    "routed_experts_prompt_start",
)
# Limit of a row's ids, whose bytes are sent for every token.
MAX_SUPPORT_WIDTH = 4096


@dataclass(frozen=True, kw_only=True)
class TokensCall(OpenAICall):
    """`support_width`: ids in a row of the packed supports; 0: they are not requested."""

    request: TokensRequest
    support_width: int = 0


class TokensApi:
    """Serves `/inference/v1/generate`."""

    def __init__(self, service: EngineService, bodies: BodyReader, calls: Calls) -> None:
        self._service = service
        self._bodies = bodies
        self._calls = calls

    @route(
        *("POST", "/inference/v1/generate", "/skyrl/v1/generate"),
        tag="vLLM",
        takes=TokensRequest,
        reply=TokensAnswer,
        event=TokensAnswer,
    )
    async def generate(self, request: Request) -> Response:
        """Generate from token ids."""
        fields = await self._bodies.read(request.stream())
        self._service.manager.limits.check_given(
            "token_ids", fields.get("token_ids"), _params_of(fields).get("truncate_prompt_tokens")
        )
        config, manager = self._service.config, self._service.manager
        call = tokens_call(fields, request.headers, config.model.served_model_name)
        call = self._calls.within_limits(call)
        if call.request.continue_from is not None:
            names = meant_by(call.request.continue_from)
            call.generate["continue_from"] = manager.ended.find(names, client_of(request)) or names[0]
        # Requests have no field for routed experts; the server's flag decides.
        call.generate["return_routed_experts"] = manager.limits.records_routes
        if call.request.return_sampling_mask is None and not call.support_width:
            call.generate["return_sampling_mask"] = config.server_args.return_sampling_mask
        form = "canonical" if request.url.path.startswith("/skyrl") else None
        return await self._calls.answer(request, call, TokensWriter(call), form)


def tokens_call(fields: Mapping[str, Any], headers: Mapping[str, str], default_model: str) -> TokensCall:
    """Read a request of `/inference/v1/generate`. Raises RequestRejected: 400."""
    _refuse_unsupported(fields, _UNSUPPORTED, "body")
    given = {name: value for name, value in with_headers(fields, headers).items() if value is not None}
    request = read(TokensRequest, given, param="body")
    given_params = request.sampling_params or {}
    if request.sampling_params is None and request.continue_from is None:
        raise RequestRejected("sampling_params: is needed", param="body.sampling_params")
    unknown = fields.keys() - {*TokensRequest.__struct_fields__, *_UNSUPPORTED}
    params, ignored = _sampling_params(given_params)
    num_logprobs = _count_of(given_params, "logprobs")
    num_prompt_logprobs = _count_of(given_params, "prompt_logprobs")
    chosen_ids = given_params.get("logprob_token_ids")
    if chosen_ids and num_logprobs is None:
        raise RequestRejected(
            "logprob_token_ids: needs logprobs", param="body.sampling_params.logprob_token_ids"
        )
    rid = request.request_id or uuid.uuid4().hex
    salt = request.cache_salt if request.cache_salt is not None else given_params.get("cache_salt")
    check_salt(salt)
    generate: Fields = {
        "input_ids": request.token_ids or None,
        "sampling_params": params if request.sampling_params is not None else None,
        "rid": rid,
        "stream": request.stream,
        "cache_salt": salt,
        "truncate_prompt_tokens": given_params.get("truncate_prompt_tokens"),
        "truncation_side": given_params.get("truncation_side"),
        "return_logprob": num_logprobs is not None or num_prompt_logprobs is not None,
        "top_logprobs_num": max(num_logprobs or 0, num_prompt_logprobs or 0),
        "token_ids_logprob": chosen_ids or None,
        "logprob_start_len": -1 if num_prompt_logprobs is None else 0,
        "return_prompt_token_ids": request.return_token_ids,
        "routed_experts_start_len": given_params.get("routed_experts_prompt_start"),
        **{name: getattr(request, name) for name in CommonFields.__struct_fields__},
        "return_sampling_mask": request.return_sampling_mask or request.return_sample_support,
    }
    return TokensCall(
        id=f"generate-tokens-{rid}",
        model=request.model if request.model is not None else default_model,
        request=request,
        support_width=_support_width(request, given_params),
        generate=generate,
        num_samples=params.get("n", 1),
        stream_options=request.stream_options or NO_STREAM_OPTIONS,
        return_token_ids=request.return_token_ids,
        return_prompt_token_ids=request.return_token_ids,
        return_weight_versions=True,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
        stop_token_ids=SamplingParams(stop_token_ids=params.get("stop_token_ids")).stop_token_id_set,
        ignored_fields=[*sorted(unknown), *ignored],
    )


def _params_of(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    params = fields.get("sampling_params")
    return params if isinstance(params, dict) else {}


def _support_width(request: TokensRequest, params: Mapping[str, Any]) -> int:
    if not request.return_sample_support:
        return 0
    top_k = params.get("top_k")
    if not isinstance(top_k, int) or not 1 < top_k <= MAX_SUPPORT_WIDTH:
        raise RequestRejected(
            "return_sample_support: its rows have top_k places: expected a top_k of 2 to "
            f"{MAX_SUPPORT_WIDTH:,}, got {top_k!r}",
            param="body.return_sample_support",
        )
    return top_k


class TokensWriter(CallWriter):
    """Writes answers of `/inference/v1/generate`."""

    def __init__(self, call: TokensCall) -> None:
        super().__init__(call)
        self._request, self._support_width = call.request, call.support_width
        self._head = {"request_id": call.id, "output_mode": call.request.output_mode}

    def answer(self, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        call, first = self._call, pieces[0]
        answer = TokensAnswer(
            **self._head,
            model=call.model,
            created=call.created,
            choices=[self._choice(piece) for piece in pieces],
            usage=usage,
            prompt_logprobs=prompt_logprobs(call, first),
            prompt_token_ids=first.prompt_token_ids if call.return_token_ids else None,
        )
        return {**msgspec.structs.asdict(answer), **self._ignored_fields(first)}

    def event_of(self, piece: Piece, usage: Usage | UnsetType | None) -> dict[str, Any]:
        usage_field = {"usage": usage} if isinstance(usage, Usage) else {}
        choice = msgspec.structs.asdict(self._choice(piece))
        choices = [{name: value for name, value in choice.items() if value is not None}]
        return {**self._head, "choices": choices, **usage_field, **self._ignored_fields(piece)}

    def usage_event(self, usage: Usage) -> dict[str, Any]:
        return {**self._head, "choices": [], "usage": usage}

    def _ignored_fields(self, piece: Piece) -> dict[str, Any]:
        ignored = self._call.ignored_fields
        return {"ignored_fields": ignored} if ignored and piece.is_first else {}

    def _choice(self, piece: Piece) -> TokensOutput:
        width, mask = self._support_width, piece.meta.get("output_token_sampling_mask")
        return TokensOutput(
            index=piece.index,
            token_ids=piece.token_ids,
            text=piece.text if self._request.output_mode == "text" else None,
            finish_reason=piece.finish_reason,
            stop_reason=stop_reason(self._call, piece),
            logprobs=self._logprobs(piece),
            routed_experts=piece.meta.get("routed_experts"),
            sampling_mask=mask if self._request.return_sampling_mask or not width else None,
            rollout_sample_support=_packed(mask, width) if width and mask is not None else None,
            weight_versions=None if piece.finish is None else piece.meta["weight_versions"],
        )

    def _logprobs(self, piece: Piece) -> TokensLogprobs | None:
        num_top = self._call.num_logprobs
        if num_top is None:
            return None
        content = [_chosen(own, top or (), num_top) for own, top in piece.positions(num_top)]
        return TokensLogprobs(content=content)


def _packed(mask: Sequence[Sequence[int]], width: int) -> PackedSupport:
    rows = np.full((len(mask), width), -1, dtype=np.int32)
    for row, ids in zip(rows, mask, strict=True):
        row[: len(ids)] = ids
    return PackedSupport(data=base64.b64encode(rows.data).decode("ascii"), shape=rows.shape)


def _chosen(own: Triple, listed: Sequence[Triple], num_top: int) -> ChosenToken:
    """Make the entry of an output token. The first `num_top` in `listed` are the most likely, in order."""
    ranked = {token_id: rank for rank, (_, token_id, _) in enumerate(listed[:num_top], 1)}
    first = _choice_of(own, ranked.get(own[1]))
    others = [_choice_of(triple, ranked.get(triple[1])) for triple in listed if triple[1] != own[1]]
    return ChosenToken(**msgspec.structs.asdict(first), top_logprobs=[first, *others])


def _choice_of(triple: Triple, rank: int | None) -> TokenChoice:
    return TokenChoice(token=f"token_id:{triple[1]}", token_id=triple[1], logprob=known(triple), rank=rank)


def _refuse_unsupported(fields: Mapping[str, Any], names: tuple[str, ...], where: str) -> None:
    """Reject unsupported fields that ask for something. Raises RequestRejected: 400, with the field."""
    for name in names:
        # Empty values ask for nothing; 0 is the default of some fields.
        if fields.get(name):
            raise RequestRejected(
                f"{name}: not supported in this version, got {fields[name]!r}", param=f"{where}.{name}"
            )


def _sampling_params(given: Mapping[str, Any]) -> tuple[Fields, list[str]]:
    """Read sampling parameters. Returns those for `/generate`, and the names of unknown ones.

    Raises RequestRejected: 400; one is not supported.
    """
    _refuse_unsupported(given, _UNSUPPORTED_PARAMS, "body.sampling_params")
    params = params_of(given, VLLM_FIELDS) | grammar_params(None, given.get("structured_outputs"))
    params["max_new_tokens"] = given.get("max_tokens")
    known = {*VLLM_FIELDS, *_UNSUPPORTED_PARAMS, *_OTHER_PARAMS}
    return params, sorted(set(given) - known)


def _count_of(given: Mapping[str, Any], name: str) -> int | None:
    """The number of requested logprobs; −1: all; None: no logprobs. Raises RequestRejected: 400."""
    value = as_int(given.get(name))
    if value is None:
        return None
    if not isinstance(value, int) or value < -1:
        raise RequestRejected(
            f"{name}: expected null or a number of tokens from 0, or -1 for all, got {value!r}",
            param=f"body.sampling_params.{name}",
        )
    return value
