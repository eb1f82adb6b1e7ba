"""Logprobs of a prompt's tokens, as vLLM's clients ask for them: `prompt_logprobs`. wire_vllm section 1.6."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from msgspec import Struct

from ebbtide.srt.managers.api.live_generation import Triple

# What stands for a token that cannot be chosen.
NEVER_LOGPROB: Final = -9999.0


class PromptLogprob(Struct, kw_only=True):
    """A token at a position of the prompt.

    `rank`: 1 is the most likely. Of a token that is not among those asked for, the least that it can be.
    """

    logprob: float
    rank: int
    decoded_token: str | None


# Per position, by the ids as text; null where nothing predicts the token.
PromptLogprobs: TypeAlias = list[dict[str, PromptLogprob] | None]


def prompt_logprobs(meta: Mapping[str, Any], num_top: int) -> PromptLogprobs:
    """Each position's own token first, then the most likely ones.

    Args:
        meta: of an output whose prompt's logprobs were asked for.
        num_top: how many of the most likely tokens are wanted; `meta` may have more.
    """
    own: Sequence[Triple] = meta["input_token_logprobs"]
    tops: Sequence[Sequence[Triple] | None] = meta.get("input_top_logprobs") or [()] * len(own)
    return [_of_position(token, (top or ())[:num_top]) for token, top in zip(own, tops, strict=True)]


def floored(logprob: float) -> float:
    """No logprob is below what stands for "never"."""
    return max(logprob, NEVER_LOGPROB)


def _of_position(own: Triple, top: Sequence[Triple]) -> dict[str, PromptLogprob] | None:
    if own[0] is None:
        return None
    ranks = {token_id: rank for rank, (_, token_id, _) in enumerate(top, 1)}
    others = [triple for triple in top if triple[1] != own[1]]
    return {
        str(token_id): PromptLogprob(
            logprob=floored(logprob), rank=ranks.get(token_id, len(top) + 1), decoded_token=text
        )
        for logprob, token_id, text in (own, *others)
        if logprob is not None
    }
