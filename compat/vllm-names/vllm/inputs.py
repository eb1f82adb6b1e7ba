"""vLLM's types of prompts."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict


class TokensPrompt(TypedDict):
    """A prompt of token ids."""

    prompt_token_ids: list[int]
    multi_modal_data: NotRequired[dict[str, Any]]
    cache_salt: NotRequired[str]


class TextPrompt(TypedDict):
    """A prompt of text."""

    prompt: str
    multi_modal_data: NotRequired[dict[str, Any]]
    cache_salt: NotRequired[str]
