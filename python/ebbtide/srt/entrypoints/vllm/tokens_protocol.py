"""Bodies of `/inference/v1/generate`: one prompt, tokens in and tokens out. Source: wire_vllm section 1.6."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct, field

from ebbtide.srt.entrypoints.bodies import VersionSpan
from ebbtide.srt.entrypoints.openai.prompt_logprobs import PromptLogprobs
from ebbtide.srt.entrypoints.openai.protocol import FinishReasonName, StreamOptions, Usage
from ebbtide.srt.managers.api.generate_fields import CommonFields


class TokensRequest(CommonFields, kw_only=True):
    """`cache_salt` may be among the sampling parameters too.

    `continue_from` comes in the place of `token_ids`; without `sampling_params` those of the output that is
    continued are in force. `return_sampling_mask`: null is as the server's flag says. `return_sample_support`
    is SkyRL's word for it, and asks for its form.
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
    """A token among those that could have been chosen, in the words of old and new versions of vLLM.

    `rank`: 1 is the most likely; null where that is not known.
    """

    token: str
    token_id: int
    logprob: float
    rank: int | None
    bytes: list[int] | None = None


class ChosenToken(TokenChoice, kw_only=True):
    """A token of the output. `top_logprobs` begin with the token itself."""

    top_logprobs: list[TokenChoice]


class TokensLogprobs(Struct, kw_only=True):
    content: list[ChosenToken]


class PackedSupport(Struct, kw_only=True):
    """base64 of int32 numbers: a row of `top_k` places for each token, -1 where fewer could be chosen.

    Readers cut `data` out by its place: it comes first.
    """

    data: str
    shape: tuple[int, int]
    dtype: Literal["int32"] = "int32"


class TokensOutput(Struct, kw_only=True):
    """A sample; in a stream, what is new about it."""

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
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
