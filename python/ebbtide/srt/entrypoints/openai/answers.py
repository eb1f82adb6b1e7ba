"""Turns outputs of `/generate` into the answers and chunks of OpenAI's endpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec import UNSET, Struct, UnsetType, json

from ebbtide.srt.entrypoints.http_answers import AnswerWriter, server_event
from ebbtide.srt.entrypoints.openai.protocol import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobList,
    PromptTokensDetails,
    TokenLogprob,
    ToolCallBody,
    TopLogprob,
    Usage,
)
from ebbtide.srt.entrypoints.openai.requests import OpenAICall
from ebbtide.srt.entrypoints.openai.tool_use import AnswerReader
from ebbtide.srt.managers.api.array_forms import flat_top_logprobs
from ebbtide.srt.managers.api.output_state import Triple

# Reported instead of −∞, which JSON does not have.
NEVER_LOGPROB: Final = -9999.0
# Decoding gives this character for bytes that are only a part of a character.
REPLACEMENT = "\ufffd"
# The fields of an output's `meta_info` that answers contain.
METADATA: Final = (
    *("weight_version", "weight_versions", "kv_weight_versions", "prefill_weight_versions"),
    "precision",
)


class Piece(Struct, frozen=True):
    """The new part of one output; the whole output if the answer is not streamed.

    Attributes:
        index: of the output within the answer.
        is_first: whether it is the first piece of this output.
        logprobs, top_logprobs, chosen_logprobs: per new token; empty if not requested. `chosen_logprobs` are
            those of the token ids that the request names.
        prompt_token_ids: None: not requested.
        meta: the output's current `meta_info`; its lists of logprobs hold new tokens only.
    """

    index: int
    is_first: bool
    text: str
    token_ids: list[int]
    logprobs: Sequence[Triple]
    top_logprobs: Sequence[Sequence[Triple] | None]
    chosen_logprobs: Sequence[Sequence[Triple] | None]
    prompt_token_ids: list[int] | None
    meta: Mapping[str, Any]

    def positions(self, num_top: int | None) -> list[tuple[Triple, Sequence[Triple] | None]]:
        """Each new token, with the `num_top` most likely tokens and those that the request names."""
        positions = list(_zip(self.logprobs, self.top_logprobs, num_top))
        if not self.chosen_logprobs:
            return positions
        pairs = zip(positions, self.chosen_logprobs, strict=True)
        return [(own, _with(top or (), chosen or ())) for (own, top), chosen in pairs]

    @property
    def finish(self) -> Mapping[str, Any] | None:
        finish: Mapping[str, Any] | None = self.meta["finish_reason"]
        return finish

    @property
    def finish_reason(self) -> Any:
        return self.finish["type"] if self.finish is not None else None

    @property
    def matched_stop(self) -> int | str | None:
        return self.finish.get("matched") if self.finish is not None else None

    @property
    def metadata(self) -> dict[str, str]:
        """The weight versions and the precision of a finished output, see `/generate`; empty before.

        OpenAI's `metadata` maps strings to strings, so other values are encoded as JSON.
        """
        values = {name: self.meta[name] for name in METADATA} if self.finish is not None else {}
        return {
            name: value if isinstance(value, str) else json.encode(value).decode()
            for name, value in values.items()
        }


def whole_pieces(result: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> list[Piece]:
    """The pieces of an answer that was not streamed."""
    outputs = [result] if isinstance(result, Mapping) else result
    return [piece_of(output, index, is_first=True) for index, output in enumerate(outputs)]


def piece_of(output: Mapping[str, Any], index: int, *, is_first: bool) -> Piece:
    """Read a chunk of a stream, or a whole output."""
    meta = output["meta_info"]
    return Piece(
        index=index,
        is_first=is_first,
        text=output.get("text", ""),
        token_ids=output["output_ids"],
        logprobs=meta.get("output_token_logprobs", ()),
        top_logprobs=meta.get("output_top_logprobs", ()),
        chosen_logprobs=meta.get("output_token_ids_logprobs", ()),
        prompt_token_ids=output.get("prompt_token_ids"),
        meta=meta,
    )


def _usage(metas: Sequence[Mapping[str, Any]], num_samples: int) -> Usage:
    """Sum the usage over the `meta_info` of all outputs. Each prompt has `num_samples` of them."""
    prompts = metas[::num_samples]
    prompt_tokens = sum(meta["prompt_tokens"] for meta in prompts)
    completion_tokens = sum(meta["completion_tokens"] for meta in metas)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens=sum(meta["cached_tokens"] for meta in prompts)
        ),
    )


class CallWriter(AnswerWriter):
    """Writes the answer to a call, or the chunks of its stream. Subclasses define the bodies."""

    def __init__(self, call: OpenAICall) -> None:
        self._call = call
        # The latest `meta_info` of each output, by its index.
        self._metas: dict[int, Mapping[str, Any]] = {}

    def whole(self, result: Any) -> Any:
        pieces = whole_pieces(result)
        return self.answer(pieces, _usage([piece.meta for piece in pieces], self._call.num_samples))

    def chunk(self, chunk: Mapping[str, Any]) -> bytes:
        return server_event(self.event(chunk))

    def end(self) -> bytes:
        return b"".join(map(server_event, self.last_events())) + super().end()

    def event(self, chunk: Mapping[str, Any]) -> Any:
        """Convert a chunk of `/generate`'s incremental stream, which holds only what is new."""
        index = chunk.get("index", 0)
        piece = piece_of(chunk, index, is_first=index not in self._metas)
        self._metas[index] = piece.meta
        return self.event_of(piece, _usage_of_chunk(self._call, piece))

    def last_events(self) -> list[Any]:
        """The events at the end of a stream: its usage, if it was requested."""
        if not self._call.stream_options.include_usage:
            return []
        metas = [self._metas[index] for index in sorted(self._metas)]
        return [self.usage_event(_usage(metas, self._call.num_samples))]

    def answer(self, pieces: Sequence[Piece], usage: Usage) -> Any:
        """Build the body of an answer that is not streamed."""
        raise NotImplementedError

    def event_of(self, piece: Piece, usage: Usage | UnsetType | None) -> Any:
        """Build the event of a new piece. `usage`: null or missing if the event has none."""
        raise NotImplementedError

    def usage_event(self, usage: Usage) -> Any:
        """Build the last event, which has the usage of the whole request."""
        raise NotImplementedError


