"""Text to token ids and back: prompts from the chat template, and `/tokenize` and `/detokenize`."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

from msgspec import Struct

from ebbtide.srt.entrypoints.openai.protocol import ChatCompletionRequest, ChatMessage, parse
from ebbtide.srt.entrypoints.openai.shared_fields import refuse_unsupported
from ebbtide.srt.errors import ConfigurationError, RequestRejected
from ebbtide.srt.managers.api.generate_fields import split_ids
from ebbtide.srt.managers.api.request_limits import RequestLimits
from ebbtide.srt.managers.text.tokenizer import Tokenizer
from ebbtide.srt.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


class TokenizeRequest(Struct, kw_only=True):
    """`prompt` or `text`, one or a list, or `messages`, which the chat template turns into text.

    `add_special_tokens`: null means true, and for messages false. `add_generation_prompt`: null means true,
    and with `continue_final_message` false.
    """

    model: str | None = None
    prompt: str | list[str] | None = None
    text: str | list[str] | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    required_prefix_token_ids: list[int] | None = None


# Decoding this many takes a tenth of a second, in which the tokenizers library holds the GIL.
MAX_IDS: Final = 1 << 20

# Requests with a conversation and the options of its prompt.
Conversation: TypeAlias = ChatCompletionRequest | TokenizeRequest


class KeptTokens(Struct, frozen=True):
    """Token ids that a prompt has to begin with.

    `num_messages`: how many of the first messages the tokens stand for; the last of them is an answer.
    """

    ids: list[int]
    num_messages: int


def kept_tokens(messages: Sequence[ChatMessage], asked: Conversation) -> KeptTokens | None:
    """The tokens that a prompt has to begin with; None: there are none.

    They matter because tokenizing an answer's text may not give the tokens that were generated.
    NeMo-RL's servers take them as `required_prefix_token_ids`, or find them in the messages, where
    NeMo-Gym leaves them. Source: wire_vllm 3.6.

    Raises RequestRejected: 400; they are given together with `continue_final_message`.
    """
    required, continues = asked.required_prefix_token_ids, asked.continue_final_message
    answers = [index for index, message in enumerate(messages, 1) if message.role == "assistant"]
    if required:
        if continues:
            raise RequestRejected("required_prefix_token_ids and continue_final_message exclude each other")
        return KeptTokens(required, answers[-1] if answers else len(messages))
    if continues or required is not None:
        return None
    for index in reversed(answers):
        answer = messages[index - 1]
        if answer.prompt_token_ids and answer.generation_token_ids is not None:
            return KeptTokens(answer.prompt_token_ids + answer.generation_token_ids, index)
    return None


def begin_with(
    kept: Sequence[int], history: Sequence[int], prompt: Sequence[int], ends: Collection[int]
) -> list[int]:
    """Replace the beginning of a prompt, which the template made of the kept messages, by the kept tokens.

    Counting the tokens that end messages finds where the last kept message ends: lengths would not, since
    templates may shorten earlier messages once others follow, for instance by their reasoning.

    Args:
        kept: the tokens of the kept messages.
        history: the template's token ids for the kept messages alone.
        prompt: the template's token ids for all messages.
        ends: the ids that end a message.

    Raises RequestRejected: 400; the template writes none of `ends` after the kept messages.
    """
    num_ends = sum(token_id in ends for token_id in history)
    places = [place for place, token_id in enumerate(prompt) if token_id in ends]
    if not 0 < num_ends <= len(places):
        raise RequestRejected(
            "required_prefix_token_ids, prompt_token_ids: cannot be kept: the chat template writes no token "
            "that ends an answer after these messages"
        )
    # An answer that was cut off has no end token, so the template's is used.
    has_end = kept[-1] in ends
    return [*kept, *prompt[places[num_ends - 1] + has_end :]]


# Arguments of transformers' `apply_chat_template` that are not variables of the template.
_NOT_OPTIONS = frozenset(
    {"conversation", "tools", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize"}
    | {"padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"}
    | {"return_assistant_tokens_mask", "self"}
)
# Enough tokens for the longest marker of reasoning and line ends after it.
_END_TOKENS = 16
_RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class ChatTemplate:
    """Renders conversations by a chat template.

    Args:
        template: in Jinja; None: the tokenizer's own.
        end_ids: tokens that end an answer, besides the tokenizer's own.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: str | None, end_ids: frozenset[int] = frozenset()
    ) -> None:
        self.tokenizer = tokenizer
        self._template = template
        self._end_ids = end_ids | tokenizer.eos_token_ids

    def prompt(
        self,
        asked: Conversation,
        messages: Sequence[ChatMessage],
        given: Sequence[Mapping[str, Any]],
        *,
        tools: list[dict[str, Any]] | None,
        add_special_tokens: bool = False,
    ) -> str | list[int]:
        """Render a conversation up to where the assistant's answer, or the rest of it, begins.

        Returns text that contains the special tokens, or token ids if the prompt has to begin with given
        tokens. May be called from any thread.

        Args:
            messages, given: the same messages: with checked types, and as they were sent, for the template.
            tools: None: the template is shown none.
            add_special_tokens: whether tokenizing adds some, where token ids are returned.

        Raises RequestRejected: 400; there are no messages, the template fails on them, options exclude each
        other, or as `kept_tokens` and `begin_with`.
        """
        opens, continues = asked.add_generation_prompt, bool(asked.continue_final_message)
        if opens and continues:
            raise RequestRejected("add_generation_prompt and continue_final_message exclude each other")
        kept = kept_tokens(messages, asked)
        render = partial(self._render, {"tools": tools, **(asked.chat_template_kwargs or {})})
        if reserved := sorted(_NOT_OPTIONS & (asked.chat_template_kwargs or {}).keys()):
            raise RequestRejected(f"chat_template_kwargs: {', '.join(reserved)} cannot be set")
        text = render(given, continues=continues, opens=not continues if opens is None else opens)
        if kept is None:
            return text
        history = render(given[: kept.num_messages], continues=False, opens=False)
        ids, of_history = (
            self.tokenizer.encode(one, add_special_tokens=add_special_tokens) for one in (text, history)
        )
        return begin_with(kept.ids, of_history, ids, self._end_ids)

    def end_of(self, prompt: str | Sequence[int]) -> str:
        """The end of a prompt, as text."""
        if isinstance(prompt, str):
            return prompt
        # Not checked yet: a client's ids may be negative.
        ids = self.tokenizer.visible(prompt[-_END_TOKENS:], skip_special_tokens=False)
        return self.tokenizer.decode([token_id for token_id in ids if token_id >= 0])

    def _render(
        self,
        variables: Mapping[str, Any],
        messages: Sequence[Mapping[str, Any]],
        *,
        continues: bool,
        opens: bool,
    ) -> str:
        if not messages:
            raise RequestRejected("messages: at least one is needed")
        hf = self.tokenizer.hf
        if self._template is None and not getattr(hf, "chat_template", None):
            raise RequestRejected("the tokenizer has no chat template: start the server with --chat-template")
        try:
            rendered: str = hf.apply_chat_template(
                [_plain(message) for message in messages],
                chat_template=self._template,
                add_generation_prompt=opens,
                continue_final_message=continues,
                tokenize=False,
                **variables,
            )
        except Exception as error:  # templates raise any kind of error for messages that they do not expect
            raise RequestRejected(
                f"the chat template fails on these messages: {type(error).__name__}: {error}"
            ) from None
        return rendered


