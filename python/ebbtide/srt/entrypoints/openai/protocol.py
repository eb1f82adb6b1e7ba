"""Bodies of the OpenAI-compatible endpoints. Source: wire_api section 5.

In requests, None means "not given"; unknown fields are ignored, and listed in `ignored_fields`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar, cast

from msgspec import UNSET, Meta, Struct, UnsetType, defstruct

from ebbtide.srt.entrypoints.bodies import VersionSpan
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.lossless import read
from ebbtide.srt.managers.api.generate_fields import PromptFields, said
from ebbtide.srt.managers.text.tool_calls import ToolCall
from ebbtide.srt.sampling_params import OPENAI_FIELDS

R = TypeVar("R", bound=Struct)
Fields: TypeAlias = dict[str, Any]
# How many of the most likely tokens are listed; -1: all.
NumTop: TypeAlias = Annotated[int, Meta(ge=-1)]

# ------------------------------------------------------------------------------------------------- requests


class StreamOptions(Struct, kw_only=True):
    """`include_usage`: a last chunk, without choices, has the usage of the whole request.

    `continuous_usage_stats`: every other chunk has the usage of its choice so far.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


NO_STREAM_OPTIONS: Final = StreamOptions()


class OpenAIRequest(PromptFields, kw_only=True):
    """The fields of completions and chats, besides sampling parameters and the fields of `/generate`.

    `routed_experts_prompt_start` also requests routed experts, from that token on; `replay_routed_experts`
    sets the experts of the first tokens of the prompt.
    `response_format`, vLLM's `structured_outputs`, or one of `regex`, `ebnf`, `json_schema` and
    `structural_tag` constrains the answer.
    `include_stop_str_in_output` is another name of `no_stop_trim`. `return_tokens_as_token_ids`: logprobs
    show tokens as "token_id:5" instead of their texts. `prompt_logprobs`: how many of the most likely tokens
    are listed at each position of the prompt. `request_id`: the answer's id ends with it; without a `rid`, it
    is that too.
    """

    model: str | None = None
    logprob_token_ids: list[int] | None = None
    stream_options: StreamOptions | None = None
    response_format: Any = None
    user: str | None = None
    include_stop_str_in_output: bool | None = None
    structured_outputs: Any = None
    rid: str | list[str] | None = None
    routed_experts_prompt_start: int | None = None
    return_token_ids: bool | None = None
    return_prompt_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_weight_versions: bool | None = None
    prompt_logprobs: NumTop | None = None
    request_id: str | None = None


def _with_sampling_params(kind: type[R]) -> type[R]:
    """Add the sampling parameters that `OPENAI_FIELDS` declares to the fields of a struct."""
    fields = [
        (name, Annotated[field.type, said(**field.openai_schema)], None)
        for name, field in OPENAI_FIELDS.items()
    ]
    namespace = {"__doc__": kind.__doc__}
    extended = defstruct(
        kind.__name__, fields, bases=(kind,), module=kind.__module__, namespace=namespace, kw_only=True
    )
    return cast("type[R]", extended)


@_with_sampling_params
class CompletionRequest(OpenAIRequest, kw_only=True):
    """`logprobs`: how many of the most likely tokens are listed. `best_of`: equal to `n`, or not given."""

    prompt: str | list[str | int | list[int]]
    max_tokens: Annotated[int | None, said(minimum=0)] = None
    echo: bool | None = None
    logprobs: NumTop | None = None
    suffix: Annotated[str | None, said(enum=["", None])] = None
    best_of: Annotated[int | None, said(minimum=1)] = None


class TextPart(Struct, kw_only=True):
    """A part of a message's content. Only text is supported."""

    type: Literal["text"]
    text: str


class ChatMessage(Struct, kw_only=True):
    """A message. Its other fields are passed to the chat template too.

    `prompt_token_ids`, `generation_token_ids`: for an earlier answer, the tokens of its prompt and its own.
    """

    role: str
    content: str | list[TextPart] | None = None
    prompt_token_ids: list[int] | None = None
    generation_token_ids: list[int] | None = None


@_with_sampling_params
class ChatCompletionRequest(OpenAIRequest, kw_only=True):
    """`messages`, or `input_ids`: the prompt's tokens, instead of what the chat template makes of messages.

    `separate_reasoning`: false leaves the reasoning in the answer's text.
    `return_flat_raw_output_top_logprobs` applies to the `meta_info` that `return_meta_info` requests.
    `logprobs`: clients of vLLM write 1 for true.
    `required_prefix_token_ids`: the tokens of all messages up to the last answer, instead of the template's.
    """

    messages: list[ChatMessage] | None = None
    input_ids: list[int] | None = None
    max_completion_tokens: Annotated[int | None, said(minimum=0)] = None
    max_tokens: int | None = None
    logprobs: bool | Literal[0, 1] | None = None
    top_logprobs: NumTop | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    separate_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    required_prefix_token_ids: list[int] | None = None
    return_meta_info: bool | None = None
    return_flat_raw_output_top_logprobs: bool | None = None
    return_flat_raw_top_logprobs_b64: bool | None = None


