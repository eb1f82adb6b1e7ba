"""Which chunks of a stream tell how many tokens there were."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from fixtures.checkpoints import make_tokenizer

from ebbtide.srt.entrypoints.openai.answers import CallWriter, ChatWriter, CompletionWriter
from ebbtide.srt.entrypoints.openai.requests import chat_call, completion_call, force_usage
from ebbtide.srt.entrypoints.openai.tokenization import ChatTemplate
from ebbtide.srt.entrypoints.vllm.generate import TokensWriter, tokens_call
from ebbtide.srt.managers.text.tokenizer import Tokenizer

pytestmark = pytest.mark.unit

# Of which output each chunk is, and how many tokens that has by then.
STEPS = ((0, 1), (1, 2), (0, 3), (1, 5))
PROMPT_TOKENS, CACHED_TOKENS = 4, 3


def outputs() -> Iterator[dict[str, Any]]:
    """The chunks of two samples of a prompt."""
    for number, (index, completion_tokens) in enumerate(STEPS):
        meta = {
            "finish_reason": {"type": "length"} if number >= 2 else None,
            "prompt_tokens": PROMPT_TOKENS,
            "cached_tokens": CACHED_TOKENS,
            "completion_tokens": completion_tokens,
            "weight_version": "7",
            "weight_versions": [],
            "kv_weight_versions": ["7"],
            "prefill_weight_versions": [],
            "precision": {},
        }
        yield {"index": index, "text": "a", "output_ids": [1], "meta_info": meta}


def writer_of(endpoint: str, options: dict[str, Any] | None) -> CallWriter:
    fields: dict[str, Any] = {"stream": True, "stream_options": options}
    if endpoint == "chat":
        message = {"role": "user", "content": "a"}
        template = ChatTemplate(Tokenizer(make_tokenizer()), None)
        return ChatWriter(chat_call({**fields, "messages": [message], "n": 2}, "tide", template, {}))
    if endpoint == "completion":
        return CompletionWriter(completion_call({**fields, "prompt": [1], "n": 2}, "tide", None))
    return TokensWriter(tokens_call({**fields, "token_ids": [1], "sampling_params": {"n": 2}}, {}, "tide"))


def usage(completion_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": completion_tokens,
        "total_tokens": PROMPT_TOKENS + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": CACHED_TOKENS},
    }


@pytest.mark.parametrize("endpoint", ["completion", "chat", "tokens"])
@pytest.mark.parametrize(
    ("options", "is_continuous", "has_last"),
    [
        (None, False, False),
        ({"continuous_usage_stats": False}, False, False),
        ({"include_usage": True}, False, True),
        ({"include_usage": True, "continuous_usage_stats": True}, True, True),
        ({"continuous_usage_stats": True}, True, False),
    ],
)
def test_chunks_tell_the_tokens_of_their_choice_and_the_last_one_those_of_all(
    endpoint: str, options: dict[str, Any] | None, is_continuous: bool, has_last: bool
) -> None:
    writer = writer_of(endpoint, options)
    events = [*map(writer.event, outputs()), *writer.last_events()]
    chunks = [msgspec.to_builtins(event) for event in events]
    last = chunks.pop() if has_last else None
    assert [len(chunk["choices"]) for chunk in chunks] == [1] * len(STEPS)
    told = [chunk.get("usage") for chunk in chunks]
    assert told == [usage(number) if is_continuous else None for _, number in STEPS]
    modes = [event.get("output_mode") for event in map(msgspec.to_builtins, events)]
    assert set(modes) == {"tokens" if endpoint == "tokens" else None}
    if last is not None:
        assert (last["choices"], last["usage"]) == ([], usage(3 + 5))


@pytest.mark.parametrize("stream", [True, "true"])
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"continuous_usage_stats": True}])
def test_a_server_may_have_every_stream_end_with_its_usage(
    options: dict[str, Any] | None, stream: object
) -> None:
    fields: dict[str, Any] = {"prompt": [1], "stream": stream, "stream_options": options}
    force_usage(fields)
    writer = CompletionWriter(completion_call(fields, "tide", None))
    has_usage = ["usage" in msgspec.to_builtins(writer.event(chunk)) for chunk in outputs()]
    assert has_usage == [True] * len(STEPS)
    assert [msgspec.to_builtins(event)["choices"] for event in writer.last_events()] == [[]]


@pytest.mark.parametrize("fields", [{}, {"stream": False}, {"stream": True, "stream_options": 3}])
def test_where_nothing_is_streamed_no_usage_is_forced(fields: dict[str, Any]) -> None:
    given = dict(fields)
    force_usage(fields)
    assert fields == given
