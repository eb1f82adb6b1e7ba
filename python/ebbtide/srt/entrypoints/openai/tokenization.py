"""Text to token ids and back for clients, in SGLang's form and in vLLM's. Source: wire_vllm section 1.5.

The forms clash in one place: of text made of tokens, SGLang leaves special tokens out and vLLM does not. The
answer has both, under the name that each of them gives it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from msgspec import Struct

from ebbtide.srt.entrypoints.openai.chat_template import ChatTemplate, kept_tokens
from ebbtide.srt.entrypoints.openai.protocol import ChatMessage, parse
from ebbtide.srt.entrypoints.openai.unsupported_fields import refuse_unsupported
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.api.generate_fields import split_ids
from ebbtide.srt.managers.api.request_limits import RequestLimits

T = TypeVar("T")


class TokenizeRequest(Struct, kw_only=True):
    """`prompt` or `text`, one or a list, or `messages`, which the chat template makes a text.

    `add_special_tokens`: true unless given, and false for messages.
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


class Tokens(Struct, kw_only=True):
    """The ids and their number; a list of each for a list of texts."""

    tokens: Sequence[int | list[int]]
    count: int | list[int]
    max_model_len: int
    token_strs: Sequence[str | list[str]] | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """`tokens`: one text's ids, or a list of such lists."""

    model: str | None = None
    tokens: list[int | list[int]]
    skip_special_tokens: bool | None = None


class Texts(Struct, kw_only=True):
    """The text, twice: unless the request says it, `text` is without special tokens and `prompt` with."""

    text: str | list[str]
    prompt: str | list[str]


class Tokenization:
    """Answers of `/tokenize` and `/detokenize`. Both take long for long texts, and may run in any thread.

    Args:
        template: with the engine's tokenizer.
    """

    def __init__(self, template: ChatTemplate, limits: RequestLimits) -> None:
        self._template = template
        self._tokenizer = template.tokenizer
        self._limits = limits

    def tokenize(self, fields: Mapping[str, Any]) -> Tokens:
        """The answer of `/tokenize`. Raises `RequestRejected`: 400."""
        request = parse(TokenizeRequest, fields)
        refuse_unsupported(fields, is_chat=request.messages is not None)
        adds_special_tokens = request.add_special_tokens
        if adds_special_tokens is None:
            # A chat template writes them.
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
        """The answer of `/detokenize`. Raises `RequestRejected`: 400."""
        request = parse(DetokenizeRequest, fields)
        batch, is_batch = split_ids("tokens", request.tokens)
        for ids in batch:
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
        """The texts, or what has its tokens already, and whether they are a batch."""
        given = [value for value in (request.prompt, request.text, request.messages) if value is not None]
        if len(given) != 1:
            raise RequestRejected(f"exactly one of prompt, text and messages is needed, got {len(given)}")
        if request.messages is None:
            texts = request.prompt if request.prompt is not None else request.text
            return ([texts], False) if isinstance(texts, str) else (texts or [], True)
        continues = bool(request.continue_final_message)
        required = request.required_prefix_token_ids
        self._limits.check_ids("required_prefix_token_ids", required or [])
        prompt = self._template.prompt(
            fields["messages"],
            tools=request.tools,
            options=request.chat_template_kwargs or {},
            continue_final_message=continues,
            add_generation_prompt=request.add_generation_prompt,
            kept=kept_tokens(request.messages, required, continues=continues),
            add_special_tokens=adds_special_tokens,
        )
        return [prompt], False


def _shaped(values: list[T], is_batch: bool) -> list[T] | T:
    """All of them; outside a batch the only one."""
    return values if is_batch else values[0]