class ChatBatchRequest(ChatCompletionRequest, kw_only=True):
    """`messages`: those of several conversations; the choices of the answer have the same order."""

    messages: list[list[ChatMessage]]  # type: ignore[assignment]


def parse(kind: type[R], fields: Mapping[str, Any]) -> R:
    """Check the types of a request's fields.

    Raises RequestRejected: 400, with the field's path and what was expected.
    """
    try:
        return read(kind, {name: value for name, value in fields.items() if value is not None})
    except RequestRejected as error:
        is_of_part = ".content[" in error.message
        hint = "; in a message, only parts with text are supported" if is_of_part else ""
        raise RequestRejected(f"{error.message}{hint}") from None


# -------------------------------------------------------------------------------------------------- answers

FinishReasonName = Literal["stop", "length", "abort", "stale"]
ChatFinishReasonName = FinishReasonName | Literal["tool_calls"]


class PromptTokensDetails(Struct, kw_only=True):
    cached_tokens: int


class Usage(Struct, kw_only=True):
    """Numbers of tokens of a request, or of a choice. A prompt counts once, however many samples it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptLogprob(Struct, kw_only=True):
    """A token at a position of the prompt.

    `rank`: 1 is the most likely. For a token that is not among the listed ones, the smallest possible rank.
    """

    logprob: float
    rank: int
    decoded_token: str | None


# Per position, by token id as text; null for the first token, which has no logprob.
PromptLogprobList: TypeAlias = list[dict[str, PromptLogprob] | None]


class CompletionLogprobs(Struct, kw_only=True):
    """Per token: its text, its logprob, the most likely tokens by text, and its offset in the text.

    The logprob of a prompt's first token is null.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Choice(Struct, kw_only=True):
    """The fields of both kinds of choices; in a stream, they hold what is new.

    Fields that were not requested are null in a whole answer, since clients index it, and absent in streams.
    """

    index: int
    matched_stop: int | str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    weight_versions: list[VersionSpan] | UnsetType | None = UNSET
    routed_experts: Any = UNSET
    sampling_mask: list[list[int]] | UnsetType = UNSET


class CompletionChoice(Choice, kw_only=True):
    """A sample; in a stream, its new part. Fields that were not requested are null in a whole answer."""

    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReasonName | None = None
    prompt_logprobs: PromptLogprobList | None = None


class Answer(Struct, kw_only=True):
    """The fields of answers and chunks of both kinds."""

    id: str
    created: int
    model: str
    usage: Usage | UnsetType | None = UNSET
    metadata: Annotated[
        dict[str, str] | UnsetType,
        said("Versions of the weights and precision as in `meta_info`: texts, or JSON in a text."),
    ] = UNSET
    ignored_fields: Annotated[
        list[str] | UnsetType,
        said("The request's unknown fields, which have no effect; in a stream, first chunks have them."),
    ] = UNSET


class Completion(Answer, kw_only=True):
    """An answer of `/v1/completions`, or a chunk of its stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class TopLogprob(Struct, kw_only=True):
    """A token by its text. `bytes`: null if the token is only a part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob, kw_only=True):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, kw_only=True):
    content: list[TokenLogprob]
    refusal: None = None


class ToolCallBody(Struct, kw_only=True):
    """A tool call; in streams too, it is sent whole."""

    index: int
    id: str
    type: Literal["function"] = "function"
    function: ToolCall


class AssistantMessage(Struct, kw_only=True):
    """An answer. `reasoning_content` and its newer name `reasoning` need a reasoning parser; null: none."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None
    reasoning_content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType | None = UNSET
    tool_calls: list[ToolCallBody] | UnsetType = UNSET


class ChatChoice(Choice, kw_only=True):
    """An answer to a conversation. Fields not requested are null where clients of vLLM index them."""

    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReasonName
    response_token_ids: list[int] | UnsetType = UNSET
    meta_info: dict[str, Any] | UnsetType = UNSET


class ChatCompletion(Answer, kw_only=True):
    """An answer of `/v1/chat/completions`."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobList | None = None
    prompt_token_ids: list[int] | UnsetType | None = None


class ChatDelta(Struct, kw_only=True):
    content: str
    role: Literal["assistant"] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallBody] | UnsetType = UNSET


class ChatChunkChoice(Choice, kw_only=True):
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReasonName | None = None
    response_token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(Answer, kw_only=True):
    """A chunk of the stream of `/v1/chat/completions`."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] | UnsetType | None = UNSET


class ModelCard(Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "ebbtide"
    root: str
    parent: str | None = None
    max_model_len: int
    permission: tuple[()] = ()


class ModelList(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]
