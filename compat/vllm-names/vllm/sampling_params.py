"""vLLM's sampling parameters."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class StructuredOutputsParams:
    """The structure that an output must have. Give one of these."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None


@dataclass
class SamplingParams:
    """Fields as of `POST /inference/v1/generate`. The engine refuses those that it does not support.

    Attributes:
        max_tokens: None: up to the end of the context.
        logprobs, prompt_logprobs: number of most likely tokens to return, besides the token itself; None: no
            logprobs.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None

    def fields(self) -> dict[str, Any]:
        """The fields that are not None, as JSON objects."""
        return _given(asdict(self))


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _given(value) if name == "structured_outputs" else value
        for name, value in values.items()
        if value is not None
    }