def text_of(message: Mapping[str, Any]) -> str:
    """The content of a message as one string."""
    content = message.get("content")
    if isinstance(content, list):
        return " ".join(part["text"] for part in content)
    return "" if content is None else str(content)


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a message for the template: content to one string, arguments of tool calls to objects."""
    plain = {**message, "content": text_of(message)}
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        plain["tool_calls"] = [_plain_call(call) for call in calls]
    return plain


def _plain_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def read_chat_template(given: str | None) -> str | None:
    """Read the flag `chat_template`: a file's path, or the template itself. None: the tokenizer's template.

    Raises ConfigurationError: it is neither.
    """
    if given is None or "{{" in given or "{%" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"chat_template: expected a file or a Jinja template: {error}") from None


def recommended_sampling(folder: str) -> dict[str, Any]:
    """Read sampling parameters from generation_config.json. Invalid ones are logged and left out."""
    path = Path(folder) / "generation_config.json"
    if not path.is_file():
        return {}
    given = json.loads(path.read_text(encoding="utf-8"))
    recommended: dict[str, Any] = {}
    for name in _RECOMMENDED:
        value = given.get(name)
        # transformers writes "off" as 0.
        if value is None or (name == "top_k" and value == 0):
            continue
        try:
            SamplingParams.from_dict({name: value})
        except RequestRejected as error:
            logger.warning("chat template %s is not used: %s", path, error)
        else:
            recommended[name] = value
    return recommended


T = TypeVar("T")


class Tokens(Struct, kw_only=True):
    """The token ids of a text and their number, or lists of both for a list of texts."""

    tokens: Sequence[int | list[int]]
    count: int | list[int]
    max_model_len: int
    token_strs: Sequence[str | list[str]] | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """`tokens`: the ids of one text, or a list of such lists."""

    model: str | None = None
    tokens: list[int | list[int]]
    skip_special_tokens: bool | None = None


class Texts(Struct, kw_only=True):
    """The text, twice: `text` without special tokens and `prompt` with; `skip_special_tokens` sets both."""

    text: str | list[str]
    prompt: str | list[str]


class Tokenization:
    """Answers `/tokenize` and `/detokenize`. Both take long for long texts, and may run in any thread.

    `template`: has the engine's tokenizer.
    """

    def __init__(self, template: ChatTemplate, limits: RequestLimits) -> None:
        self._template = template
        self._tokenizer = template.tokenizer
        self._limits = limits

    def tokenize(self, fields: Mapping[str, Any]) -> Tokens:
        """Answer `/tokenize`. Raises RequestRejected: 400."""
        request = parse(TokenizeRequest, fields)
        refuse_unsupported(fields, is_chat=request.messages is not None)
        adds_special_tokens = request.add_special_tokens
        if adds_special_tokens is None:
            # The chat template writes the special tokens of messages.
            adds_special_tokens = request.messages is None
        prompts, is_batch = self._prompts(request, fields, adds_special_tokens)
        tokens = [
            prompt
            if isinstance(prompt, list)
            else self._tokenizer.encode(prompt, add_special_tokens=adds_special_tokens)
            for prompt in prompts
        ]
        shaped, counts = _shaped(tokens, is_batch), _shaped(list(map(len, tokens)), is_batch)
        answer = Tokens(tokens=shaped, count=counts, max_model_len=self._limits.context_len)
        if request.return_token_strs:
            answer.token_strs = _shaped([self._tokenizer.names(ids) for ids in tokens], is_batch)
        return answer

    def detokenize(self, fields: Mapping[str, Any]) -> Texts:
        """Answer `/detokenize`. Raises RequestRejected: 400."""
        request = parse(DetokenizeRequest, fields)
        batch, is_batch = split_ids("tokens", request.tokens)
        for ids in batch:
            if len(ids) > MAX_IDS:
                raise RequestRejected(f"tokens: a text has {len(ids)} ids: expected at most {MAX_IDS}")
            self._limits.check_ids("tokens", ids)
        skips = request.skip_special_tokens

        def decode(default: bool) -> list[str]:
            skip = default if skips is None else skips
            return [self._tokenizer.decode(ids, skip_special_tokens=skip) for ids in batch]

        text, prompt = decode(True), decode(False)
        return Texts(text=_shaped(text, is_batch), prompt=_shaped(prompt, is_batch))

    def _prompts(
        self, request: TokenizeRequest, fields: Mapping[str, Any], adds_special_tokens: bool
    ) -> tuple[Sequence[str | list[int]], bool]:
        """The texts, or token ids if there are some already, and whether the request has a list of texts."""
        given = [value for value in (request.prompt, request.text, request.messages) if value is not None]
        if len(given) != 1:
            raise RequestRejected(f"exactly one of prompt, text and messages is needed, got {len(given)}")
        if request.messages is None:
            texts = request.prompt if request.prompt is not None else request.text
            return ([texts], False) if isinstance(texts, str) else (texts or [], True)
        self._limits.check_ids("required_prefix_token_ids", request.required_prefix_token_ids or [])
        about = request, request.messages, fields["messages"]
        make = self._template.prompt
        return [make(*about, tools=request.tools, add_special_tokens=adds_special_tokens)], False


def _shaped(values: list[T], is_batch: bool) -> list[T] | T:
    """All values for a batch, else the only one."""
    return values if is_batch else values[0]
