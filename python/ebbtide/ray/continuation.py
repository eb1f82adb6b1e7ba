"""One output that several replicas may work on, one after the other, and the answer that comes of it.

A replica that dies takes the state of its requests along. What the caller, or this process, was given of an
output is not lost: another replica is given prompt and output as its prompt, and goes on behind them. Where
more than the tokens decides what comes next, or what is told of them, the output begins anew instead; if some
of it has been streamed by then, the request ends with an error.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from ebbtide.srt.sampling_params import SamplingParams

# Of a request that is not streamed, so many tokens are lost at most.
CHECKPOINT_TOKENS: Final = 16
# An odd number with bits all over: seeds of continuations have nothing in common with the first.
SEED_STEP: Final = 0x1E3779B97F4A7C15

# Lists in `meta_info` that grow by what is new, and those that come once, with the prompt.
OUTPUT_LISTS: Final = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")
INPUT_LISTS: Final = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")
# Told of the first replica's work.
OF_THE_FIRST: Final = (
    *("prompt_tokens", "cached_tokens", "queue_time", "first_token_latency", "prefill_weight_versions"),
    *INPUT_LISTS,
)
# What a continued request would leave out of its answer.
WHOLE_FIELDS: Final = ("return_routed_experts", "return_sampling_mask", "replay_routed_experts")


class Continuation:
    """What is known of an output, and what is still to be asked for.

    Args:
        fields: of the request; one prompt, one output.
        is_incremental: answers hold what is new alone.
    """

    def __init__(self, fields: Mapping[str, Any], *, is_incremental: bool = False) -> None:
        self._fields = dict(fields)
        self._params = sampling_params(fields.get("sampling_params"))
        self._is_stream = bool(self._fields.pop("stream", False))
        self._wants_prompt = bool(fields.get("return_prompt_token_ids"))
        self._is_incremental = is_incremental
        self._started_s = time.monotonic()
        self._prompt_ids: list[int] | None = None
        self._text: str | None = None
        self._output_ids: list[int] = []
        self._lists: dict[str, list[Any]] = {}
        self._kept: dict[str, Any] = {}
        self._spans: list[dict[str, Any]] = []
        self._kv_versions: list[str] = []
        self._num_retractions = 0
        # What the replicas before this one have done.
        self._num_before = 0
        self._spans_before: list[dict[str, Any]] = []
        self._retractions_before = 0
        self._num_moves = 0

    @property
    def num_tokens(self) -> int:
        """Output tokens so far."""
        return len(self._output_ids)

    @property
    def is_single(self) -> bool:
        """Whether it is one output."""
        return self._params.n == 1

    @property
    def obstacle(self) -> str:
        """What stands against going on behind the tokens that there are; empty if nothing does."""
        params, fields = self._params, self._fields
        wholes = [name for name in WHOLE_FIELDS if fields.get(name)]
        if wholes:
            return wholes[0]
        if params.grammar is not None:
            return params.grammar.kind
        if params.stop_strings:
            return "stop"
        penalties = {
            "frequency_penalty": params.frequency_penalty,
            "presence_penalty": params.presence_penalty,
            "repetition_penalty": params.repetition_penalty - 1,
        }
        return next((name for name, value in penalties.items() if value), "")

    def move(self) -> None:
        """The replica has died: another one goes on, or begins anew."""
        self._num_moves += 1
        if self.obstacle or self._prompt_ids is None:
            self._output_ids, self._text, self._lists = [], None, {}
            self._spans, self._kv_versions = [], []
            self._kept = {}
        self._num_before = len(self._output_ids)
        self._spans_before = self._spans
        self._retractions_before = self._num_retractions + 1

    def next_fields(self) -> dict[str, Any]:
        """The request to the next replica."""
        fields = {**self._fields, "return_prompt_token_ids": True}
        params = self._params
        if not self._is_stream:
            params = replace(params, stream_interval=max(params.stream_interval or 0, CHECKPOINT_TOKENS))
        done = self._num_before
        if done > 0:
            assert self._prompt_ids is not None, "it comes with the first tokens"
            for name in ("prompt", "text", "truncate_prompt_tokens", "logprob_start_len"):
                fields.pop(name, None)
            fields["input_ids"] = self._prompt_ids + self._output_ids
            params = replace(
                params,
                max_new_tokens=None if params.max_new_tokens is None else params.max_new_tokens - done,
                min_new_tokens=max(0, params.min_new_tokens - done),
                sampling_seed=_moved_seed(params.sampling_seed, done),
            )
        if fields.get("timeout_s") is not None:
            elapsed_s = time.monotonic() - self._started_s
            fields["timeout_s"] = max(1e-3, fields["timeout_s"] - elapsed_s)
        fields["sampling_params"] = params
        return fields

    def add(self, chunk: Mapping[str, Any], replica: str) -> dict[str, Any]:
        """Take a chunk of what is new in; returns the answer as it stands.

        Args:
            replica: the name of the one that sends it.
        """
        meta = chunk["meta_info"]
        self._prompt_ids = self._prompt_ids or chunk["prompt_token_ids"]
        self._output_ids += chunk["output_ids"]
        if "text" in chunk:
            self._text = (self._text or "") + chunk["text"]
        for name in OUTPUT_LISTS:
            if name in meta:
                self._lists.setdefault(name, []).extend(meta[name])
        if not self._kept:
            self._kept = {name: meta[name] for name in OF_THE_FIRST if name in meta}
        elif self._num_before == 0:
            # The prompt's own are in the first chunk, what is told at the end in the last.
            self._kept |= {name: meta[name] for name in OF_THE_FIRST if meta.get(name)}
        self._spans = joined_spans(self._spans_before, meta["weight_versions"], self._num_before)
        self._kv_versions += [one for one in meta["kv_weight_versions"] if one not in self._kv_versions]
        self._num_retractions = self._retractions_before + meta["num_retractions"]
        return self._answer(chunk, replica)

    def _answer(self, chunk: Mapping[str, Any], replica: str) -> dict[str, Any]:
        fresh = self._is_incremental
        body: dict[str, Any] = {}
        if self._text is not None:
            body["text"] = chunk["text"] if fresh else self._text
        body["output_ids"] = chunk["output_ids"] if fresh else list(self._output_ids)
        if self._wants_prompt:
            body["prompt_token_ids"] = self._prompt_ids
        meta = {**chunk["meta_info"], **self._kept}
        if not fresh:
            meta |= {name: list(values) for name, values in self._lists.items()}
        meta["completion_tokens"] = len(self._output_ids)
        if "output_token_logprobs_length" in meta:
            meta["output_token_logprobs_length"] = len(self._output_ids)
        meta["weight_versions"] = self._spans
        meta["kv_weight_versions"] = list(self._kv_versions)
        meta["num_retractions"] = self._num_retractions
        meta["replica"], meta["num_moves"] = replica, self._num_moves
        finish = meta["finish_reason"]
        if finish is not None and finish["type"] == "length" and self._num_before:
            meta["finish_reason"] = {**finish, "length": finish["length"] + self._num_before}
        if "e2e_latency" in meta and self._num_moves:
            meta["e2e_latency"] = time.monotonic() - self._started_s
        body["meta_info"] = meta
        return body


def sampling_params(given: Any) -> SamplingParams:
    """Raises `RequestRejected` for what is none."""
    if isinstance(given, SamplingParams):
        return given
    return SamplingParams.from_dict({} if given is None else given)


def joined_spans(
    before: Sequence[Mapping[str, Any]], spans: Sequence[Mapping[str, Any]], num_before: int
) -> list[dict[str, Any]]:
    """Spans of the output of one replica behind those of the tokens before."""
    joined = [dict(span) for span in before]
    for span in spans:
        start, end = span["start"] + num_before, span["end"] + num_before
        if joined and joined[-1]["version"] == span["version"]:
            joined[-1]["end"] = end
        elif end > start or not joined:
            joined.append({**span, "start": start, "end": end})
    return joined


def _moved_seed(seed: int | None, num_tokens: int) -> int | None:
    """Noise hangs on the seed and the number of output tokens, which begins at 0 again: another seed."""
    if seed is None:
        return None
    return (seed + SEED_STEP * num_tokens) % 2**63
