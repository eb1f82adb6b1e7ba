"""Prompts that begin with the tokens of an earlier prompt and its answer, as they were.

The text of an answer need not become the same tokens again. NeMo-RL's servers take the tokens as
`required_prefix_token_ids`, or find them in the messages, where NeMo-Gym leaves them. Source: wire_vllm 3.6.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec import Struct

from ebbtide.srt.entrypoints.openai.protocol import ChatMessage
from ebbtide.srt.errors import RequestRejected


class KeptTokens(Struct, frozen=True):
    """The tokens, and the number of messages that they are, the answer that they end with among them."""

    ids: list[int]
    num_messages: int


def kept_tokens(
    messages: Sequence[ChatMessage], required: list[int] | None, *, continues: bool
) -> KeptTokens | None:
    """What a prompt has to begin with, if anything.

    Args:
        required: those of the messages up to the last answer; None: as the last answer that has any tells.
        continues: the final message is to go on.

    Raises:
        RequestRejected: 400; they are required of a message that goes on.
    """
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
    """A prompt whose beginning, what the template makes of the kept messages, is replaced by the kept tokens.

    The end of the last of those messages is found by the number of tokens that end one: a template may write
    earlier messages differently, without their reasoning for instance, once others follow.

    Args:
        history: the ids of the kept messages alone.
        prompt: the ids of all messages.
        ends: the ids that end a message.

    Raises:
        RequestRejected: 400; the template ends messages with none of them.
    """
    num_ends = sum(token_id in ends for token_id in history)
    places = [place for place, token_id in enumerate(prompt) if token_id in ends]
    if not 0 < num_ends <= len(places):
        raise RequestRejected(
            "required_prefix_token_ids, prompt_token_ids: cannot be kept: the chat template writes no token "
            "that ends an answer behind these messages"
        )
    # An answer that was cut off has no end; the template's is taken.
    has_end = kept[-1] in ends
    return [*kept, *prompt[places[num_ends - 1] + has_end :]]