def _head(call: OpenAICall, piece: Piece | None = None) -> dict[str, Any]:
    """The fields that all answers and chunks have.

    `piece`: the piece of a chunk, or the first one of an answer; None: of a chunk with the usage alone.
    """
    head: dict[str, Any] = {"id": call.id, "created": call.created, "model": call.model}
    if piece is None:
        return head
    head["metadata"] = piece.metadata or UNSET
    if call.ignored_fields and piece.is_first:
        head["ignored_fields"] = call.ignored_fields
    return head


def _usage_of_chunk(call: OpenAICall, piece: Piece) -> Usage | UnsetType | None:
    """A chunk's own usage, if requested; else null if a last chunk follows with the sum, else absent."""
    if call.stream_options.continuous_usage_stats:
        return _usage([piece.meta], num_samples=1)
    return None if call.stream_options.include_usage else UNSET


# ---------------------------------------------------------------------------------------------- completions


class CompletionWriter(CallWriter):
    """Writes answers of `/v1/completions`."""

    def __init__(self, call: OpenAICall) -> None:
        super().__init__(call)
        self._offsets: dict[int, int] = {}

    def answer(self, pieces: Sequence[Piece], usage: Usage) -> Completion:
        choices = [self._choice(piece, absent=None) for piece in pieces]
        return Completion(**_head(self._call, pieces[0]), choices=choices, usage=usage)

    def event_of(self, piece: Piece, usage: Usage | UnsetType | None) -> Completion:
        choices = [self._choice(piece, absent=UNSET)]
        return Completion(**_head(self._call, piece), choices=choices, usage=usage)

    def usage_event(self, usage: Usage) -> Completion:
        return Completion(**_head(self._call), choices=[], usage=usage)

    def _choice(self, piece: Piece, absent: UnsetType | None) -> CompletionChoice:
        call = self._call
        text = piece.text
        if call.echo is not None and piece.is_first:
            assert piece.prompt_token_ids is not None, "asked for with the echo"
            text = call.echo(piece.index // call.num_samples, piece.prompt_token_ids) + text
        return CompletionChoice(
            **_choice_fields(call, piece, absent),
            text=text,
            logprobs=self._logprobs(piece) if call.num_logprobs is not None else None,
            finish_reason=piece.finish_reason,
            prompt_logprobs=prompt_logprobs(call, piece),
        )

    def _logprobs(self, piece: Piece) -> CompletionLogprobs:
        num_top = self._call.num_logprobs
        positions = piece.positions(num_top)
        if self._call.echo is not None and piece.is_first:
            meta = piece.meta
            prompt = meta.get("input_token_logprobs", ()), meta.get("input_top_logprobs", ())
            positions = [*_zip(*prompt, num_top), *positions]
        tokens = [token_text(triple) for triple, _ in positions]
        offset = self._offsets.get(piece.index, 0)
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        self._offsets[piece.index] = offset
        return CompletionLogprobs(
            tokens=tokens,
            token_logprobs=[None if triple[0] is None else floored(triple[0]) for triple, _ in positions],
            # The first token of a prompt has no logprob, since nothing precedes it.
            top_logprobs=[
                None if own[0] is None or top is None else _by_text([own, *top]) for own, top in positions
            ],
            text_offset=offsets,
        )


def _zip(
    triples: Sequence[Triple], tops: Sequence[Sequence[Triple] | None], num_top: int | None
) -> Iterator[tuple[Triple, Sequence[Triple] | None]]:
    """Pair each position's token with its `num_top` most likely tokens, which are empty if not requested."""
    fewest = [None if top is None else top[:num_top] for top in tops]
    return zip(triples, fewest or [()] * len(triples), strict=True)


def _with(top: Sequence[Triple], chosen: Sequence[Triple]) -> list[Triple]:
    """The most likely tokens, then the chosen ones that are not among them."""
    known_ids = {token_id for _, token_id, _ in top}
    return [*top, *(triple for triple in chosen if triple[1] not in known_ids)]


def prompt_logprobs(call: OpenAICall, piece: Piece) -> PromptLogprobList | None:
    """vLLM's `prompt_logprobs`: each position's own token, then the most likely ones; None: not requested."""
    num_top, meta = call.num_prompt_logprobs, piece.meta
    if num_top is None:
        return None
    own: Sequence[Triple] = meta["input_token_logprobs"]
    # There may be more than requested: `/generate` takes one number for the prompt and the output.
    tops: Sequence[Sequence[Triple] | None] = meta.get("input_top_logprobs") or [()] * len(own)
    return [_of_position(token, (top or ())[:num_top]) for token, top in zip(own, tops, strict=True)]


def floored(logprob: float) -> float:
    """Replace −∞, and anything else below `NEVER_LOGPROB`, by it."""
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


def _by_text(triples: Iterable[Triple]) -> dict[str, float]:
    logprobs: dict[str, float] = {}
    for triple in triples:
        if triple[0] is not None:
            # Of tokens with the same text keep the first: the position's own, or the most likely.
            logprobs.setdefault(token_text(triple), floored(triple[0]))
    return logprobs


def token_text(triple: Triple) -> str:
    """A token's text, or `token_id:5` if the logprobs have no texts."""
    return triple[2] if triple[2] is not None else f"token_id:{triple[1]}"


def _choice_fields(call: OpenAICall, piece: Piece, absent: UnsetType | None) -> dict[str, Any]:
    """The fields of both kinds of choices. `absent`: the value of those that were not requested."""
    has_versions = call.return_weight_versions and piece.finish is not None
    return {
        "index": piece.index,
        "matched_stop": piece.matched_stop,
        "stop_reason": stop_reason(call, piece),
        "token_ids": piece.token_ids if call.return_token_ids else absent,
        "prompt_token_ids": _prompt_token_ids(call, piece, absent),
        "weight_versions": piece.meta["weight_versions"] if has_versions else absent,
        "routed_experts": piece.meta.get("routed_experts", absent),
        "sampling_mask": piece.meta.get("output_token_sampling_mask", UNSET),
    }


def _prompt_token_ids(
    call: OpenAICall, piece: Piece, absent: UnsetType | None
) -> list[int] | UnsetType | None:
    is_wanted = call.return_prompt_token_ids and piece.is_first and piece.prompt_token_ids is not None
    return piece.prompt_token_ids if is_wanted else absent


def stop_reason(call: OpenAICall, piece: Piece) -> int | str | None:
    """The stop string or token of the request that ended an output; None: another end, such as EOS."""
    matched = piece.matched_stop
    return matched if isinstance(matched, str) or matched in call.stop_token_ids else None


# ----------------------------------------------------------------------------------------------------- chat


class ChatWriter(CallWriter):
    """Writes answers of `/v1/chat/completions`.

    `return_meta_info`: whether choices have `/generate`'s `meta_info`; not in streams.
    """

    def __init__(self, call: OpenAICall, *, return_meta_info: bool = False) -> None:
        super().__init__(call)
        self._return_meta_info = return_meta_info
        self._readers: dict[int, AnswerReader] = {}

    def answer(self, pieces: Sequence[Piece], usage: Usage) -> ChatCompletion:
        choices = [self._choice(piece) for piece in pieces]
        return ChatCompletion(
            **_head(self._call, pieces[0]),
            choices=choices,
            usage=usage,
            prompt_logprobs=prompt_logprobs(self._call, pieces[0]),
            prompt_token_ids=_prompt_token_ids(self._call, pieces[0], None),
        )

    def event_of(self, piece: Piece, usage: Usage | UnsetType | None) -> ChatCompletionChunk:
        call = self._call
        reasoning, content, calls = self._parts(piece)
        choice = ChatChunkChoice(
            **_choice_fields(call, piece, UNSET),
            delta=ChatDelta(
                content=content,
                role="assistant" if piece.is_first else UNSET,
                reasoning_content=reasoning or UNSET,
                reasoning=reasoning or UNSET,
                tool_calls=calls or UNSET,
            ),
            logprobs=self._logprobs(piece),
            finish_reason=self._finish_reason(piece),
            response_token_ids=piece.token_ids if call.return_token_ids else UNSET,
        )
        return ChatCompletionChunk(
            **_head(call, piece),
            choices=[choice],
            usage=usage,
            prompt_token_ids=choice.prompt_token_ids,
        )

    def usage_event(self, usage: Usage) -> ChatCompletionChunk:
        return ChatCompletionChunk(**_head(self._call), choices=[], usage=usage)

    def _choice(self, piece: Piece) -> ChatChoice:
        call = self._call
        reasoning, content, calls = self._parts(piece)
        thought = UNSET if call.forms[0].reasoning is None else reasoning or None
        return ChatChoice(
            # Clients of vLLM read the prompt's ids from the answer, so the choice needs no null.
            **_choice_fields(call, piece, None) | {"prompt_token_ids": _prompt_token_ids(call, piece, UNSET)},
            message=AssistantMessage(
                content=content, reasoning_content=thought, reasoning=thought, tool_calls=calls or UNSET
            ),
            logprobs=self._logprobs(piece),
            finish_reason=self._finish_reason(piece),
            response_token_ids=piece.token_ids if call.return_token_ids else UNSET,
            meta_info=self._meta_info(piece) if self._return_meta_info else UNSET,
        )

    def _meta_info(self, piece: Piece) -> dict[str, Any]:
        meta = dict(piece.meta)
        if self._call.flat_top is not None and "output_top_logprobs" in meta:
            meta |= flat_top_logprobs(meta.pop("output_top_logprobs"), self._call.flat_top)
        return meta

    def _parts(self, piece: Piece) -> tuple[str, str, list[ToolCallBody]]:
        index = piece.index
        if index not in self._readers:
            self._readers[index] = AnswerReader(self._call.forms[index // self._call.num_samples])
        return self._readers[index].push(piece.text, is_last=piece.finish is not None)

    def _finish_reason(self, piece: Piece) -> Any:
        """`tool_calls` for an answer that stopped after calls of tools. Call it after `_parts`."""
        has_calls = self._readers[piece.index].num_calls > 0
        return "tool_calls" if piece.finish_reason == "stop" and has_calls else piece.finish_reason

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        num_top = self._call.num_logprobs
        if num_top is None:
            return None
        return ChatLogprobs(
            content=[
                TokenLogprob(
                    token=token_text(triple),
                    logprob=known(triple),
                    bytes=_bytes(triple),
                    top_logprobs=[
                        TopLogprob(token=token_text(other), logprob=known(other), bytes=_bytes(other))
                        for other in top or ()
                    ],
                )
                for triple, top in piece.positions(num_top)
            ]
        )


def known(triple: Triple) -> float:
    """The logprob of an output's token."""
    assert triple[0] is not None, "only the first token of a prompt has no logprob"
    return floored(triple[0])


def _bytes(triple: Triple) -> list[int] | None:
    text = triple[2]
    return None if text is None or REPLACEMENT in text else list(text.encode())
