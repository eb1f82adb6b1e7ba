"""vLLM's types of outputs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Logprob:
    """Logprob of a token. `rank`: 1 is the most likely token; None: unknown."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """A sample. `logprobs`: for each output token a dictionary by token id; the sampled token is first."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    """All samples of a prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
