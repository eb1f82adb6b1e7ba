"""Messages to text, by the chat template of the model; and how its authors would have it sampled."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ebbtide.srt.entrypoints.openai.kept_tokens import KeptTokens, begin_with
from ebbtide.srt.errors import ConfigurationError, RequestRejected
from ebbtide.srt.managers.text.tokenizer import Tokenizer
from ebbtide.srt.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

# Arguments of transformers' own that a client must not set: what is rendered, and as what it comes back.
_NOT_OPTIONS = frozenset(
    {"conversation", "tools", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize"}
    | {"padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"}
    | {"return_assistant_tokens_mask", "self"}
)
# As many as the longest marker of reasoning, and line ends behind it, can be.
_END_TOKENS = 16
_RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class ChatTemplate:
    """Renders conversations.

    Args:
        template: Jinja; None for the tokenizer's own.
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
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: list[dict[str, Any]] | None,
        options: Mapping[str, Any],
        continue_final_message: bool,
        add_generation_prompt: bool | None = None,
        kept: KeptTokens | None = None,
        add_special_tokens: bool = False,
    ) -> str | list[int]:
        """As `render`; with the ids of its tokens if some are kept.

        Args:
            kept: what the prompt has to begin with.
            add_special_tokens: with those that the tokenizer adds to a text by itself.

        Raises:
            RequestRejected: as `render` and `begin_with`.
        """
        render = partial(self.render, tools=tools, options=options)
        text = render(
            messages,
            continue_final_message=continue_final_message,
            add_generation_prompt=add_generation_prompt,
        )
        if kept is None:
            return text
        history = render(
            messages[: kept.num_messages], continue_final_message=False, add_generation_prompt=False
        )
        ids, of_history = (
            self.tokenizer.encode(one, add_special_tokens=add_special_tokens) for one in (text, history)
        )
        return begin_with(kept.ids, of_history, ids, self._end_ids)

    def end_of(self, prompt: str | Sequence[int]) -> str:
        """The end of a prompt, as text."""
        if isinstance(prompt, str):
            return prompt
        # A client's ids have not been checked yet.
        ids = self.tokenizer.visible(prompt[-_END_TOKENS:], skip_special_tokens=False)
        return self.tokenizer.decode([token_id for token_id in ids if token_id >= 0])

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: list[dict[str, Any]] | None,
        options: Mapping[str, Any],
        continue_final_message: bool,
        add_generation_prompt: bool | None = None,
    ) -> str:
        """The text of a conversation, up to where the assistant's answer, or the rest of it, begins.

        It holds the special tokens. May be called from any thread.

        Args:
            messages: with string, text-part or no content; whatever else they have is the template's affair.
            options: further variables of the template.
            add_generation_prompt: whether an answer is opened; None: unless the final message goes on.

        Raises:
            RequestRejected: 400; there are no messages, or the template does not take them.
        """
        if not messages:
            raise RequestRejected("messages: at least one is needed")
        reserved = sorted(_NOT_OPTIONS & options.keys())
        if reserved:
            raise RequestRejected(f"chat_template_kwargs: {', '.join(reserved)} cannot be set")
        if add_generation_prompt and continue_final_message:
            raise RequestRejected("add_generation_prompt and continue_final_message exclude each other")
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        hf = self.tokenizer.hf
        if self._template is None and not getattr(hf, "chat_template", None):
            raise RequestRejected("the tokenizer has no chat template: start the server with --chat-template")
        try:
            rendered: str = hf.apply_chat_template(
                [_plain(message) for message in messages],
                tools=tools,
                chat_template=self._template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **options,
            )
        except Exception as error:  # a template fails in any way it likes over messages it was not made for
            raise RequestRejected(
                f"the chat template does not take this: {type(error).__name__}: {error}"
            ) from None
        return rendered


def text_of(message: Mapping[str, Any]) -> str:
    """The content of a message as one string."""
    content = message.get("content")
    if isinstance(content, list):
        return " ".join(part["text"] for part in content)
    return "" if content is None else str(content)


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: its content one string, the arguments of tool calls as objects."""
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
    """The template that the argument means: a file's contents, or the text itself.

    Raises:
        ConfigurationError: it is neither.
    """
    if given is None or "{{" in given or "{%" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"chat_template: expected a file or a Jinja template: {error}") from None


def recommended_sampling(folder: str) -> dict[str, Any]:
    """The sampling parameters of generation_config.json; those that make no sense are left out and logged."""
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
